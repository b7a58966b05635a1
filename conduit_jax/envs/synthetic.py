"""A world of any size and cost whose content says where it came from: for loads, and for proofs of integrity.

Every observation begins with its episode's stamp and its step; the rest follows from those two, so whoever holds a row can
tell from the row alone whether it is what the world had shown.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.envs.core import Environment, EnvironmentSpec, TimeStep
from conduit_jax.errors import check_integer
from conduit_jax.types import Array, Key

STAMPS = 1 << 24  # whole numbers that float32 holds exactly
WORK_SIZE = 64
NUM_ACTIONS = 4


class SyntheticState(NamedTuple):
    """``stamp`` (uint32, of the episode), ``steps`` (int32), and ``work`` (float32 ``(64,)``), which costs and means nothing."""

    stamp: Array
    steps: Array
    work: Array


def make_synthetic(dimension: int = 128, max_steps: int = 100, *, step_cost: int = 0) -> Environment:
    """Return a world with float32 ``(dimension,)`` observations and four actions.

    Observations are ``content(stamp, step, dimension)``; the reward of action a at step t is (stamp + t + a) mod 4 - 1.5.
    Episodes only end at the time limit.

    Args:
        dimension: numbers in an observation, at least 2: the stamp, the step, and what follows from them.
        max_steps: steps after which an episode is truncated, less than 2**24.
        step_cost: products of a 64 x 64 matrix and a vector that a step takes (about 8,000 operations each).

    Raises:
        ConfigError: an argument is out of range.
    """
    check_integer("dimension", dimension, 2)
    check_integer("max_steps", max_steps, 1)
    check_integer("step_cost", step_cost, 0)

    def reset(key: Key) -> tuple[SyntheticState, Array]:
        stamp = jax.random.bits(key, (), jnp.uint32) % STAMPS
        state = SyntheticState(stamp, jnp.zeros((), jnp.int32), jnp.ones(WORK_SIZE, jnp.float32))
        return state, content(stamp, state.steps, dimension)

    def step(state: SyntheticState, action: Array) -> tuple[SyntheticState, TimeStep]:
        reward = reward_of(state.stamp, state.steps, action)
        state = SyntheticState(state.stamp, state.steps + 1, _toil(state.work, step_cost))
        observation = content(state.stamp, state.steps, dimension)
        return state, TimeStep(observation, reward, jnp.zeros((), bool), state.steps >= max_steps)

    spec = EnvironmentSpec(
        observation=jax.ShapeDtypeStruct((dimension,), jnp.float32),
        num_actions=NUM_ACTIONS,
        action=jax.ShapeDtypeStruct((), jnp.int32),
        max_steps=max_steps,
    )
    return Environment("synthetic", spec, reset, step)


def content(stamp: Array, step: Array, dimension: int) -> Array:
    """Return the observation of that step, float32 ``(dimension,)``: stamp, step, then whole numbers below 2**24.

    ``x_i = mix(stamp, step, i) >> 8`` with the finalizer of murmur3 as ``mix``: equal on every backend, bit for bit.
    """
    index = jnp.arange(dimension - 2, dtype=jnp.uint32)
    start = jnp.asarray(stamp, jnp.uint32) * jnp.uint32(0x9E3779B9) + jnp.asarray(step, jnp.uint32)
    words = _mix(_mix(start) ^ (index * jnp.uint32(0x85EBCA77)))
    head = jnp.stack([jnp.asarray(stamp), jnp.asarray(step)]).astype(jnp.float32)
    return jnp.concatenate([head, (words >> 8).astype(jnp.float32)])


def reward_of(stamp: Array, step: Array, action: Array) -> Array:
    """Return the reward of ``action`` at that step, a float32 scalar."""
    total = jnp.asarray(stamp, jnp.uint32) + jnp.asarray(step, jnp.uint32) + jnp.asarray(action, jnp.uint32)
    return (total % NUM_ACTIONS).astype(jnp.float32) - 1.5


def intact(observation: Array) -> Array:
    """Return whether each row of ``observation`` ``(n, dimension)`` is what this world shows, bool ``(n,)``."""
    expected = jax.vmap(lambda row: content(row[0].astype(jnp.uint32), row[1].astype(jnp.uint32), row.shape[0]))
    return jnp.all(observation == expected(observation), axis=-1)


def _mix(word: Array) -> Array:
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def _toil(work: Array, count: int) -> Array:
    """Return ``work`` after ``count`` matrix products that keep its size; what comes of it stays in the state, so it is done."""
    if not count:
        return work
    row = jnp.arange(WORK_SIZE, dtype=jnp.float32)
    matrix = jnp.cos(row[:, None] * row[None, :]) / 8
    return jax.lax.fori_loop(0, count, lambda _, vector: jnp.tanh(matrix @ vector) + 0.1, work)
