"""What stale batches cost and what they save: DQN on CartPole for ``max_staleness`` 0 to 64, uniform and prioritized draws.

python -m benchmarks.staleness --json benchmarks/results/staleness.json --plot docs/staleness.png       (extra plot)

A row's seeds train in one program that draws ``max_staleness + 1`` batches at a time: 0 to ``max_staleness`` updates old, evenly,
whatever a schedule would choose. Its wall time is that of a plane's loop at the granularity the bound allows (8 at the most), timed apart.
``--sampler``, ``--bound`` and ``--only`` choose what is done; new rows replace those of the file, which is written after each.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import numpy as np

import conduit_jax as conduit
from benchmarks.drawn_ahead import train
from benchmarks.harness import arguments, calibrate, interleave, marked, report, rows_to_add_to, write
from conduit_jax.examples import dqn
from conduit_jax.examples.worlds import make_pure_world
from conduit_jax.schedule.semantics import MAX_GRANULARITY

BOUNDS = (0, 1, 4, 16, 64)
SAMPLERS = ("uniform", "prioritized")
POINTS = 25  # of a curve


def learned(sampler: str, staleness: int, steps: int, seeds: int) -> dict[str, Any]:
    """Train ``seeds`` seeds and return their final returns, the means of their curves (``areas``) and the mean curve."""
    settings = dqn.settings_for("cartpole", steps=steps, sampler=sampler)
    trained = train(dqn.make_dqn, dqn, settings, seeds, staleness)
    ends = np.linspace(0, trained.curve.shape[1], min(POINTS, trained.curve.shape[1]) + 1).astype(int)[1:]
    offset = settings.iterations - trained.curve.shape[1]
    curve = trained.curve.mean(axis=0)
    row: dict[str, Any] = {"sampler": sampler, "max_staleness": staleness, "seeds": seeds, "env_steps": steps}
    row |= {"returns": trained.returns.mean(axis=1).tolist(), "areas": trained.curve.mean(axis=1).tolist()}
    row |= {"iteration": (ends + offset).tolist()}
    return row | {"recent_return": [float(curve[end - 1]) for end in ends]}


def iteration_seconds(block_s: float, repeats: int) -> dict[tuple[str, int], float]:
    """Return the seconds an iteration takes through a plane, by sampler and bound, timed in turn."""
    cases = {}
    for sampler in SAMPLERS:
        settings = dqn.settings_for("cartpole", sampler=sampler, placement="device")
        world, algorithm = make_pure_world(settings, lambda spec, settings=settings: dqn.make_dqn(spec, settings))
        rollout, init = jax.jit(world.rollout), jax.jit(world.init)
        for bound in BOUNDS:
            g = conduit.Schedule(g_delivery=Fraction(min(bound + 1, MAX_GRANULARITY)))
            plane = dqn.make_plane(dqn.settings_for("cartpole", sampler=sampler, max_staleness=bound, schedule=g))
            loop = conduit.wrap(algorithm.train_step, rollout=rollout, policy=algorithm.policy, plane=plane)
            kept = [algorithm.init(jax.random.key(0)), init(jax.random.key(1))]

            def run(calls: int, loop: Any = loop, kept: list[Any] = kept) -> None:
                kept[0], kept[1], _ = loop.run(kept[0], kept[1], calls)
                jax.block_until_ready(kept[0])

            run(40)
            cases[f"{sampler} {bound}"] = run
    calls = {name: calibrate(case, block_s)[0] for name, case in cases.items()}
    times = interleave(cases, calls=calls, repeats=repeats)
    return {(sampler, bound): times[f"{sampler} {bound}"].median for sampler in SAMPLERS for bound in BOUNDS}


def draw_plot(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draw return against iterations and, where the loops were timed, below it against wall time; a column a sampler."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = 2 if all("iteration_ms" in row for row in rows) else 1
    figure, axes = pyplot.subplots(lines, len(SAMPLERS), figsize=(9, 3 * lines), sharey=True, squeeze=False)
    for column, sampler in enumerate(SAMPLERS):
        for row in (row for row in rows if row["sampler"] == sampler):
            iterations = np.asarray(row["iteration"])
            units = (1.0, row.get("iteration_ms", 0) * 1e-3)
            for line, unit in enumerate(units[:lines]):
                label = f"max_staleness={row['max_staleness']}"
                axes[line, column].plot(iterations * unit, row["recent_return"], label=label, linewidth=1.2)
        axes[0, column].set(title=f"{sampler}, mean of {rows[0]['seeds']} seeds", xlabel="iterations")
        axes[-1, column].set_xlabel("seconds" if lines == 2 else "iterations")
        axes[0, column].legend(fontsize=7, frameon=False)
    for each in axes.flat:
        each.grid(alpha=0.3)
    for line in axes[:, 0]:
        line.set_ylabel("recent return")
    figure.tight_layout()
    figure.savefig(path, dpi=70)


def merged(rows: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Return ``rows`` with ``new`` in place of the row of the same sampler and bound, whose times it keeps."""
    told = {(row["sampler"], row["max_staleness"]): row for row in rows}
    name = (new["sampler"], new["max_staleness"])
    told[name] = {key: told[name][key] for key in ("iteration_ms",) if key in told.get(name, {})} | new
    return [told[name] for name in sorted(told, key=lambda name: (SAMPLERS.index(name[0]), name[1]))]


