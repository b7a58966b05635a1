"""Laws of what an algorithm allows: the feasible sets of paper section 4, by brute force and at their borders."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import conduit_jax as conduit
from conduit_jax.schedule.semantics import (
    MAX_GRANULARITY,
    SEQUENTIAL,
    check_feasible,
    draw_staleness,
    feasible_delivery,
    feasible_ingestion,
    resolve_schedule,
)

OVERLAP = conduit.Schedule(overlap_ingestion=True, overlap_delivery=True)


def simulated_staleness(prefetch: int, g: int, batches: int = 40) -> int:
    """Play a delivery schedule by hand: the most updates any batch saw between its draw call and its use."""
    drawn_at: list[int] = []
    worst = 0
    for updates in range(batches):
        while len(drawn_at) < (prefetch + 1) * g and (len(drawn_at) <= prefetch * g):
            drawn_at += [updates] * g
        worst = max(worst, updates - drawn_at.pop(0))
    return worst


@given(st.booleans(), st.integers(1, MAX_GRANULARITY), st.integers(0, 20))
def test_an_off_policy_schedule_is_feasible_exactly_if_its_staleness_is_within_bounds(
    overlap: bool, g: int, bound: int
) -> None:
    schedule = conduit.Schedule(overlap_delivery=overlap, g_delivery=Fraction(g))
    algorithm = conduit.OffPolicy(batch_size=4, max_staleness=bound)
    assert draw_staleness(schedule) == simulated_staleness(int(overlap), g)
    feasible = (overlap, Fraction(g)) in feasible_delivery(algorithm)
    assert feasible == (simulated_staleness(int(overlap), g) <= bound)
    if feasible:
        check_feasible(schedule, algorithm)
    else:
        with pytest.raises(conduit.ConfigError, match=f"raise max_staleness to {draw_staleness(schedule)}"):
            check_feasible(schedule, algorithm)


@given(st.integers(1, 12))
def test_on_policy_granularities_are_fractions_of_one_iteration(num_minibatches: int) -> None:
    algorithm = conduit.OnPolicy(num_minibatches=num_minibatches)
    ingestion, delivery = feasible_ingestion(algorithm), feasible_delivery(algorithm)
    assert (False, Fraction(1)) in ingestion
    assert [g for overlap, g in ingestion if overlap] == [
        Fraction(k, num_minibatches) for k in range(1, num_minibatches)
    ]
    assert delivery == [(False, Fraction(1)), (True, Fraction(1, num_minibatches))]


def test_the_default_algorithm_feasible_sets_are_not_trivial() -> None:
    pairs = feasible_delivery(conduit.OffPolicy(batch_size=4, max_staleness=4))
    assert pairs == [(False, Fraction(g)) for g in (1, 2, 3, 4, 5)] + [(True, Fraction(g)) for g in (1, 2)]


@given(st.integers(0, 6))
def test_batches_drawn_ahead_count_against_the_policy_lag(lag: int) -> None:
    pairs = feasible_delivery(conduit.BoundedLag(batch_size=4, max_policy_lag=lag))
    assert pairs == [
        (overlap, Fraction(g)) for overlap in (False, True) for g in range(1, 9) if (overlap + 1) * g - 1 <= lag
    ]


def test_overlap_is_refused_where_no_staleness_is_allowed_and_auto_stays_sequential() -> None:
    strict = conduit.OffPolicy(batch_size=4, max_staleness=0)
    with pytest.raises(conduit.ConfigError, match=r"overlap=True, g=1[\s\S]*raise max_staleness to 1"):
        resolve_schedule("overlap", strict, own_device=True)
    assert resolve_schedule("auto", strict, own_device=True) == SEQUENTIAL


@pytest.mark.parametrize(("own_device", "want"), [(True, OVERLAP), (False, SEQUENTIAL)])
def test_auto_overlaps_only_where_the_plane_has_a_device_of_its_own(own_device: bool, want: conduit.Schedule) -> None:
    assert resolve_schedule("auto", conduit.OffPolicy(batch_size=4), own_device=own_device) == want


def test_a_given_schedule_is_checked_and_kept() -> None:
    algorithm = conduit.OffPolicy(batch_size=4, max_staleness=1)
    wanted = conduit.Schedule(overlap_delivery=True)
    assert resolve_schedule(wanted, algorithm, own_device=False) is wanted
    with pytest.raises(conduit.ConfigError, match="delivery schedule"):
        resolve_schedule(conduit.Schedule(overlap_delivery=True, g_delivery=Fraction(2)), algorithm, own_device=False)
    with pytest.raises(conduit.ConfigError, match="ingestion schedule"):
        resolve_schedule(conduit.Schedule(g_ingestion=Fraction(1, 2)), algorithm, own_device=False)


def test_an_unknown_schedule_comes_with_a_suggestion() -> None:
    with pytest.raises(conduit.ConfigError, match="did you mean 'sequential'"):
        resolve_schedule("sequental", conduit.OffPolicy(batch_size=4), own_device=False)


@pytest.mark.parametrize("g", [0, -1, True, 1.5, "2", Fraction(0)])
def test_what_is_no_granularity_is_refused_when_it_is_set(g: Any) -> None:
    for name in ("g_ingestion", "g_delivery"):
        with pytest.raises(conduit.ConfigError, match=f"{name}=. is no granularity"):
            conduit.Schedule(**{name: g})


def test_whole_numbers_are_granularities() -> None:
    assert conduit.Schedule(g_delivery=2) == conduit.Schedule(g_delivery=Fraction(2))


@pytest.mark.parametrize("schedule", [conduit.Schedule(g_ingestion=2), conduit.Schedule(g_delivery=2)])
def test_on_policy_granularity_over_iterations_is_refused_with_what_there_is(schedule: conduit.Schedule) -> None:
    with pytest.raises(conduit.ConfigError, match=r"does not allow this (in|de)[\s\S]*overlap=1, g=1/4"):
        resolve_schedule(schedule, conduit.OnPolicy(num_minibatches=4), own_device=True)


@pytest.mark.parametrize("name", ["sequential", "overlap", "auto"])
@pytest.mark.parametrize(
    "algorithm", [conduit.OffPolicy(batch_size=4), conduit.OffPolicy(batch_size=4, max_staleness=1)]
)
def test_every_named_schedule_is_feasible_for_what_it_resolves_to(name: str, algorithm: conduit.OffPolicy) -> None:
    check_feasible(resolve_schedule(name, algorithm, own_device=True), algorithm)
