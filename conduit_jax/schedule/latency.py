"""How long an iteration takes under a schedule (paper section 6.2, eqs. 2-6, Appendix E), from costs measured once.

    T_iter = T_ing-path + u * T_del-path
    T_ing-path = T_rollout + T_ing(g)/g + overlap * (T_sync - hide),   hide = gamma(g) * min(T_rollout, (1 - c) * T_ing(g)/g)
    T_del-path likewise with T_update;                                  gamma(g) = 1 for g >= 1, 1 - g below

Beyond the paper: T(g) is a fixed cost a call plus a marginal one a part, so that g need not all be measured, and the
*contention* c says how much of a stage occupies what the other side computes with. On a device the learner computes on
c is 1 and overlap hides nothing; for a stage that waits for something elsewhere it is 0, the paper's case. Pure
functions; measuring is ``profile``'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from conduit_jax.config import Algorithm, OnPolicy
from conduit_jax.schedule.semantics import Schedule, parts_per_call


class CallCost(NamedTuple):
    """Seconds of one call over n parts (units or batches): ``fixed_s + n * marginal_s``."""

    fixed_s: float
    marginal_s: float

    def per_part(self, parts: int) -> float:
        """Return the cost of one of ``parts`` parts of a call."""
        return self.fixed_s / parts + self.marginal_s


def fit(seconds_per_call: Mapping[int, float]) -> CallCost:
    """Return the cost that fits the seconds of calls over n parts best, relative errors squared, neither term negative.

    One measured n leaves no room for a marginal cost: all of it is taken to be marginal, so that no gain is promised.
    """
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
    """What one iteration is made of, seconds: one rollout, one update, and what calls of the path cost.

    ``sync_ingestion_s`` and ``sync_delivery_s`` are what overlapping costs a unit and a batch; contention is in [0, 1].
    """

    rollout_s: float
    update_s: float
    ingestion: CallCost
    delivery: CallCost
    sync_ingestion_s: float = 0.0
    sync_delivery_s: float = 0.0
    contention_ingestion: float = 0.0
    contention_delivery: float = 0.0


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


def exposed(overlap: bool, share: float, beside_s: float, cost_s: float, sync_s: float, contention: float) -> float:
    """Return what shows of ``cost_s`` beside ``beside_s`` of other work (eqs. 4, 5); ``share`` is gamma(g)."""
    hidden = share * min(beside_s, (1 - contention) * cost_s)
    return cost_s + overlap * (sync_s - hidden)


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
    ingestion = exposed(
        schedule.overlap_ingestion,
        gamma(schedule.g_ingestion),
        costs.rollout_s,
        costs.ingestion.per_part(units_a_call),
        costs.sync_ingestion_s,
        costs.contention_ingestion,
    )
    delivery = exposed(
        schedule.overlap_delivery,
        gamma(schedule.g_delivery),
        costs.update_s,
        costs.delivery.per_part(batches_a_call),
        costs.sync_delivery_s,
        costs.contention_delivery,
    )
    computed = units * costs.rollout_s + updates * costs.update_s
    return Prediction(computed + units * ingestion + updates * delivery, units * ingestion, updates * delivery)


def _per_iteration(algorithm: Algorithm) -> tuple[int, int]:
    """Return the units and the updates of one iteration."""
    if isinstance(algorithm, OnPolicy):
        return algorithm.units_per_iteration, algorithm.num_minibatches * algorithm.num_epochs
    return 1, algorithm.updates_per_rollout
