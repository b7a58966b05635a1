"""What schedules are worth, and whether the automatic choice finds the best: the paper's Figs. 6, 14 and 15 and Tab. 4.

python -m benchmarks.scheduling --json benchmarks/results/scheduling.json
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")  # the data plane has one of its own
os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import conduit_jax as conduit
from benchmarks.harness import arguments, report
from benchmarks.scheduling_runs import (
    STALENESS,
    Stage,
    Times,
    World,
    cores,
    fused_loop,
    iterate,
    path_costs,
    placements,
    request_loop,
)
from conduit_jax.schedule.latency import Costs, predict
from conduit_jax.testing import delayed

WIDTHS = (128, 256, 512, 1000, 2000, 5000, 10_000)
GRANULARITIES = (1, 2, 4, 8)
FLOORS = {
    "exposed_reduction": 0.9,
    "exposed_of_possible": 0.8,
    "auto_regret_max": 0.10,
    "best_in_predicted_top2": 0.85,
    "prediction_mape": 0.21,
    "prediction_pearson": 0.95,
}
Config = tuple[str, bool, int]


def schedule_of(overlap: bool, g: int) -> conduit.Schedule:
    return conduit.Schedule(overlap_ingestion=overlap, overlap_delivery=overlap, g_ingestion=g, g_delivery=g)


def grid(width: int, *, repeats: int, block_s: float, ratio: float = 1.0, places: int = 4) -> list[dict[str, Any]]:
    """Time every placement, overlap and granularity at one width, in turns; rows with the model's prediction beside."""
    worlds = {name: World(width, place()) for name, place in list(placements().items())[:places]}
    costs, paths = {}, {}
    for name, world in worlds.items():
        costs[name], paths[name] = path_costs(world)
    path = float(np.median(list(paths.values())))
    rollout, update = Stage(0.4 * ratio * path), Stage(0.6 * ratio * path)
    costs = {name: one._replace(rollout_s=rollout.seconds, update_s=update.seconds) for name, one in costs.items()}
    iterations = int(np.clip(block_s / (2 * path), 8, 64)) // 8 * 8
    times: dict[Config, list[Times]] = {}
    for repeat in range(repeats + 1):
        for name, world in worlds.items():
            for overlap in (False, True):
                for g in GRANULARITIES:
                    world.schedule(overlap, g)
                    once = iterate(world, rollout, update, iterations if repeat else 8, overlap=overlap)
                    if repeat:  # the first compiles
                        times.setdefault((name, overlap, g), []).append(once)
    return [_row(width, ratio, config, measured, costs[config[0]]) for config, measured in times.items()]


def _row(width: int, ratio: float, config: Config, measured: list[Times], costs: Costs) -> dict[str, Any]:
    name, overlap, g = config
    stages = float(np.median([one.stages_s for one in measured]))  # what waits of so long really take
    share = costs.rollout_s / (costs.rollout_s + costs.update_s)
    costs = costs._replace(rollout_s=stages * share, update_s=stages * (1 - share))
    algorithm = conduit.OffPolicy(batch_size=1, max_staleness=STALENESS)
    predicted = predict(costs, schedule_of(overlap, g), algorithm)
    return {
        "figure": "15",
        "width": width,
        "stages_over_path": ratio,
        "placement": name,
        "overlap": overlap,
        "g": g,
        "iteration_ms": [one.iteration_s * 1e3 for one in measured],
        "exposed_ms": [one.exposed_s * 1e3 for one in measured],
        "predicted_ms": predicted.iteration_s * 1e3,
    }


