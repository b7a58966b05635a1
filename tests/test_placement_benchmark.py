"""Laws of the placement benchmark's figures: what regret, order and error mean, on times made up for the purpose."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.placement import planes, summary
from benchmarks.placement.workload import DIMENSIONS, PARTITIONS
from conduit_jax.sharding.topology import load_topology


def times(*seconds: float, repeats: int = 10, noise: float = 0.01) -> dict[str, list[float]]:
    draws = np.random.default_rng(0)
    return {f"p{i}": list(value * (1 + noise * draws.standard_normal(repeats))) for i, value in enumerate(seconds)}


def test_regret_is_what_the_choice_costs_beyond_the_best_and_nothing_for_the_best() -> None:
    measured = times(1.0, 1.3, 2.0)
    assert summary.regret(measured, "p0")["regret"] == 0
    worse = summary.regret(measured, "p1")
    assert worse["best"] == "p0"
    assert worse["low"] <= worse["regret"] <= worse["high"]
    assert worse["regret"] == pytest.approx(0.3, abs=0.05)
    tied = summary.regret(times(1.0, 1.0, noise=0.05), "p1")
    assert tied["low"] <= 0.02


def test_the_best_is_found_on_other_repeats_than_regret_is_measured_on() -> None:
    lucky = {"chosen": [1.0] * 10, "lucky": [1.1, 0.5] * 5}  # fast on odd repeats alone
    assert summary.regret(lucky, "chosen")["best"] == "lucky"
    assert summary.regret(lucky, "chosen")["regret"] == 0


def test_order_counts_pairs_that_differ_by_more_than_noise_and_ten_at_least() -> None:
    measured = times(1, 2, 3, 4, 5)
    right = {name: float(index) for index, name in enumerate(measured)}
    assert summary.rank_correlation(measured, right) == 1.0
    assert summary.rank_correlation(measured, {name: -value for name, value in right.items()}) == -1.0
    first, second, *_ = right
    tied = right | {second: right[first]}
    assert summary.rank_correlation(measured, tied) == pytest.approx(
        9 / np.sqrt(10 * 9)
    )  # scipy.stats.kendalltau says so too
    assert summary.rank_correlation(times(1, 2, 3), right) == "insufficient"
    assert summary.rank_correlation(times(1, 1, 1, 1, 1, noise=0.2), right) == "insufficient"
    assert summary.worst(["insufficient", 0.9, 1.0], min) == 0.9
    assert summary.worst(["insufficient"], min) == "insufficient"


def test_errors_and_ratios() -> None:
    measured = {"a": [2.0, 2.0, 2.0], "b": [1.0, 1.0, 1.0]}
    assert summary.errors(measured, {"a": 1.0, "b": 1.5}) == [0.5, 0.5]
    assert summary.ratio_low(measured["a"], measured["b"]) == (2.0, 2.0)


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_limits_make_both_regimes_of_the_paper(dimension: int) -> None:
    decided, feasible = planes.candidates(load_topology("a100_80gb_x8"), dimension)
    assert decided.layout.name in feasible
    assert ("single_device" in feasible) == (dimension <= 5000)
    assert {"pageable", "pinned_host", "shared:8"} <= set(feasible)
    for layout, seconds in feasible.values():
        assert sum(layout.parts[0].partitions) == PARTITIONS
        assert seconds >= decided.total_s
