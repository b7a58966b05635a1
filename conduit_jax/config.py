"""What a user chooses: frozen, keyword-only, hashable values that refuse at once what can never work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from conduit_jax.errors import ConfigError, check_at_least, check_choice, check_integer, refuse
from conduit_jax.growth import Growth
from conduit_jax.items import Items


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Draw every live item with probability 1/size, with replacement."""


@dataclass(frozen=True, kw_only=True)
class Prioritized:
    """Draw item i with probability p_i**exponent / sum_j p_j**exponent (Schaul et al. 2016, proportional variant).

    A new item gets the highest priority seen so far. Weights are (N * P)**-importance_exponent, divided by the largest of
    the ``"batch"`` or left as they are (``"none"``). ``stratified`` draws one item from each of ``batch_size`` equal
    strata of the total, otherwise draws are independent.
    """

    exponent: float = 0.6
    importance_exponent: float = 0.4
    importance_normalization: str = "batch"
    stratified: bool = True

    def __post_init__(self) -> None:
        for name in ("exponent", "importance_exponent"):
            check_at_least(f"Prioritized({name}=)", getattr(self, name), 0.0)
            if math.isinf(getattr(self, name)):
                refuse(
                    ConfigError,
                    f"Prioritized({name}=) is not finite.",
                    got=getattr(self, name),
                    want="a finite number >= 0",
                )
        check_choice("Prioritized(importance_normalization=)", self.importance_normalization, ("batch", "none"))


@dataclass(frozen=True, kw_only=True)
class Fifo:
    """Take the oldest insertion; priority updates do not move an item."""


@dataclass(frozen=True, kw_only=True)
class Lifo:
    """Take the newest insertion; priority updates do not move an item. As a remover it evicts the newcomer."""


@dataclass(frozen=True, kw_only=True)
class MinHeap:
    """Take the lowest priority; ties go to the least recently inserted or updated item."""


@dataclass(frozen=True, kw_only=True)
class MaxHeap:
    """Take the highest priority; ties go to the least recently inserted or updated item."""


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """Draw uniformly without replacement: every live item exactly once an epoch, in an order that the keys decide.

    An item inserted during an epoch belongs to it. The next epoch begins with the draw after the last item's.
    """


Remover = Uniform | Prioritized | Fifo | Lifo | MinHeap | MaxHeap
Sampler = Remover | Epochs
RING_SAMPLERS = (Uniform, Prioritized)


class RateLimits(NamedTuple):
    """A limiter's parameters in exact numbers; ``None`` where a difference is unbounded.

    Samples want ``inserts - deletes >= min_size`` and ``inserts * samples_per_insert - samples >= min_diff`` after them;
    inserts want ``inserts - deletes <= min_size`` or ``inserts * samples_per_insert - samples <= max_diff`` after them.
    """

    samples_per_insert: Fraction
    min_size: int
    min_diff: Fraction | None
    max_diff: Fraction | None


@dataclass(frozen=True, kw_only=True)
class MinSize:
    """Samples wait until ``min_size`` items are live; inserts never wait."""

    min_size: int

    def __post_init__(self) -> None:
        check_integer("MinSize(min_size=)", self.min_size, 1)

    @property
    def limits(self) -> RateLimits:
        return RateLimits(Fraction(1), self.min_size, None, None)


@dataclass(frozen=True, kw_only=True)
class SampleToInsertRatio:
    """Keep ``inserts * samples_per_insert - samples`` near ``min_size * samples_per_insert``: nobody runs far ahead.

    ``error_buffer`` is how far it may stray on either side, or the pair ``(min_diff, max_diff)`` itself. Numbers are taken
    as the nearest fractions with a denominator of at most 10**6 (``1/3`` is a third) and counted exactly from there on.
    """

    samples_per_insert: float | Fraction
    min_size: int
    error_buffer: float | tuple[float, float]

    def __post_init__(self) -> None:
        name = "SampleToInsertRatio"
        check_integer(f"{name}(min_size=)", self.min_size, 1)
        pair = self.error_buffer if isinstance(self.error_buffer, tuple) else (self.error_buffer,)
        if isinstance(self.error_buffer, tuple) and len(pair) != 2:
            refuse(ConfigError, f"{name}(error_buffer=) is no pair.", got=pair, want="(min_diff, max_diff)")
        _check_finite(f"{name}(samples_per_insert=)", self.samples_per_insert)
        for value in pair:
            _check_finite(f"{name}(error_buffer=)", value)
        if self.limits.samples_per_insert <= 0:
            got = repr(self.samples_per_insert)
            refuse(ConfigError, f"{name}(samples_per_insert=) is out of range.", got=got, want="at least 10**-6")
        _check_limits(self.limits)

    @property
    def limits(self) -> RateLimits:
        ratio = _nearest_fraction(self.samples_per_insert)
        if isinstance(self.error_buffer, tuple):
            least, most = self.error_buffer
            return RateLimits(ratio, self.min_size, _nearest_fraction(least), _nearest_fraction(most))
        middle, buffer = ratio * self.min_size, _nearest_fraction(self.error_buffer)
        return RateLimits(ratio, self.min_size, middle - buffer, middle + buffer)


