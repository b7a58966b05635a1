"""Priorities on their way back: which batch waits for its own, and which wait for the next draw."""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit_jax.adapters.rllib.programs import BEYOND
from conduit_jax.errors import ValueRefusedError, refuse

_LEAST_PRIORITY = np.float32(1e-12)  # RLlib's own floor


class Priorities:
    """Of the module ``name``, whose ring has ``capacity`` rows. ``stale`` counts those that came too late for their rows."""

    def __init__(self, name: str, capacity: int):
        self.name, self.capacity, self.stale = name, capacity, 0
        self._given: list[tuple[np.ndarray, int]] = []
        self._pending: list[tuple[np.ndarray, np.ndarray, int]] = []

    def expect(self, slots: np.ndarray, flushed: int) -> None:
        """Expect priorities for ``slots`` ``(batch,)``, drawn when ``flushed`` rows had been written, and for no batch before.

        A batch may have been looked at only, or its module not updated: what comes next is still the newest batch's.
        """
        self._given = [(slots, flushed)]

    def receive(self, priorities: Any) -> None:
        """Take those of the batch given out last, ``(batch,)``: they wait for the next draw.

        ``ValueRefusedError`` for another number of them or one that is not finite: nothing of the call is applied.
        """
        values = np.asarray(priorities, np.float32).reshape(-1)
        if not self._given or len(values) != len(self._given[0][0]):
            want = f"{len(self._given[0][0])}" if self._given else "none: no batch is out"
            refuse(ValueRefusedError, "Priorities do not belong to the batch.", got=f"{len(values)}", want=want)
        slots, flushed = self._given[0]
        if not np.isfinite(values).all():
            refuse(
                ValueRefusedError,
                f"A TD error of module {self.name!r} is not finite.",
                got=f"{values[~np.isfinite(values)][0]} among {len(values)}",
                want="finite numbers",
                fix="lower the learning rate, or clip gradients or rewards",
            )
        self._given.clear()
        self._pending.append((slots, np.maximum(np.abs(values), _LEAST_PRIORITY), flushed))

    def take(self, usual: int, flushed: int) -> np.ndarray:
        """Return all that wait, uint32 ``(n, 2)`` of slots and float32 priorities, without those for rows overwritten since.

        n is a multiple of ``usual``; ``flushed`` rows have been written by now.
        """
        total = sum(len(slots) for slots, _, _ in self._pending)
        updates = np.zeros((-(-max(total, 1) // usual) * usual, 2), np.uint32)
        updates[:, 0], at = BEYOND, 0
        for slots, values, drawn in self._pending:
            stale = (slots - drawn % self.capacity) % self.capacity < flushed - drawn  # the ring's head has passed them
            updates[at : at + len(slots), 0] = np.where(stale, BEYOND, slots)
            updates[at : at + len(slots), 1] = values.view(np.uint32)
            self.stale += int(np.count_nonzero(stale))
            at += len(slots)
        self._pending.clear()
        return updates

    def get_state(self) -> dict[str, Any]:
        """Return all of it as plain values and arrays."""
        return {"stale": self.stale, "_given": list(self._given), "_pending": list(self._pending)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from what ``get_state`` returned."""
        for name, value in state.items():
            setattr(self, name, list(value) if isinstance(value, list) else value)


__all__ = ["Priorities"]
