"""MountainCarContinuous-v0: the weak car again, with a continuous push that costs its square (Moore, 1990)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from conduit_jax.envs.core import Environment, EnvironmentSpec, TimeStep
from conduit_jax.envs.mountain_car import MountainCarState, moved, observe, start
from conduit_jax.errors import check_integer
from conduit_jax.types import Array

GOAL = 0.45
POWER = 0.0015
GOAL_REWARD = 100.0


def make_mountain_car_continuous(max_steps: int = 999) -> Environment:
    """Return MountainCarContinuous-v0, equal to Gymnasium's within float32 rounding.

    v' = clip(v + POWER clip(a, -1, 1) - GRAVITY cos 3x),  x' = clip(x + v');  the left wall stops the car.

    The observation is float32 ``(position, velocity)``, the action float32 ``(1,)``. The reward is -0.1 a^2 a step, a not
    clipped, and 100 more where the goal at 0.45 terminates the episode. The car starts at rest, uniformly in [-0.6, -0.4].

    Args:
        max_steps: steps after which an episode is truncated.

    Raises:
        ConfigError: ``max_steps`` is not a positive integer.
    """
    check_integer("max_steps", max_steps, 1)

    def step(state: MountainCarState, action: Array) -> tuple[MountainCarState, TimeStep]:
        push = jnp.asarray(action, jnp.float32)[0]
        state = moved(state, jnp.clip(push, -1, 1) * POWER)
        terminated = (state.position >= GOAL) & (state.velocity >= 0)
        reward = jnp.where(terminated, jnp.float32(GOAL_REWARD), 0) - 0.1 * push**2
        return state, TimeStep(observe(state), reward, terminated, state.steps >= max_steps)

    spec = EnvironmentSpec(
        observation=jax.ShapeDtypeStruct((2,), jnp.float32),
        num_actions=None,
        action=jax.ShapeDtypeStruct((1,), jnp.float32),
        max_steps=max_steps,
        action_low=-1.0,
        action_high=1.0,
    )
    return Environment("mountain_car_continuous", spec, start, step)
