"""Runs a schedule for replayed experience: the order of inserts, draws and updates, dispatched, never waited for.

Everything that decides *which* bytes are delivered happens in program order, under one lock; copies and gathers run
asynchronously behind it. What a pull does for later ones may be left to a thread; the next call waits for it.

* Delivery draws ``g_delivery`` batches a call when the last one of a call has been handed over; with
  ``overlap_delivery`` one call earlier, so that between g and 2g - 1 batches are ahead of the learner. A batch drawn with
  q batches ahead of it sees exactly the priorities after update k - 1 - q.
* Ingestion inserts ``g_ingestion`` units a call, when that many wait; with ``overlap_ingestion`` behind the draws of the
  iteration instead of in front of them. Units go in singly where a batch is wanted that cannot be drawn without them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from conduit_jax.errors import ConfigError, NotReadyError, ValueRefusedError, refuse
from conduit_jax.schedule.programs import Drawn, Programs, Unit, at_home, checked_priorities, context_kind
from conduit_jax.schedule.residence import Resident
from conduit_jax.schedule.semantics import Schedule
from conduit_jax.sharding.mesh import in_callers_mesh
from conduit_jax.sharding.pressure import MemoryPressure
from conduit_jax.types import AddInfo, Sample, SampleInfo

Array = jax.Array
PyTree = Any


class ReplayPipeline(Resident):
    """One table at run time. Threads may share it; its lock orders them."""

    _draws_surely = True  # a table that may draw once may draw on

    def push(self, unit: Unit, deadline_s: float = 0.0) -> AddInfo | None:
        """Insert one unit now, or let it wait for its group or behind the next draws; return what an insert did, if any.

        ``BackpressureError`` where a limiter forbids it for ``deadline_s``; nothing was pushed then.
        """
        with self._lock.lock, self._lock:
            self._admit(deadline_s)
            unit = unit if unit.door is self._door else at_home(unit, self._door)
            g, late = self._units_a_call, self._schedule.overlap_ingestion
            if g == 1 and not late:
                return in_callers_mesh(self._insert((unit,)))
            self._check_context(unit)
            info = self._insert_next(g) if late and len(self._waiting) >= g else None
            self._waiting.append(unit)
            if not late and len(self._waiting) >= g:
                try:
                    info = self._insert_next(g)
                except BaseException:
                    self._waiting.pop()  # a push that raises has pushed nothing
                    raise
            return in_callers_mesh(info)

    def admit(self, deadline_s: float = 0.0) -> None:
        """Raise what ``push`` would raise for its limiter."""
        with self._lock.lock, self._lock:
            self._admit(deadline_s)

    def pull(self, context: PyTree, deadline_s: float = 0.0) -> Sample:
        """Return the next batch; ``NotReadyError`` when there is none for ``deadline_s``. Where it raises, no batch is lost."""
        return self.pull_group(context, 1, deadline_s)[0]

    def pull_group(self, context: PyTree, most: int, deadline_s: float = 0.0) -> list[Sample]:
        """Return what ``pull`` would, and up to ``most`` in all those that pulls behind it would return without a draw."""
        with self._lock.lock, self._lock:
            self._lock.pulled()
            self._await_ready(deadline_s)
            context = context if self._door is None else self._door.context(context)
            self._refill(context, 0)
            count = 1 if most == 1 else self._group(context, most)
            samples: list[Any] = [self._drawn[index].sample for index in range(count)]
            samples = in_callers_mesh(samples) if self._submit is None else samples  # or they are being made
            if self._overlaps and self._work_is_due():
                hand_over = partial(self._hand_over, count)
                self._lock.leave(partial(self._work_ahead, context, count), hand_over, MemoryPressure)
            else:
                self._hand_over(count)
            return samples

    def await_ready(self, deadline_s: float) -> None:
        """Return once a batch may be pulled; ``NotReadyError`` where none may for ``deadline_s``."""
        with self._lock.lock, self._lock:
            self._await_ready(deadline_s)

    def prepare(self, context: PyTree, most: int) -> list[Any]:
        """Draw as ``pull_group`` would and return its batches, in no caller's mesh; they stay here until ``hand_over``."""
        with self._lock.lock, self._lock:
            self._lock.pulled()
            self._await_ready(0.0)
            context = context if self._door is None else self._door.context(context)
            self._refill(context, 0)
            if self._work_is_due() or (most > 1 and not self._draws_surely):
                self._work_ahead(context, 0)
            return [self._drawn[index].sample for index in range(self._within_reach(most))]

    def hand_over(self, count: int) -> None:
        """Enter the next ``count`` batches, which are drawn, as handed over."""
        with self._lock.lock, self._lock:
            self._hand_over(count)

    def reschedule(self, schedule: Schedule) -> None:
        """Run ``schedule`` from here on: units that wait are inserted now, batches drawn ahead are delivered first."""
        with self._lock.lock, self._lock:
            self._insert_waiting()
            self.schedule = schedule

    def sure_units(self) -> int | None:
        """Return after how many units more batches may still be drawn; ``None``: after any number, once ``ready``."""
        return None

    def ready(self) -> bool:
        """Whether ``pull`` would return a batch."""
        with self._lock.lock, self._lock:
            return self._ready()

    def update_priorities(self, info: SampleInfo, priorities: Any) -> Array:
        """Apply new priorities to the items of ``info``; return how many were still there, int32 a partition.

        Where the sampler keeps no priorities nothing is dispatched: host values and shapes are checked all the same, but
        the numbers returned are 0 (nothing was updated) and no stale or refused update is counted.
        """
        if not isinstance(priorities, jax.Array):
            priorities = checked_priorities(priorities)
        if priorities.shape != info.shape:
            refuse(
                ValueRefusedError,
                "Priorities and info are of different batches.",
                got=f"priorities {priorities.shape}",
                want=f"{info.shape}",
            )
        with self._lock.lock, self._lock:
            if self._programs.keeps_priorities:
                self.updated_from.add(isinstance(priorities, np.ndarray))
                info, priorities = self._programs.to_placement((info, priorities))
                self._control, applied = self._programs.update_priorities(self._control, info, priorities)
            else:
                applied = self._nothing_applied()
            self._ledger.priority_updates += 1
            return in_callers_mesh(applied)

    @property
    def deletes(self) -> bool:
        """Whether single items can be deleted."""
        return False

    def delete(self, info: SampleInfo) -> Array:
        """Refuse: a ring has no room for holes."""
        refuse(
            ConfigError,
            "The ring storage cannot delete single items.",
            want="a table of slots",
            fix='ReplayConfig(storage="slots", items=None), or update_priorities to 0 where draws are prioritized',
        )

    def reset(self, *, counted: bool) -> None:
        """Empty the table, its limiter and what was drawn ahead; ``counted``: a hook counts records on the device."""
        with self._lock.lock, self._lock:
            self._insert_waiting()
            before = self._inserted_items()
            (self._control,) = self._programs.reset(self._control)
            self._ledger.dropped_batches += len(self._drawn)
            self._drawn.clear()
            self._ledger.empty(exact=not counted)
            self._ledger.inserted_elsewhere += before - self._inserted_items()
            self._lock.notify()

    def flush(self) -> None:
        """Insert what waits and wait until the device has done all of it."""
        with self._lock.lock, self._lock:
            self._insert_waiting()
            fence = self._control
        jax.block_until_ready(fence)

    def _insert(self, units: tuple[Unit, ...]) -> AddInfo:
        """Insert ``units`` in one call."""
        versions = [np.uint32(unit.version & 0xFFFFFFFF) for unit in units]
        ingest, values = self._programs.ingest, (units[0].rollout, units[0].context, versions[0])
        if len(units) > 1:
            rollouts, contexts, *_ = zip(*units, strict=True)
            ingest, values = self._programs.ingest_group, (rollouts, contexts, tuple(versions))
        self._storage, self._control, self._carry, info = ingest(self._storage, self._control, self._carry, *values)
        for unit in units:
            self._ledger.insert(self._unit_steps, unit.version)
            if unit.ticket is not None:
                unit.ticket.reader = info
        self._lock.notify()
        return info

    def _insert_next(self, count: int) -> AddInfo:
        """Insert the ``count`` units that wait longest, in one call; they go on waiting if that raises."""
        info = self._insert(tuple(self._waiting[index] for index in range(count)))
        for _ in range(count):
            self._waiting.popleft()
        return info

    def _insert_waiting(self) -> None:
        """Insert all that wait: whole groups, then what is left one by one."""
        while self._waiting:
            g = self._units_a_call
            self._insert_next(g if len(self._waiting) >= g else 1)

    def _check_context(self, unit: Unit) -> None:
        """Raise now what the hook would raise for a context of this shape later, when the unit's turn comes."""
        kind = context_kind(unit.context)
        if kind in self._known_contexts or self._shapes_of_ingest is None:
            return
        state = (self._storage, self._control, self._carry)
        self._shapes_of_ingest(*state, unit.rollout, unit.context, np.uint32(0))
        self._known_contexts.add(kind)

    def _nothing_applied(self) -> Array:
        applied = self._none_applied
        if applied is None:
            words = self._control.ring.words
            applied = self._none_applied = jax.device_put(np.zeros(words.shape[0], np.int32), words.sharding)
        return applied

    def _work_is_due(self) -> bool:
        """Whether a pull has to draw or to insert for later ones."""
        schedule = self._schedule
        if schedule.overlap_delivery and len(self._drawn) <= self._batches_a_call:
            return True
        return schedule.overlap_ingestion and len(self._waiting) >= self._units_a_call

    def _group(self, context: PyTree, most: int) -> int:
        """Return how many batches come without another draw, ``most`` at most; what is not sure to come is drawn first."""
        if not self._draws_surely:
            self._work_ahead(context, 0)
        return self._within_reach(most)

    def _within_reach(self, most: int) -> int:
        """Return how many batches a group has: the one that may draw others, and those up to the next that does."""
        g, drawn = self._batches_a_call, len(self._drawn)
        ahead = self.schedule.prefetch * g
        if drawn <= ahead and self._draws_surely:  # what the first one draws, or leaves to be drawn
            drawn += -(-(ahead + 1 - drawn) // g) * g
        return max(1, min(most, drawn - ahead, len(self._drawn)))

    def _work_ahead(self, context: PyTree, count: int) -> None:
        """Do what a pull has to do for later ones, then enter its own ``count`` batches."""
        self._refill(context, self.schedule.prefetch)
        g = self._units_a_call
        while self.schedule.overlap_ingestion and len(self._waiting) >= g:
            self._insert_next(g)
        self._hand_over(count)

    def _refill(self, context: PyTree, ahead: int) -> None:
        """Draw what is due: a call when nothing is drawn, or as many calls ``ahead`` of that."""
        g = self._batches_a_call
        while len(self._drawn) <= ahead * g:
            self._draw(g, context)

    def _draw(self, count: int, context: PyTree) -> None:
        """Draw ``count`` batches in one call."""
        first, before = self._ledger.drawn_batches, self._ledger.delivered_batches
        if count == 1:
            self._control, *samples = self._programs.deliver(
                self._control, self._storage, self._key, np.uint32(first & 0xFFFFFFFF), context
            )
        else:
            numbers = tuple(np.uint32((first + index) & 0xFFFFFFFF) for index in range(count))
            self._control, samples = self._programs.deliver_group(
                self._control, self._storage, self._key, numbers, context
            )
        samples = self._programs.batch_to_learner(tuple(samples))
        self._drawn.extend([Drawn(sample, before) for sample in samples])
        self._ledger.draw(count)
        self._lock.notify()

    def _hand_over(self, count: int) -> None:
        """Enter the ``count`` batches that are handed over now."""
        for _ in range(count):
            self._ledger.deliver(self._ledger.delivered_batches - self._drawn.popleft().delivered_before)

    def _admit(self, deadline_s: float) -> None:
        """Return where a unit may be inserted, which a ring without limiter always allows."""

    def _ready(self) -> bool:
        if self._drawn or (self._ledger.exact and self._ledger.ready):
            return True
        if not self._ledger.ready:
            self._insert_waiting()
        if not self._ledger.ready or self._ledger.exact:
            return self._ledger.ready
        live = self._live_by_partition()
        self._ledger.observe(int(live.sum()))
        # every partition draws its share, and a ring never shrinks: from here on the account is right about readiness
        self._ledger.exact = bool(live.min() >= -(-self._ledger.min_size // live.size)) and self._ledger.ready
        return self._ledger.exact

    def _await_ready(self, deadline_s: float) -> None:
        if not (self._ready() or (deadline_s and self._lock.wait_for(self._ready, deadline_s))):
            self._refuse_not_ready()

    def _refuse_not_ready(self) -> None:
        refuse(
            NotReadyError,
            "The replay holds too little experience to draw a batch.",
            got=f"{self._ledger.size} items",
            want=f"at least min_size={self._ledger.min_size}",
            fix="push more rollouts first, or lower ReplayConfig(min_size=)",
        )


__all__ = ["Drawn", "Programs", "ReplayPipeline", "Unit"]