def against_sequential(rows: list[dict[str, Any]], figure: str, *, resamples: int = 5000) -> dict[str, list[float]]:
    """Return, by row, ``figure``'s mean over seeds as a share of that at bound 0: the share, and its 95 % bootstrap interval."""
    draws, shares = np.random.default_rng(0), {}
    for row in rows:
        fresh = [each for each in rows if (each["sampler"], each["max_staleness"]) == (row["sampler"], 0)]
        if fresh and row["max_staleness"]:
            means = [
                np.asarray(each[figure])[draws.integers(0, len(each[figure]), (resamples, len(each[figure])))].mean(
                    axis=1
                )
                for each in (row, *fresh)
            ]
            low, high = np.percentile(means[0] / means[1], [2.5, 97.5])
            share = np.mean(row[figure]) / np.mean(fresh[0][figure])
            shares[f"{row['sampler']}_{row['max_staleness']}"] = [float(share), float(low), float(high)]
    return shares


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means, times, and areas and final returns as shares of the sequential ones, by sampler and bound."""
    summary: dict[str, Any] = {}
    for row in rows:
        name = f"{row['sampler']}_{row['max_staleness']}"
        summary |= {f"mean_return_{name}": float(np.mean(row["returns"])), f"area_{name}": float(np.mean(row["areas"]))}
        if "iteration_ms" in row:
            summary[f"iteration_ms_{name}"] = row["iteration_ms"]
    for figure in ("areas", "returns"):
        summary |= {f"{figure}_share_{name}": share for name, share in against_sequential(rows, figure).items()}
    return summary


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--plot", type=Path, help="write the curves as PNG (needs matplotlib)")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--sampler", choices=SAMPLERS)
    parser.add_argument("--bound", type=int, choices=BOUNDS)
    parser.add_argument("--only", choices=("learn", "times", "plot"), help="one of the three steps")
    options = parser.parse_args()
    seeds, steps, bounds = (2, 3_000, BOUNDS[::4]) if options.quick else (options.seeds, options.steps, BOUNDS)
    rows = rows_to_add_to(parser, options)
    if options.only in ("times", "plot") and not rows:
        parser.error(f"--only {options.only} goes by the rows of --json, and {options.json} holds none")
    if options.only in (None, "learn"):
        for sampler in (sampler for sampler in SAMPLERS if options.sampler in (None, sampler)):
            for bound in (bound for bound in bounds if options.bound in (None, bound)):
                rows = merged(rows, marked(learned(sampler, bound, steps, seeds), options))
                if options.json:
                    write(options.json, rows, summarize(rows))
                print(f"{sampler} {bound}", flush=True)
    if options.only in (None, "times"):
        times = iteration_seconds(*((0.05, 1) if options.quick else (0.3, 7)))
        rows = [row | {"iteration_ms": times[row["sampler"], row["max_staleness"]] * 1e3} for row in rows]
    report(options.json, rows, summarize(rows))
    if options.plot:
        draw_plot(options.plot, rows)


if __name__ == "__main__":
    main()
