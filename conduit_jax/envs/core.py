"""What an environment is here: two pure functions over one lane, and the facts needed to build a network for it.

``reset`` and ``step`` take and return values, so ``jit``, ``scan`` and ``vmap`` (which lifts one lane to many) apply to
them as they stand. Every constructor in this package names its dtype: JAX's x64 mode changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from conduit_jax.errors import ConfigError, refuse
from conduit_jax.types import Array, Key, PyTree


class EnvironmentSpec(NamedTuple):
    """The shapes of one lane, and its limits.

    ``observation`` and ``action`` are ``jax.ShapeDtypeStruct``s without the lane axis, dicts of them by agent where there
    are several. ``num_actions`` is how many
    actions there are, numbered from 0, or ``None`` where actions are continuous; then ``action_low`` and
    ``action_high`` bound them (one number each, or one a component). ``max_steps`` is the time limit at which an
    episode is truncated, ``None`` where there is none. Hashable, so it may be a static argument.
    """

    observation: PyTree
    num_actions: int | None
    action: Any
    max_steps: int | None
    action_low: float | tuple[float, ...] | None = None
    action_high: float | tuple[float, ...] | None = None


class TimeStep(NamedTuple):
    """What one step gave: ``observation``, ``reward`` (float32 scalar), ``terminated``, ``truncated`` (bool scalars).

    ``terminated`` says that the world ended and nothing follows; ``truncated`` that the time limit was reached, and
    only the watching ended. Both may hold at the same step.
    """

    observation: PyTree
    reward: Array
    terminated: Array
    truncated: Array


class Environment(NamedTuple):
    """A world as pure functions of one lane.

    ``reset(key) -> (state, observation)`` and ``step(state, action) -> (state, TimeStep)``. The time limit belongs to
    the environment: ``state`` counts the steps. A step after the episode's end is undefined; ``autoreset`` never takes
    one. Anything random after the reset draws from a key kept in ``state``.
    """

    name: str
    spec: EnvironmentSpec
    reset: Callable[[Key], tuple[PyTree, PyTree]]
    step: Callable[[PyTree, Any], tuple[PyTree, PyTree]]


def discrete_actions(spec: EnvironmentSpec, who: str) -> int:
    """Return how many actions there are; ``ConfigError`` where they are continuous and ``who`` cannot take them."""
    if spec.num_actions is None:
        refuse(
            ConfigError,
            f"{who} needs discrete actions.",
            got=spec.action,
            fix="train sac, which is for continuous ones",
        )
    return spec.num_actions


def continuous_actions(spec: EnvironmentSpec, who: str) -> tuple[Array, Array]:
    """Return the bounds of actions, both float32 shaped like one; ``ConfigError`` where they are discrete or unbounded."""
    if spec.num_actions is not None or spec.action_low is None or spec.action_high is None:
        got = spec.action if spec.num_actions is None else f"{spec.num_actions} actions"
        refuse(ConfigError, f"{who} needs continuous actions with bounds.", got=got, fix="train dqn or ppo")
    low, high = jnp.asarray(spec.action_low, jnp.float32), jnp.asarray(spec.action_high, jnp.float32)
    return jnp.broadcast_to(low, spec.action.shape), jnp.broadcast_to(high, spec.action.shape)
