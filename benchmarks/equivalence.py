"""Is what is learned the same: the replay used directly against the schedules a plane may choose, by two one-sided tests.

python -m benchmarks.equivalence --json benchmarks/results/equivalence.json          (extra bench: rliable)

Direct: the pure ``Replay`` in sequential order, all seeds in one program. Against it, with other seeds: batches as old as the default
``max_staleness`` allows (no automatic schedule draws older ones), in one program too; and whole trainings through planes with
``schedule="auto"``. A run's score is the mean return over its training (the area under its curve) and that of its final policy. Equivalent
(TOST at 5 %): the 90 % interval of the difference of interquartile means, from rliable's stratified bootstrap, lies within
``MARGIN`` of the direct runs' interquartile mean.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.drawn_ahead import train
from benchmarks.harness import arguments, report
from conduit_jax.examples import dqn, sac

MARGIN = 0.1
CASES = {
    "dqn_cartpole": (dqn, dqn.make_dqn, "cartpole", 40_000),
    "sac_pendulum": (sac, sac.make_sac, "pendulum", 10_000),
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
        "iqm_direct": float(middle),
        "iqm_other": float(metrics.aggregate_iqm(other)),
        "difference_low": float(low),
        "difference_high": float(high),
        "margin": margin,
        "equivalent": bool(-margin <= low and high <= margin),
    }


def through_planes(example: Any, env: str, steps: int, seeds: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Train ``seeds`` planes one after the other; return areas, final returns and the seconds of all."""
    areas, finals, begun = [], [], time.perf_counter()
    for seed in range(seeds):
        settings = example.settings_for(env, seed=2_000 + seed, steps=steps, schedule="auto")
        result = example.train(settings, report_every=10)
        areas.append(np.mean([recent for _, recent in result.curve]))
        finals.append(result.evaluation_returns.mean())
    return np.array(areas), np.array(finals), time.perf_counter() - begun


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=24, help="runs of each in one program")
    parser.add_argument("--planes", type=int, default=0, help="runs through planes, one after the other (minutes)")
    parser.add_argument("--case", choices=sorted(CASES))
    options = parser.parse_args()
    seeds, planes = (4, 0) if options.quick else (options.seeds, options.planes)
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {"margin": MARGIN}
    for name, (example, make, env, steps) in CASES.items():
        if options.case not in (None, name):
            continue
        settings = example.settings_for(env, steps=1_500 if options.quick else steps)
        sides = {}
        for kind, staleness, first in (("direct", 0, 0), ("max_staleness", settings.max_staleness, 1_000)):
            begun = time.perf_counter()
            trained = train(make, example, settings, seeds, staleness, first)
            taken = time.perf_counter() - begun
            sides[kind] = (trained.curve.mean(axis=1), trained.returns.mean(axis=1), taken)
        if planes:
            sides["planes"] = through_planes(example, env, settings.steps, planes)
        for kind, (areas, finals, taken) in sides.items():
            row = {"case": name, "kind": kind, "areas": areas.tolist(), "finals": finals.tolist(), "seconds": taken}
            rows.append(row)
            for figure, at in (("area", 0), ("final", 1)) if kind != "direct" else ():
                verdict = compare(sides["direct"][at], sides[kind][at])
                row[figure] = verdict
                summary[f"{name}_{kind}_{figure}_equivalent"] = verdict["equivalent"]
                print(name, kind, figure, {key: round(value, 2) for key, value in verdict.items()}, flush=True)
        report(options.json, rows, summary)


if __name__ == "__main__":
    main()
