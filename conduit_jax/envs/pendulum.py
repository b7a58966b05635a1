"""Pendulum-v1: swing a rod up and hold it there with less torque than its weight asks for."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.envs.core import Environment, EnvironmentSpec, TimeStep
from conduit_jax.errors import check_integer
from conduit_jax.types import Array, Key

GRAVITY = 10.0
MASS = 1.0
LENGTH = 1.0
MAX_TORQUE = 2.0
MAX_SPEED = 8.0
SECONDS_PER_STEP = 0.05
START_ANGLE, START_SPEED = math.pi, 1.0


class PendulumState(NamedTuple):
    """``angle`` (rad, 0 is upright, kept in [-pi, pi)) and ``velocity`` are float32 scalars; ``steps`` (int32) counts."""

    angle: Array
    velocity: Array
    steps: Array


def make_pendulum(max_steps: int = 200) -> Environment:
    """Return Pendulum-v1, equal to Gymnasium's within float32 rounding.

    w' = clip(w + (3 g / 2 l sin q + 3 u / m l^2) dt),  q' = q + w' dt,  reward -(q^2 + 0.1 w^2 + 0.001 u^2) of before.

    The observation is float32 ``(cos q, sin q, w)``; the action float32 ``(1,)``, a torque clipped to [-2, 2]. Episodes
    never terminate. Angle and velocity start uniform in [-pi, pi] and [-1, 1].

    Args:
        max_steps: steps after which an episode is truncated.

    Raises:
        ConfigError: ``max_steps`` is not a positive integer.
    """
    check_integer("max_steps", max_steps, 1)

    def reset(key: Key) -> tuple[PendulumState, Array]:
        high = jnp.array([START_ANGLE, START_SPEED], jnp.float32)
        angle, velocity = jax.random.uniform(key, (2,), jnp.float32, -high, high)
        state = PendulumState(angle, velocity, jnp.zeros((), jnp.int32))
        return state, _observe(state)

    def step(state: PendulumState, action: Array) -> tuple[PendulumState, TimeStep]:
        torque = jnp.clip(jnp.asarray(action, jnp.float32)[0], -MAX_TORQUE, MAX_TORQUE)
        cost = _wrapped(state.angle) ** 2 + 0.1 * state.velocity**2 + 0.001 * torque**2
        state = _move(state, torque)
        return state, TimeStep(_observe(state), -cost, jnp.zeros((), bool), state.steps >= max_steps)

    spec = EnvironmentSpec(
        observation=jax.ShapeDtypeStruct((3,), jnp.float32),
        num_actions=None,
        action=jax.ShapeDtypeStruct((1,), jnp.float32),
        max_steps=max_steps,
        action_low=-MAX_TORQUE,
        action_high=MAX_TORQUE,
    )
    return Environment("pendulum", spec, reset, step)


def _observe(state: PendulumState) -> Array:
    return jnp.stack([jnp.cos(state.angle), jnp.sin(state.angle), state.velocity])


def _wrapped(angle: Array) -> Array:
    return jnp.mod(angle + jnp.float32(math.pi), jnp.float32(2 * math.pi)) - jnp.float32(math.pi)


def _move(state: PendulumState, torque: Array) -> PendulumState:
    acceleration = 3 * GRAVITY / (2 * LENGTH) * jnp.sin(state.angle) + 3 / (MASS * LENGTH**2) * torque
    velocity = jnp.clip(state.velocity + acceleration * SECONDS_PER_STEP, -MAX_SPEED, MAX_SPEED)
    return PendulumState(_wrapped(state.angle + velocity * SECONDS_PER_STEP), velocity, state.steps + 1)