def judge(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one width's figures: the best on odd repeats, its regret and gain on even ones."""
    odd = [float(np.median(row["iteration_ms"][0::2])) for row in rows]
    even = [float(np.median(row["iteration_ms"][1::2])) for row in rows]
    predicted = [row["predicted_ms"] for row in rows]
    best, chosen, order = int(np.argmin(odd)), int(np.argmin(predicted)), np.argsort(predicted)
    base = next(
        row for row in rows if row["placement"] == rows[best]["placement"] and not row["overlap"] and row["g"] == 1
    )
    exposed = [float(np.median(row["exposed_ms"][1::2])) for row in (base, rows[best])]
    top = np.argsort(odd)[:8]
    return {
        "width": rows[0]["width"],
        "best": _name(rows[best]),
        "chosen": _name(rows[chosen]),
        "regret": max(0.0, even[chosen] / even[best] - 1),
        "in_top2": bool(best in order[:2]),
        "exposed_reduction": 1 - max(0.0, exposed[1]) / exposed[0],
        "top8_spearman": _spearman(np.asarray(even)[top], np.asarray(predicted)[top]),
        "best_ms": even[best],
        "best_predicted_ms": predicted[best],
    }


def _name(row: dict[str, Any]) -> str:
    return f"{row['placement']}, overlap={int(row['overlap'])}, g={row['g']}"


def _spearman(one: np.ndarray, other: np.ndarray) -> float:
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


def busy_here(width: int, repeats: int, iterations: int) -> dict[str, Any]:
    """Return how much of what work conservation allows overlap hides where rollout and update burn a core."""
    world = World(width, placements()["own device, device"]())
    _, path = path_costs(world)
    rollout, update = Stage(0.4 * path, here=True), Stage(0.6 * path, here=True)
    runs: dict[bool, list[Times]] = {False: [], True: []}
    for repeat in range(repeats + 1):
        for overlap in (False, True):
            world.schedule(overlap, 1)
            once = iterate(world, rollout, update, iterations, overlap=overlap)
            if repeat:
                runs[overlap].append(once)
    plain, hidden = (Times(*np.median(np.asarray(runs[overlap]), axis=0)) for overlap in (False, True))
    bound = max(plain.stages_s, plain.cpu_s / cores())  # the work there is, over the cores there are
    possible = plain.iteration_s - bound
    share = (plain.iteration_s - hidden.iteration_s) / possible
    undefined = possible < 0.05 * plain.iteration_s
    return {
        "figure": "busy here",
        "width": width,
        "sequential_ms": plain.iteration_s * 1e3,
        "overlap_ms": hidden.iteration_s * 1e3,
        "bound_ms": bound * 1e3,
        "of_possible": None if undefined else share,
    }


def operator_batches(repeats: int) -> list[dict[str, Any]]:
    """Fig. 6: cost a transition against transitions a call, ingestion and delivery."""
    rows = []
    for size in (32, 64, 128, 256, 512):
        world = World(1000, placements()["learner's device, device"](), unit_steps=size // 32, batch=size)
        into, out = [], []
        for turn in range(repeats + 2):
            start = time.perf_counter()
            world.push()
            world.wait()
            middle = time.perf_counter()
            jax.block_until_ready(world.plane.pull().data)
            if turn > 1:
                into.append((middle - start) / size)
                out.append((time.perf_counter() - middle) / size)
        rows.append(
            {"figure": "6", "batch": size, "ingestion_us": np.median(into) * 1e6, "delivery_us": np.median(out) * 1e6}
        )
    return rows


def fused_speedup(iterations: int) -> list[dict[str, Any]]:
    """Time a small loop in JAX alone, sequential and fused, with 1 and 8 updates an iteration."""
    rows = []
    for updates in (1, 8):
        row: dict[str, Any] = {"figure": "fused", "updates": updates}
        for schedule in ("sequential", "fused"):
            loop = fused_loop(schedule, updates)
            learner, actor, _ = loop.run(jnp.ones((8, 1)), jnp.float32(0), iterations=128)
            best = np.inf
            for _ in range(3):
                start = time.perf_counter()
                learner, actor, _ = loop.run(learner, actor, iterations=iterations)
                jax.block_until_ready(learner)
                best = min(best, (time.perf_counter() - start) / iterations)
            row[f"{schedule}_us"] = best * 1e6
        row["speedup"] = row["sequential_us"] / row["fused_us"]
        rows.append(row)
    return rows


def deterministic() -> bool:
    """Whether random delays change no bit under three schedules."""
    same = []
    for schedule in (schedule_of(False, 2), schedule_of(True, 1), schedule_of(True, 2)):
        ends = []
        for seed in (None, 1):
            world = World(64, placements()["own device, device"](), batch=64)
            world.pipeline.reschedule(schedule)
            with delayed(world.plane, pause=time.sleep if seed else lambda _: None, seed=seed or 0):
                samples = []
                for _ in range(6):
                    world.push()
                    samples.append(jax.tree.map(np.asarray, world.plane.pull()))
            ends.append(b"".join(leaf.tobytes() for leaf in jax.tree.leaves(samples)))
        same.append(ends[0] == ends[1])
    return all(same)


def decomposition(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the best exposed milliseconds as each decision is added, at one width."""

    def least(**fixed: Any) -> float:
        return min(
            float(np.median(row["exposed_ms"]))
            for row in rows
            if all(row[key] == value for key, value in fixed.items())
        )

    worst = rows[-1]["placement"]
    return {
        "sequential": least(placement=worst, overlap=False, g=1),
        "+ placement": least(overlap=False, g=1),
        "+ granularity": least(overlap=False),
        "+ overlap": least(),
    }


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    quick = options.quick
    widths, repeats = ((1000,), 2) if quick else (WIDTHS, 2)
    rows, verdicts = [], []
    for width in widths:
        own = grid(width, repeats=repeats, block_s=0.05 if quick else 0.1, places=1 if quick else 4)
        rows += own
        verdicts.append(judge(own))
        print(
            {key: round(value, 3) if isinstance(value, float) else value for key, value in verdicts[-1].items()},
            flush=True,
        )
    scaled = [
        judge(grid(1000, repeats=2, block_s=0.1, ratio=ratio, places=1)) | {"ratio": ratio}
        for ratio in (() if quick else (0.25, 4.0))
    ]
    here = [
        busy_here(width, 2 if quick else 3, 8 if quick else 16)
        for width in (widths if quick else (1000, 2000, 5000, 10_000))
    ]
    operators, fused = operator_batches(3 if quick else 20), fused_speedup(128 if quick else 1000)
    requests = [_requests(width, like) for width in widths for like in ("reverb", "gear")]
    measured = np.asarray([np.median(row["iteration_ms"]) for row in rows])
    predicted = np.asarray([row["predicted_ms"] for row in rows])
    shares = [row["of_possible"] for row in here if row["of_possible"] is not None]
    summary: dict[str, Any] = {
        "exposed_reduction": float(np.median([one["exposed_reduction"] for one in verdicts])),
        "exposed_of_possible": float(np.median(shares)) if shares else None,
        "granularity_gain_ingestion": float(operators[0]["ingestion_us"] / operators[-1]["ingestion_us"]),
        "granularity_gain_delivery": float(operators[0]["delivery_us"] / operators[-1]["delivery_us"]),
        "auto_regret_max": max(one["regret"] for one in verdicts),
        "best_in_predicted_top2": float(np.mean([one["in_top2"] for one in verdicts])),
        "top8_spearman_min": min(one["top8_spearman"] for one in verdicts),
        "prediction_mape": float(np.mean(np.abs(predicted - measured) / measured)),
        "prediction_pearson": float(np.corrcoef(predicted, measured)[0, 1]),
        "fused_speedup": max(row["speedup"] for row in fused),
        "determinism": deterministic(),
        "decomposition": decomposition([row for row in rows if row["width"] == 1000]),
    }
    summary["missed"] = _missed(summary)
    tables = [{"figure": "tab4", **one} for one in [*verdicts, *scaled]]
    report(options.json, rows + tables + here + operators + fused + requests, summary)


def _requests(width: int, like: str) -> dict[str, Any]:
    """Time the path of a request-driven replay alone."""
    times = request_loop(width, 8, Stage(0.0), Stage(0.0), serialised=like == "reverb")
    return {"figure": "14", "width": width, "like": like, "path_ms": times.exposed_s * 1e3}


def _missed(summary: dict[str, Any]) -> list[str]:
    """Return the figures that miss their floors."""
    at_most = ("auto_regret_max", "prediction_mape")
    missed = []
    for name, floor in FLOORS.items():
        value = summary[name]
        if value is None or (value > floor if name in at_most else value < floor):
            missed.append(f"{name}: {value} against {floor}")
    return missed


if __name__ == "__main__":
    main()
