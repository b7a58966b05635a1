"""What the examples share around their algorithms: a world to act in, and one run from first step to evaluation.

An algorithm's own file holds everything that makes it that algorithm; this one holds what would be the same in each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import conduit_jax as conduit
from conduit_jax import envs
from conduit_jax.adapters.gymnasium import GymnasiumActor, parse_environment_name

PyTree = Any


def as_it_is(policy: PyTree, key: jax.Array) -> PyTree:
    """The ``begin`` of an algorithm whose policy is the same in every rollout."""
    return policy


class Algorithm(NamedTuple):
    """An algorithm's functions, all pure; observations and actions are ``(lanes, ...)``.

    ``init(key) -> learner``; ``policy(learner)``: what actors are given; ``act(policy, observation, key)``: an action to
    learn from, or ``(action, extras)``; ``act_greedily``: the action of an evaluation; ``train_step(learner, sample)``;
    ``begin(policy, key)``: the policy of one rollout; ``context(learner)``: what the plane's hooks are given.
    """

    init: Callable[[jax.Array], Any]
    policy: Callable[[Any], Any]
    act: Callable[[Any, jax.Array, jax.Array], Any]
    act_greedily: Callable[[Any, jax.Array, jax.Array], jax.Array]
    train_step: Callable[[Any, conduit.Sample], tuple]
    begin: Callable[[Any, jax.Array], Any] = as_it_is
    context: Callable[[Any], Any] | None = None


class RunSettings(Protocol):
    """What a run needs to know of an example's settings."""

    @property
    def env(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def lanes(self) -> int: ...
    @property
    def rollout_length(self) -> int: ...
    @property
    def iterations(self) -> int: ...
    @property
    def evaluation_episodes(self) -> int: ...


class World(NamedTuple):
    """An environment to act in: pure JAX, or Gymnasium's on the host. ``actor`` is handed through the loop."""

    spec: envs.EnvironmentSpec
    actor: Any
    rollout: Callable[[Any, Any, jax.Array], tuple[Any, conduit.Rollout]]
    evaluate: Callable[[Any, jax.Array], np.ndarray]
    recent_return: Callable[[Any], float]
    close: Callable[[], None]


MakeAlgorithm = Callable[[envs.EnvironmentSpec], Algorithm]


def make_world(settings: RunSettings, make_algorithm: MakeAlgorithm, key: jax.Array) -> tuple[World, Algorithm]:
    """Return the world ``settings.env`` names and the algorithm made for it."""
    kind, name = parse_environment_name(settings.env)
    if kind == "gymnasium":
        return _gymnasium_world(settings, name, make_algorithm)
    env = envs.make(name)
    algorithm = make_algorithm(env.spec)
    functions = envs.make_rollout(env, algorithm.act, settings.lanes, settings.rollout_length)
    evaluate = jax.jit(partial(envs.evaluate, env, algorithm.act_greedily, episodes=settings.evaluation_episodes))
    return World(
        spec=env.spec,
        actor=jax.jit(functions.init)(key),
        rollout=jax.jit(lambda actor, policy, key: functions.rollout(actor, algorithm.begin(policy, key), key)),
        evaluate=lambda policy, key: np.asarray(evaluate(policy, key)),
        recent_return=lambda actor: float(envs.recent_return(actor.statistics)),
        close=lambda: None,
    ), algorithm


def _gymnasium_world(settings: RunSettings, name: str, make_algorithm: MakeAlgorithm) -> tuple[World, Algorithm]:
    actor = GymnasiumActor(name, settings.lanes, settings.rollout_length, seed=settings.seed)
    algorithm = make_algorithm(actor.spec)

    def acting(act: Callable[..., Any]) -> Callable[[Any, jax.Array], Callable[[np.ndarray], Any]]:
        step = jax.jit(
            lambda policy, observation, key, number: act(policy, observation, jax.random.fold_in(key, number))
        )

        def with_policy(policy: Any, key: jax.Array) -> Callable[[np.ndarray], Any]:
            numbers = iter(range(2**31))
            return lambda seen: jax.tree.map(np.asarray, step(policy, seen, key, np.uint32(next(numbers))))

        return with_policy

    explore, exploit = acting(algorithm.act), acting(algorithm.act_greedily)

    def rollout(actor: GymnasiumActor, policy: Any, key: jax.Array) -> tuple[GymnasiumActor, conduit.Rollout]:
        return actor, actor.rollout(explore(algorithm.begin(policy, key), key))

    def evaluate(policy: Any, key: jax.Array) -> np.ndarray:
        seed = int(jax.random.randint(key, (), 0, 2**30))
        return actor.evaluate(exploit(policy, key), episodes=settings.evaluation_episodes, seed=seed)

    recent = lambda actor: float(envs.recent_return(actor.statistics))  # noqa: E731
    return World(actor.spec, actor, rollout, evaluate, recent, actor.close), algorithm


class Progress(NamedTuple):
    """What an observer is shown while training goes on."""

    iteration: int
    iterations: int
    env_steps: int
    steps_per_s: float
    recent_return: float
    loss: float
    latency: Any
    draw_staleness: int


class Result(NamedTuple):
    """What a run came to; ``curve`` holds (environment steps, recent return) as training went on."""

    evaluation_returns: np.ndarray
    learner: Any
    policy: Any
    stats: Any
    explanation: str
    env_steps: int
    updates: int
    train_s: float
    interrupted: bool
    exposed: Any
    curve: list[tuple[int, float]]
    resumed_steps: int = 0


class Keep(NamedTuple):
    """What a run leaves behind: checkpoints, from which one may ``resume``, and its figures in ``sinks`` (``conduit.CsvSink``)."""

    checkpoint_dir: Path | None = None
    checkpoint_every: int | None = None
    resume: bool = False
    sinks: tuple[Any, ...] = ()


NOTHING_KEPT = Keep()
Observe = Callable[[Progress], None]


def unobserved(progress: Progress) -> None:
    """Look away."""


def train(
    settings: RunSettings,
    make_algorithm: MakeAlgorithm,
    plane: conduit.ExperiencePlane,
    observe: Observe = unobserved,
    report_every: int = 50,
    keep: Keep = NOTHING_KEPT,
) -> Result:
    """Train for ``settings.iterations`` iterations and evaluate the final policy, greedily, with a fresh key."""
    world_key, learner_key, evaluation_key = jax.random.split(jax.random.key(settings.seed), 3)
    world, algorithm = make_world(settings, make_algorithm, world_key)
    loop = conduit.wrap(
        algorithm.train_step,
        rollout=world.rollout,
        policy=algorithm.policy,
        plane=plane,
        context=algorithm.context,
    )
    learner = jax.jit(algorithm.init)(learner_key)
    start, curve = time.perf_counter(), []
    record, unit = conduit.recording(plane, *keep.sinks), settings.lanes * settings.rollout_length

    def report(state: conduit.LoopState) -> None:
        steps, stats = state.iteration * unit, plane.stats()
        if keep.sinks:
            record(state)
        staleness = max((table for entry in stats.tables.values() for table in entry.staleness), default=0)
        loss = float(state.metrics["loss"]) if state.metrics is not None else float("nan")
        rate = (steps - loop.resumed_at * unit) / (time.perf_counter() - start)
        recent = world.recent_return(state.actor)
        curve.append((steps, recent))
        observe(Progress(state.iteration, settings.iterations, steps, rate, recent, loss, stats.latency, staleness))

    try:
        with conduit.interruptible() as stop:  # one Ctrl-C ends training, and what is known by then is still reported
            learner, actor, _ = loop.run(
                learner,
                world.actor,
                settings.iterations,
                every={report_every: report},
                checkpoint_dir=keep.checkpoint_dir,
                checkpoint_every=keep.checkpoint_every,
                resume=keep.resume,
            )
            jax.block_until_ready(learner)
            train_s, stats, explanation = time.perf_counter() - start, plane.stats(), plane.explain()
            policy = jax.tree.map(jnp.copy, algorithm.policy(learner))
            returns = world.evaluate(policy, evaluation_key)
            block = min(50, loop.trained_iterations // 10)  # iterations, so that a short run stays short
            measurable = plane.ready() and block and not stop.is_set()
            updates = loop.updates
            exposed = loop.measure(learner, actor, iterations=block) if measurable else None
            steps, resumed = loop.trained_iterations * unit, loop.resumed_at * unit
        plane.close()
    finally:
        world.close()
    interrupted = loop.interrupted
    return Result(
        returns, learner, policy, stats, explanation, steps, updates, train_s, interrupted, exposed, curve, resumed
    )
