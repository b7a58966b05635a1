"""What rows of ``benchmarks.scheduling`` say: the best schedule, what the automatic choice lacks of it, how well it was predicted.

The best is found on odd repeats and everything about it is measured on even ones, in pairs: a configuration is slower by as
much as 95 % confidence leaves (``slower``). Two that are neither told apart by it nor by more than the 5 % for which a
running loop would change its schedule are *tied*: naming either is no mistake.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats

from conduit_jax.schedule.optimizer import HYSTERESIS

Row = dict[str, Any]


def slower(times: Any, others: Any) -> float:
    """Return by what share ``times`` are longer than ``others``, pair by pair: a one-sided lower 95 % confidence bound."""
    ratios = np.log(np.asarray(times) / np.asarray(others))
    if len(ratios) < 2:
        return float(np.expm1(ratios.mean()))
    margin = stats.t.ppf(0.95, len(ratios) - 1) * ratios.std(ddof=1) / np.sqrt(len(ratios))
    return float(np.expm1(ratios.mean() - margin))


def name_of(row: Row) -> str:
    """Return a configuration as text."""
    return f"{row['placement']}, overlap={int(row['overlap'])}, g={row['g']}"


def judge(rows: list[Row], ranked: list[int]) -> Row:
    """Return the figures of one width; ``ranked`` numbers its rows in the order in which ``choose`` ranks them."""
    odd = [float(np.median(row["iteration_ms"][0::2])) for row in rows]
    even = [np.asarray(row["iteration_ms"][1::2]) for row in rows]
    best, chosen = int(np.argmin(odd)), ranked[0]
    tied = [
        index
        for index, times in enumerate(even)
        if index == best or (slower(times, even[best]) <= 0 and np.median(times / even[best]) <= 1 + HYSTERESIS)
    ]
    base = next(
        row for row in rows if row["placement"] == rows[best]["placement"] and not row["overlap"] and row["g"] == 1
    )
    exposed = [float(np.median(row["exposed_ms"][1::2])) for row in (base, rows[best])]
    mid = np.asarray([float(np.median(times)) for times in even])
    predicted = np.asarray([row["predicted_ms"] for row in rows])
    top = np.argsort(odd)[:8]
    return {
        "figure": "tab4",
        "width": rows[0]["width"],
        "batch": rows[0]["batch"],
        "stages_over_path": rows[0]["stages_over_path"],
        "best": name_of(rows[best]),
        "chosen": name_of(rows[chosen]),
        "regret": max(0.0, slower(even[chosen], even[best])),
        "regret_median": max(0.0, float(np.median(even[chosen] / even[best])) - 1),
        "in_top2": any(index in tied for index in ranked[:2]),
        "in_top2_strict": best in ranked[:2],
        "tied": len(tied),
        "exposed_reduction": 1 - max(0.0, exposed[1]) / exposed[0],
        "sequential_exposed_ms": exposed[0],
        "best_exposed_ms": exposed[1],
        "top8_spearman": spearman(mid[top], predicted[top]),
        "concordance": concordance(even, predicted),
        "best_ms": mid[best],
        "best_predicted_ms": predicted[best],
        "mape": float(np.mean(np.abs(predicted - mid) / mid)),
    }


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """Return the rank correlation of two lists of numbers."""
    return float(stats.spearmanr(one, other).statistic)


def concordance(times: list[np.ndarray], predicted: np.ndarray) -> float | None:
    """Return the share of pairs, of those whose order the ``times`` tell, that are predicted in that order."""
    right = told = 0
    for one in range(len(times)):
        for other in range(len(times)):
            if slower(times[one], times[other]) > 0:
                told += 1
                right += bool(predicted[one] > predicted[other])
    return right / told if told else None


def decomposition(rows: list[Row], fused_ms: float) -> dict[str, float]:
    """Return the exposed milliseconds at one width as each decision is added to what others fix: pinned memory, in order, g = 1."""

    def least(**fixed: Any) -> float:
        return min(
            float(np.median(row["exposed_ms"]))
            for row in rows
            if all(row[key] == value for key, value in fixed.items())
        )

    fixed = next((row["placement"] for row in rows if "pinned" in row["placement"]), rows[0]["placement"])
    return {
        "sequential": least(placement=fixed, overlap=False, g=1),
        "+ placement": least(overlap=False, g=1),
        "+ granularity": least(overlap=False),
        "+ overlap": least(),
        "fused": fused_ms,
    }
