"""Is what is learned the same: DQN on CartPole with and without conduit, seed by seed in turn.

python -m benchmarks.rllib.learning --json benchmarks/results/rllib_learning.json          (extra rllib)

A run's score is its mean return over all iterations after learning began, the area under its curve. Equivalent means that
the 95 % bootstrap interval of the difference of mean scores lies within ``MARGIN`` of RLlib's mean score.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import time
import warnings
from typing import Any

import numpy as np

from benchmarks.harness import arguments, report
from benchmarks.rllib.workloads import WORKLOADS

MARGIN = 0.2
_ITERATION_STEPS, _START = 500, 1000


def train(conduit: bool, seed: int, steps: int) -> dict[str, Any]:
    """Return a run's returns by iteration, its score and its seconds."""
    config = WORKLOADS["dqn_cartpole"].make(conduit).debugging(seed=seed)
    config.training(num_steps_sampled_before_learning_starts=min(_START, steps // 2))
    config.reporting(min_sample_timesteps_per_iteration=_ITERATION_STEPS, min_time_s_per_iteration=0)
    if conduit:
        from conduit_jax.adapters import rllib

        config = rllib.attach(config)
    algo, begin = config.build_algo(), time.perf_counter()
    returns = []
    for _ in range(steps // _ITERATION_STEPS):
        returns.append(float(algo.train()["env_runners"]["episode_return_mean"]))
    seconds = time.perf_counter() - begin
    algo.stop()
    learning = returns[min(_START, steps // 2) // _ITERATION_STEPS :]
    return {"conduit": conduit, "seed": seed, "returns": returns, "score": float(np.mean(learning)), "seconds": seconds}


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the difference of mean scores with its interval, the verdict, and the seconds of all runs compared."""
    scores = {kind: np.array([row["score"] for row in rows if row["conduit"] is kind]) for kind in (False, True)}
    drawn = np.random.default_rng(0)
    means = {kind: drawn.choice(score, (5000, len(score))).mean(axis=1) for kind, score in scores.items()}
    low, high = np.percentile(means[True] - means[False], [2.5, 97.5])
    stock = float(scores[False].mean())
    seconds = {kind: sum(row["seconds"] for row in rows if row["conduit"] is kind) for kind in (False, True)}
    return {
        "score_stock": stock,
        "score_conduit": float(scores[True].mean()),
        "difference_low": float(low),
        "difference_high": float(high),
        "margin": MARGIN * stock,
        "seeds": len(scores[True]),
        "learning_equivalent": bool(-MARGIN * stock <= low and high <= MARGIN * stock),
        "seconds_of_stock": seconds[True] / seconds[False],
    }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=10, help="runs of each")
    parser.add_argument("--steps", type=int, default=8000, help="environment steps a run")
    options = parser.parse_args()
    import ray
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # RLlib's own
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=100 << 20
    )
    seeds, steps = (2, 1000) if options.quick else (options.seeds, options.steps)
    rows = []
    for seed in range(seeds):
        for conduit in (False, True) if seed % 2 == 0 else (True, False):
            rows.append(train(conduit, seed, steps))
            print(f"seed {seed}, conduit {conduit}: {rows[-1]['score']:.1f} in {rows[-1]['seconds']:.0f} s", flush=True)
            report(options.json, rows, summarize(rows) if len(rows) % 2 == 0 else {})
    ray.shutdown()


if __name__ == "__main__":
    main()
