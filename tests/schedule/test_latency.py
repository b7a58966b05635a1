"""Laws of the latency model and of the choice made from it: the paper's equations, bounds, and arg min by brute force."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import conduit_jax as conduit
from conduit_jax.schedule.latency import WAKING_S, CallCost, Costs, fit, gamma, predict
from conduit_jax.schedule.optimizer import HYSTERESIS, RESOLUTION, Memory, choose, enumerate_schedules
from conduit_jax.schedule.semantics import check_feasible

SECONDS = st.floats(1e-6, 1e-1)
CALLS = st.builds(CallCost, SECONDS, SECONDS, st.integers(0, 8), st.floats(0, 1e-1))
SHARES = st.floats(0, 1)
COSTS = st.builds(
    Costs, SECONDS, CALLS, CALLS, CALLS, CALLS, CALLS, SHARES, SHARES, st.booleans(), st.just(0.0), stretch=CALLS
)
OFF = conduit.OffPolicy(batch_size=4, updates_per_rollout=3, max_staleness=4)
ON = conduit.OnPolicy(num_minibatches=4, num_epochs=2, units_per_iteration=8)
ALGORITHMS = st.sampled_from([OFF, ON, conduit.BoundedLag(batch_size=4, max_policy_lag=3)])


def test_the_paper_equations_by_hand() -> None:
    """T_rollout 4, T_update 3, T_ing(g) = 1 + g, T_del(g) = 2 + g, T_sync 0.1 and 0.1 + 0.05 g, u = 3, nothing contended."""
    costs = Costs(
        4.0, CallCost(0.0, 3.0), CallCost(1.0, 1.0), CallCost(2.0, 1.0), CallCost(0.0, 0.1), CallCost(0.1, 0.05)
    )
    assert predict(costs, conduit.Schedule(), OFF).iteration_s == pytest.approx(4 + 2 + 3 * (3 + 3))
    hidden = conduit.Schedule(overlap_ingestion=True, g_ingestion=2, overlap_delivery=True, g_delivery=2)
    assert predict(costs, hidden, OFF).iteration_s == pytest.approx(4 + 0.1 + 3 * (3 + 0.1))
    slow = costs._replace(delivery=CallCost(0.0, 5.0))  # longer than the update it hides behind
    assert predict(slow, hidden, OFF).iteration_s == pytest.approx(4 + 0.1 + 3 * (3 + 5 - 3 + 0.1))
    shares = conduit.Schedule(
        overlap_ingestion=True, g_ingestion=Fraction(1, 4), overlap_delivery=True, g_delivery=Fraction(1, 4)
    )
    ingestion, delivery = 1 / 2 + 1, 2 + 1  # two units, one mini-batch a call
    want = 8 * (4 + ingestion * 0.25 + 0.1) + 8 * (3 + delivery * 0.25 + 0.15)
    assert predict(costs, shares, ON).iteration_s == pytest.approx(want)


def test_batches_of_a_call_are_updated_with_in_one_program_within_an_iteration_or_epoch() -> None:
    """T_update(n) = 3 + n, u = 3: one by one 12 an iteration, two and one 9, three 6 and no less with five a call."""
    costs = Costs(0.0, CallCost(3.0, 1.0), CallCost(0.0, 0.0), CallCost(0.0, 0.0))
    times = [predict(costs, conduit.Schedule(g_delivery=g), OFF).iteration_s for g in (1, 2, 3, 5)]
    assert times == pytest.approx([12.0, 3 * (3 / 2 + 1), 6.0, 6.0])
    epochs = predict(costs, conduit.Schedule(), ON).iteration_s  # of four mini-batches each
    assert epochs == pytest.approx(2 * (3 + 4))


def test_what_runs_beside_overlapped_calls_is_stretched_by_them() -> None:
    """Rollout and update take 0.5 and 0.25 longer a batch beside calls over one batch and over two; u = 3."""
    costs = Costs(4.0, CallCost(0.0, 3.0), CallCost(0.0, 1.0), CallCost(0.0, 1.0), stretch=CallCost(0.5, 0.0))
    for late in ({"overlap_ingestion": True}, {"overlap_delivery": True}):
        for g in (1, 2):
            schedule = conduit.Schedule(g_delivery=g, **late)
            alone = predict(costs._replace(stretch=CallCost(0.0, 0.0)), schedule, OFF)
            shown = predict(costs, schedule, OFF)
            assert shown.iteration_s == pytest.approx(alone.iteration_s + 1.5 / g)
            legs = (
                shown.exposed_ingestion_s - alone.exposed_ingestion_s,
                shown.exposed_delivery_s - alone.exposed_delivery_s,
            )
            assert legs == pytest.approx((0, 1.5 / g) if schedule.overlap_delivery else (1.5 / g, 0))
    in_order = conduit.Schedule(g_delivery=2)
    assert predict(costs, in_order, OFF).exposed_s == pytest.approx(4.0), "of ingestion 1, of three deliveries 3"


@given(COSTS, ALGORITHMS)
def test_no_schedule_beats_the_computation_or_work_conservation(costs: Costs, algorithm: conduit.OffPolicy) -> None:
    contended = costs._replace(contention_ingestion=1.0, contention_delivery=1.0)
    for schedule in enumerate_schedules(algorithm):
        free, full = predict(costs, schedule, algorithm), predict(contended, schedule, algorithm)
        computed = free.iteration_s - free.exposed_s
        assert free.exposed_ingestion_s >= 0
        assert free.exposed_delivery_s >= 0
        assert computed > 0
        alone = schedule.__class__(g_ingestion=schedule.g_ingestion, g_delivery=schedule.g_delivery)
        assert full.iteration_s >= predict(contended, alone, algorithm).iteration_s - 1e-12, (
            "overlap hid contended work"
        )


def effort(schedule: conduit.Schedule) -> tuple:
    return schedule.overlap_ingestion + schedule.overlap_delivery, schedule.g_ingestion + schedule.g_delivery


@given(COSTS, ALGORITHMS, st.data())
def test_the_choice_is_the_arg_min_as_far_as_predictions_tell_and_feasible_and_a_schedule_in_use_needs_a_margin(
    costs: Costs, algorithm: conduit.OffPolicy, data: st.DataObject
) -> None:
    everything = enumerate_schedules(algorithm)
    decision = choose(costs, algorithm)
    best = min(predict(costs, schedule, algorithm).iteration_s for schedule in everything)
    chosen = decision.chosen
    assert decision.ranked[0].prediction.iteration_s == pytest.approx(best, abs=1e-9)
    assert chosen.prediction.iteration_s <= (1 + RESOLUTION) * best + 1e-9
    for one in decision.ranked:
        if one.prediction.iteration_s <= best:
            assert effort(one.schedule) >= effort(chosen.schedule)
    assert len(decision.ranked) == len(everything)
    check_feasible(decision.chosen.schedule, algorithm)
    present = data.draw(st.sampled_from(everything))
    assert [one.schedule for one in choose(costs, algorithm, among={present}).ranked] == [present]
    kept = choose(costs, algorithm, present=present).chosen
    best = chosen.prediction.iteration_s
    margin = best <= (1 - HYSTERESIS) * predict(costs, present, algorithm).iteration_s
    assert (kept.schedule == decision.chosen.schedule) if margin else (kept.schedule == present)


@given(SECONDS, SECONDS, st.sets(st.integers(1, 16), min_size=2, max_size=4))
def test_a_straight_line_is_fitted_exactly(fixed: float, marginal: float, parts: set[int]) -> None:
    cost = fit({n: fixed + n * marginal for n in parts})
    for n in (1, 3, 8):
        assert cost.per_part(n) == pytest.approx(fixed / n + marginal, rel=1e-6)


def test_of_two_calls_the_larger_may_cost_more_than_in_proportion() -> None:
    """T(1) = 2, T(4) = 14: a part more costs 4, not 2."""
    cost = fit({1: 2.0, 4: 14.0})
    assert [n * cost.per_part(n) for n in (1, 2, 4, 8)] == pytest.approx([2.0, 6.0, 14.0, 30.0])


def test_calls_that_outgrow_something_cost_more_from_the_last_that_do_not() -> None:
    """T(g) = 1 + g up to 4; 8 take 21 where the line says 9: 3 more for each beyond 4."""
    cost = fit({1: 2.0, 2: 3.0, 4: 5.0, 8: 21.0})
    assert [n * cost.per_part(n) for n in (1, 4, 6, 8)] == pytest.approx([2.0, 5.0, 13.0, 21.0])
    noisy = fit({1: 2.0, 2: 3.0, 4: 5.0, 8: 9.5})
    assert noisy.steeper_s == 0, "noise is no knee"


@given(st.dictionaries(st.integers(1, 16), SECONDS, min_size=1, max_size=4))
def test_a_fit_never_promises_negative_costs(seconds: dict[int, float]) -> None:
    cost = fit(seconds)
    assert cost.fixed_s >= 0
    assert cost.marginal_s >= 0
    assert cost.per_part(1) > 0


def test_in_one_queue_what_one_stage_leaves_over_hides_what_the_other_cannot() -> None:
    """T_rollout 4 hides an ingestion of 1 and, of a delivery of 6 beside T_update 3, the 3 that are left; 2 more show."""
    costs = Costs(4.0, CallCost(0.0, 3.0), CallCost(0.0, 1.0), CallCost(0.0, 6.0), one_queue=True)
    algorithm = conduit.OffPolicy(batch_size=4, max_staleness=4)
    both = conduit.Schedule(overlap_ingestion=True, overlap_delivery=True)
    assert predict(costs, both, algorithm).iteration_s == pytest.approx(7.0)
    longer = costs._replace(delivery=CallCost(0.0, 8.0))
    assert predict(longer, both, algorithm).iteration_s == pytest.approx(7 + 1 + 8 - 7)
    assert predict(costs._replace(one_queue=False), both, algorithm).iteration_s == pytest.approx(7 + 3)
    on_policy = conduit.OnPolicy(num_minibatches=2, num_epochs=1, units_per_iteration=2)
    half = Fraction(1, 2)
    halves = conduit.Schedule(overlap_ingestion=True, g_ingestion=half, overlap_delivery=True, g_delivery=half)
    within = [predict(costs._replace(one_queue=one), halves, on_policy) for one in (True, False)]
    assert within[0] == within[1], "an iteration's batches wait for all of it"


@given(COSTS, ALGORITHMS)
def test_one_queue_hides_no_more_than_rollout_and_update_take(costs: Costs, algorithm: conduit.OffPolicy) -> None:
    shared, apart = costs._replace(one_queue=True), costs._replace(one_queue=False)
    for schedule in enumerate_schedules(algorithm):
        one, other = predict(shared, schedule, algorithm), predict(apart, schedule, algorithm)
        computed, plain = (
            one.iteration_s - one.exposed_s,
            schedule.__class__(g_ingestion=schedule.g_ingestion, g_delivery=schedule.g_delivery),
        )
        assert one.iteration_s <= other.iteration_s + 1e-12
        assert one.exposed_s >= predict(apart, plain, algorithm).exposed_s - computed - 1e-9


def test_a_thread_dispatches_while_the_caller_waits_elsewhere_where_that_pays() -> None:
    """T_sync is 1 ms a unit and 2 ms a batch, an iteration one unit and three batches."""
    costs = Costs(
        0.01,
        CallCost(0.0, 0.01),
        *[CallCost(0.0, 0.001)] * 2,
        CallCost(0.0, 0.001),
        CallCost(0.0, 0.002),
        one_queue=True,
    )
    overlap = conduit.Schedule(overlap_ingestion=True, overlap_delivery=True, g_delivery=2)
    assert predict(costs, overlap, OFF).exposed_s == pytest.approx(0.007)
    waking = 1.5 * WAKING_S  # two batches a call
    for elsewhere_s, left_s in ((0.04, 0.007), (0.004, 0.004), (0.5 * waking, waking)):
        shown = predict(costs._replace(elsewhere_s=elsewhere_s), overlap, OFF)
        assert shown.exposed_s == pytest.approx(0.007 - left_s + waking)
        assert shown.exposed_delivery_s == pytest.approx(6 * shown.exposed_ingestion_s)
    assert predict(costs._replace(elsewhere_s=1.0), conduit.Schedule(), OFF) == predict(costs, conduit.Schedule(), OFF)


@given(COSTS, ALGORITHMS, SECONDS)
def test_waiting_elsewhere_costs_nothing_and_saves_no_more_than_dispatch(
    costs: Costs, algorithm: conduit.OffPolicy, elsewhere_s: float
) -> None:
    for schedule in enumerate_schedules(algorithm):
        here, left, free = (
            predict(one, schedule, algorithm).exposed_s
            for one in (
                costs,
                costs._replace(elsewhere_s=elsewhere_s),
                costs._replace(sync_ingestion=CallCost(0.0, 0.0), sync_delivery=CallCost(0.0, 0.0)),
            )
        )
        assert free - 1e-12 <= left <= here + 1e-12


def test_the_share_that_can_be_hidden_is_equation_6() -> None:
    assert [gamma(g) for g in (4, 1, Fraction(3, 4), Fraction(1, 4))] == [1.0, 1.0, 0.25, 0.75]


def test_placement_and_schedule_are_chosen_jointly() -> None:
    """The slower leg wins where it is hidden: here host ingestion is longer but off the learner's device."""
    device = Costs(
        4.0,
        CallCost(0.0, 4.0),
        CallCost(0.0, 2.0),
        CallCost(0.0, 1.0),
        contention_ingestion=1.0,
        contention_delivery=1.0,
    )
    host = device._replace(ingestion=CallCost(0.0, 3.0), contention_ingestion=0.0)
    decision = choose({"device": device, "host": host}, conduit.OffPolicy(batch_size=4))
    assert decision.chosen.placement == "host"
    assert decision.chosen.schedule.overlap_ingestion
    assert choose({"device": device, "host": host}, conduit.OffPolicy(batch_size=4, max_staleness=0)).ranked


def test_what_does_not_fit_is_rejected_with_what_is_missing() -> None:
    costs = Costs(1.0, CallCost(0.0, 1.0), CallCost(1.0, 0.0), CallCost(1.0, 0.0))
    decision = choose(costs, OFF, memory=Memory(unit_bytes=10, batch_bytes=100, free_bytes=250))
    assert {int(candidate.schedule.g_delivery) for candidate in decision.ranked} == {1, 2}
    assert any("lacks" in why for _, why in decision.rejected)
    assert "not feasible" in str(decision)
    with pytest.raises(conduit.ConfigError, match="No schedule fits"):
        choose(costs, OFF, memory=Memory(10, 100, 0))
