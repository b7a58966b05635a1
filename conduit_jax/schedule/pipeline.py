"""Runs a schedule for replayed experience: the order of inserts, draws and updates, dispatched, never waited for.

Everything that decides *which* bytes are delivered happens in program order, under one lock; copies and gathers run
asynchronously behind it.

* Delivery draws ``g_delivery`` batches a call when the last one of a call has been handed over; with
  ``overlap_delivery`` one call earlier, so that between g and 2g - 1 batches are ahead of the learner. A batch drawn with
  q batches ahead of it sees exactly the priorities after update k - 1 - q.
* Ingestion inserts ``g_ingestion`` units a call, when that many wait; with ``overlap_ingestion`` behind the draws of the
  iteration instead of in front of them. Units go in singly where a batch is wanted that cannot be drawn without them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from conduit_jax.errors import ConfigError, NotReadyError, ValueRefusedError, refuse
from conduit_jax.replay.buffer import ReplayState
from conduit_jax.schedule.ledger import Ledger
from conduit_jax.schedule.programs import Drawn, Programs, Unit, checked_priorities, context_kind, stays
from conduit_jax.schedule.residence import at_home
from conduit_jax.schedule.semantics import Schedule
from conduit_jax.schedule.trace import Recorder
from conduit_jax.schedule.worker import Pending
from conduit_jax.sharding.intake import Intake
from conduit_jax.sharding.mesh import in_callers_mesh
from conduit_jax.types import AddInfo, Sample, SampleInfo

Array = jax.Array
PyTree = Any


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
        self._submit: Callable[[tuple], tuple] | None = None
        self._recorder: Recorder | None = None
        self.apart = False  # a hook on the host stands between the buffer and the loop
        self._storage, self._control, self._carry = state.storage, state.control, carry
        self._waiting: deque[Unit] = deque()
        self._drawn: deque[Drawn] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._shapes_of_ingest = getattr(programs.ingest, "shapes", None)
        self._known_contexts: set[Any] = set()
        self._none_applied: Array | None = None
        self.updated_from: set[bool] = set()  # whether priorities came from the host: each way is a program of its own

    @property
    def state(self) -> ReplayState:
        """The present arrays. Do not keep them: the next call donates them."""
        return ReplayState(self._storage, self._control)

    @property
    def programs(self) -> Programs:
        """The compiled functions."""
        return self._programs

    @property
    def mesh(self) -> Mesh:
        """The mesh of the programs."""
        return self._programs.mesh

    @property
    def one_site(self) -> bool:
        """Whether the buffer is in device memory where the learner computes, and all hooks are traced."""
        return self._programs.one_site and not self.apart

    @property
    def key(self) -> Array:
        """The raw key all draws derive from, uint32 ``(2,)``."""
        return self._key

    @property
    def store(self) -> tuple[PyTree, PyTree, PyTree]:
        """(storage, control, carry): what a fused program takes over, and gives back by ``resume``."""
        return self._storage, self._control, self._carry

    def resume(self, store: tuple[PyTree, PyTree, PyTree], units: int, batches: int, *, prioritized: bool) -> None:
        """Go on with ``store`` after ``units`` were inserted and ``batches`` delivered, none drawn ahead, by others."""
        with self._lock:
            self._storage, self._control, self._carry = store
            self.ledger.advance(units, units * self._unit_steps, batches, batches if prioritized else 0)

    @property
    def undelivered(self) -> int:
        """Batches drawn and not yet delivered."""
        return len(self._drawn)

    @property
    def waiting_units(self) -> int:
        """Units pushed and not yet inserted."""
        return len(self._waiting)

    def push(self, unit: Unit, deadline_s: float = 0.0) -> AddInfo | None:
        """Insert one unit now, or let it wait for its group or behind the next draws; return what an insert did, if any.

        ``BackpressureError`` where a limiter forbids it for ``deadline_s``; nothing was pushed then.
        """
        with self._lock:
            self._admit(deadline_s)
            unit = at_home(unit, self._door)
            g, late = int(self.schedule.g_ingestion), self.schedule.overlap_ingestion
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
        with self._lock:
            self._admit(deadline_s)

    def pull(self, context: PyTree, deadline_s: float = 0.0) -> Sample:
        """Return the next batch; ``NotReadyError`` when there is none for ``deadline_s``. Where it raises, no batch is lost."""
        with self._lock:
            if not (self._ready() or (deadline_s and self._changed.wait_for(self._ready, deadline_s))):
                self._refuse_not_ready()
            self._refill(context if self._door is None else self._door.context(context))
            g = int(self.schedule.g_ingestion)
            while self.schedule.overlap_ingestion and len(self._waiting) >= g:
                self._insert_next(g)
            sample = self._drawn[0].sample
            sample = sample if isinstance(sample, Pending) else in_callers_mesh(sample)
            self._hand_over(self._drawn.popleft())
            return sample

    def record(self, recorder: Recorder) -> None:
        """Enter every transfer to the learner from here on."""
        self._recorder, move = recorder, self._programs.batch_to_learner
        if move is not stays:
            move = recorder.timed("transfer", "batches to the learner", move)
            self._programs = self._programs._replace(batch_to_learner=move)

    def deliver_by(self, submit: Callable[[tuple], tuple]) -> None:
        """Hand every batch that is drawn to ``submit``, and what that returns to whoever pulls."""
        to_learner, self._submit = self._programs.batch_to_learner, submit
        self.apart = True
        self._programs = self._programs._replace(batch_to_learner=lambda samples: submit(to_learner(samples)))

    def reschedule(self, schedule: Schedule) -> None:
        """Run ``schedule`` from here on: units that wait are inserted now, batches drawn ahead are delivered first."""
        with self._lock:
            self._insert_waiting()
            self.schedule = schedule

    def sure_units(self) -> int | None:
        """Return after how many units more batches may still be drawn; ``None``: after any number, once ``ready``."""
        return None

    def ready(self) -> bool:
        """Whether ``pull`` would return a batch."""
        with self._lock:
            return self._ready()

    def drawn_already(self) -> bool:
        """Whether the next ``pull`` hands over a batch that is drawn, and is not the one that draws others."""
        with self._lock:
            return self._ready() and len(self._drawn) > self.schedule.prefetch * int(self.schedule.g_delivery)

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
        with self._lock:
            if self._programs.keeps_priorities:
                self.updated_from.add(isinstance(priorities, np.ndarray))
                info, priorities = self._programs.to_placement((info, priorities))
                self._control, applied = self._programs.update_priorities(self._control, info, priorities)
            else:
                applied = self._nothing_applied()
            self.ledger.priority_updates += 1
            return in_callers_mesh(applied)

    def delete(self, info: SampleInfo) -> Array:
        """Refuse: a ring has no room for holes."""
        refuse(
            ConfigError,
            "The ring storage cannot delete single items.",
            want="a table of slots",
            fix='ReplayConfig(storage="slots"), or update_priorities to 0 where draws are prioritized',
        )

    def reset(self, *, counted: bool) -> None:
        """Empty the table, its limiter and what was drawn ahead; ``counted``: a hook counts records on the device."""
        with self._lock:
            self._insert_waiting()
            before = self._inserted_items()
            (self._control,) = self._programs.reset(self._control)
            self.ledger.dropped_batches += len(self._drawn)
            self._drawn.clear()
            self.ledger.empty(exact=not counted)
            self.ledger.inserted_elsewhere += before - self._inserted_items()
            self._changed.notify_all()

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
            return self._inserted_items()

    def faults(self) -> dict[str, int]:
        """Return what device-side values did wrong, by name, over all partitions: a sync point."""
        with self._lock:
            return {name: int(np.sum(np.asarray(count))) for name, count in self._control.faults._asdict().items()}

    def _inserted_items(self) -> int:
        ring = jax.tree.map(np.asarray, self._control.ring)
        steps = ring.laps.astype(np.int64) * self.ledger.length + ring.head
        lanes = self.ledger.lanes // steps.shape[0] if steps.ndim == 1 else 1
        return int(steps.sum()) * lanes + self.ledger.inserted_elsewhere

    def _live_by_partition(self) -> np.ndarray:
        """Return live items, ``(partitions,)``: a sync point. A ring counts for all lanes, or one a lane where ragged."""
        filled = jax.tree.map(np.asarray, self._control.ring).filled  # reading on the device asks for its own mesh
        return filled * (self.ledger.lanes // filled.shape[0]) if filled.ndim == 1 else filled.sum(axis=1)

    def _insert(self, units: tuple[Unit, ...]) -> AddInfo:
        """Insert ``units`` in one call."""
        rollouts, contexts, _, tickets, _ = zip(*units, strict=True)
        versions = tuple(np.uint32(unit.version & 0xFFFFFFFF) for unit in units)
        ingest, values = self._programs.ingest_group, (rollouts, contexts, versions)
        if len(units) == 1:
            ingest, values = self._programs.ingest, (rollouts[0], contexts[0], versions[0])
        self._storage, self._control, self._carry, info = ingest(self._storage, self._control, self._carry, *values)
        for unit in units:
            self.ledger.insert(self._unit_steps, unit.version)
        for ticket in tickets:
            if ticket is not None:
                ticket.reader = info
        self._changed.notify_all()
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
            g = int(self.schedule.g_ingestion)
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

    def _refill(self, context: PyTree) -> None:
        """Draw what is due: a call when nothing is drawn, or one call ahead of that."""
        g = int(self.schedule.g_delivery)
        while len(self._drawn) <= self.schedule.prefetch * g:
            self._draw(g, context)

    def _draw(self, count: int, context: PyTree) -> None:
        """Draw ``count`` batches in one call."""
        first = self.ledger.drawn_batches
        numbers = tuple(np.uint32((first + index) & 0xFFFFFFFF) for index in range(count))
        if count == 1:
            self._control, *samples = self._programs.deliver(
                self._control, self._storage, self._key, numbers[0], context
            )
        else:
            self._control, samples = self._programs.deliver_group(
                self._control, self._storage, self._key, numbers, context
            )
        before = self.ledger.delivered_batches
        samples = self._programs.batch_to_learner(tuple(samples))
        self._drawn.extend(Drawn(sample, before) for sample in samples)
        self.ledger.draw(count)
        self._changed.notify_all()

    def _hand_over(self, drawn: Drawn) -> None:
        """Enter the batch that is handed over now."""
        self.ledger.deliver(self.ledger.delivered_batches - drawn.delivered_before)

    def _admit(self, deadline_s: float) -> None:
        """Return where a unit may be inserted, which a ring without limiter always allows."""

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


__all__ = ["Drawn", "Programs", "ReplayPipeline", "Unit"]
