"""What the examples act in: an algorithm's functions and an environment, pure JAX or on the host, brought together.

An algorithm's own file holds everything that makes it that algorithm; this one holds what would be the same in each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import jax
import numpy as np

import conduit_jax as conduit
from conduit_jax import envs
from conduit_jax.adapters.names import HOST_SOURCES, make_actor, make_pure, parse_environment_name, without_source

PyTree = Any


def as_it_is(policy: PyTree, key: jax.Array) -> PyTree:
    """The ``begin`` of an algorithm whose policy is the same in every rollout."""
    return policy


class Algorithm(NamedTuple):
    """An algorithm's functions, all pure; observations and actions are ``(lanes, ...)``.

    ``init(key) -> learner``; ``policy(learner)``: what actors are given; ``act(policy, observation, key)``: an action to
    learn from, or ``(action, extras)``; ``act_greedily``: the action of an evaluation; ``train_step(learner, sample)``;
    ``begin(policy, key)``: the policy of one rollout; ``context(learner)``: what the plane's hooks are given; ``value``
    ``(context, observation)``: what a hook may want to know of it.
    """

    init: Callable[[jax.Array], Any]
    policy: Callable[[Any], Any]
    act: Callable[[Any, jax.Array, jax.Array], Any]
    act_greedily: Callable[[Any, jax.Array, jax.Array], jax.Array]
    train_step: Callable[[Any, conduit.Sample], tuple]
    begin: Callable[[Any, jax.Array], Any] = as_it_is
    context: Callable[[Any], Any] | None = None
    value: Callable[[Any, jax.Array], jax.Array] | None = None


class Ingestion(NamedTuple):
    """How a rollout becomes records: ``init_carry(rollout)``, then ``hook(carry, rollout) -> carry, Records``."""

    init_carry: Callable[[conduit.Rollout], Any]
    hook: Callable[[Any, conduit.Rollout], tuple[Any, conduit.Records]]


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


Chosen = TypeVar("Chosen")
NOTHING: Mapping[str, Any] = MappingProxyType({})


def with_preset(
    settings: Chosen, presets: Mapping[str, Mapping[str, Any]], more: Mapping[str, Any] = NOTHING, **chosen: Any
) -> Chosen:
    """Return ``settings`` with their environment's preset, ``more`` and what was ``chosen`` (``None``: not chosen), in that order."""
    name = without_source(cast(RunSettings, settings).env)
    chosen = {key: value for key, value in chosen.items() if value is not None}
    return replace(cast(Any, settings), **{**presets.get(name, {}), **more, **chosen})


class World(NamedTuple):
    """An environment to act in: pure JAX, or one on the host. ``actor`` is handed through the loop."""

    spec: envs.EnvironmentSpec
    actor: Any
    rollout: Callable[[Any, Any, jax.Array], tuple[Any, conduit.Rollout]]
    evaluate: Callable[[Any, jax.Array], np.ndarray]
    recent_return: Callable[[Any], float]
    close: Callable[[], None]


MakeAlgorithm = Callable[[envs.EnvironmentSpec], Algorithm]
MakePlane = Callable[[Algorithm], conduit.ExperiencePlane]


class PureWorld(NamedTuple):
    """A pure-JAX environment to act in, as pure functions; ``agents`` is how many lanes each of its lanes is to the algorithm.

    ``init(key) -> actor``; ``rollout(actor, policy, key) -> actor, Rollout``; ``evaluate(policy, key)``: returns of whole
    episodes, float32 ``(episodes,)``.
    """

    spec: envs.EnvironmentSpec
    agents: int
    init: Callable[[jax.Array], envs.ActorState]
    rollout: Callable[[envs.ActorState, Any, jax.Array], tuple[envs.ActorState, conduit.Rollout]]
    evaluate: Callable[[Any, jax.Array], jax.Array]


