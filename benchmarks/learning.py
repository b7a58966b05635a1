"""Does it learn: the final policy's return over fresh episodes, by seed, on our worlds and on Gymnasium's.

python -m benchmarks.learning --json benchmarks/results/learning.json

``--env``, ``--algorithm``, ``--first`` and ``--seeds`` choose what is run. The file is written after every run: a new row
replaces the one of the same case and seed, all others stay.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import arguments, marked, report, rows_to_add_to, write
from conduit_jax import envs
from conduit_jax.examples import dqn, ppo, sac
from conduit_jax.examples.running import Result

EXAMPLES: dict[str, Any] = {"dqn": dqn, "sac": sac, "ppo": ppo}


class Case(NamedTuple):
    """An algorithm and an environment, how many seeds they are run with, and the mean that is owed.

    ``judged``: ``"return"``, or ``"solved"``, the share of episodes that reach their goal, or ``"times_random"``, the
    return in units of that of random actions.
    """

    algorithm: str
    env: str
    seeds: int
    owed: float
    sampler: str | None = "uniform"
    judged: str = "return"

    @property
    def name(self) -> str:
        """What the summary calls it."""
        prefix = "" if self.algorithm == "dqn" else f"{self.algorithm}_"
        return prefix + "_".join(word for word in (self.env, self.sampler) if word)


CASES = (
    Case("dqn", "cartpole", 5, 475.0),
    Case("dqn", "gymnasium:CartPole-v1", 5, 475.0),
    Case("dqn", "cartpole", 5, 475.0, "prioritized"),
    Case("dqn", "mountain_car", 5, -130.0),
    Case("dqn", "gymnasium:MountainCar-v0", 5, -130.0),
    Case("dqn", "multi_agent_cartpole", 5, 4.0, judged="times_random"),
    Case("sac", "pendulum", 5, -200.0),
    Case("sac", "gymnasium:Pendulum-v1", 5, -200.0),
    Case("ppo", "cartpole", 5, 475.0, None),
    Case("ppo", "reach_128", 5, 0.9, None, judged="solved"),
    Case("ppo", "reach_256", 1, 0.9, None, judged="solved"),
)


def solved_share(env: str, result: Result, seed: int, episodes: int = 100) -> float:
    """Return the share of fresh episodes in which the final policy reaches the goal: without shaping, their mean return."""
    world = envs.make(env, shaped=False)
    algorithm = ppo.make_ppo(world.spec, ppo.settings_for(env))
    run = jax.jit(partial(envs.evaluate, world, algorithm.act_greedily, episodes=episodes))
    return float(np.mean(run(result.policy, jax.random.key(10_000 + seed))))


def random_return(env: str, episodes: int = 100) -> float:
    """Return the mean return of actions drawn uniformly, in all agents alike."""
    world = envs.stack_agents(envs.make(env))
    count, agents = envs.discrete_actions(world.spec, "random"), world.spec.action.shape

    def policy(parameters: Any, observation: jax.Array, key: jax.Array) -> jax.Array:
        return jax.random.randint(key, (observation.shape[0], *agents), 0, count, jnp.int32)

    run = jax.jit(partial(envs.evaluate, world, policy, episodes=episodes))
    return float(np.mean(run(None, jax.random.key(0))))


def judge(case: Case, result: Result, seed: int) -> float:
    """Return the figure that is held against what is owed."""
    if case.judged == "solved":
        return solved_share(case.env, result, seed)
    mean = float(result.evaluation_returns.mean())
    return mean / random_return(case.env) if case.judged == "times_random" else mean


def run(case: Case, seed: int, steps: int | None) -> dict[str, Any]:
    """Train once and return what it came to."""
    example = EXAMPLES[case.algorithm]
    chosen = {"sampler": case.sampler} if case.sampler else {}
    result = example.train(example.settings_for(case.env, seed=seed, steps=steps, **chosen))
    row = {
        "algorithm": case.algorithm,
        "env": case.env,
        "sampler": case.sampler,
        "seed": seed,
        "env_steps": result.env_steps,
        "updates": result.updates,
        "evaluation_return": float(result.evaluation_returns.mean()),
        "evaluation_min": float(result.evaluation_returns.min()),
        "train_s": result.train_s,
        "judged": case.judged,
        "figure": judge(case, result, seed),
        "owed": case.owed,
    }
    print({name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()}, flush=True)
    return row


def belongs(row: dict[str, Any], case: Case) -> bool:
    """Return whether ``row`` is one of ``case``; rows from before there was a second algorithm are DQN's."""
    return (row.get("algorithm", "dqn"), row["env"], row["sampler"]) == (case.algorithm, case.env, case.sampler)


def merged(rows: list[dict[str, Any]], case: Case, new: dict[str, Any]) -> list[dict[str, Any]]:
    """Return ``rows`` with ``new``, a run of ``case``, in place of that case's row of the same seed, in the order of ``CASES``."""
    kept = [row for row in rows if not (belongs(row, case) and row["seed"] == new["seed"])]
    place = {(each.algorithm, each.env, each.sampler): number for number, each in enumerate(CASES)}

    def order(row: dict[str, Any]) -> tuple[int, int]:
        return place.get((row.get("algorithm", "dqn"), row["env"], row["sampler"]), len(CASES)), row["seed"]

    return sorted([*kept, new], key=order)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean, worst and how many seeds met what was owed, for every case that has rows."""
    summary: dict[str, Any] = {}
    for case in CASES:
        mine = [row.get("figure", row["evaluation_return"]) for row in rows if belongs(row, case)]
        if mine:
            summary[f"{case.name}_mean"], summary[f"{case.name}_worst"] = float(np.mean(mine)), min(mine)
            met = sum(value >= case.owed for value in mine)
            summary[f"{case.name}_met"] = f"{met} of {len(mine)} seeds >= {case.owed:g} ({case.judged})"
    return summary


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--env", help="only this environment")
    parser.add_argument("--algorithm", choices=sorted(EXAMPLES), help="only this algorithm")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, help="how many seeds from there on  [default: the case's]")
    options = parser.parse_args()
    chosen = [case for case in CASES if options.env in (None, case.env) and options.algorithm in (None, case.algorithm)]
    if not chosen:
        known = ", ".join(f"{case.algorithm} on {case.env}" for case in CASES)
        parser.error(f"no case is {options.algorithm or 'any algorithm'} on {options.env}; there are: {known}")
    rows = rows_to_add_to(parser, options)
    for case in chosen:
        for seed in range(options.first, options.first + (1 if options.quick else options.seeds or case.seeds)):
            new = run(case, seed, 3_000 if options.quick else None)
            rows = merged(rows, case, marked(new, options))
            if options.json:
                write(options.json, rows, summarize(rows))
    report(options.json, rows, summarize(rows))


if __name__ == "__main__":
    main()
