"""From times to the figures asked for: regret with its lower bound, order, error of prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np

_FEWEST_PAIRS = 10


def regret(times: Mapping[str, list[float]], chosen: str) -> dict[str, Any]:
    """Return how much longer ``chosen`` takes than the best: the best is found on odd repeats, regret measured on even ones.

    ``low`` is the lower end of a 95 % bootstrap interval of the median of paired differences, as a share of the best's time.
    """
    odd = {name: float(np.median(values[1::2])) for name, values in times.items()}
    best = min(odd, key=lambda name: odd[name])
    if best == chosen:
        return {"best": best, "regret": 0.0, "low": 0.0, "high": 0.0}
    paired = np.array(times[chosen][0::2]) / np.array(times[best][0::2]) - 1
    drawn = np.random.default_rng(0).integers(0, len(paired), (2000, len(paired)))
    low, high = np.percentile(np.median(paired[drawn], axis=1), [2.5, 97.5])
    return {
        "best": best,
        "regret": max(0.0, float(np.median(paired))),
        "low": max(0.0, float(low)),
        "high": max(0.0, float(high)),
    }


def rank_correlation(times: Mapping[str, list[float]], predicted: Mapping[str, float]) -> float | str:
    """Return Kendall's tau-b over pairs whose times differ by more than their noise; ``"insufficient"`` below ten pairs.

    A pair that is predicted to take the same time, as equal devices are, is neither in order nor out of it: a tie of tau-b.
    """
    agree = pairs = ties = 0
    for one, other in combinations(times, 2):
        difference = np.array(times[one]) - np.array(times[other])
        low, high = _interval(difference)
        if low <= 0 <= high:
            continue
        pairs += 1
        order = int(np.sign((predicted[one] - predicted[other]) * np.median(difference)))
        agree, ties = agree + order, ties + (order == 0)
    if pairs < _FEWEST_PAIRS or pairs == ties:
        return "insufficient"
    return agree / math.sqrt(pairs * (pairs - ties))


def _interval(values: np.ndarray) -> tuple[float, float]:
    drawn = np.random.default_rng(0).integers(0, len(values), (1000, len(values)))
    low, high = np.percentile(np.median(values[drawn], axis=1), [2.5, 97.5])
    return float(low), float(high)


def errors(times: Mapping[str, list[float]], predicted: Mapping[str, float]) -> list[float]:
    """Return |predicted - measured| / measured of each placement."""
    return [abs(predicted[name] / float(np.median(values)) - 1) for name, values in times.items()]


def ratio_low(slow: list[float], fast: list[float]) -> tuple[float, float]:
    """Return the median of paired ratios, and the lower end of its 95 % bootstrap interval."""
    pairs = np.array(slow) / np.array(fast)
    return float(np.median(pairs)), _interval(pairs)[0]


def worst(values: list[float | str], pick: Any) -> float | str:
    """Return the worst of the numbers among ``values``; ``"insufficient"`` where there is none."""
    numbers = [value for value in values if not isinstance(value, str)]
    return pick(numbers) if numbers else "insufficient"
