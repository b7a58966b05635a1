"""From blocks to figures: each reduction with its 95 % interval, held on the lower bound."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from benchmarks.rllib.probes import PARTS

Blocks = list[dict[str, Any]]
LAST_PIECE = 1 / 32  # of a fragment: conduit_jax.adapters.rllib.streaming
FLOORS = {
    "exposed_reduction_min_offpolicy": 0.85,
    "exposed_reduction_max": 0.95,
    "exposed_reduction_ppo_pixels": 0.85,
    "iteration_of_share_min": 0.8,
    "iteration_reduction_max": 0.30,
    "iteration_reduction_min": -0.03,
}


class Interval(NamedTuple):
    """A median and the ends of its 95 % bootstrap interval."""

    median: float
    low: float
    high: float


def interval(values: Any, resamples: int = 2000) -> Interval:
    """Return the median of ``values``, one a pair of neighbouring blocks."""
    values = np.asarray(values)
    drawn = np.random.default_rng(0).integers(0, len(values), (resamples, len(values)))
    low, high = np.percentile(np.median(values[drawn], axis=1), [2.5, 97.5])
    return Interval(float(np.median(values)), float(low), float(high))


def reduction(stock: Blocks, other: Blocks, clock: str, part: str) -> Interval:
    """Return by what share ``other`` spends less in ``part`` than ``stock``, block against neighbouring block."""
    return interval([1 - b[clock][part] / a[clock][part] for a, b in zip(stock, other, strict=True)])


def as_row(workload: str, case: str, blocks: Blocks) -> dict[str, Any]:
    """Return a case's shares and times: milliseconds an update are medians over blocks, shares are of all blocks."""
    steps = np.concatenate([block["steps"] for block in blocks])
    row: dict[str, Any] = {"workload": workload, "case": case, "updates": len(steps)}
    for clock in ("wall", "cpu"):
        total = sum(block[clock]["total"] for block in blocks)
        row[f"{clock}_share"] = {part: sum(block[clock][part] for block in blocks) / total for part in PARTS}
        row[f"{clock}_ms"] = {
            part: 1e3 * float(np.median([block[clock][part] for block in blocks]))
            for part in (*PARTS, "total", "value_forward")
        }
    row["iteration_ms"] = {f"p{at}": 1e3 * float(np.percentile(steps, at)) for at in (50, 99)}
    return row


def matched(stock: Blocks, other: Blocks) -> tuple[Blocks, Blocks]:
    """Return blocks of RLlib's and of a case measured less often, each beside its neighbour: the block of the same ``turn``."""
    turns = {block["turn"]: block for block in stock}
    return [turns[block["turn"]] for block in other], other


def hidden(cases: dict[str, Blocks], cores: int) -> dict[str, Any]:
    """Return what share of the value function's pass the learner no longer waits for, and the most that ``cores`` allow.

    At most all but the last piece sampled can be hidden, and no more than the other cores can do during a rollout. ``net``
    counts against it what the rollout takes longer beside it than without (case ``sequential``), noise of both rollouts
    included.
    """
    ahead, sequential = cases["ahead"], cases["sequential"]
    forward = [block["wall"]["value_forward"] for block in sequential]
    waited = [block["wall"]["value_forward"] for block in ahead]
    rollouts = [[block["wall"]["rollout"] for block in blocks] for blocks in (sequential, ahead)]
    longer = np.subtract(rollouts[1], rollouts[0])
    spare = (cores - 1) * float(np.median(rollouts[0])) / float(np.median(forward))
    return {
        "hidden": interval(1 - np.divide(waited, forward))._asdict(),
        "net": interval(1 - np.divide(np.add(waited, longer), np.median(forward)))._asdict(),
        "bound": min(1 - LAST_PIECE, spare),
        "forward_ms": 1e3 * float(np.median(forward)),
    }


