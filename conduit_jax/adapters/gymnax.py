"""gymnax's environments as this package's pure worlds: ``conduit-jax train dqn --env gymnax:CartPole-v1``.

Nothing of gymnax is imported until an environment is asked for by name; ``from_gymnax`` takes any object with gymnax 1.0's
``reset_env``, ``step_env``, ``is_truncated`` and spaces.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.adapters.optional import required
from conduit_jax.adapters.pure_worlds import bounds, check_one_array, one_or_each, scalar, settled, spec_of
from conduit_jax.envs.core import Environment, EnvironmentSpec, TimeStep
from conduit_jax.errors import ConfigError, check_choice, refuse
from conduit_jax.types import Key, PyTree

__all__ = ["GymnaxState", "from_gymnax", "make_gymnax"]


class GymnaxState(NamedTuple):
    """gymnax's own state, and the key from which its steps draw."""

    environment: PyTree
    key: Key


def make_gymnax(name: str, **options: Any) -> Environment:
    """Return the registered gymnax environment ``name`` with its default parameters; ``options`` go to ``gymnax.make``.

    Raises:
        ConfigError: gymnax is missing, has no such environment (with the nearest name), or one of a kind that cannot be taken.
    """
    gymnax = required("gymnax", "gymnax", "gymnax")
    check_choice("gymnax environment", name, gymnax.registered_envs)
    return from_gymnax(*gymnax.make(name, **options), name=name)


def from_gymnax(env: Any, params: Any = None, *, name: str | None = None) -> Environment:
    """Return ``env`` as an ``Environment``: the same states, observations and rewards, step by step.

    ``step_env`` and ``is_truncated`` are called, not ``step``: gymnax's own reset would come before the observation that ended
    an episode could be kept. The key of a step is split from one in the state, so a lane depends on its first key alone.

    Args:
        env: a gymnax environment (1.0 or later: termination and truncation apart).
        params: its parameters; the default ones unless given.
        name: what errors and reports call it.

    Raises:
        ConfigError: an older gymnax, observations that are not one array, actions neither discrete nor a bounded box.
    """
    name = str(name or getattr(env, "name", type(env).__name__))
    if not hasattr(env, "is_truncated"):
        what = f"{name} does not tell truncation from termination."
        refuse(ConfigError, what, want="gymnax 1.0 or later", fix="pip install 'conduit_jax[gymnax]'")
    params = env.default_params if params is None else params
    seen, held = (spec_of(tree) for tree in jax.eval_shape(lambda key: env.reset_env(key, params), jax.random.key(0)))
    check_one_array(name, seen, "a gymnax wrapper that flattens them")

    def reset(key: Key) -> tuple[GymnaxState, PyTree]:
        key, reset_key = jax.random.split(key)
        observation, state = env.reset_env(reset_key, params)
        return GymnaxState(settled(state, held), key), settled(observation, seen)

    def step(state: GymnaxState, action: Any) -> tuple[GymnaxState, TimeStep]:
        key, step_key = jax.random.split(state.key)
        observation, inner, reward, terminated, _ = env.step_env(step_key, state.environment, action, params)
        truncated = env.is_truncated(inner, params)
        given = TimeStep(
            settled(observation, seen),
            scalar(reward, jnp.float32),
            scalar(terminated, jnp.bool_),
            scalar(truncated, jnp.bool_),
        )
        return GymnaxState(settled(inner, held), key), given

    return Environment(name, _spec(name, env, params, seen), reset, step)


def _spec(name: str, env: Any, params: Any, observation: Any) -> EnvironmentSpec:
    space = env.action_space(params)
    limit = getattr(params, "max_steps_in_episode", None)
    max_steps = int(limit) if limit is not None and math.isfinite(limit) else None
    if hasattr(space, "n"):
        return EnvironmentSpec(observation, int(space.n), jax.ShapeDtypeStruct((), jnp.int32), max_steps)
    if not hasattr(space, "low"):
        refuse(ConfigError, f"{name} has actions that cannot be taken.", got=space, want="Discrete, or a bounded Box")
    shape = tuple(space.shape)
    low, high = (one_or_each(bound, shape) for bound in bounds(name, space.low, space.high, shape))
    return EnvironmentSpec(observation, None, jax.ShapeDtypeStruct(shape, jnp.float32), max_steps, low, high)