def make_world(settings: RunSettings, make_algorithm: MakeAlgorithm, key: jax.Array) -> tuple[World, Algorithm]:
    """Return the world ``settings.env`` names and the algorithm made for it."""
    if parse_environment_name(settings.env)[0] in HOST_SOURCES:
        return _host_world(settings, make_algorithm)
    pure, algorithm = make_pure_world(settings, make_algorithm)
    evaluate = jax.jit(pure.evaluate)
    return World(
        spec=pure.spec,
        actor=jax.jit(pure.init)(key),
        rollout=jax.jit(pure.rollout),
        evaluate=lambda policy, key: np.asarray(evaluate(policy, key)),
        recent_return=lambda actor: float(envs.recent_return(actor.statistics)),
        close=lambda: None,
    ), algorithm


def make_pure_world(settings: RunSettings, make_algorithm: MakeAlgorithm) -> tuple[PureWorld, Algorithm]:
    """Return the pure-JAX world ``settings.env`` names and the algorithm made for it; ``ConfigError`` for any other."""
    made_as = make_pure(settings.env)
    shared = envs.has_agents(made_as.spec)
    env, algorithm, act_greedily = greedy_policy(made_as, make_algorithm)
    # One policy for all agents: to the algorithm each of them is a lane.
    act, unit = (_for_each_agent(algorithm.act), envs.agents_as_lanes) if shared else (algorithm.act, _as_made)
    agents = env.spec.action.shape[0] if shared else 1
    functions = envs.make_rollout(env, act, settings.lanes, settings.rollout_length)

    def rollout(actor: Any, policy: Any, key: jax.Array) -> tuple[Any, conduit.Rollout]:
        actor, made = functions.rollout(actor, algorithm.begin(policy, key), key)
        return actor, unit(made)

    evaluate = partial(envs.evaluate, env, act_greedily, episodes=settings.evaluation_episodes)
    return PureWorld(env.spec, agents, functions.init, rollout, evaluate), algorithm


def greedy_policy(
    env: envs.Environment, make_algorithm: MakeAlgorithm
) -> tuple[envs.Environment, Algorithm, Callable[[Any, jax.Array, jax.Array], jax.Array]]:
    """Return ``env`` with its agents stacked, the algorithm made for it, and its greedy policy over ``(lanes, ...)``."""
    if not envs.has_agents(env.spec):
        algorithm = make_algorithm(env.spec)
        return env, algorithm, algorithm.act_greedily
    algorithm = make_algorithm(envs.agent_spec(env.spec))
    return envs.stack_agents(env), algorithm, _for_each_agent(algorithm.act_greedily)


def _as_made(rollout: conduit.Rollout) -> conduit.Rollout:
    return rollout


def _for_each_agent(act: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``act`` over observations ``(lanes, agents, ...)``: lanes and agents are one axis to the policy."""

    def acting(policy: Any, observation: jax.Array, key: jax.Array) -> Any:
        lead = observation.shape[:2]
        made = act(policy, observation.reshape(-1, *observation.shape[2:]), key)
        return jax.tree.map(lambda leaf: leaf.reshape(*lead, *leaf.shape[1:]), made)

    return acting


def _host_world(settings: RunSettings, make_algorithm: MakeAlgorithm) -> tuple[World, Algorithm]:
    actor = make_actor(settings.env, settings.lanes, settings.rollout_length, seed=settings.seed)
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

    def rollout(actor: Any, policy: Any, key: jax.Array) -> tuple[Any, conduit.Rollout]:
        return actor, actor.rollout(explore(algorithm.begin(policy, key), key))

    def evaluate(policy: Any, key: jax.Array) -> np.ndarray:
        seed = int(jax.random.randint(key, (), 0, 2**30))
        return actor.evaluate(exploit(policy, key), episodes=settings.evaluation_episodes, seed=seed)

    recent = lambda actor: float(envs.recent_return(actor.statistics))  # noqa: E731
    return World(actor.spec, actor, rollout, evaluate, recent, actor.close), algorithm
