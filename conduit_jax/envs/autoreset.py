"""Resets at once where an episode ended, so that a lane never stops and a scan never branches."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.envs.core import Environment
from conduit_jax.errors import ConfigError, refuse
from conduit_jax.types import Array, Key, PyTree


class AutoResetState(NamedTuple):
    """The wrapped environment's state, and the key from which its next reset will be drawn."""

    environment: PyTree
    key: Key


class AutoResetStep(NamedTuple):
    """One step of a lane that resets itself; scalars but for the observations.

    ``observation`` is what the policy sees next: the first of a new episode where this step ended one.
    ``final_observation`` is what really followed the action, ended or not, so values are always bootstrapped from it.
    """

    observation: PyTree
    reward: Array
    terminated: Array
    truncated: Array
    final_observation: PyTree


def autoreset(env: Environment) -> Environment:
    """Return ``env`` with a step that resets in the same call when the episode ended.

    ``step(AutoResetState, action) -> (AutoResetState, AutoResetStep)`` stays a pure function: the reset key travels in
    the state and is split at each reset, so the episodes of a lane depend on its first key and its actions alone.

    The new episode is computed at every step and then selected. Under ``vmap`` a ``lax.cond`` would become the same
    select, and the states meant here are small.

    Raises:
        ConfigError: at the first trace of ``step``, if ``env`` resets itself already.
    """

    def reset(key: Key) -> tuple[AutoResetState, PyTree]:
        key, reset_key = jax.random.split(key)
        state, observation = env.reset(reset_key)
        return AutoResetState(state, key), observation

    def step(state: AutoResetState, action: Array) -> tuple[AutoResetState, AutoResetStep]:
        inner, stepped = env.step(state.environment, action)
        _check_single_reset(env.name, stepped)
        ended = jnp.logical_or(stepped.terminated, stepped.truncated)
        going_on = (AutoResetState(inner, state.key), stepped.observation)
        state, observation = jax.tree.map(lambda new, old: jnp.where(ended, new, old), reset(state.key), going_on)
        return state, AutoResetStep(*stepped._replace(observation=observation), final_observation=stepped.observation)

    return env._replace(reset=reset, step=step)


def _check_single_reset(name: str, stepped: PyTree) -> None:
    """Refuse to wrap twice: the outer wrapper would take the new episode's first observation for the final one."""
    if isinstance(stepped, AutoResetStep):
        refuse(
            ConfigError,
            f"Environment {name!r} resets itself already.",
            got="autoreset(autoreset(env)), or make_rollout(autoreset(env), ...)",
            want="an environment that ends its episodes",
            fix="pass the environment itself",
        )