@dataclass(frozen=True, kw_only=True)
class Queue:
    """At most ``size`` inserts ahead of the samples; with ``Fifo()`` twice and ``max_times_sampled=1`` a queue."""

    size: int

    def __post_init__(self) -> None:
        check_integer(f"{type(self).__name__}(size=)", self.size, 1)

    @property
    def limits(self) -> RateLimits:
        return RateLimits(Fraction(1), 1, Fraction(0), Fraction(self.size))


@dataclass(frozen=True, kw_only=True)
class Stack(Queue):
    """At most ``size`` inserts ahead of the samples; with ``Lifo()`` twice and ``max_times_sampled=1`` a stack."""


Limiter = MinSize | SampleToInsertRatio | Queue | Stack


def _check_limits(limits: RateLimits) -> None:
    """Refuse limits under which samples and inserts come to wait for each other."""
    ratio, min_size, least, most = limits
    if least is None or most is None:
        return
    numbers = f"samples_per_insert={float(ratio)}, min_size={min_size}, min_diff={float(least)}, max_diff={float(most)}"
    if most - least < 2 * max(Fraction(1), ratio):
        refuse(
            ConfigError,
            "A rate limiter this tight would deadlock: one insert or sample could leave neither allowed.",
            got=numbers,
            want=f"max_diff - min_diff >= {float(2 * max(Fraction(1), ratio))}",
            fix="raise SampleToInsertRatio(error_buffer=)",
        )
    if least > min_size * ratio:
        refuse(
            ConfigError,
            "A rate limiter would deadlock at once: min_size items do not reach min_diff.",
            got=numbers,
            want=f"min_diff <= min_size * samples_per_insert = {float(min_size * ratio)}",
        )


def _nearest_fraction(value: float | Fraction) -> Fraction:
    return Fraction(value).limit_denominator(10**6)  # 0.1 is a tenth


def _check_finite(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | Fraction) or not math.isfinite(value):
        refuse(ConfigError, f"{name} is not a finite number.", got=repr(value), want="a finite number")


