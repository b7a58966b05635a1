"""What is known on the host about a ring of rows: where episodes are open, which slots hold steps, what waits to be written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from conduit_jax.adapters.rllib.chunks import Chunk, record_dtype
from conduit_jax.adapters.rllib.programs import BEYOND, STEP, TERMINATED, TRUNCATED, Layout
from conduit_jax.sharding.staging import aligned_empty

_LEAST_ROWS, _MOST_ROWS, _MOST_BYTES = 16, 1024, 32 << 20
_MANY_OPEN = 256


class Open(NamedTuple):
    """The open end of an episode: the row at ``slot``, the ``number``-th ever written, waits for step ``time``.

    ``at`` is its record in the batch of writes numbered ``batch``; ``previous`` what is needed to end the step before it:
    the number of its row, its record, its large leaves.
    """

    slot: int
    number: int
    time: int
    at: int
    batch: int
    previous: tuple[int, np.ndarray, list[np.ndarray]]


class Writes(NamedTuple):
    """Rows to write: ``staged`` uint32 ``(n, 1 + words)``, slot first, and the large leaves ``(n, ...)``; n is a power of two."""

    staged: np.ndarray
    apart: tuple[np.ndarray, ...]


@dataclass
class Staging:
    """Turns chunks into rows of a ring of ``slots``, and keeps them until they are ``taken``.

    ``written`` rows ever (the ring's head is ``written % slots``), ``live`` steps in the ring. ``full`` says that the next
    chunk of up to ``piece`` steps needs the rows taken first. Every array handed out is fresh: JAX may still read it later.
    """

    layout: Layout
    slots: int
    written: int = 0
    live: int = 0
    broken: int = 0
    open: dict[str, Open] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.record = record_dtype(self.layout)
        most = min(_MOST_ROWS, max(_LEAST_ROWS, _MOST_BYTES // self.layout.row_bytes), self.slots // 4)
        self.limit = 1 << (most.bit_length() - 1)
        self.piece = max(1, self.limit - 2)
        self.stepped = np.zeros(self.slots, bool)
        self.batch = 0
        self._start()

    def _start(self) -> None:
        self.count, self._records = 0, self._fresh(_LEAST_ROWS)
        self._apart: list[tuple[Any, list[np.ndarray]]] = []

    def _fresh(self, rows: int) -> np.ndarray:
        records = np.zeros(rows, self.record)
        records["slot"] = BEYOND
        return records

    def room_for(self, steps: int) -> bool:
        """Whether ``steps`` more steps, at most ``piece``, can be staged before the rows are taken."""
        return self.count + steps + 2 <= self.limit

    def add(self, chunk: Chunk, begin: int, end: int) -> None:
        """Stage the steps from ``begin`` to ``end`` of ``chunk``, and the observation that follows them."""
        before = self._continued(chunk.name, chunk.start + begin)
        steps, last = end - begin, end == chunk.steps
        new = (self.written + np.arange(steps + (before is None))) % self.slots
        slots = new if before is None else np.concatenate([[before.slot], new])
        at = self._places(before, len(new))
        self._record(chunk, begin, end, slots, at)
        self._account(new, slots)
        self.written += len(new)
        records = self._records
        if last and (chunk.terminated or chunk.truncated):
            records["flags"][at[-2]] |= TERMINATED * chunk.terminated | TRUNCATED * chunk.truncated
            self.open.pop(chunk.name, None)
            return
        number = before.number if before is not None and steps == 1 else self.written - 2
        previous = number, records[at[-2] : at[-2] + 1].copy(), [leaf[end - 1] for leaf in self._large(chunk)]
        self.open[chunk.name] = Open(
            int(slots[-1]), self.written - 1, chunk.start + end, int(at[-1]), self.batch, previous
        )

    def end(self, chunk: Chunk) -> bool:
        """End an episode by a chunk without steps: its last step is written again with the flags.

        False where that is gone, or about to be: the step is drawn as though the episode went on.
        """
        before = self.open.pop(chunk.name, None)
        if before is None:
            return True
        if not self._safe(before.previous[0]):
            return False
        record, large = before.previous[1].copy(), before.previous[2]
        record["flags"] |= TERMINATED * chunk.terminated | TRUNCATED * chunk.truncated
        taken = np.flatnonzero(self._records["slot"][: self.count] == record["slot"][0])
        if len(taken):
            self._records["flags"][taken[0]] = record["flags"][0]
            return True
        at = self._places(None, 1)
        self._records[at[0]] = record[0]
        self._apart.append((at, [leaf[None] for leaf in large]))
        return True

    def _continued(self, name: str, time: int) -> Open | None:
        """Return the open row that step ``time`` of the episode goes on from, unless it is gone or steps between are missing."""
        before = self.open.get(name)
        if before is None:
            self.broken += time > 0
            return None
        if before.time != time or not self._safe(before.number):
            self.broken += 1
            return None
        return before

    def _safe(self, number: int) -> bool:
        """Whether the row written as ``number`` outlives all that can be staged beside it."""
        return number >= 0 and self.written - number + self.limit < self.slots

    def _places(self, before: Open | None, new: int) -> np.ndarray:
        """Return where the records go: behind those staged, the open row first, which may be staged already."""
        staged = before is not None and before.batch == self.batch
        extra = before is not None and not staged
        at = np.arange(self.count, self.count + new + extra)
        self.count += new + extra
        if self.count > len(self._records):
            grown = self._fresh(1 << (self.count - 1).bit_length())
            grown[: len(self._records)] = self._records
            self._records = grown
        return np.concatenate([[before.at], at]) if before is not None and staged else at

    def _record(self, chunk: Chunk, begin: int, end: int, slots: np.ndarray, at: np.ndarray) -> None:
        records, steps = self._records, end - begin
        where = slice(at[0], at[-1] + 1) if at[-1] - at[0] == steps else at
        stepped = slice(at[0], at[-1]) if isinstance(where, slice) else at[:-1]
        records["slot"][where] = slots
        records["next"][stepped] = slots[1:]
        records["flags"][stepped] = STEP
        records["reward"][stepped] = chunk.rewards[begin:end]
        for number, leaf in enumerate(self.layout.observation):
            if leaf.start is not None and leaf.bytes:
                records[f"o{number}"][where] = chunk.observations[number][begin : end + 1]
        for number, leaf in enumerate(self.layout.action):
            if leaf.bytes:
                records[f"a{number}"][stepped] = chunk.actions[number][begin:end]
        if self.layout.apart:
            self._apart.append((where, [leaf[begin : end + 1] for leaf in self._large(chunk)]))

    def _large(self, chunk: Chunk) -> list[np.ndarray]:
        pairs = zip(chunk.observations, self.layout.observation, strict=True)
        return [array for array, leaf in pairs if leaf.start is None]

    def _account(self, new: np.ndarray, slots: np.ndarray) -> None:
        self.live += len(slots) - 1 - int(np.count_nonzero(self.stepped[new]))
        self.stepped[slots[:-1]] = True
        self.stepped[slots[-1]] = False

    def take(self) -> Writes:
        """Return all staged rows, and begin anew."""
        records = self._records
        # What is in rows that go nowhere is never read: it is not written either. JAX takes aligned memory as it is.
        apart = tuple(aligned_empty((len(records), *leaf.shape), leaf.dtype) for leaf in self.layout.apart)
        for where, leaves in self._apart:
            for whole, leaf in zip(apart, leaves, strict=True):
                whole[where] = leaf
        self.batch += 1
        self._start()
        if len(self.open) > _MANY_OPEN:
            self.open = {name: end for name, end in self.open.items() if self._safe(end.number)}
        return Writes(records.view(np.uint32).reshape(len(records), -1), apart)

    @property
    def rows(self) -> int:
        """The rows of the writes that ``take`` would return."""
        return len(self._records)

    def get_state(self) -> dict[str, Any]:
        """Return all of it as plain values and arrays, none of which changes later."""
        plain = {name: getattr(self, name) for name in ("written", "live", "broken", "batch", "count")}
        kept = {name: getattr(self, name).copy() for name in ("open", "stepped", "_records", "_apart")}
        return plain | kept

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from what ``get_state`` returned."""
        for name, value in state.items():
            setattr(self, name, value.copy() if hasattr(value, "copy") else value)


__all__ = ["Open", "Staging", "Writes"]
