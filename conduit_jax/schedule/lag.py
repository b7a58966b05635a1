"""Runs a schedule for experience of bounded lag: each item is delivered once, oldest first, at most k policy versions old.

Which items are live is decided on the host, from the versions units were pushed with: a unit that is too old when it is
pushed is refused, items that grow too old while they wait are dropped, and so is a batch that did after it was drawn ahead.
All of it is counted. The device only gathers the slots it is told.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.config import BoundedLag, ReplayConfig, Uniform
from conduit_jax.delivery import delivered
from conduit_jax.errors import ConfigError, refuse
from conduit_jax.hooks import Hook
from conduit_jax.replay import random_bits, ring, storage
from conduit_jax.replay.interface import Replay, ReplayState
from conduit_jax.schedule.ledger import Ledger
from conduit_jax.schedule.pipeline import ReplayPipeline
from conduit_jax.schedule.programs import Drawn, Programs, Unit
from conduit_jax.schedule.semantics import Schedule
from conduit_jax.sharding.intake import Intake
from conduit_jax.sharding.lift import Kind, lift
from conduit_jax.sharding.memory import storage_access
from conduit_jax.sharding.placement import Placement
from conduit_jax.types import AddInfo, Rollout, Sample, SampleInfo

Array = jax.Array
PyTree = Any


class Span(NamedTuple):
    """Items ``[start, end)`` of every partition, made by policy ``version``; numbered in the order they were pushed."""

    version: int
    start: int
    end: int


@dataclass(kw_only=True)
class LagLedger(Ledger):
    """The account of a queue: ``waiting`` spans of items of each of ``partitions``, none older than ``max_lag`` versions.

    ``lag`` counts delivered items by their age in versions; ``stale_items`` were dropped for it, ``refused_items`` not
    even stored; ``overflow_items`` were overwritten before anybody took them.
    """

    partitions: int
    max_lag: int
    waiting: deque[Span] = field(default_factory=deque)
    lag: Counter[int] = field(default_factory=Counter)
    stale_items: int = 0
    refused_items: int = 0
    overflow_items: int = 0
    _end: int = 0

    def insert(self, steps: int, version: int) -> None:
        """Enter a unit; the oldest items make room where the queue is full."""
        count = steps * self.lanes // self.partitions
        self.pushed_units += 1
        self.waiting.append(Span(version, self._end, self._end + count))
        self._end += count
        first = self._end - self.capacity // self.partitions
        while self.waiting[0].start < first:
            span = self.waiting.popleft()
            self.overflow_items += (min(span.end, first) - span.start) * self.partitions
            if span.end > first:
                self.waiting.appendleft(span._replace(start=first))
        self._count()

    def drop_stale(self, version: int) -> None:
        """Drop what is more than ``max_lag`` versions older than ``version``."""
        fresh = deque(span for span in self.waiting if version - span.version <= self.max_lag)
        kept = sum(span.end - span.start for span in fresh) * self.partitions
        self.stale_items += self.size - kept
        self.waiting, self.size = fresh, kept

    def take(self, count: int) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
        """Take the ``count`` oldest items of each partition: their numbers, and how many of all of each version."""
        parts: list[np.ndarray] = []
        versions: Counter[int] = Counter()
        while count:
            span = self.waiting.popleft()
            end = min(span.end, span.start + count)
            parts.append(np.arange(span.start, end))
            versions[span.version] += (end - span.start) * self.partitions
            count -= end - span.start
            if end < span.end:
                self.waiting.appendleft(span._replace(start=end))
        self._count()
        return np.concatenate(parts), tuple(versions.items())

    def _count(self) -> None:
        self.size = sum(span.end - span.start for span in self.waiting) * self.partitions


def take_slots(hook: Hook, replay: Replay, access: storage.Storage, partitions: int) -> Callable[..., tuple]:
    """Return ``(partition, control, storage, key, (number, slots, waiting), context) -> (control, Sample)`` of the named ``slots``.

    ``slots`` int32 ``(batch,)`` are counted within a partition; ``waiting`` int32 is the number of live items in it.
    """

    def take(partition: Array, control: PyTree, kept: PyTree, key: Array, slots: Array, stamp: tuple) -> tuple:
        number, waiting, context = stamp
        time = slots % replay.geometry.length
        data, versions = storage.gather(access, kept, slots)
        ones = jnp.ones(slots.shape, jnp.float32)
        info = SampleInfo(
            slot=slots + partition * replay.geometry.slots,
            generation=ring.generation(control.ring, time),
            probability=ones,
            priority=ones,
            table_size=jnp.broadcast_to(waiting, slots.shape),
            age=ring.age(control.ring, replay.geometry.length, time),
            policy_version=versions,
        )
        data = delivered(hook, data, random_bits.fold(key, number), partition, context)
        return control, Sample.packed(data, info, ones, None, jnp.ones(slots.shape, bool))

    return take


def compile_taking(hook: Hook, replay: Replay, access: storage.Storage, placement: Placement) -> tuple[Any, Any]:
    """Return the programs that deliver one batch and g batches (tuples of slots and stamps) of named slots."""
    take = take_slots(hook, replay, access, placement.part.partitions)

    def take_group(partition: Array, control: PyTree, kept: PyTree, key: Array, slots: tuple, stamps: tuple) -> tuple:
        pairs = zip(slots, stamps, strict=True)
        samples = tuple(take(partition, control, kept, key, own, stamp)[1] for own, stamp in pairs)
        return control, samples

    kinds = (Kind.CONTROL, Kind.STORAGE, Kind.SAME, Kind.BATCH, Kind.SAME)
    results = (Kind.CONTROL, Kind.BATCH)
    return lift(take, placement, kinds, results, donate=(0,)), lift(take_group, placement, kinds, results, donate=(0,))


class LagPipeline(ReplayPipeline):
    """A queue at run time. ``version()`` is the present policy version; ``batch_size`` is over all partitions."""

    _ledger: LagLedger
    _draws_surely = False

    def __init__(
        self, arguments: tuple, *, version: Callable[[], int], batch_size: int, to_slots: Callable[..., np.ndarray]
    ):
        super().__init__(*arguments)
        self._version, self._batch_size, self._to_slots = version, batch_size, to_slots
        self._now = 0  # the version when the present pull was made

    def push(self, unit: Unit, deadline_s: float = 0.0) -> AddInfo | None:
        """Insert one unit as any replay does; one that is too old already is refused, counted, and ``None`` returned.

        A version that the rollout itself carries counts; where it is on a device, it is waited for.
        """
        own = unit.rollout.policy_version if isinstance(unit.rollout, Rollout) else None
        unit = unit if own is None else unit._replace(version=int(own))
        if self._version() - unit.version > self._ledger.max_lag:
            with self._lock.lock, self._lock:
                self._ledger.refused_items += self._unit_steps * self._ledger.lanes
                return None
        return super().push(unit, deadline_s)

    def reset(self, *, counted: bool) -> None:
        """Refuse: what waits is taken, once, in its order."""
        refuse(
            ConfigError,
            "A queue of bounded lag is not reset: which of its items are too old is known.",
            got="reset",
            want="OffPolicy",
            fix="raise plane.policy_version, or pull what waits",
        )

    def _refill(self, context: PyTree, ahead: int) -> None:
        g = self._batches_a_call
        while len(self._drawn) <= ahead * g and self._ledger.size >= self._batch_size:
            self._draw(min(g, self._ledger.size // self._batch_size), context)

    def _draw(self, count: int, context: PyTree) -> None:
        share, partitions = self._batch_size // self._ledger.partitions, self._ledger.partitions
        left = self._ledger.waiting.copy(), self._ledger.size
        slots, stamps, versions = [], [], []
        for index in range(count):
            number = np.uint32((self._ledger.drawn_batches + index) & 0xFFFFFFFF)
            stamps.append((number, np.int32(self._ledger.size // partitions), context))
            numbers, counts = self._ledger.take(share)
            slots.append(np.tile(self._to_slots(numbers), partitions))
            versions.append(counts)
        try:
            self._dispatch(slots, stamps, versions)
        except BaseException:
            self._ledger.waiting, self._ledger.size = left
            raise

    def _dispatch(self, slots: list[np.ndarray], stamps: list[tuple], versions: list[tuple]) -> None:
        take, values = self._programs.deliver_group, (tuple(slots), tuple(stamps))
        if len(slots) == 1:
            take, values = self._programs.deliver, (slots[0], stamps[0])
        self._control, result = take(self._control, self._storage, self._key, *values)
        samples = self._programs.batch_to_learner((result,) if len(slots) == 1 else tuple(result))
        before = self._ledger.delivered_batches
        self._drawn.extend(Drawn(one, before, made) for one, made in zip(samples, versions, strict=True))
        self._ledger.drawn_batches += len(slots)

    def _ready(self) -> bool:
        self._now = version = self._version()
        while self._drawn and self._is_stale(self._drawn[0]):
            self._drawn.popleft()
            self._ledger.stale_items += self._batch_size
        self._ledger.drop_stale(version)
        if self._drawn:
            return True
        if not self._ledger.ready:
            self._insert_waiting()
            self._ledger.drop_stale(version)
        return self._ledger.ready

    def _within_reach(self, most: int) -> int:
        behind = islice(self._drawn, 1, super()._within_reach(most))
        return 1 + sum(1 for _ in takewhile(lambda drawn: not self._is_stale(drawn), behind))

    def _is_stale(self, drawn: Drawn) -> bool:
        return self._now - min(made for made, _ in drawn.versions) > self._ledger.max_lag

    def _hand_over(self, count: int) -> None:
        for drawn in islice(self._drawn, count):
            for made, items in drawn.versions:
                self._ledger.lag[self._now - made] += items
        super()._hand_over(count)

    def live_items(self) -> int:
        """Return the number of items that wait to be taken."""
        with self._lock.lock, self._lock:
            return self._ledger.size


def lag_programs(programs: Programs, replay: Replay, hook: Hook, placement: Placement) -> Programs:
    """Return ``programs`` with a delivery that takes the slots it is told."""
    taking = compile_taking(hook, replay, storage_access(*placement.memory_kinds), placement)
    return programs._replace(deliver=taking[0], deliver_group=taking[1], keeps_priorities=False)


def lag_pipeline(
    algorithm: BoundedLag, parts: tuple[Programs, Replay, ReplayState, PyTree], partitions: int, schedule: Schedule,
    steps: tuple[Array, int, Intake], version: Callable[[], int],
) -> LagPipeline:  # fmt: skip
    """Return the running queue of ``parts``: programs, one partition's replay, state and carry; ``steps``: key, steps a unit, door."""
    programs, replay, state, carry = parts
    geometry = replay.geometry
    ledger = LagLedger(
        length=geometry.length,
        lanes=geometry.lanes * partitions,
        min_size=algorithm.batch_size,
        partitions=partitions,
        max_lag=algorithm.max_policy_lag,
    )
    return LagPipeline(
        (programs, state, carry, ledger, schedule, *steps),
        version=version,
        batch_size=algorithm.batch_size,
        to_slots=slots_in_order(*geometry),
    )


def slots_in_order(lanes: int, length: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return item numbers -> slots int32 of one partition: step by step over its ``lanes``, around rings of ``length``."""
    return lambda numbers: (numbers % lanes * length + numbers // lanes % length).astype(np.int32)


def queue_config(algorithm: BoundedLag, config: ReplayConfig, unit_items: int) -> ReplayConfig:
    """Return the queue's configuration; one that was not given holds what ``max_policy_lag`` lets anybody use."""
    if not isinstance(config.sampler, Uniform):
        refuse(
            ConfigError,
            "Experience of bounded lag is taken oldest first, each item once.",
            got=f"sampler={config.sampler}",
            want="replay=None, or ReplayConfig(capacity=...) alone",
        )
    if config.capacity >= algorithm.batch_size:
        return config
    used = max(unit_items, algorithm.batch_size * algorithm.updates_per_rollout)
    return dataclasses.replace(config, capacity=(algorithm.max_policy_lag + 2) * used)
