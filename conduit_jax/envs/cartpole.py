"""CartPole-v1: balance a pole by pushing the cart beneath it left or right (Barto, Sutton and Anderson, 1983)."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.envs.core import Environment, EnvironmentSpec, TimeStep
from conduit_jax.errors import check_integer
from conduit_jax.types import Array, Key

GRAVITY = 9.8
POLE_MASS = 0.1
TOTAL_MASS = 1.0 + POLE_MASS
HALF_LENGTH = 0.5
FORCE = 10.0
SECONDS_PER_STEP = 0.02
TRACK_LIMIT = 2.4
ANGLE_LIMIT = math.radians(12)
START_LIMIT = 0.05


class CartPoleState(NamedTuple):
    """Cart ``position`` (m) and ``velocity``, pole ``angle`` (rad) and ``angular_velocity``: float32 scalars.

    ``steps`` (int32) counts the steps of this episode.
    """

    position: Array
    velocity: Array
    angle: Array
    angular_velocity: Array
    steps: Array


def make_cartpole(max_steps: int = 500) -> Environment:
    """Return CartPole-v1, equal to Gymnasium's within float32 rounding.

    The observation is float32 ``(position, velocity, angle, angular velocity)``; the actions are 0 push left, 1 push
    right. The reward is 1 a step, the last one included; beyond 2.4 m or 12 degrees the episode terminates. It starts
    with all four numbers uniform in [-0.05, 0.05].

    Args:
        max_steps: steps after which an episode is truncated.

    Raises:
        ConfigError: ``max_steps`` is not a positive integer.
    """
    check_integer("max_steps", max_steps, 1)

    def reset(key: Key) -> tuple[CartPoleState, Array]:
        start = jax.random.uniform(key, (4,), jnp.float32, -START_LIMIT, START_LIMIT)
        return CartPoleState(*start, steps=jnp.zeros((), jnp.int32)), start

    def step(state: CartPoleState, action: Array) -> tuple[CartPoleState, TimeStep]:
        state = _move(state, action)
        terminated = (jnp.abs(state.position) > TRACK_LIMIT) | (jnp.abs(state.angle) > ANGLE_LIMIT)
        reward = jnp.ones((), jnp.float32)
        return state, TimeStep(jnp.stack(state[:4]), reward, terminated, state.steps >= max_steps)

    spec = EnvironmentSpec(
        observation=jax.ShapeDtypeStruct((4,), jnp.float32),
        num_actions=2,
        action=jax.ShapeDtypeStruct((), jnp.int32),
        max_steps=max_steps,
    )
    return Environment("cartpole", spec, reset, step)


def _move(state: CartPoleState, action: Array) -> CartPoleState:
    """Advance by one explicit Euler step: positions move by the velocities of before the push."""
    acceleration, angular_acceleration = _accelerations(state, action)
    return CartPoleState(
        position=state.position + SECONDS_PER_STEP * state.velocity,
        velocity=state.velocity + SECONDS_PER_STEP * acceleration,
        angle=state.angle + SECONDS_PER_STEP * state.angular_velocity,
        angular_velocity=state.angular_velocity + SECONDS_PER_STEP * angular_acceleration,
        steps=state.steps + 1,
    )


def _accelerations(state: CartPoleState, action: Array) -> tuple[Array, Array]:
    """Return the cart's and the pole's acceleration (float32 scalars).

    u = (F + m l w^2 sin q) / M,  w' = (g sin q - u cos q) / (l (4/3 - m cos^2 q / M)),  v' = u - m l w' cos q / M
    """
    force = (2 * (jnp.asarray(action) == 1).astype(jnp.float32) - 1) * FORCE
    sine, cosine = jnp.sin(state.angle), jnp.cos(state.angle)
    moment = POLE_MASS * HALF_LENGTH
    push = (force + moment * state.angular_velocity**2 * sine) / TOTAL_MASS
    inertia = HALF_LENGTH * (4 / 3 - POLE_MASS * cosine**2 / TOTAL_MASS)
    angular_acceleration = (GRAVITY * sine - cosine * push) / inertia
    return push - moment * angular_acceleration * cosine / TOTAL_MASS, angular_acceleration
