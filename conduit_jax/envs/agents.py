"""Many agents as one array, and as lanes: for algorithms that train one policy for all of them.

An environment of several agents has dicts by agent for observations and actions, all agents alike. The last number of an
agent's observation is 1 while it plays and 0 from the step on that ended its own episode.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from conduit_jax.envs.core import Environment, EnvironmentSpec, TimeStep
from conduit_jax.types import Array, Key, PyTree, Rollout


def has_agents(spec: EnvironmentSpec) -> bool:
    """Return whether observations and actions are dicts by agent."""
    return isinstance(spec.action, dict)


def agent_spec(spec: EnvironmentSpec) -> EnvironmentSpec:
    """Return the spec as one agent sees it: the shapes of any of them."""
    name = next(iter(spec.observation))
    return spec._replace(observation=spec.observation[name], action=spec.action[name])


def stack_agents(env: Environment) -> Environment:
    """Return ``env`` with arrays ``(agents, ...)`` in place of dicts, agents in the order of the spec."""
    names = tuple(env.spec.observation)
    stacked = lambda leaf: jax.ShapeDtypeStruct((len(names), *leaf.shape), leaf.dtype)  # noqa: E731
    one = agent_spec(env.spec)
    spec = env.spec._replace(observation=stacked(one.observation), action=stacked(one.action))

    def reset(key: Key) -> tuple[PyTree, Array]:
        state, observation = env.reset(key)
        return state, jnp.stack([observation[name] for name in names])

    def step(state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        state, stepped = env.step(state, {name: action[number] for number, name in enumerate(names)})
        return state, stepped._replace(observation=jnp.stack([stepped.observation[name] for name in names]))

    return Environment(env.name, spec, reset, step)


def agents_as_lanes(rollout: Rollout) -> Rollout:
    """Return a rollout of a stacked environment with every agent as a lane: ``(T, lanes, agents, ...)`` to ``(T, lanes * agents, ...)``.

    Each lane has the shared reward and terminates with its own agent. One that had ended before is terminated at every step
    until the reset: nothing is bootstrapped from rows in which it no longer plays, and none of their values enters another's.
    """
    agents = rollout.action.shape[2]
    ended = rollout.final_observation[..., -1] == 0
    joined = lambda leaf: leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:])  # noqa: E731
    shared = lambda leaf: jnp.repeat(leaf, agents, axis=1)  # noqa: E731
    bootstrap = rollout.bootstrap_observation
    return Rollout(
        observation=joined(rollout.observation),
        action=joined(rollout.action),
        reward=shared(rollout.reward),
        terminated=joined(ended) | shared(rollout.terminated),
        truncated=shared(rollout.truncated),
        final_observation=joined(rollout.final_observation),
        bootstrap_observation=bootstrap.reshape(-1, *bootstrap.shape[2:]),
        extras=jax.tree.map(joined, rollout.extras),
    )
