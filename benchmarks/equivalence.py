"""Is what is learned the same: the replay used directly against the schedules a plane may choose, by two one-sided tests.

python -m benchmarks.equivalence --json benchmarks/results/equivalence.json          (extra bench: rliable)

Each case has up to three kinds of run, with seeds of their own. ``direct``: pure functions in sequential order, all seeds in
one program. ``stale``: the same with batches as old as the default ``max_staleness`` allows; no automatic schedule draws older
ones, and on-policy data is never old. ``planes``: whole trainings through planes with ``schedule="auto"``, one after the other,
where the data plane may have a device of its own. Runs as short as these may end before a schedule is looked for (512 iterations
and 15 seconds are to be left), so rows tell by what schedules they ran.
A run's scores are the mean return over its training (``area`` under its curve) and that of its final policy (``final``).
Equivalent (TOST at 5 %): the 90 % interval of the difference of interquartile means, from rliable's stratified bootstrap, lies
within ``MARGIN`` of the direct runs' interquartile mean.

``--case``, ``--kind``, ``--first`` and ``--seeds`` choose what is run; new rows replace those of the same runs in the file.
"""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

import numpy as np

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")  # the data plane has one of its own

from benchmarks import drawn_ahead
from benchmarks.harness import arguments, marked, report, rows_to_add_to, write
from conduit_jax.examples import dqn, fused, ppo, sac

MARGIN = 0.1
SCORES = ("area", "final")
FIRST_SEED = {"direct": 0, "stale": 1_000, "planes": 2_000}
EVERY = 10  # iterations between two points of a curve


class Case(NamedTuple):
    """An example, its environment and the environment steps of a run, whole or quick; ``make`` is ``None`` on-policy: nothing is stale."""

    example: Any
    make: Any
    env: str
    steps: int
    quick_steps: int


CASES = {
    "dqn_cartpole": Case(dqn, dqn.make_dqn, "cartpole", 100_000, 3_000),
    "sac_pendulum": Case(sac, sac.make_sac, "pendulum", 10_000, 1_500),
    "ppo_cartpole": Case(ppo, None, "cartpole", 100_000, 12_000),
}


def compare(direct: np.ndarray, other: np.ndarray, *, resamples: int = 5000) -> dict[str, Any]:
    """Return both interquartile means of scores ``(seeds,)``, the 90 % interval of their difference, and the verdict."""
    from rliable import library, metrics

    def difference(one: np.ndarray, two: np.ndarray) -> np.ndarray:
        return np.array([metrics.aggregate_iqm(two) - metrics.aggregate_iqm(one)])

    scores = {"both": (direct[:, None], other[:, None])}
    state, middle = np.random.RandomState(0), metrics.aggregate_iqm(direct)
    _, spread = library.get_interval_estimates(
        scores, difference, reps=resamples, confidence_interval_size=0.9, random_state=state
    )
    low, high = spread["both"][:, 0]
    margin = MARGIN * abs(float(middle))
    return {
        "seeds": [len(direct), len(other)],
        "iqm_direct": float(middle),
        "iqm_other": float(metrics.aggregate_iqm(other)),
        "difference_low": float(low),
        "difference_high": float(high),
        "margin": margin,
        "equivalent": bool(-margin <= low and high <= margin),
    }


def area(curve: np.ndarray, settings: Any) -> np.ndarray:
    """Return the mean of curves ``(seeds, iterations)`` over each ``EVERY``-th iteration of the run, whatever filled the replay.

    A curve may begin late, its end is the run's. A point before any episode has ended (NaN) is left out.
    """
    numbers = np.arange(settings.iterations - curve.shape[1], settings.iterations) + 1
    return np.nanmean(curve[:, numbers % EVERY == 0], axis=1)


