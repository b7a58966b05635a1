"""How long an iteration takes under a schedule (paper section 6.2, eqs. 2-6, Appendix E), from costs measured once.

    T_iter = T_ing-path + u * T_del-path
    T_ing-path = T_rollout + T_ing(g)/g + overlap * (T_sync - hide),   hide = gamma(g) * min(T_rollout, (1 - c) * T_ing(g)/g)
    T_del-path likewise with T_update;                                  gamma(g) = 1 for g >= 1, 1 - g below

Beyond the paper: T(g) is a fixed cost a call plus a marginal one a part, higher beyond a knee, so that g need not all be
measured. So is T_sync, which is what the overlapped calls keep the host for. The *contention* c says how much of a stage
occupies what the other side computes with: on a device the learner computes on c is 1 and overlap hides nothing; for a stage
that waits for something elsewhere it is 0, the paper's case. Where both legs are calls of *one queue* that goes on through
rollout and update alike, as replayed experience is, what of an overlapped leg its own stage is too short to hide is hidden
by what the other leaves over. And what overlapped calls keep the host for does not show as far as their caller waits elsewhere
meanwhile: a thread does it then (``turns``), for what waking it costs. Calls that run beside a rollout or an update *stretch*
it: they share cores, caches and an interpreter with it. And the batches of a call are updated with in one program, which
costs a fixed part and a marginal one as calls do. Pure functions; measuring is ``profile``'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from conduit_jax.config import Algorithm, OnPolicy
from conduit_jax.schedule.semantics import Schedule, parts_per_call, updates_together

WAKING_S = 60e-6  # what leaving work to a thread costs its caller: to wake it, and to share the interpreter at first


class CallCost(NamedTuple):
    """Seconds of one call over n parts (units or batches): ``fixed_s + n * marginal_s``, and ``steeper_s`` for each beyond ``knee``.

    Calls whose data outgrow a cache, or an allocator's reuse, cost more a part than smaller ones.
    """

    fixed_s: float
    marginal_s: float
    knee: int = 0
    steeper_s: float = 0.0

    def per_part(self, parts: int) -> float:
        """Return the cost of one of ``parts`` parts of a call."""
        return self.fixed_s / parts + self.marginal_s + self.steeper_s * max(0, parts - self.knee) / parts


_BENT = 1.15  # how much longer than on a straight line the largest call takes where there is a knee


def fit(seconds_per_call: Mapping[int, float]) -> CallCost:
    """Return the cost that fits the seconds of calls over n parts best, relative errors squared, no term negative.

    One measured n leaves no room for a marginal cost: all of it is taken to be marginal, so that no gain is promised. Of two
    the larger may cost more than in proportion: there is a knee at the smaller then. Four tell whether the largest lies on
    the line of the others; where it is above it, there is a knee at the last of these.
    """
    *others, last = sorted(seconds_per_call)
    if len(others) == 1:
        (first,) = others
        above_s = seconds_per_call[last] - last / first * seconds_per_call[first]
        if above_s > 0:
            return CallCost(0.0, seconds_per_call[first] / first, first, above_s / (last - first))
    if len(others) >= 3:
        line = _straight({n: seconds_per_call[n] for n in others})
        above_s = seconds_per_call[last] - last * line.per_part(last)
        if above_s > (_BENT - 1) * last * line.per_part(last):
            return line._replace(knee=others[-1], steeper_s=above_s / (last - others[-1]))
    return _straight(seconds_per_call)


def _straight(seconds_per_call: Mapping[int, float]) -> CallCost:
    parts = np.asarray(list(seconds_per_call), float)
    seconds = np.maximum(np.asarray(list(seconds_per_call.values()), float), 1e-12)
    if len(parts) == 1:
        return CallCost(0.0, float(seconds[0] / parts[0]))
    weighted = np.stack([1 / seconds, parts / seconds], axis=1)
    fixed, marginal = np.linalg.lstsq(weighted, np.ones(len(parts)), rcond=None)[0]
    if fixed < 0:
        return CallCost(0.0, float(np.sum(parts / seconds) / np.sum((parts / seconds) ** 2)))
    if marginal < 0:
        return CallCost(float(np.sum(1 / seconds) / np.sum(1 / seconds**2)), 0.0)
    return CallCost(float(fixed), float(marginal))


class Costs(NamedTuple):
    """What one iteration is made of, seconds: one rollout, updates with n batches, and what calls of the path cost.

    ``sync_ingestion`` and ``sync_delivery`` are what overlapped calls over n parts keep the host for, ``stretch`` what rollout
    and update take longer beside those over n batches; contention is in [0, 1]; ``one_queue`` says that rollout and update
    hide either leg alike; ``elsewhere_s`` of rollout and update the host waits and wants no core, so that a thread can do
    meanwhile what calls keep it for.
    """

    rollout_s: float
    update: CallCost
    ingestion: CallCost
    delivery: CallCost
    sync_ingestion: CallCost = CallCost(0.0, 0.0)
    sync_delivery: CallCost = CallCost(0.0, 0.0)
    contention_ingestion: float = 0.0
    contention_delivery: float = 0.0
    one_queue: bool = False
    elsewhere_s: float = 0.0
    stretch: CallCost = CallCost(0.0, 0.0)


class Prediction(NamedTuple):
    """Seconds an iteration: all of it, and what of the path shows on either side of the buffer."""

    iteration_s: float
    exposed_ingestion_s: float
    exposed_delivery_s: float

    @property
    def exposed_s(self) -> float:
        """What of the path shows."""
        return self.exposed_ingestion_s + self.exposed_delivery_s


def gamma(g: Fraction | int | float) -> float:
    """Return the share of a stage that can be hidden at granularity ``g`` (eq. 6): a part of an iteration waits for its first."""
    return 1.0 if g >= 1 else float(1 - g)


class Leg(NamedTuple):
    """One side of the buffer in an iteration, seconds: ``beside_s`` of rollout or update, ``cost_s`` of the path.

    ``hideable_s`` of the cost may run meanwhile, and does as far as ``hidden_s``; ``sync_s`` is what overlapping costs.
    """

    beside_s: float
    cost_s: float
    hideable_s: float
    sync_s: float

    @property
    def hidden_s(self) -> float:
        """What rollout or update hides (eqs. 4, 5)."""
        return min(self.beside_s, self.hideable_s)


def leg(
    overlap: bool, g: Fraction | int, parts: int, calls: tuple[CallCost, CallCost], side: tuple[int, float, float]
) -> Leg:
    """Return the leg of ``side``: (parts an iteration, seconds beside each, contention); ``calls``: of work and of T_sync.

    Times of ``beside_s`` are shortened by gamma(g), as eqs. 4 and 5 do, where g is a part of an iteration.
    """
    count, beside_s, contended = side
    cost_s = calls[0].per_part(parts)
    hideable_s = overlap * gamma(g) * (1 - contended) * cost_s
    sync_s = overlap * calls[1].per_part(parts)
    return Leg(count * gamma(g) * beside_s, count * cost_s, count * hideable_s, count * sync_s)


def contention(stage_cores: float, beside_cores: float, cores: float, *, same_device: bool) -> float:
    """Return the share of a stage that takes what the other side computes with, in [0, 1].

    On one device programs run one after the other: 1. Elsewhere it is what ``cores`` lack for both at once.
    """
    if same_device:
        return 1.0
    return min(1.0, max(0.0, stage_cores + beside_cores - cores) / max(stage_cores, 1e-9))


def predict(costs: Costs, schedule: Schedule, algorithm: Algorithm) -> Prediction:
    """Return how long an iteration of ``algorithm`` takes under ``schedule`` (eq. 2)."""
    units, updates = _per_iteration(algorithm)
    units_a_call, batches_a_call = parts_per_call(schedule, algorithm)
    update_s = costs.update.per_part(updates_together(schedule, algorithm))
    ingestion = leg(
        schedule.overlap_ingestion,
        schedule.g_ingestion,
        units_a_call,
        (costs.ingestion, costs.sync_ingestion),
        (units, costs.rollout_s, costs.contention_ingestion),
    )
    delivery = leg(
        schedule.overlap_delivery,
        schedule.g_delivery,
        batches_a_call,
        (costs.delivery, costs.sync_delivery),
        (updates, update_s, costs.contention_delivery),
    )
    shown = [one.cost_s + one.sync_s - one.hidden_s for one in (ingestion, delivery)]
    if costs.one_queue and not isinstance(algorithm, OnPolicy):
        shown[0] -= min(ingestion.hideable_s - ingestion.hidden_s, delivery.beside_s - delivery.hidden_s)
        shown[1] -= min(delivery.hideable_s - delivery.hidden_s, ingestion.beside_s - ingestion.hidden_s)
        syncs, calls = (ingestion.sync_s, delivery.sync_s), max(units / units_a_call, updates / batches_a_call)
        left_s = _left_to_thread(sum(syncs), costs.elsewhere_s, calls)
        shown = [one - left_s * sync / sum(syncs) if left_s else one for one, sync in zip(shown, syncs, strict=True)]
    if schedule.overlap_ingestion or schedule.overlap_delivery:
        shown[schedule.overlap_delivery] += updates * costs.stretch.per_part(batches_a_call)
    computed = units * costs.rollout_s + updates * update_s
    return Prediction(computed + sum(shown), *shown)


def _left_to_thread(sync_s: float, elsewhere_s: float, calls: float) -> float:
    """Return what of ``sync_s`` an iteration is saved by a thread that is woken ``calls`` times, 0 where that does not pay."""
    return max(0.0, min(sync_s, elsewhere_s) - calls * WAKING_S)


def _per_iteration(algorithm: Algorithm) -> tuple[int, int]:
    """Return the units and the updates of one iteration."""
    if isinstance(algorithm, OnPolicy):
        return algorithm.units_per_iteration, algorithm.num_minibatches * algorithm.num_epochs
    return 1, algorithm.updates_per_rollout
