"""Is what is learned the same: DQN, SAC and PPO with and without conduit, seed by seed in turn.

python -m benchmarks.rllib.learning --json benchmarks/results/rllib_learning.json          (extra rllib)

A run's score is its mean return over all iterations after learning began, the area under its curve. Equivalent means that
the 95 % bootstrap interval of the mean difference, seed by seed (two runs of a seed begin with the same steps), lies within
``MARGIN`` of the size of RLlib's mean score; nothing is said (null) of fewer than ``LEAST_SEEDS`` pairs, whose interval would be too
narrow. That the runs learned at all is shown by ``stock_first`` and ``stock_last``: mean
returns of RLlib's first and last iteration.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import arguments, marked, report, rows_to_add_to
from benchmarks.rllib.workloads import WORKLOADS

MARGIN = 0.2
LEAST_SEEDS = 10


class Task(NamedTuple):
    """``steps`` environment steps a run in iterations of ``iteration``; learning begins after ``start``. ``make``: the configuration."""

    make: Callable[[bool], Any]
    steps: int
    iteration: int
    start: int


def _small_sac(conduit: bool) -> Any:
    """Return SAC on Pendulum with nets, rates and a discount that learn it in few updates."""
    config = WORKLOADS["sac_pendulum"].make(conduit)
    config.training(train_batch_size_per_learner=64, actor_lr=1e-3, critic_lr=1e-3, alpha_lr=1e-3, tau=0.01, gamma=0.95)
    return config.rl_module(model_config={"fcnet_hiddens": [64, 64], "head_fcnet_hiddens": []})


TASKS = {
    "dqn_cartpole": Task(WORKLOADS["dqn_cartpole"].make, 8000, 500, 1000),
    "sac_pendulum": Task(_small_sac, 4000, 200, 400),
    "ppo_cartpole": Task(WORKLOADS["ppo_cartpole"].make, 20_000, 2000, 0),
}


def train(name: str, conduit: bool, seed: int, steps: int) -> dict[str, Any]:
    """Return a run's returns by iteration, its score and its seconds."""
    task = TASKS[name]
    config, start = task.make(conduit).debugging(seed=seed), min(task.start, steps // 2)
    if task.start:
        config.training(num_steps_sampled_before_learning_starts=start)
    config.reporting(min_sample_timesteps_per_iteration=task.iteration, min_time_s_per_iteration=0)
    if conduit:
        from conduit_jax.adapters import rllib

        config = rllib.attach(config)
    algo, begin = config.build_algo(), time.perf_counter()
    returns = []
    for _ in range(max(1, steps // task.iteration)):
        returns.append(float(algo.train()["env_runners"].get("episode_return_mean", np.nan)))
    seconds = time.perf_counter() - begin
    algo.stop()
    score = float(np.nanmean(returns[start // task.iteration :]))
    return {"task": name, "conduit": conduit, "seed": seed, "returns": returns, "score": score, "seconds": seconds}


def compare(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one task's mean difference of scores with its interval, the verdict, and the seconds of all runs compared."""
    ordered = sorted(rows, key=lambda row: row["seed"])
    scores = {kind: np.array([row["score"] for row in ordered if row["conduit"] is kind]) for kind in (False, True)}
    differences = scores[True] - scores[False]
    drawn = np.random.default_rng(0).choice(differences, (5000, len(differences))).mean(axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    stock = float(scores[False].mean())
    margin = MARGIN * abs(stock)
    seconds = {kind: sum(row["seconds"] for row in rows if row["conduit"] is kind) for kind in (False, True)}
    curve = np.nanmean([row["returns"] for row in rows if not row["conduit"]], axis=0)
    return {
        "score_stock": stock,
        "score_conduit": float(scores[True].mean()),
        "difference_low": float(low),
        "difference_high": float(high),
        "margin": margin,
        "seeds": len(scores[True]),
        "learning_equivalent": bool(-margin <= low and high <= margin) if len(differences) >= LEAST_SEEDS else None,
        "stock_first": float(curve[~np.isnan(curve)][0]),
        "stock_last": float(curve[-1]),
        "seconds_of_stock": seconds[True] / seconds[False],
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return ``compare`` of every task with as many runs of each kind, and whether all of them are equivalent.

    ``learning_equivalent``: false where one task is not, ``None`` where of one (or of all) too little is known.
    """
    tasks = {}
    for name in dict.fromkeys(row["task"] for row in rows):
        mine = [row for row in rows if row["task"] == name]
        paired = {row["seed"] for row in mine if row["conduit"]} & {row["seed"] for row in mine if not row["conduit"]}
        if paired:
            tasks[name] = compare([row for row in mine if row["seed"] in paired])
    verdicts = {found["learning_equivalent"] for found in tasks.values()} or {None}
    return {
        "learning_equivalent": None if None in verdicts and False not in verdicts else False not in verdicts,
        "fewest_seeds": min((found["seeds"] for found in tasks.values()), default=0),
        "tasks": tasks,
    }


def kept(rows: list[dict[str, Any]], names: list[str], resume: bool) -> list[dict[str, Any]]:
    """Return a file's runs of tasks other than ``names`` and, to ``resume``, the pairs of runs it has of these."""
    whole = Counter((row["task"], row["seed"]) for row in rows)
    return [row for row in rows if row["task"] not in names or (resume and whole[row["task"], row["seed"]] == 2)]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=TASKS, help="these tasks; what the file says of others is kept")
    parser.add_argument("--seeds", type=int, default=10, help="runs of each")
    parser.add_argument("--resume", action="store_true", help="add the seeds that the file lacks to those it has")
    options = parser.parse_args()
    import ray
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # RLlib's own
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=100 << 20
    )
    names = options.only or list(TASKS)
    rows = kept(rows_to_add_to(parser, options), names, options.resume)
    for name in names:
        steps, seeds = (TASKS[name].iteration * 2, 2) if options.quick else (TASKS[name].steps, options.seeds)
        done = {row["seed"] for row in rows if row["task"] == name}
        for seed in sorted(set(range(seeds)) - done):
            for conduit in (False, True) if seed % 2 == 0 else (True, False):
                rows.append(marked(train(name, conduit, seed, steps), options))
                score, seconds = rows[-1]["score"], rows[-1]["seconds"]
                print(f"{name}, seed {seed}, conduit {conduit}: {score:.1f} in {seconds:.0f} s", flush=True)
            report(options.json, rows, summarize(rows))
    ray.shutdown()


if __name__ == "__main__":
    main()