def together(kind: str, case: Case, settings: Any, seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """Train ``seeds`` seeds in one program; return curves ``(seeds, iterations)`` and the final policies' mean returns."""
    if kind == "direct":
        trained: Any = fused.train(case.example, settings, seeds)
    else:
        trained = drawn_ahead.train(case.make, case.example, settings, seeds, settings.max_staleness, settings.seed)
    return trained.curve, trained.returns.mean(axis=1)


def through_plane(case: Case, settings: Any) -> tuple[float, float, list[str]]:
    """Train once through a plane whose schedule is automatic; return area, final return and the schedules it ran by."""
    result = case.example.train(settings, report_every=EVERY)
    unit = settings.lanes * settings.rollout_length
    curve = {steps // unit: recent for steps, recent in result.curve}
    points = [
        recent for iteration, recent in curve.items() if iteration % EVERY == 0 and iteration > first_update(settings)
    ]
    schedules = [str(change.schedule) for change in result.stats.schedule_history]
    return float(np.nanmean(points)), float(result.evaluation_returns.mean()), schedules


def first_update(settings: Any) -> int:
    """Return the iteration before which a replay is filled and nothing is learned: no part of a curve."""
    return -(-getattr(settings, "min_size", 0) // (settings.lanes * settings.rollout_length))


def run(name: str, kind: str, seeds: range, steps: int) -> list[dict[str, Any]]:
    """Train ``seeds`` of one kind and return a row for each."""
    case, begun = CASES[name], time.perf_counter()
    settings = case.example.settings_for(case.env, steps=steps, seed=seeds.start, schedule="auto")
    more: dict[str, Any] = {}
    if kind == "planes":
        one, two, more["schedules"] = through_plane(case, settings)
        areas, finals = [one], [two]
    else:
        curve, finals = together(kind, case, settings, len(seeds))
        areas = area(curve, settings)
    taken = (time.perf_counter() - begun) / len(seeds)
    rows = [
        {"case": name, "kind": kind, "seed": seed, "env_steps": settings.steps, "area": float(one), "final": float(two)}
        for seed, one, two in zip(seeds, areas, finals, strict=True)
    ]
    return [row | {"seconds": taken} | more for row in rows]


def merged(rows: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``rows`` with ``new`` in place of those of the same runs."""
    told = {(row["case"], row["kind"], row["seed"]): row for row in [*rows, *new]}
    order = {name: number for number, name in enumerate(CASES)}
    return sorted(told.values(), key=lambda row: (order[row["case"]], row["seed"]))


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the verdicts: every kind that was run against the direct runs of its case."""
    summary: dict[str, Any] = {"margin": MARGIN}
    for name in CASES:
        for score in SCORES:
            told = {
                kind: np.array([row[score] for row in rows if (row["case"], row["kind"]) == (name, kind)])
                for kind in FIRST_SEED
            }
            for kind in ("stale", "planes"):
                if len(told["direct"]) > 1 and len(told[kind]) > 1:
                    verdict = compare(told["direct"], told[kind])
                    summary[f"{name}_{kind}_{score}_equivalent"] = verdict["equivalent"]
                    summary[f"{name}_{kind}_{score}"] = verdict
    return summary


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=24, help="runs of each kind")
    parser.add_argument(
        "--first", type=int, default=0, help="the first of them, counted from the kind's own first seed"
    )
    parser.add_argument("--case", choices=sorted(CASES))
    parser.add_argument("--kind", choices=list(FIRST_SEED))
    options = parser.parse_args()
    count = 2 if options.quick else options.seeds
    rows = rows_to_add_to(parser, options)
    for name, case in CASES.items():
        for kind, first in FIRST_SEED.items():
            if (
                options.case not in (None, name)
                or options.kind not in (None, kind)
                or (kind == "stale" and not case.make)
            ):
                continue
            at = first + options.first
            pieces = [range(at, at + count)] if kind != "planes" else [range(s, s + 1) for s in range(at, at + count)]
            for seeds in pieces:
                new = run(name, kind, seeds, case.quick_steps if options.quick else case.steps)
                rows = merged(rows, [marked(row, options) for row in new])
                if options.json:  # what was run stays, whatever follows
                    write(options.json, rows, {})
                print(f"{name} {kind} seeds {seeds.start} to {seeds.stop - 1}", flush=True)
    report(options.json, rows, summarize(rows))


if __name__ == "__main__":
    main()
