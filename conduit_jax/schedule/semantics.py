"""What an algorithm allows: the feasible sets of overlap and granularity (paper section 4), and the check that keeps to them.

Off-policy: g in {1, 2, ...}, a schedule being feasible when (prefetch + 1) * g_del - 1 <= max_staleness. On-policy with M
mini-batches: ingestion (overlap, g) in {(0, 1)} and {(1, k/M) : k < M}, delivery in {(0, 1), (1, 1/M)}, never across
iterations. Bounded lag: items are delivered once, so prefetching ages them; batches drawn ahead count against the lag.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from conduit_jax.config import Algorithm, BoundedLag, OffPolicy, OnPolicy
from conduit_jax.errors import ConfigError, check_choice, check_integer, refuse

MAX_GRANULARITY = 8


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When data moves. ``g_ingestion``: rollout units a call; ``g_delivery``: batches a call; overlap: off the critical path or not.

    With ``fused=k`` a training loop runs up to k whole iterations as one compiled program, in sequential order.
    """

    overlap_ingestion: bool = False
    overlap_delivery: bool = False
    g_ingestion: Fraction | int = Fraction(1)
    g_delivery: Fraction | int = Fraction(1)
    fused: int = 0

    def __post_init__(self) -> None:
        for name in ("g_ingestion", "g_delivery"):
            g = getattr(self, name)
            if isinstance(g, bool) or not isinstance(g, int | Fraction) or g <= 0:
                want = "a whole number >= 1, or Fraction(k, M) on-policy"
                refuse(ConfigError, f"Schedule({name}=) is no granularity.", got=repr(g), want=want)
            object.__setattr__(self, name, Fraction(g))
        check_integer("Schedule(fused=)", self.fused, 0)
        if self.fused and (self.overlap_ingestion, self.overlap_delivery, self.g_ingestion, self.g_delivery) != (
            0,
            0,
            1,
            1,
        ):
            refuse(
                ConfigError,
                "A fused schedule runs in sequential order: inside one program there is nothing to overlap or to group.",
                got=str(self),
                want="Schedule(fused=k) alone",
            )

    @property
    def prefetch(self) -> int:
        """Delivery calls that run ahead of the learner."""
        return int(self.overlap_delivery)

    def __str__(self) -> str:
        if self.fused and not (self.overlap_ingestion or self.overlap_delivery):
            return f"fused, up to {self.fused} iterations a program"
        ingestion = f"ingestion overlap={int(self.overlap_ingestion)} g={self.g_ingestion}"
        return f"{ingestion}, delivery overlap={int(self.overlap_delivery)} g={self.g_delivery}"


def draw_staleness(schedule: Schedule) -> Fraction:
    """Return the largest number of updates between drawing a batch and using it: (prefetch + 1) * g_del - 1."""
    return (schedule.prefetch + 1) * Fraction(schedule.g_delivery) - 1


def parts_per_call(schedule: Schedule, algorithm: Algorithm) -> tuple[int, int]:
    """Return the units an ingestion call and the batches a delivery call takes.

    On-policy a share of an iteration is rounded up to whole units, and a delivery of g = 1 is an epoch's mini-batches.
    """
    if not isinstance(algorithm, OnPolicy):
        return int(schedule.g_ingestion), int(schedule.g_delivery)
    units = math.ceil(schedule.g_ingestion * algorithm.units_per_iteration)
    return units, math.ceil(schedule.g_delivery * algorithm.num_minibatches)


def updates_together(schedule: Schedule, algorithm: Algorithm) -> int:
    """Return the batches a loop updates with in one program: those of a delivery call, and of one iteration or epoch."""
    count = algorithm.num_minibatches if isinstance(algorithm, OnPolicy) else algorithm.updates_per_rollout
    return min(count, parts_per_call(schedule, algorithm)[1])


def held_parts(schedule: Schedule, algorithm: Algorithm) -> tuple[int, int]:
    """Return the most units that wait and the most batches that are drawn at once."""
    units, batches = parts_per_call(schedule, algorithm)
    return units + schedule.overlap_ingestion, batches * (1 + schedule.overlap_delivery)


