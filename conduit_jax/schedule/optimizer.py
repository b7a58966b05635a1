"""Which schedule to run (paper section 6.3): enumerate what the algorithm allows, predict, rank, pick; nothing is measured here.

There are at most 4 * |G_ing| * |G_del| candidates, each scored in constant time. Where costs are given for several
placements, placement and schedule are searched jointly: a leg that is hidden costs nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from conduit_jax.config import Algorithm
from conduit_jax.errors import ConfigError, refuse
from conduit_jax.schedule.latency import Costs, Prediction, predict
from conduit_jax.schedule.semantics import (
    MAX_GRANULARITY,
    Schedule,
    feasible_delivery,
    feasible_ingestion,
    held_parts,
)

RESOLUTION = 0.02  # predictions that differ by less do not tell which is faster
HYSTERESIS = 0.05  # a schedule in use is left for one that is predicted to be this much faster, not for less


class Memory(NamedTuple):
    """Bytes of a rollout unit and of a batch as they wait, and how many are free for them."""

    unit_bytes: int
    batch_bytes: int
    free_bytes: int


class Candidate(NamedTuple):
    """A schedule, on a placement where several were compared, and what it is predicted to cost."""

    schedule: Schedule
    prediction: Prediction
    placement: str = ""


@dataclass(frozen=True)
class Decision:
    """The ``chosen`` candidate and all others in order of their predicted iteration time; ``rejected`` with the reason."""

    chosen: Candidate
    ranked: tuple[Candidate, ...]
    rejected: tuple[tuple[Schedule, str], ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        lines = [f"{'predicted':>12} {'exposed':>10}  schedule"]
        for candidate in self.ranked[:8]:
            mark = "*" if candidate == self.chosen else " "
            where = f"{candidate.placement}: " if candidate.placement else ""
            times = [value * 1e6 for value in (candidate.prediction.iteration_s, candidate.prediction.exposed_s)]
            lines.append(f"{times[0]:>9,.0f} us {times[1]:>7,.0f} us {mark}{where}{candidate.schedule}")
        return "\n".join(lines + [f"not feasible: {schedule}: {why}" for schedule, why in self.rejected[:4]])


def enumerate_schedules(algorithm: Algorithm, max_granularity: int = MAX_GRANULARITY) -> list[Schedule]:
    """Return every schedule ``algorithm`` allows, the sequential one first."""
    pairs = itertools.product(
        feasible_ingestion(algorithm, max_granularity), feasible_delivery(algorithm, max_granularity)
    )
    return [
        Schedule(overlap_ingestion=early, g_ingestion=units, overlap_delivery=ahead, g_delivery=batches)
        for (early, units), (ahead, batches) in pairs
    ]


def choose(
    costs: Costs | Mapping[str, Costs],
    algorithm: Algorithm,
    *,
    present: Schedule | None = None,
    memory: Memory | None = None,
    max_granularity: int = MAX_GRANULARITY,
    among: Collection[Schedule] | None = None,
) -> Decision:
    """Return the schedule (and placement) of the shortest predicted iteration; ties go to the least overlap and granularity.

    So do candidates that are predicted to be slower by less than ``RESOLUTION``: batches are fresher and less memory is
    held. ``present`` is kept unless another is faster by ``HYSTERESIS``. What would hold more than ``memory`` has free is
    rejected; ``ConfigError`` where that is everything. With ``among`` only those schedules are considered.
    """
    by_placement = {"": costs} if isinstance(costs, Costs) else costs
    candidates, rejected = [], []
    for schedule in enumerate_schedules(algorithm, max_granularity):
        if among is not None and schedule not in among:
            continue
        lacking = 0 if memory is None else _held_bytes(schedule, algorithm, memory) - memory.free_bytes
        if lacking > 0:
            rejected.append((schedule, f"lacks {lacking:,} bytes for what waits"))
            continue
        candidates += [
            Candidate(schedule, predict(one, schedule, algorithm), name) for name, one in by_placement.items()
        ]
    if not candidates:
        refuse(ConfigError, "No schedule fits the memory that is free.", got=rejected[0][1], want="a smaller batch")
    ranked = sorted(candidates, key=_order)
    close = [one for one in ranked if one.prediction.iteration_s <= (1 + RESOLUTION) * ranked[0].prediction.iteration_s]
    chosen, reason = min(close, key=_effort), "shortest predicted iteration"
    kept = next((one for one in ranked if one.schedule == present), None)
    if kept is not None and chosen.prediction.iteration_s > (1 - HYSTERESIS) * kept.prediction.iteration_s:
        chosen, reason = kept, f"no other is predicted to be {HYSTERESIS:.0%} faster"
    return Decision(chosen, tuple(ranked), tuple(rejected), reason)


def _order(candidate: Candidate) -> tuple:
    return round(candidate.prediction.iteration_s, 9), *_effort(candidate)


def _effort(candidate: Candidate) -> tuple:
    schedule = candidate.schedule
    return schedule.overlap_ingestion + schedule.overlap_delivery, schedule.g_ingestion + schedule.g_delivery


def _held_bytes(schedule: Schedule, algorithm: Algorithm, memory: Memory) -> int:
    units, batches = held_parts(schedule, algorithm)
    return units * memory.unit_bytes + batches * memory.batch_bytes