MAX_TIMES_SAMPLED = 2**16


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """One table: how many items it holds, from when on it may be sampled, how, and what has to go when it is full.

    ``capacity`` is in items over all partitions; where it does not divide evenly it is rounded up and reported.
    ``partitions`` is decided by the learner's mesh unless given. ``ragged`` says that pushes may fill lanes unequally far
    (``lengths``, or a subset of the lanes); a plane sets it by itself when its hook or its pushes ask for it.

    ``limiter`` is ``MinSize(min_size=min_size)`` unless given. An item is removed by its ``max_times_sampled``-th draw; 0 means
    never. ``storage``: a ``"ring"`` in time order serves ``Fifo`` removal with ``Uniform`` or ``Prioritized`` draws;
    ``"slots"`` serves everything, deletes too, at the price of one item after another when full; ``"auto"`` takes the ring
    where it serves. ``growth`` declares which leaves may grow or be missing.

    ``items``: what is drawn, where that is not the stored step itself: ``Windows`` of a trajectory, a ``TransitionView`` of
    neighbouring steps, ``Hindsight`` goals, whole ``Episodes``. They need the ring; ``capacity`` goes on counting steps,
    ``min_size`` counts what may be drawn.
    """

    capacity: int
    min_size: int = 1
    sampler: Sampler = field(default_factory=Uniform)
    remover: Remover = field(default_factory=Fifo)
    limiter: Limiter | None = None
    max_times_sampled: int = 0
    storage: str = "auto"
    partitions: int | None = None
    ragged: bool = False
    growth: Growth | None = None
    items: Items | None = None

    def __post_init__(self) -> None:
        check_integer("ReplayConfig(capacity=)", self.capacity, 1)
        check_integer("ReplayConfig(min_size=)", self.min_size, 1)
        if self.partitions is not None:
            check_integer("ReplayConfig(partitions=)", self.partitions, 1)
        self._check_parts()
        if self.min_size != 1 and self.limits.min_size != self.min_size:
            refuse(
                ConfigError,
                "The replay and its limiter name two minimum sizes.",
                got=f"min_size={self.min_size}, limiter={self.limiter}",
                want="one of them",
                fix="leave ReplayConfig(min_size=) out",
            )
        if self.limits.min_size > self.capacity:
            refuse(
                ConfigError,
                "A replay that may hold fewer items than it needs before sampling would wait for ever.",
                got=f"min_size={self.limits.min_size}, capacity={self.capacity}",
                want="min_size <= capacity",
            )
        if self.storage == "ring" and self.resolved_storage != "ring":
            refuse(
                ConfigError,
                "The ring storage cannot serve this replay.",
                got=self._beyond_the_ring(),
                want="remover=Fifo(), sampler Uniform() or Prioritized(), max_times_sampled=0",
                fix='storage="slots"',
            )
        if self.items is not None and self.resolved_storage != "ring":
            refuse(
                ConfigError,
                "Items that read their neighbours need steps in time order, which only the ring storage keeps.",
                got=self._beyond_the_ring() or 'storage="slots"',
                want="remover=Fifo(), sampler Uniform() or Prioritized(), max_times_sampled=0",
            )
        if self.items is not None:
            self.items.check(self)

    def _check_parts(self) -> None:
        parts = (
            ("sampler", self.sampler, Sampler, "conduit.Uniform() or conduit.Prioritized()"),
            ("remover", self.remover, Remover, "conduit.Fifo() or another selector, but not Epochs"),
            ("growth", self.growth, Growth | None, "None or conduit.Growth(...)"),
            (
                "items",
                self.items,
                Items | None,
                "None (single steps), conduit.Windows(...), TransitionView, Hindsight or Episodes",
            ),
            ("limiter", self.limiter, Limiter | None, "None, conduit.MinSize(...) or conduit.SampleToInsertRatio(...)"),
        )
        for name, value, kind, wanted in parts:
            if not isinstance(value, kind):
                refuse(ConfigError, f"Unknown {name}.", got=repr(value), want=wanted)
        check_integer("ReplayConfig(max_times_sampled=)", self.max_times_sampled, 0)
        if self.max_times_sampled > MAX_TIMES_SAMPLED:
            got, want = self.max_times_sampled, f"at most {MAX_TIMES_SAMPLED}"
            refuse(
                ConfigError, "ReplayConfig(max_times_sampled=) is out of range.", got=got, want=want, fix="0: no bound"
            )
        check_choice("ReplayConfig(storage=)", self.storage, ("auto", "ring", "slots"))

    @property
    def limits(self) -> RateLimits:
        """The limiter's parameters, ``MinSize(min_size)`` where none was given."""
        return (MinSize(min_size=self.min_size) if self.limiter is None else self.limiter).limits

    @property
    def resolved_storage(self) -> str:
        """``"ring"`` or ``"slots"``: what ``storage`` comes to."""
        return "slots" if self.storage == "slots" or self._beyond_the_ring() else "ring"

    def _beyond_the_ring(self) -> str:
        """What the ring cannot serve, in words; empty where it can serve all."""
        beyond = [] if isinstance(self.sampler, RING_SAMPLERS) else [f"sampler={self.sampler}"]
        beyond += [] if isinstance(self.remover, Fifo) else [f"remover={self.remover}"]
        beyond += [] if self.max_times_sampled == 0 else [f"max_times_sampled={self.max_times_sampled}"]
        return ", ".join(beyond)


@dataclass(frozen=True, kw_only=True)
class OffPolicy:
    """Any stored item may be used, however old. ``max_staleness`` bounds the updates between drawing a batch and using it.

    A schedule with ``prefetch`` batches drawn ahead, ``g`` batches a call, is feasible when (prefetch + 1) * g - 1 <=
    max_staleness (paper section 4.2); 0 means strictly sequential.
    """

    batch_size: int
    updates_per_rollout: int = 1
    max_staleness: int = 4

    def __post_init__(self) -> None:
        check_integer("OffPolicy(batch_size=)", self.batch_size, 1)
        check_integer("OffPolicy(updates_per_rollout=)", self.updates_per_rollout, 1)
        check_integer("OffPolicy(max_staleness=)", self.max_staleness, 0)