def of_workload(cases: dict[str, Blocks], adopted: str, *, on_policy: bool, cores: int = 1) -> dict[str, Any]:
    """Return one workload's figures: what conduit saves in the case ``adopted``, and what it saves in each."""
    path = "path_without_values" if on_policy else "path"
    stock, ours = cases["stock"], cases[adopted]
    seen = {"sequential", "ahead"} <= set(cases) and all(block["wall"]["value_forward"] > 0 for block in stock)
    streamed = {"value_forward_hidden": hidden(cases, cores)} if seen else {}
    share = interval([block["wall"]["path"] / block["wall"]["total"] for block in stock])
    share_cpu = interval([block["cpu"]["path"] / block["cpu"]["total"] for block in stock])
    iteration = reduction(stock, ours, "wall", "total")
    iteration_cpu = reduction(stock, ours, "cpu", "total")
    return {
        "adopted": adopted,
        "on_policy": on_policy,
        "exposed_reduction": reduction(stock, ours, "cpu", path)._asdict(),
        "exposed_reduction_wall": reduction(stock, ours, "wall", path)._asdict(),
        "iteration_reduction": iteration._asdict(),
        "iteration_reduction_cpu": iteration_cpu._asdict(),
        "path_share": share._asdict(),
        "path_share_cpu": share_cpu._asdict(),
        "iteration_of_share": of_share(stock, ours, "wall")._asdict(),
        "iteration_of_share_cpu": of_share(stock, ours, "cpu")._asdict(),
        "decomposed_cpu": {
            case: reduction(*matched(stock, blocks), "cpu", path)._asdict()
            for case, blocks in cases.items()
            if case != "stock"
        },
        "decomposed_iteration": {
            case: reduction(*matched(stock, blocks), "wall", "total")._asdict()
            for case, blocks in cases.items()
            if case != "stock"
        },
    } | streamed


def of_share(stock: Blocks, other: Blocks, clock: str, resamples: int = 2000) -> Interval:
    """Return what an iteration saves as a share of what the path takes of RLlib's: 1 where all of the path is gone.

    The ratio of the medians over pairs of blocks; the interval draws pairs, and so has the share's uncertainty in it too.
    """
    saved = np.array([1 - b[clock]["total"] / a[clock]["total"] for a, b in zip(stock, other, strict=True)])
    share = np.array([block[clock]["path"] / block[clock]["total"] for block in stock])
    drawn = np.random.default_rng(0).integers(0, len(saved), (resamples, len(saved)))
    low, high = np.percentile(np.median(saved[drawn], axis=1) / np.median(share[drawn], axis=1), [2.5, 97.5])
    return Interval(float(np.median(saved) / np.median(share)), float(low), float(high))


def summarize(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the figures over all workloads, lower bounds of the intervals, and the floors they are held against."""
    off_policy = [figures for figures in found.values() if not figures["on_policy"]]
    exposed = [figures["exposed_reduction"]["low"] for figures in off_policy]
    iteration = [figures["iteration_reduction"]["low"] for figures in found.values()]
    summary: dict[str, Any] = {"iteration_reduction_max": max(iteration), "iteration_reduction_min": min(iteration)}
    if off_policy:
        summary |= {
            "exposed_reduction_min_offpolicy": min(exposed),
            "exposed_reduction_max": max(exposed),
            "iteration_of_share_min": min(figures["iteration_of_share"]["low"] for figures in off_policy),
            "iteration_of_share_cpu_min": min(figures["iteration_of_share_cpu"]["low"] for figures in off_policy),
            "iteration_of_share_min_of_medians": min(figures["iteration_of_share"]["median"] for figures in off_policy),
        }
    pixels = [figures["exposed_reduction"]["low"] for name, figures in found.items() if name.startswith("ppo_pixels")]
    if pixels:
        summary["exposed_reduction_ppo_pixels"] = min(pixels)
    if "value_forward_hidden" in found.get("ppo_pixels_128", {}):
        streamed = found["ppo_pixels_128"]["value_forward_hidden"]
        summary["value_forward_hidden"] = streamed["hidden"]["low"]
        summary["value_forward_hidden_bound"] = streamed["bound"]
    met = {name: {"floor": floor, "met": summary[name] >= floor} for name, floor in FLOORS.items() if name in summary}
    return summary | {"floors": met, "workloads": found}
