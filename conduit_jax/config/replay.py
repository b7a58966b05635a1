"""What a user chooses of one table."""

from __future__ import annotations

from dataclasses import dataclass, field

from conduit_jax.config.limiters import Limiter, MinSize, RateLimits
from conduit_jax.config.selectors import RING_SAMPLERS, Fifo, Remover, Sampler, Uniform
from conduit_jax.errors import ConfigError, check_choice, check_integer, refuse
from conduit_jax.growth import Growth
from conduit_jax.items import Items

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
    ``min_size`` counts what may be drawn. Where these are not as many, a limiter's own minimum counts steps, and both hold.
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
        if self.min_size != 1 and self.limits.min_size != self.min_size and not self._counts_apart:
            refuse(
                ConfigError,
                "The replay and its limiter name two minimum sizes.",
                got=f"min_size={self.min_size}, limiter={self.limiter}",
                want="one of them: both count items",
                fix="leave ReplayConfig(min_size=) out",
            )
        if max(self.min_size, self.limits.min_size) > self.capacity:
            refuse(
                ConfigError,
                "A replay that may hold fewer items than it needs before sampling would wait for ever.",
                got=f"min_size={max(self.min_size, self.limits.min_size)}, capacity={self.capacity}",
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
    def _counts_apart(self) -> bool:
        """Whether ``min_size`` counts something else than a limiter's own minimum does."""
        return self.items is not None and self.items.most_lost(1) is not None

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
