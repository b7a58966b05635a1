"""Acrobot-v1: two links hanging from a bar, a motor only between them, to be swung above it (Sutton, 1996)."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.envs.core import Environment, EnvironmentSpec, TimeStep
from conduit_jax.errors import check_integer
from conduit_jax.types import Array, Key

GRAVITY = 9.8
MASS = 1.0  # of either link
LENGTH = 1.0  # of the first link
CENTRE = 0.5  # of mass, along either link
INERTIA = 1.0  # of either link
SECONDS_PER_STEP = 0.2
MAX_SPEEDS = (4 * math.pi, 9 * math.pi)
START_LIMIT = 0.1


class AcrobotState(NamedTuple):
    """``angles`` and ``velocities`` of both links, the second relative to the first: float32 scalars.

    Angle 0 hangs down; both are kept in [-pi, pi). ``steps`` (int32) counts the steps of this episode.
    """

    angle: Array
    second_angle: Array
    velocity: Array
    second_velocity: Array
    steps: Array


def make_acrobot(max_steps: int = 500) -> Environment:
    """Return Acrobot-v1 (the dynamics of Sutton and Barto's book), equal to Gymnasium's within float32 rounding.

    The observation is float32 ``(cos q1, sin q1, cos q2, sin q2, w1, w2)``; the actions are torques 0: -1, 1: none, 2: +1,
    held for one fourth-order Runge-Kutta step. The reward is -1 a step, 0 for the one that brings the tip a link's length
    above the bar and terminates. All four numbers start uniform in [-0.1, 0.1].

    Args:
        max_steps: steps after which an episode is truncated.

    Raises:
        ConfigError: ``max_steps`` is not a positive integer.
    """
    check_integer("max_steps", max_steps, 1)

    def reset(key: Key) -> tuple[AcrobotState, Array]:
        start = jax.random.uniform(key, (4,), jnp.float32, -START_LIMIT, START_LIMIT)
        state = AcrobotState(*start, steps=jnp.zeros((), jnp.int32))
        return state, _observe(state)

    def step(state: AcrobotState, action: Array) -> tuple[AcrobotState, TimeStep]:
        state = _move(state, jnp.asarray(action, jnp.float32) - 1)
        terminated = -jnp.cos(state.angle) - jnp.cos(state.second_angle + state.angle) > 1
        reward = jnp.where(terminated, jnp.float32(0), jnp.float32(-1))
        return state, TimeStep(_observe(state), reward, terminated, state.steps >= max_steps)

    spec = EnvironmentSpec(
        observation=jax.ShapeDtypeStruct((6,), jnp.float32),
        num_actions=3,
        action=jax.ShapeDtypeStruct((), jnp.int32),
        max_steps=max_steps,
    )
    return Environment("acrobot", spec, reset, step)


def _observe(state: AcrobotState) -> Array:
    angles = (jnp.cos(state.angle), jnp.sin(state.angle), jnp.cos(state.second_angle), jnp.sin(state.second_angle))
    return jnp.stack([*angles, state.velocity, state.second_velocity])


def _move(state: AcrobotState, torque: Array) -> AcrobotState:
    """Advance by one classical Runge-Kutta step with the torque held."""
    start, dt = jnp.stack(state[:4]), SECONDS_PER_STEP
    k1 = _derivatives(start, torque)
    k2 = _derivatives(start + dt / 2 * k1, torque)
    k3 = _derivatives(start + dt / 2 * k2, torque)
    k4 = _derivatives(start + dt * k3, torque)
    angle, second, velocity, second_velocity = start + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return AcrobotState(
        _wrapped(angle),
        _wrapped(second),
        jnp.clip(velocity, -MAX_SPEEDS[0], MAX_SPEEDS[0]),
        jnp.clip(second_velocity, -MAX_SPEEDS[1], MAX_SPEEDS[1]),
        state.steps + 1,
    )


def _wrapped(angle: Array) -> Array:
    return jnp.mod(angle + jnp.float32(math.pi), jnp.float32(2 * math.pi)) - jnp.float32(math.pi)


def _derivatives(state: Array, torque: Array) -> Array:
    """Return velocities and accelerations of ``(q1, q2, w1, w2)``: Sutton and Barto, the equations of the acrobot."""
    q1, q2, w1, w2 = state
    reach = MASS * LENGTH * CENTRE
    d1 = MASS * CENTRE**2 + MASS * (LENGTH**2 + CENTRE**2) + 2 * reach * jnp.cos(q2) + 2 * INERTIA
    d2 = MASS * CENTRE**2 + reach * jnp.cos(q2) + INERTIA
    phi2 = MASS * CENTRE * GRAVITY * jnp.sin(q1 + q2)
    phi1 = -reach * w2**2 * jnp.sin(q2) - 2 * reach * w2 * w1 * jnp.sin(q2)
    phi1 = phi1 + (MASS * CENTRE + MASS * LENGTH) * GRAVITY * jnp.sin(q1) + phi2
    second = torque + d2 / d1 * phi1 - reach * w1**2 * jnp.sin(q2) - phi2
    second = second / (MASS * CENTRE**2 + INERTIA - d2**2 / d1)
    return jnp.stack([w1, w2, -(d2 * second + phi1) / d1, second])
