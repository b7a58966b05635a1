"""Does it learn: the final policy's return over fresh episodes, by seed, on our worlds and on Gymnasium's.

python -m benchmarks.learning --json benchmarks/results/learning.json
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import arguments, report
from conduit_jax.examples import dqn


class Case(NamedTuple):
    """An environment, how many seeds it is run with, and the mean return that is owed."""

    env: str
    seeds: int
    owed: float
    sampler: str = "uniform"


CASES = (
    Case("cartpole", 5, 475.0),
    Case("gymnasium:CartPole-v1", 3, 475.0),
    Case("cartpole", 5, 475.0, "prioritized"),
    Case("mountain_car", 5, -130.0),
)


def run(case: Case, seed: int, steps: int | None) -> dict[str, Any]:
    """Train once and return what it came to."""
    settings = dqn.settings_for(case.env, seed=seed, steps=steps, sampler=case.sampler)
    result = dqn.train(settings)
    row = {
        "env": case.env,
        "sampler": case.sampler,
        "seed": seed,
        "env_steps": result.env_steps,
        "updates": result.updates,
        "evaluation_return": float(result.evaluation_returns.mean()),
        "evaluation_min": float(result.evaluation_returns.min()),
        "train_s": result.train_s,
        "owed": case.owed,
    }
    print({name: round(value, 1) if isinstance(value, float) else value for name, value in row.items()}, flush=True)
    return row


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--env", help="only this environment")
    options = parser.parse_args()
    rows = [
        run(case, seed, 3_000 if options.quick else None)
        for case in CASES
        if options.env in (None, case.env)
        for seed in range(1 if options.quick else case.seeds)
    ]
    summary: dict[str, Any] = {}
    for case in CASES:
        mine = [row for row in rows if (row["env"], row["sampler"]) == (case.env, case.sampler)]
        if mine:
            name = f"{case.env}_{case.sampler}"
            returns = [row["evaluation_return"] for row in mine]
            summary[f"{name}_mean"] = float(np.mean(returns))
            summary[f"{name}_worst"] = min(returns)
            summary[f"{name}_met"] = (
                f"{sum(value >= case.owed for value in returns)} of {len(mine)} seeds >= {case.owed:g}"
            )
    report(options.json, rows, summary)


if __name__ == "__main__":
    main()
