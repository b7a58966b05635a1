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
    shows: float | None = None,
    longer_s: float = 0.0,
    besides_s: float = 0.0,
    update: tuple[float, float] = (0.0, 1e-3),
    algorithm: conduit.OffPolicy = OFF,
    habit: int = 31,
) -> list:
    """Feed a tuner with a loop whose calls cost ``fixed_s`` each, on one iteration in g, beside 1 ms of rollout and its updates.

    Calls return after the share ``dispatch`` of it; what is overlapped shows as much (or ``shows``) of its cost, and makes an
    iteration ``longer_s`` longer. ``besides_s`` the loop does in every iteration. Updates with n batches take
    ``update[0] + n * update[1]``. Programs compile for 1 s. ``left`` iterations are still to come after the first.
    One in 32 iterations, that of number ``habit``, the loop runs stage by stage anyway.
    """
    changes = []
    for number in range(iterations):
        schedule, u, since = tuner.present, algorithm.updates_per_rollout, tuner._since
        due = {"ingestion": int(since % schedule.g_ingestion == schedule.g_ingestion - 1), "delivery": 0.0}
        g = int(schedule.g_delivery)
        due["delivery"] = sum(batch % g == 0 for batch in range(since * u, since * u + u))
        together = min(u, g)
        stages = {"rollout": 1e-3, "update": update[0] * -(-u // together) + u * update[1]}
        stages |= {name: fixed_s * calls + (since < 8) for name, calls in due.items()}
        late = {"ingestion": schedule.overlap_ingestion, "delivery": schedule.overlap_delivery}
        shown = dispatch if shows is None else shows
        path = sum(stages[name] * (shown if late[name] and since >= 8 else 1) for name in late)
        longer = longer_s * any(late.values())
        seconds = (
            fused_s if schedule.fused else slow * (stages["rollout"] + stages["update"] + path + longer) + besides_s
        )
        blocked = tuner.runs_blocked(number % 32 == habit)
        told = stages if blocked else {name: dispatch * value for name, value in stages.items()}
        if change := tuner.note(1, None if blocked else seconds, told, left - number):
            check_feasible(change.schedule, algorithm)
            changes.append(change)
    return changes


def test_nothing_changes_before_the_programs_have_settled() -> None:
    assert play(Tuner(OFF, SEQUENTIAL, fusable=True, contention=1.0), SETTLE + TRIAL - 1) == []


def test_a_run_too_short_to_repay_a_trial_is_left_as_it_is() -> None:
    """1,000 iterations of 4 ms are over before another program has repaid its compilation; 10,000 are not."""
    assert play(Tuner(OFF, SEQUENTIAL, fusable=True, contention=1.0), 1000, fused_s=5e-4, left=1000) == []
    assert play(Tuner(OFF, SEQUENTIAL, fusable=True, contention=1.0), 1000, fused_s=5e-4, left=10_000)


@pytest.mark.parametrize("habit", range(0, 32, 3))
def test_a_profile_times_whole_rounds_wherever_the_loop_runs_one_stage_by_stage(habit: int) -> None:
    tuner = Tuner(OFF, SEQUENTIAL, fusable=False, contention=1.0)
    play(tuner, 8 * TRIAL, habit=habit)
    assert tuner.costs is not None
    for cost in (tuner.costs.ingestion, tuner.costs.delivery):
        assert [cost.per_part(g) * g for g in (1, 2, 4, 8)] == pytest.approx([1e-3] * 4, rel=1e-3)


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
    play(tuner, 10 * TRIAL, dispatch=1.0, shows=0.05)
    assert tuner.present.overlap_ingestion
    assert tuner.present.overlap_delivery
    assert tuner.costs is not None
    assert tuner.costs.elsewhere_s == pytest.approx(2e-3), "no more than rollout and update take"


def test_where_overlapping_takes_longer_than_it_is_predicted_to_the_choice_is_made_anew() -> None:
    tuner = Tuner(OFF, SEQUENTIAL, fusable=False, contention=0.0)
    changes = play(tuner, 12 * TRIAL, longer_s=2e-3)
    assert changes[-2].schedule.overlap_delivery
    assert tuner.present == Schedule(g_ingestion=6, g_delivery=5)
    assert "of it where stages overlap" in changes[-1].reason
    assert tuner.costs is not None
    assert tuner.costs.stretch.per_part(1) == pytest.approx(2e-3, rel=1e-3)


@pytest.mark.parametrize(("longer_s", "besides_s"), [(0.0, 0.0), (0.0, 2e-3), (1e-4, 0.0)])
def test_what_every_iteration_takes_longer_or_little_is_no_reason_to_leave_what_was_chosen(
    longer_s: float, besides_s: float
) -> None:
    tuner = Tuner(OFF, SEQUENTIAL, fusable=False, contention=0.0)
    changes = play(tuner, 12 * TRIAL, longer_s=longer_s, besides_s=besides_s)
    assert tuner.present == changes[-1].schedule == Schedule(overlap_ingestion=True, overlap_delivery=True)


def test_updates_are_timed_by_how_many_are_in_a_program() -> None:
    """Four updates an iteration of 1 + n ms: delivering more batches a call saves updates too."""
    four = conduit.OffPolicy(batch_size=4, updates_per_rollout=4, max_staleness=4)
    tuner = Tuner(four, SEQUENTIAL, fusable=False, contention=1.0)
    play(tuner, 10 * TRIAL, fixed_s=1e-7, update=(1e-3, 1e-3), algorithm=four)
    assert tuner.costs is not None
    assert [tuner.costs.update.per_part(n) for n in (1, 2, 4)] == pytest.approx([2e-3, 1.5e-3, 1.25e-3])
    assert tuner.present == Schedule(g_delivery=4)


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
