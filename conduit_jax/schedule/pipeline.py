"""Runs a schedule for replayed experience: the order of inserts, draws and updates, dispatched, never waited for.

Everything that decides *which* bytes are delivered happens in program order, under one lock; copies and gathers run
asynchronously behind it. With ``overlap_delivery`` one batch is drawn ahead of the learner (batch k then sees the
priorities after update k - 2); with ``overlap_ingestion`` a unit is inserted behind the draws of its iteration instead of
in front of them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from conduit_jax.errors import NotReadyError, ValueRefusedError, refuse
from conduit_jax.replay.buffer import ReplayState
from conduit_jax.schedule.ledger import Ledger
from conduit_jax.schedule.residence import at_home
from conduit_jax.schedule.semantics import Schedule
from conduit_jax.sharding.intake import Intake
from conduit_jax.sharding.mesh import in_callers_mesh
from conduit_jax.sharding.staging import Ticket
from conduit_jax.types import AddInfo, Sample, SampleInfo

Array = jax.Array
PyTree = Any


class Programs(NamedTuple):
    """The compiled functions of one table, see ``ingestion`` and ``delivery``; ``batch_to_learner`` moves a sample to the learner.

    ``keeps_priorities`` is False where the sampler has no use for any, so that an update has nothing to change.
    """

    ingest: Callable[..., tuple]
    deliver: Callable[..., tuple]
    update_priorities: Callable[..., tuple]
    batch_to_learner: Callable[[Sample], Sample]
    to_placement: Callable[[PyTree], PyTree]
    keeps_priorities: bool = True


class Drawn(NamedTuple):
    """A batch drawn and not yet delivered, with the number of batches delivered when it was drawn."""

    sample: Sample
    delivered_before: int


class Unit(NamedTuple):
    """A rollout unit waiting to be inserted, brought to its placement by ``door``."""

    rollout: PyTree
    context: PyTree
    version: int
    ticket: Ticket | None
    door: Intake | None = None


class ReplayPipeline:
    """One table at run time: its arrays, its programs and its account. Threads may share it; the lock orders them."""

    def __init__(
        self,
        programs: Programs,
        state: ReplayState,
        carry: PyTree,
        ledger: Ledger,
        schedule: Schedule,
        key: Array,
        unit_steps: int,
        door: Intake | None = None,
    ):
        self.ledger, self.schedule, self._door = ledger, schedule, door
        self._programs, self._key, self._unit_steps = programs, key, unit_steps
        self._storage, self._control, self._carry = state.storage, state.control, carry
        self._waiting: deque[Unit] = deque()
        self._drawn: deque[Drawn] = deque()
        self._lock = threading.Lock()
        self._shapes_of_ingest = getattr(programs.ingest, "shapes", None)
        self._known_contexts: set[Any] = set()
        self._none_applied: Array | None = None

    @property
    def state(self) -> ReplayState:
        """The present arrays. Do not keep them: the next call donates them."""
        return ReplayState(self._storage, self._control)

    @property
    def undelivered(self) -> int:
        """Batches drawn and not yet delivered."""
        return len(self._drawn)

    def push(self, unit: Unit) -> AddInfo | None:
        """Insert one unit now, or let it wait behind the next draws; return what the insert did if it was dispatched."""
        with self._lock:
            unit = at_home(unit, self._door)
            if not self.schedule.overlap_ingestion:
                return in_callers_mesh(self._insert(unit))
            self._check_context(unit)
            info = self._insert_next() if self._waiting else None
            self._waiting.append(unit)
            return in_callers_mesh(info)

    def pull(self, context: PyTree) -> Sample:
        """Return the next batch; ``NotReadyError`` when the replay holds too little. Where it raises, no batch is lost."""
        with self._lock:
            if not self._ready():
                self._refuse_not_ready()
            context = context if self._door is None else self._door.context(context)
            while len(self._drawn) < 1 + self.schedule.prefetch:
                self._drawn.append(self._draw(context))
            self._insert_waiting()
            sample = in_callers_mesh(self._drawn[0].sample)
            drawn = self._drawn.popleft()
            self.ledger.deliver(self.ledger.delivered_batches - drawn.delivered_before)
            return sample

    def ready(self) -> bool:
        """Whether ``pull`` would return a batch."""
        with self._lock:
            return self._ready()

    def update_priorities(self, info: SampleInfo, priorities: Any) -> Array:
        """Apply new priorities to the items of ``info``; return how many were still there, int32 a partition.

        Where the sampler keeps no priorities nothing is dispatched: host values and shapes are checked all the same, but
        the numbers returned are 0 (nothing was updated) and no stale or refused update is counted.
        """
        if not isinstance(priorities, jax.Array):
            priorities = _checked_on_host(priorities)
        if priorities.shape != info.slot.shape:
            refuse(
                ValueRefusedError,
                "Priorities and info are of different batches.",
                got=f"priorities {priorities.shape}",
                want=f"{info.slot.shape}",
            )
        with self._lock:
            if self._programs.keeps_priorities:
                info, priorities = self._programs.to_placement((info, priorities))
                self._control, applied = self._programs.update_priorities(self._control, info, priorities)
            else:
                applied = self._nothing_applied()
            self.ledger.priority_updates += 1
            return in_callers_mesh(applied)

    def flush(self) -> None:
        """Insert what waits and wait until the device has done all of it."""
        with self._lock:
            self._insert_waiting()
            fence = self._control
        jax.block_until_ready(fence)

    def live_items(self) -> int:
        """Return the number of live items read from the device: a sync point."""
        with self._lock:
            live = int(self._live_by_partition().sum())
            self.ledger.observe(live)
            return live

    def inserted_items(self) -> int:
        """Return the number of items inserted so far, padding not counted: a sync point."""
        with self._lock:
            ring = jax.tree.map(np.asarray, self._control.ring)
            steps = ring.laps.astype(np.int64) * self.ledger.length + ring.head
            lanes = self.ledger.lanes // steps.shape[0] if steps.ndim == 1 else 1
            return int(steps.sum()) * lanes + self.ledger.inserted_elsewhere

    def faults(self) -> dict[str, int]:
        """Return what device-side values did wrong, by name, over all partitions: a sync point."""
        with self._lock:
            return {name: int(np.sum(np.asarray(count))) for name, count in self._control.faults._asdict().items()}

    def _live_by_partition(self) -> np.ndarray:
        """Return live items, ``(partitions,)``: a sync point. A ring counts for all lanes, or one a lane where ragged."""
        filled = np.asarray(self._control.ring.filled)
        return filled * (self.ledger.lanes // filled.shape[0]) if filled.ndim == 1 else filled.sum(axis=1)

    def _insert(self, unit: Unit) -> AddInfo:
        version = np.uint32(unit.version & 0xFFFFFFFF)
        self._storage, self._control, self._carry, info = self._programs.ingest(
            self._storage, self._control, self._carry, unit.rollout, unit.context, version
        )
        self.ledger.insert(self._unit_steps)
        if unit.ticket is not None:
            unit.ticket.reader = info.added
        return info

    def _insert_next(self) -> AddInfo:
        """Insert the unit that waits longest; it goes on waiting if that raises."""
        info = self._insert(self._waiting[0])
        self._waiting.popleft()
        return info

    def _insert_waiting(self) -> None:
        while self._waiting:
            self._insert_next()

    def _check_context(self, unit: Unit) -> None:
        """Raise now what the hook would raise for a context of this shape later, when the unit's turn comes."""
        leaves, structure = jax.tree.flatten(unit.context)
        kind = (structure, tuple((np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves))
        if kind in self._known_contexts or self._shapes_of_ingest is None:
            return
        state = (self._storage, self._control, self._carry)
        self._shapes_of_ingest(*state, unit.rollout, unit.context, np.uint32(0))
        self._known_contexts.add(kind)

    def _nothing_applied(self) -> Array:
        applied = self._none_applied
        if applied is None:
            filled = self._control.ring.filled
            applied = self._none_applied = jax.device_put(np.zeros(filled.shape[0], np.int32), filled.device)
        return applied

    def _draw(self, context: PyTree) -> Drawn:
        number = np.uint32(self.ledger.drawn_batches & 0xFFFFFFFF)
        self._control, sample = self._programs.deliver(self._control, self._storage, self._key, number, context)
        drawn = Drawn(self._programs.batch_to_learner(sample), self.ledger.delivered_batches)
        self.ledger.drawn_batches += 1
        return drawn

    def _ready(self) -> bool:
        if self._drawn:
            return True
        if not self.ledger.ready:
            self._insert_waiting()
        if not self.ledger.ready or self.ledger.exact:
            return self.ledger.ready
        live = self._live_by_partition()
        self.ledger.observe(int(live.sum()))
        # every partition draws its share, and a ring never shrinks: from here on the account is right about readiness
        self.ledger.exact = bool(live.min() >= -(-self.ledger.min_size // live.size)) and self.ledger.ready
        return self.ledger.exact

    def _refuse_not_ready(self) -> None:
        refuse(
            NotReadyError,
            "The replay holds too little experience to draw a batch.",
            got=f"{self.ledger.size} items",
            want=f"at least min_size={self.ledger.min_size}",
            fix="push more rollouts first, or lower ReplayConfig(min_size=)",
        )


def _checked_on_host(priorities: Any) -> np.ndarray:
    values = np.array(priorities, np.float32)  # a copy: the program may read it after the caller has written to its own
    bad = ~(np.isfinite(values) & (values >= 0))
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        refuse(
            ValueRefusedError,
            "Priorities must be finite and not negative; nothing of this update was applied.",
            got=f"{values.reshape(-1)[first]} at index {first} ({int(bad.sum())} bad of {values.size})",
            want="finite numbers >= 0",
            fix="take abs() of TD errors and check the loss for NaN",
        )
    return values


__all__ = ["Drawn", "Programs", "ReplayPipeline", "Unit"]
