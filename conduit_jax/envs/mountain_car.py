"""MountainCar-v0: a car too weak for the hill must swing back and forth to climb it (Moore, 1990)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.envs.core import Environment, EnvironmentSpec, TimeStep
from conduit_jax.errors import check_integer
from conduit_jax.types import Array, Key

LEFT_WALL = -1.2
RIGHT_EDGE = 0.6
GOAL = 0.5
MAX_SPEED = 0.07
FORCE = 0.001
GRAVITY = 0.0025
START_LOW, START_HIGH = -0.6, -0.4


class MountainCarState(NamedTuple):
    """``position`` and ``velocity`` are float32 scalars, ``steps`` (int32) counts the steps of this episode."""

    position: Array
    velocity: Array
    steps: Array


def make_mountain_car(max_steps: int = 200) -> Environment:
    """Return MountainCar-v0, equal to Gymnasium's within float32 rounding.

    v' = clip(v + FORCE (a - 1) - GRAVITY cos 3x),  x' = clip(x + v');  the left wall stops the car.

    The observation is float32 ``(position, velocity)``; the actions are 0 push left, 1 coast, 2 push right. The reward
    is -1 a step until the goal at 0.5 terminates the episode. The car starts at rest, uniformly in [-0.6, -0.4].

    Args:
        max_steps: steps after which an episode is truncated.

    Raises:
        ConfigError: ``max_steps`` is not a positive integer.
    """
    check_integer("max_steps", max_steps, 1)

    def step(state: MountainCarState, action: Array) -> tuple[MountainCarState, TimeStep]:
        state = moved(state, (jnp.asarray(action, jnp.float32) - 1) * FORCE)
        terminated = (state.position >= GOAL) & (state.velocity >= 0)
        reward = jnp.full((), -1.0, jnp.float32)
        return state, TimeStep(observe(state), reward, terminated, state.steps >= max_steps)

    spec = EnvironmentSpec(
        observation=jax.ShapeDtypeStruct((2,), jnp.float32),
        num_actions=3,
        action=jax.ShapeDtypeStruct((), jnp.int32),
        max_steps=max_steps,
    )
    return Environment("mountain_car", spec, start, step)


def start(key: Key) -> tuple[MountainCarState, Array]:
    """Return a car at rest somewhere in [-0.6, -0.4] and what it sees: the reset of both mountain cars."""
    position = jax.random.uniform(key, (), jnp.float32, START_LOW, START_HIGH)
    state = MountainCarState(position, jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))
    return state, observe(state)


def observe(state: MountainCarState) -> Array:
    """Return float32 ``(position, velocity)``."""
    return jnp.stack([state.position, state.velocity])


def moved(state: MountainCarState, push: Array) -> MountainCarState:
    """Return the state one step on, with ``push`` added to the velocity (float32 scalar): the dynamics of both mountain cars."""
    velocity = state.velocity + push - jnp.cos(3 * state.position) * GRAVITY
    velocity = jnp.clip(velocity, -MAX_SPEED, MAX_SPEED)
    position = jnp.clip(state.position + velocity, LEFT_WALL, RIGHT_EDGE)
    # The comparison is exact: clip returns the wall itself, rounded to float32 as it is here.
    against_wall = (position == jnp.float32(LEFT_WALL)) & (velocity < 0)
    return MountainCarState(position, jnp.where(against_wall, 0, velocity), state.steps + 1)