@dataclass(frozen=True, kw_only=True)
class OnPolicy:
    """Only this iteration's items: ``units_per_iteration`` rollouts, then ``num_epochs`` passes of ``num_minibatches``."""

    num_minibatches: int
    num_epochs: int = 1
    units_per_iteration: int = 1

    def __post_init__(self) -> None:
        check_integer("OnPolicy(num_minibatches=)", self.num_minibatches, 1)
        check_integer("OnPolicy(num_epochs=)", self.num_epochs, 1)
        check_integer("OnPolicy(units_per_iteration=)", self.units_per_iteration, 1)


@dataclass(frozen=True, kw_only=True)
class BoundedLag:
    """Each item is used once, oldest first, and only while at most ``max_policy_lag`` versions old; older ones are dropped and counted.

    An item's age is the plane's ``policy_version`` when its batch is handed over less the version it was pushed with.
    ``plane.stats()`` counts delivered items by age and the items dropped; ``SampleInfo.policy_version`` tells each item's.
    """

    batch_size: int
    max_policy_lag: int
    updates_per_rollout: int = 1

    def __post_init__(self) -> None:
        check_integer("BoundedLag(batch_size=)", self.batch_size, 1)
        check_integer("BoundedLag(max_policy_lag=)", self.max_policy_lag, 0)
        check_integer("BoundedLag(updates_per_rollout=)", self.updates_per_rollout, 1)


Algorithm = OffPolicy | OnPolicy | BoundedLag

DEFAULT_TABLE = "experience"


def checked_seed(seed: object) -> int:
    """Return ``seed`` as an ``int``; ``ConfigError`` unless it is an integer of 32 bits, which is all that keys are made of."""
    index = getattr(seed, "__index__", None)  # numpy integers too
    if isinstance(seed, bool) or index is None or not 0 <= index() < 2**32:
        refuse(ConfigError, "A seed is out of range.", got=repr(seed), want="an integer, 0 <= seed < 2**32")
    return index()


def replay_tables(
    algorithm: Algorithm, replay: ReplayConfig | Mapping[str, ReplayConfig] | None
) -> dict[str, ReplayConfig]:
    """Return the tables a plane of ``algorithm`` has, by name; ``ConfigError`` for a combination that can never work."""
    if not isinstance(algorithm, Algorithm):
        refuse(ConfigError, "Unknown algorithm class.", got=repr(algorithm), want="OffPolicy, OnPolicy or BoundedLag")
    if isinstance(algorithm, OnPolicy):
        if replay is not None:
            refuse(
                ConfigError,
                "On-policy experience has no replay: it is dropped after its iteration.",
                got=repr(replay),
                want="replay=None",
            )
        return {DEFAULT_TABLE: ReplayConfig(capacity=1)}
    if replay is None and isinstance(algorithm, BoundedLag):
        return {DEFAULT_TABLE: ReplayConfig(capacity=1)}  # the queue's length is decided when the unit is known
    if replay is None:
        refuse(ConfigError, "Off-policy experience needs a replay.", want="replay=conduit.ReplayConfig(capacity=...)")
    if not isinstance(replay, ReplayConfig | Mapping) or not replay:
        want = "a conduit.ReplayConfig(...), or several by table name"
        refuse(ConfigError, "Off-policy experience needs a replay.", got=repr(replay), want=want)
    tables = {DEFAULT_TABLE: replay} if isinstance(replay, ReplayConfig) else dict(replay)
    for name, config in tables.items():
        if not isinstance(name, str):
            refuse(ConfigError, "A table's name is not a string.", got=repr(name), want="a str")
        if not isinstance(config, ReplayConfig):
            refuse(ConfigError, f"Table {name!r} is not described by a ReplayConfig.", got=type(config).__name__)
        if algorithm.batch_size > config.capacity:
            refuse(
                ConfigError,
                "A batch is larger than the replay.",
                got=f"batch_size={algorithm.batch_size}, capacity={config.capacity}",
                want="batch_size <= capacity",
            )
    return tables
