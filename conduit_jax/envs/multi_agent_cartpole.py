"""Several poles, one reward: CartPole as a task that agents share, in the manner of PettingZoo's parallel interface."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.envs.cartpole import make_cartpole
from conduit_jax.envs.core import Environment, EnvironmentSpec, TimeStep
from conduit_jax.errors import check_integer
from conduit_jax.types import Array, Key, PyTree


class MultiAgentCartPoleState(NamedTuple):
    """The ``poles``, every leaf with a leading axis of agents; ``playing`` bool ``(agents,)``; ``steps`` int32."""

    poles: PyTree
    playing: Array
    steps: Array


def make_multi_agent_cartpole(num_agents: int = 4, max_steps: int = 500) -> Environment:
    """Return ``num_agents`` independent CartPoles (``pole_0``, ...) whose agents share one reward.

    Observations and actions are dicts by agent. An agent's observation is float32 ``(5,)``: the four numbers of CartPole and
    1 while it plays. Where its pole falls its own episode has terminated: it sees that once, with a 0 behind it, then only
    zeros, and its actions do nothing. The reward, of all of them alike, is the share of agents that were playing when the
    step began. The episode terminates when the last pole has fallen.

    Args:
        num_agents: how many.
        max_steps: steps after which an episode is truncated.

    Raises:
        ConfigError: an argument is not a positive integer.
    """
    check_integer("num_agents", num_agents, 1)
    check_integer("max_steps", max_steps, 1)
    cartpole = make_cartpole(max_steps)
    names = tuple(f"pole_{number}" for number in range(num_agents))

    def observe(observation: Array, played: Array, playing: Array) -> dict[str, Array]:
        seen = jnp.concatenate([observation, playing[:, None].astype(jnp.float32)], axis=1)
        return dict(zip(names, jnp.where(played[:, None], seen, 0), strict=True))

    def reset(key: Key) -> tuple[MultiAgentCartPoleState, dict[str, Array]]:
        poles, observation = jax.vmap(cartpole.reset)(jax.random.split(key, num_agents))
        playing = jnp.ones(num_agents, bool)
        return MultiAgentCartPoleState(poles, playing, jnp.zeros((), jnp.int32)), observe(observation, playing, playing)

    def step(state: MultiAgentCartPoleState, action: dict[str, Array]) -> tuple[MultiAgentCartPoleState, TimeStep]:
        poles, stepped = jax.vmap(cartpole.step)(state.poles, jnp.stack([action[name] for name in names]))
        # What a fallen pole goes on to compute is undefined and may be NaN: it keeps the state it fell with.
        poles = jax.tree.map(lambda new, old: jnp.where(state.playing, new, old), poles, state.poles)
        playing = state.playing & ~stepped.terminated
        steps = state.steps + 1
        reward = jnp.mean(state.playing.astype(jnp.float32))
        seen = observe(stepped.observation, state.playing, playing)
        given = TimeStep(seen, reward, ~jnp.any(playing), steps >= max_steps)
        return MultiAgentCartPoleState(poles, playing, steps), given

    spec = EnvironmentSpec(
        observation={name: jax.ShapeDtypeStruct((5,), jnp.float32) for name in names},
        num_actions=2,
        action={name: jax.ShapeDtypeStruct((), jnp.int32) for name in names},
        max_steps=max_steps,
    )
    return Environment("multi_agent_cartpole", spec, reset, step)
