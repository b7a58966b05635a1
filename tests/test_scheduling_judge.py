"""Laws of how the scheduling benchmark judges: noise is no mistake, a difference that repeats is one."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.scheduling_judge import concordance, decomposition, judge, slower


def row(times: list[float], predicted: float, g: int = 1, *, overlap: bool = False) -> dict:
    exposed = [time - 2.0 for time in times]
    kept = {"width": 8, "batch": 4, "stages_over_path": 1.0, "placement": "pinned"}
    return kept | {
        "overlap": overlap,
        "g": g,
        "iteration_ms": times,
        "exposed_ms": exposed,
        "predicted_ms": predicted,
    }


def test_slower_is_what_confidence_leaves_of_paired_ratios() -> None:
    assert slower([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == pytest.approx(1.0)
    assert slower([1.0, 3.0, 2.0], [2.0, 2.0, 2.0]) < 0, "no difference that repeats"
    assert slower([1.5], [1.0]) == pytest.approx(0.5)


def test_the_best_is_found_on_odd_repeats_and_the_regret_measured_on_even_ones() -> None:
    rows = [row([4.0, 4.0] * 3, 4.0), row([2.0, 3.0] * 3, 2.0, 2), row([2.5, 2.5] * 3, 3.0, 4)]
    told = judge(rows, [1, 2, 0])
    assert (told["best"], told["regret"], told["in_top2"], told["in_top2_strict"]) == (told["chosen"], 0.0, True, True)
    told = judge(rows, [0, 2, 1])
    assert told["regret"] == pytest.approx(1 / 3)
    assert told["in_top2"], "one that is faster than the best on the repeats that count is tied with it"
    assert not told["in_top2_strict"]
    assert not judge(rows[:2], [0])["in_top2"]
    assert told["exposed_reduction"] == pytest.approx(0.5)


def test_only_pairs_that_are_told_apart_count_for_their_order() -> None:
    times = [np.asarray(one) for one in ([1.0, 1.0, 1.0], [2.0, 2.0, 2.1], [1.9, 2.1, 2.1])]
    assert concordance(times, np.asarray([1.0, 3.0, 2.0])) == 1.0
    assert concordance(times, np.asarray([2.5, 3.0, 2.0])) == 0.5
    assert concordance(times[:1], np.asarray([1.0])) is None


def test_the_decomposition_only_ever_adds_freedom() -> None:
    rows = [row([5.0] * 4, 1.0), row([4.0] * 4, 1.0, 2), row([3.0] * 4, 1.0, overlap=True)]
    told = decomposition(rows, 0.5)
    assert list(told.values()) == [3.0, 3.0, 2.0, 1.0, 0.5]
