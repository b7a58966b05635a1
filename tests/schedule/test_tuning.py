"""Laws of the automatic choice at run time: what it does with measured times, all of them made up here."""

from __future__ import annotations

import pytest

import conduit_jax as conduit
from conduit_jax.schedule.latency import contention
from conduit_jax.schedule.semantics import SEQUENTIAL, Schedule, check_feasible
from conduit_jax.schedule.tuning import REST, SETTLE, TRIAL, Tuner

OFF = conduit.OffPolicy(batch_size=4, max_staleness=4)


def play(
    tuner: Tuner,
    iterations: int,
    *,
    fixed_s: float = 1e-3,
    fused_s: float = 1e-3,
    slow: float = 1.0,
    left: float = float("inf"),
    dispatch: float = 0.0,
) -> list:
    """Feed a tuner with a loop whose calls cost ``fixed_s`` each beside 1 ms of rollout and 1 ms of update.

    Calls return after the share ``dispatch`` of it. ``left`` iterations are still to come after the first.
    """
    changes = []
    for number in range(iterations):
        schedule = tuner.present
        path = fixed_s / int(schedule.g_ingestion) + fixed_s / int(schedule.g_delivery)
        stages = {"rollout": 1e-3, "update": 1e-3, "ingestion": fixed_s / int(schedule.g_ingestion)}
        stages["delivery"] = fixed_s / int(schedule.g_delivery)
        seconds = fused_s if schedule.fused else slow * (2e-3 + path)
        blocked = tuner.wants_stages
        told = stages if blocked else {name: dispatch * value for name, value in stages.items()}
        if change := tuner.note(1, None if blocked else seconds, told, left - number):
            check_feasible(change.schedule, OFF)
            changes.append(change)
    return changes


def test_nothing_changes_before_the_programs_have_settled() -> None:
    assert play(Tuner(OFF, SEQUENTIAL, fusable=True, contention=1.0), SETTLE + TRIAL - 1) == []


def test_a_run_too_short_to_repay_a_trial_is_left_as_it_is() -> None:
    """1,000 iterations of 4 ms are over before another program has repaid its compilation; 10,000 are not."""
    assert play(Tuner(OFF, SEQUENTIAL, fusable=True, contention=1.0), 1000, fused_s=5e-4, left=1000) == []
    assert play(Tuner(OFF, SEQUENTIAL, fusable=True, contention=1.0), 1000, fused_s=5e-4, left=10_000)


def test_fusing_is_tried_first_and_kept_where_it_is_faster() -> None:
    tuner = Tuner(OFF, SEQUENTIAL, fusable=True, contention=1.0)
    (change,) = play(tuner, 20 * TRIAL, fused_s=5e-4)
    assert change.schedule.fused
    assert tuner.present.fused


def test_where_fusing_does_not_help_granularity_is_profiled_and_chosen() -> None:
    tuner = Tuner(OFF, SEQUENTIAL, fusable=True, contention=1.0)
    changes = play(tuner, 20 * TRIAL, fused_s=1e-2)
    assert [change.schedule.fused > 0 for change in changes[:2]] == [True, False]
    assert "profile: 4 units" in changes[4].reason
    assert changes[-1].schedule == Schedule(g_ingestion=6, g_delivery=5), "fixed costs, and overlap hides nothing here"
    assert tuner.decision is not None
    assert tuner.costs is not None
    assert tuner.costs.ingestion.fixed_s == pytest.approx(1e-3, rel=1e-3)


def test_overlap_is_chosen_where_nothing_contends_and_the_cheapest_effort_among_equals() -> None:
    tuner = Tuner(OFF, SEQUENTIAL, fusable=False, contention=0.0)
    play(tuner, 10 * TRIAL)
    assert tuner.present == Schedule(overlap_ingestion=True, overlap_delivery=True)


def test_overlap_is_worth_nothing_where_calls_return_when_they_are_done() -> None:
    """As programs do that run inline: what overlapping hides is dispatched in the host's own time."""
    tuner = Tuner(OFF, SEQUENTIAL, fusable=False, contention=0.0)
    play(tuner, 10 * TRIAL, dispatch=1.0)
    assert tuner.present == Schedule(g_ingestion=6, g_delivery=5), "8 units a call are predicted to save 2 % more"
    assert tuner.costs is not None
    assert tuner.costs.sync_delivery.fixed_s == pytest.approx(1e-3, rel=1e-3)


def test_overlap_is_worth_it_where_the_loop_waits_elsewhere_while_a_thread_dispatches() -> None:
    tuner = Tuner(OFF, SEQUENTIAL, fusable=False, contention=0.0, elsewhere=lambda: 5e-3)
    play(tuner, 10 * TRIAL, dispatch=1.0)
    assert tuner.present.overlap_ingestion
    assert tuner.present.overlap_delivery
    assert tuner.costs is not None
    assert tuner.costs.elsewhere_s == pytest.approx(2e-3), "no more than rollout and update take"


def test_a_path_of_no_cost_changes_nothing() -> None:
    tuner = Tuner(OFF, SEQUENTIAL, fusable=False, contention=1.0)
    play(tuner, 10 * TRIAL, fixed_s=1e-7)
    assert tuner.present == SEQUENTIAL


def test_times_that_drift_ask_for_another_profile_but_not_at_once_nor_for_a_moment() -> None:
    tuner = Tuner(OFF, SEQUENTIAL, fusable=False, contention=1.0)
    play(tuner, 12 * TRIAL)
    assert play(tuner, REST) == []
    assert play(tuner, TRIAL, slow=3.0) == []
    assert play(tuner, 2 * TRIAL) == []
    changes = play(tuner, 12 * TRIAL, slow=3.0)
    assert "drift" in changes[0].reason


def test_contention_is_total_on_one_device_and_what_cores_lack_elsewhere() -> None:
    assert contention(0.1, 0.1, 64, same_device=True) == 1
    assert contention(1, 1, 2, same_device=False) == 0
    assert contention(1, 1, 1, same_device=False) == 1
    assert contention(1, 1.5, 2, same_device=False) == pytest.approx(0.5)