def feasible_ingestion(algorithm: Algorithm, max_granularity: int = MAX_GRANULARITY) -> list[tuple[bool, Fraction]]:
    """Return the (overlap, g) pairs ingestion may use."""
    if isinstance(algorithm, OnPolicy):
        parts = algorithm.num_minibatches
        return [(False, Fraction(1))] + [(True, Fraction(k, parts)) for k in range(1, parts)]
    return [(overlap, Fraction(g)) for overlap in (False, True) for g in range(1, max_granularity + 1)]


def feasible_delivery(algorithm: Algorithm, max_granularity: int = MAX_GRANULARITY) -> list[tuple[bool, Fraction]]:
    """Return the (overlap, g) pairs delivery may use."""
    if isinstance(algorithm, OnPolicy):
        return [(False, Fraction(1)), (True, Fraction(1, algorithm.num_minibatches))]
    bound = algorithm.max_policy_lag if isinstance(algorithm, BoundedLag) else algorithm.max_staleness
    pairs = [(overlap, Fraction(g)) for overlap in (False, True) for g in range(1, max_granularity + 1)]
    return [(overlap, g) for overlap, g in pairs if (int(overlap) + 1) * g - 1 <= bound]


def check_feasible(schedule: Schedule, algorithm: Algorithm) -> None:
    """Raise ``ConfigError`` unless ``algorithm`` allows ``schedule``: one outside the feasible sets is never run."""
    if schedule.fused and isinstance(algorithm, BoundedLag):
        refuse(
            ConfigError,
            "Experience of bounded lag cannot be fused: the host decides which items are too old.",
            got=str(schedule),
            want="OffPolicy or OnPolicy",
        )
    if (schedule.overlap_ingestion, schedule.g_ingestion) not in feasible_ingestion(algorithm):
        refuse(
            ConfigError,
            "The algorithm does not allow this ingestion schedule.",
            got=f"overlap={schedule.overlap_ingestion}, g={schedule.g_ingestion}",
            want=_pairs(feasible_ingestion(algorithm)),
        )
    if (schedule.overlap_delivery, schedule.g_delivery) not in feasible_delivery(algorithm):
        stale = isinstance(algorithm, OffPolicy) and draw_staleness(schedule) > algorithm.max_staleness
        refuse(
            ConfigError,
            "The algorithm does not allow this delivery schedule.",
            got=f"overlap={schedule.overlap_delivery}, g={schedule.g_delivery}",
            want=_pairs(feasible_delivery(algorithm)),
            fix=f"raise max_staleness to {draw_staleness(schedule)}, or switch prefetch off" if stale else None,
        )


def _pairs(pairs: list[tuple[bool, Fraction]]) -> str:
    return ", ".join(f"(overlap={int(overlap)}, g={g})" for overlap, g in pairs)


SEQUENTIAL = Schedule()
FUSED_ITERATIONS = 64  # a program by default: what dispatching it costs is then little beside anything worth fusing
SCHEDULE_NAMES = ("auto", "sequential", "overlap", "fused")


def resolve_schedule(name: str | Schedule, algorithm: Algorithm, *, own_device: bool) -> Schedule:
    """Return the schedule ``name`` stands for; ``"auto"`` overlaps where the data plane has devices of its own.

    On a device that the learner computes on, overlap hides no compute and would only make batches staler. On-policy
    ``"auto"`` is sequential. ``ConfigError`` for what the algorithm does not allow.
    """
    if isinstance(name, Schedule):
        check_feasible(name, algorithm)
        return name
    check_choice("schedule", name, SCHEDULE_NAMES)
    if name == "sequential":
        return SEQUENTIAL
    if name == "fused":
        check_feasible(fused := Schedule(fused=FUSED_ITERATIONS), algorithm)
        return fused
    if isinstance(algorithm, OnPolicy):
        wanted = Schedule(overlap_delivery=True, g_delivery=Fraction(1, algorithm.num_minibatches))
    else:
        wanted = Schedule(overlap_ingestion=True, overlap_delivery=True)
    if name == "overlap":
        check_feasible(wanted, algorithm)
        return wanted
    if isinstance(algorithm, OnPolicy):
        return SEQUENTIAL
    feasible = (wanted.overlap_delivery, wanted.g_delivery) in feasible_delivery(algorithm)
    return wanted if own_device and feasible else SEQUENTIAL
