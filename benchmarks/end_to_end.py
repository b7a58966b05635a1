"""A whole training run against what people run today: same networks, losses, sizes and machine, taken in turn.

python -m benchmarks.end_to_end --json benchmarks/results/end_to_end.json        # needs flashbax: pip install '.[bench]'

``summary`` holds ratios of times, theirs over ours (above 1: ours is faster), with 95 % intervals as ``_low`` and ``_high``.
A ratio counts only where both sides reach the return that is owed; otherwise it is null and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import conduit_jax as conduit
from benchmarks.end_to_end_peers import FlashbaxLoop, jitted_dqn, jitted_ppo
from benchmarks.harness import Timing, arguments, calibrate, interleave, ratio, report
from conduit_jax import envs
from conduit_jax.examples import dqn, fused, ppo
from conduit_jax.examples.worlds import Algorithm, PureWorld, make_pure_world

OWED = 450.0  # of 500, the mean over seeds of final policies
UPDATES = 5  # an iteration
TOGETHER = conduit.Schedule(g_delivery=Fraction(UPDATES))  # an iteration's batches in one call: within max_staleness=4


class Race(NamedTuple):
    """Two ways of one training: ``ours(calls)`` and ``theirs(calls)`` are timed, ``returns()`` are what both come to, by seed."""

    name: str
    ours: Callable[[int], Any]
    theirs: Callable[[int], Any]
    returns: Callable[[], tuple[np.ndarray, np.ndarray]]


def dqn_settings(steps: int, **chosen: Any) -> dqn.Settings:
    """Return DQN on CartPole as both sides can run it: one-step targets, one update for every step of the lanes."""
    sizes = dict(lanes=10, rollout_length=UPDATES, updates_per_rollout=UPDATES, n_step=1)
    return dqn.settings_for("cartpole", steps=steps, **(sizes | chosen))


def evaluated(training: Callable, world: PureWorld, algorithm: Algorithm, seeds: int) -> np.ndarray:
    """Train ``seeds`` seeds in one program and return the mean return of each final policy, float32 ``(seeds,)``."""
    keys = jax.vmap(jax.random.key)(100 + jnp.arange(seeds))
    learner = jax.jit(jax.vmap(training))(keys)[0]
    evaluate = jax.jit(jax.vmap(lambda learner, key: world.evaluate(algorithm.policy(learner), key)))
    return np.asarray(evaluate(learner, jax.vmap(jax.random.key)(1000 + jnp.arange(seeds)))).mean(axis=1)


def fused_race(name: str, example: Any, settings: Any, timed: Any, theirs_of: Callable, seeds: int) -> Race:
    """Return the race of our fused training against ``theirs_of(settings, algorithm, env)``; ``timed`` are short settings."""

    def make(settings: Any) -> tuple:
        ours, world, algorithm = fused.make_training(example, settings)
        return ours, theirs_of(settings, algorithm, envs.make(settings.env)), world, algorithm

    ours, theirs, _, _ = make(timed)
    programs = [jax.jit(one) for one in (ours, theirs)]

    def case(program: Callable, calls: int) -> None:
        for number in range(calls):
            jax.block_until_ready(program(jax.random.key(number)))

    def returns() -> tuple[np.ndarray, np.ndarray]:
        ours, theirs, world, algorithm = make(settings)
        return evaluated(ours, world, algorithm, seeds), evaluated(theirs, world, algorithm, seeds)

    return Race(name, partial(case, programs[0]), partial(case, programs[1]), returns)


class OurLoop:
    """``conduit.wrap`` around the same rollout and train step."""

    def __init__(self, settings: dqn.Settings, algorithm: Algorithm, world: PureWorld):
        self.loop = conduit.wrap(
            algorithm.train_step,
            rollout=jax.jit(world.rollout),
            policy=algorithm.policy,
            plane=dqn.make_plane(settings),
        )
        actor_key, learner_key = jax.random.split(jax.random.key(settings.seed))
        self.actor, self.learner = jax.jit(world.init)(actor_key), jax.jit(algorithm.init)(learner_key)

    def run(self, iterations: int) -> None:
        """Run that many iterations and wait for them."""
        self.learner, self.actor, _ = self.loop.run(self.learner, self.actor, iterations)
        jax.block_until_ready((self.learner, self.actor))


def loop_race(name: str, settings: dqn.Settings, seeds: int) -> Race:
    """Return the race of our Python loop, on the settings' schedule, against flashbax's."""
    world, algorithm = make_pure_world(settings, lambda spec: dqn.make_dqn(spec, settings))
    ours, theirs = OurLoop(settings, algorithm, world), FlashbaxLoop(settings, algorithm, world)
    evaluate = jax.jit(lambda learner, key: world.evaluate(algorithm.policy(learner), key))

    def returns() -> tuple[np.ndarray, np.ndarray]:
        ends: dict[Any, list[float]] = {OurLoop: [], FlashbaxLoop: []}
        for seed in range(seeds):
            for kind in ends:
                loop = kind(replace(settings, seed=seed), algorithm, world)
                loop.run(settings.iterations)
                ends[kind].append(float(np.mean(evaluate(loop.learner, jax.random.key(1000 + seed)))))
        return np.array(ends[OurLoop]), np.array(ends[FlashbaxLoop])

    return Race(name, ours.run, theirs.run, returns)


def run(race: Race, *, repeats: int, block_s: float, judge: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time both sides in turn and return the row and its part of the summary."""
    cases = {"ours": race.ours, "theirs": race.theirs}
    calls = {name: calibrate(case, block_s)[0] for name, case in cases.items()}
    times: dict[str, Timing] = interleave(cases, calls=calls, repeats=repeats)
    faster = ratio(times["theirs"], times["ours"])
    row: dict[str, Any] = {"race": race.name, "repeats": repeats, **faster._asdict()}
    row |= {f"{name}_s": time.median for name, time in times.items()}
    row |= {f"{name}_cpu_s": time.cpu for name, time in times.items()}
    counts = True
    if judge:
        ours, theirs = race.returns()
        row |= {"our_returns": ours.tolist(), "their_returns": theirs.tolist(), "owed": OWED}
        counts = bool(min(ours.mean(), theirs.mean()) >= OWED)
    row["counts"] = counts
    print({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}, flush=True)
    figures = {race.name: faster.median, f"{race.name}_low": faster.low, f"{race.name}_high": faster.high}
    return row, figures if counts else dict.fromkeys(figures) | {f"{race.name}_why": "a side missed the return"}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--race", help="only the race of this name")
    options = parser.parse_args()
    quick, seeds = options.quick, 3  # seeds of each side that are trained to the end
    full, short = dqn_settings(200_000), dqn_settings(2_000 if quick else 10_000)
    ppo_full, ppo_short = (ppo.settings_for("cartpole", steps=steps) for steps in (150_000, 4_096 if quick else 20_480))
    races = {
        "fused_vs_jitted_dqn": lambda name: fused_race(name, dqn, full, short, jitted_dqn, seeds),
        "fused_ppo_parity": lambda name: fused_race(name, ppo, ppo_full, ppo_short, jitted_ppo, seeds),
        "loop_vs_flashbax_loop": lambda name: loop_race(name, replace(full, schedule=TOGETHER), seeds),
        "sequential_loop_vs_flashbax_loop": lambda name: loop_race(name, replace(full, schedule="sequential"), seeds),
    }
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for name, make in races.items():
        if options.race in (None, name):
            row, figures = run(make(name), repeats=3 if quick else 15, block_s=0.2 if quick else 0.8, judge=not quick)
            rows.append(row)
            summary |= figures
            report(options.json, rows, summary)  # after each: a run that is stopped leaves what it had


if __name__ == "__main__":
    main()
