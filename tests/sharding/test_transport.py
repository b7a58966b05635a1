"""Laws of the transfer plan and the placement map: nothing lost, no shorter transport exists, a look-up is the planner's answer."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conduit_jax as conduit
from conduit_jax.errors import refuse
from conduit_jax.sharding.placement_map import placement_map
from conduit_jax.sharding.transport import transfer_plan

RATES = st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, 7.5, math.inf])


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[float]]]:
    sources, targets = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    supply = draw(st.lists(st.integers(0, 4), min_size=sources, max_size=sources))
    demand = [0] * targets
    for _ in range(sum(supply)):
        demand[draw(st.integers(0, targets - 1))] += 1
    rates = draw(st.lists(st.lists(RATES, min_size=targets, max_size=targets), min_size=sources, max_size=sources))
    return supply, demand, rates


def splits(total: int, room: list[int]) -> itertools.chain:
    """All ways of writing ``total`` as whole numbers, each within its room."""
    if len(room) == 1:
        return itertools.chain([[total]] if total <= room[0] else [])
    return itertools.chain.from_iterable(
        ([first, *rest] for rest in splits(total - first, room[1:])) for first in range(min(total, room[0]) + 1)
    )


def least_makespan(supply: list[int], demand: list[int], rates: list[list[float]]) -> float:
    """Try every way of sending whole rows."""
    if not supply:
        return 0.0 if not any(demand) else math.inf
    best = math.inf
    for row in splits(supply[0], demand):
        if any(count and not rate for count, rate in zip(row, rates[0], strict=True)):
            continue
        own = max((count / rate for count, rate in zip(row, rates[0], strict=True) if count), default=0.0)
        left = [want - count for want, count in zip(demand, row, strict=True)]
        best = min(best, max(own, least_makespan(supply[1:], left, rates[1:])))
    return best


@given(problems())
def test_no_way_of_sending_whole_rows_is_shorter_and_none_is_lost(problem: tuple) -> None:
    supply, demand, rates = problem
    best = least_makespan(supply, demand, rates)
    if math.isinf(best):
        with pytest.raises(conduit.PlacementError, match="No edges carry"):
            transfer_plan(supply, demand, rates)
        return
    plan = transfer_plan(supply, demand, rates)
    assert plan.seconds == pytest.approx(best, rel=1e-6)
    flows = np.zeros((len(supply), len(demand)), int)
    for source, target, rows in plan.flows:
        assert rows > 0
        flows[source, target] += rows
    assert flows.sum(axis=1).tolist() == supply
    assert flows.sum(axis=0).tolist() == demand


def test_rows_that_may_stay_do_and_bytes_set_the_scale() -> None:
    plan = transfer_plan([4, 4], [4, 4], [[math.inf, 100.0], [100.0, math.inf]], unit_bytes=50)
    assert plan == (((0, 0, 4), (1, 1, 4)), 0.0)
    spread = transfer_plan([8], [2, 2, 2, 2], [[math.inf, 100.0, 100.0, 50.0]], unit_bytes=50)
    assert spread.seconds == pytest.approx(2.0)


def test_a_plan_for_a_node_of_eight_and_millions_of_rows_balances_unequal_links() -> None:
    rates = [[100e9, 200e9, 400e9, 100e9, 200e9, 100e9, 100e9, 200e9]]
    demand = [125_000] * 8
    plan = transfer_plan([1_000_000], demand, rates, unit_bytes=48_000)
    assert plan.seconds == pytest.approx(125_000 * 48_000 / 100e9)
    assert sum(flow.rows for flow in plan.flows) == 1_000_000


@pytest.mark.parametrize(
    ("supply", "demand", "rates", "message"),
    [
        ([1], [2], [[1.0]], "not what arrives"),
        ([1.5], [1.5], [[1.0]], "whole numbers"),
        ([-1], [-1], [[1.0]], "whole numbers"),
        ([1], [1], [[math.nan]], "do not describe"),
        ([1], [1], [[-2.0]], "do not describe"),
        ([1], [1], [[1.0, 2.0]], "do not describe"),
    ],
)
def test_numbers_that_describe_no_transport_are_refused(supply: list, demand: list, rates: list, message: str) -> None:
    with pytest.raises(conduit.ConfigError, match=message):
        transfer_plan(supply, demand, rates)


@given(st.lists(st.integers(2, 5000), max_size=6, unique=True), st.data())
def test_the_map_answers_what_the_planner_would(steps: list[int], data: st.DataObject) -> None:
    ends = sorted(steps)

    def plan(item_bytes: int) -> str:
        kind = sum(item_bytes >= end for end in ends)
        if kind == 3:
            refuse(conduit.PlacementError, "nothing fits")
        return f"placement {kind}"

    found = placement_map(plan, [1, 5000, *ends])
    asked = data.draw(st.integers(1, 5000))
    wanted = None if sum(asked >= end for end in ends) == 3 else plan(asked)
    assert found(asked) == wanted


def test_a_coarse_sweep_still_finds_the_breakpoint_to_the_byte_with_few_plans() -> None:
    asked: list[int] = []

    def plan(item_bytes: int) -> str:
        asked.append(item_bytes)
        return "single" if item_bytes < 48_013 else "shared"

    found = placement_map(plan, [1, 200_000])
    assert found.starts == (1, 48_013)
    assert (found(48_012), found(48_013)) == ("single", "shared")
    assert len(asked) < 25
    assert "shared" in str(found)


def test_a_size_nobody_planned_for_and_an_empty_sweep_are_refused() -> None:
    found = placement_map(lambda item_bytes: "here", [10, 20])
    for size in (9, 21):
        with pytest.raises(conduit.PlacementError, match="No placement was planned"):
            found(size)
    with pytest.raises(conduit.ConfigError, match="needs sizes"):
        placement_map(lambda item_bytes: "here", [])
