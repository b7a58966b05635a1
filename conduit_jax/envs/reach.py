"""Reaching, seen from above in pixels: move a hand to a goal that is somewhere else in every episode.

Two sizes with discrete moves stand in for the payloads of visual robot data: 48 KB an observation at 128 x 128 x 3, as
Meta-World's in the paper, and 192 KB at 256 x 256 x 3, as Open X-Embodiment's. A small one, 64 x 64 x 3, has continuous
moves. Everything is drawn by arithmetic on arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.envs.core import Environment, EnvironmentSpec, TimeStep
from conduit_jax.errors import ConfigError, check_integer, refuse
from conduit_jax.types import Array, Key

STEP = 0.15  # of a hand's move, where the field is 2 wide
REACHED = 0.15  # distance at which the goal counts as reached
START_DISTANCE = 0.4  # at least
FIELD = 0.85  # hand and goal stay within this of the middle
HAND_RADIUS, GOAL_RADIUS, ARM_WIDTH = 0.1, 0.12, 0.04
BASE = (0.0, -1.0)  # where the arm is fixed
MOVES = ((0.0, 0.0), (1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.0, -1.0))
BACKGROUND, ARM, GOAL, HAND = (30, 30, 40), (120, 120, 130), (60, 200, 80), (230, 70, 60)


class ReachState(NamedTuple):
    """``hand`` and ``goal``, float32 ``(2,)`` in [-1, 1], x to the right and y up; ``steps`` (int32) of this episode."""

    hand: Array
    goal: Array
    steps: Array


def make_reach(size: int = 128, max_steps: int = 30, *, shaped: bool = True) -> Environment:
    """Return the reaching task; observations are uint8 ``(size, size, 3)``, the five actions stay, right, left, up, down.

    The episode terminates with reward 1 when the hand is within 0.15 of the goal. ``shaped`` adds, at each step, by how much
    the hand came nearer; without it an episode's return is 1 where the goal was reached and 0 where it was not.

    Args:
        size: pixels along a side, a multiple of 16.
        max_steps: steps after which an episode is truncated; 13 suffice.
        shaped: whether coming nearer is rewarded.

    Raises:
        ConfigError: ``size`` is no positive multiple of 16, or ``max_steps`` no positive integer.
    """
    return _make(f"reach_{size}", size, max_steps, shaped, _DISCRETE)


def make_reach_continuous(size: int = 64, max_steps: int = 30, *, shaped: bool = True) -> Environment:
    """Return the reaching task of ``make_reach`` with float32 ``(2,)`` actions: moves right and up, each clipped to [-1, 1].

    Args:
        size: pixels along a side, a multiple of 16.
        max_steps: steps after which an episode is truncated; 13 suffice.
        shaped: whether coming nearer is rewarded.

    Raises:
        ConfigError: ``size`` is no positive multiple of 16, or ``max_steps`` no positive integer.
    """
    return _make("reach_continuous", size, max_steps, shaped, _CONTINUOUS)


class _Moves(NamedTuple):
    """What actions are: ``of(action)`` is the move, float32 ``(2,)`` in units of ``STEP``; the rest is for a spec."""

    of: Callable[[Array], Array]
    action: jax.ShapeDtypeStruct
    choices: int | None
    bound: float | None


_DISCRETE = _Moves(
    lambda action: jnp.asarray(MOVES, jnp.float32)[jnp.asarray(action, jnp.int32)],
    jax.ShapeDtypeStruct((), jnp.int32),
    len(MOVES),
    None,
)
_CONTINUOUS = _Moves(
    lambda action: jnp.clip(jnp.asarray(action, jnp.float32), -1, 1), jax.ShapeDtypeStruct((2,), jnp.float32), None, 1.0
)


def _make(name: str, size: int, max_steps: int, shaped: bool, moves: _Moves) -> Environment:
    check_integer("size", size, 16)
    check_integer("max_steps", max_steps, 1)
    if size % 16:
        refuse(
            ConfigError, "size is not a multiple of 16.", got=size, want=f"{size // 16 * 16} or {-(-size // 16) * 16}"
        )

    def reset(key: Key) -> tuple[ReachState, Array]:
        goal_key, angle_key, distance_key = jax.random.split(key, 3)
        goal = jax.random.uniform(goal_key, (2,), jnp.float32, -FIELD, FIELD)
        hand = _start(goal, angle_key, distance_key)
        state = ReachState(hand, goal, jnp.zeros((), jnp.int32))
        return state, render(state, size)

    def step(state: ReachState, action: Array) -> tuple[ReachState, TimeStep]:
        hand = jnp.clip(state.hand + STEP * moves.of(action), -FIELD, FIELD)
        before, after = _distance(state.hand, state.goal), _distance(hand, state.goal)
        state = ReachState(hand, state.goal, state.steps + 1)
        reached = after < REACHED
        reward = reached.astype(jnp.float32) + (before - after if shaped else 0)
        return state, TimeStep(render(state, size), reward, reached, state.steps >= max_steps)

    spec = EnvironmentSpec(
        observation=jax.ShapeDtypeStruct((size, size, 3), jnp.uint8),
        num_actions=moves.choices,
        action=moves.action,
        max_steps=max_steps,
        action_low=None if moves.bound is None else -moves.bound,
        action_high=moves.bound,
    )
    return Environment(name, spec, reset, step)


make_reach_128 = partial(make_reach, 128)
make_reach_256 = partial(make_reach, 256)


def render(state: ReachState, size: int) -> Array:
    """Return the picture of ``state``, uint8 ``(size, size, 3)``: the arm from its base, the goal, the hand on top."""
    half_pixel = 1 / size
    side = jnp.asarray(np.linspace(-1 + half_pixel, 1 - half_pixel, size), jnp.float32)
    x, y = side[None, :], -side[:, None]
    picture = jnp.broadcast_to(jnp.asarray(BACKGROUND, jnp.float32), (size, size, 3))
    for colour, distance in (
        (ARM, _to_arm(x, y, state.hand) - ARM_WIDTH),
        (GOAL, _length(x - state.goal[0], y - state.goal[1]) - GOAL_RADIUS),
        (HAND, _length(x - state.hand[0], y - state.hand[1]) - HAND_RADIUS),
    ):
        cover = jnp.clip(0.5 - distance / (2 * half_pixel), 0, 1)[
            ..., None
        ]  # soft edges: where it is, to less than a pixel
        picture = picture + cover * (jnp.asarray(colour, jnp.float32) - picture)
    return jnp.round(picture).astype(jnp.uint8)


def _start(goal: Array, angle_key: Key, distance_key: Key) -> Array:
    """Return where the hand starts: in a direction in which it stays on the field, at least ``START_DISTANCE`` away."""
    angle = jax.random.uniform(angle_key, (), jnp.float32, 0, jnp.float32(np.pi / 2))
    inward = jnp.where(goal > 0, jnp.float32(-1), jnp.float32(1))  # the goal's far corner is at least FIELD away
    direction = inward * jnp.stack([jnp.cos(angle), jnp.sin(angle)])
    room = jnp.min((FIELD + jnp.abs(goal)) / jnp.maximum(jnp.abs(direction), 1e-6))
    return goal + direction * jax.random.uniform(distance_key, (), jnp.float32, START_DISTANCE, room)


def _distance(hand: Array, goal: Array) -> Array:
    return jnp.sqrt(jnp.sum((hand - goal) ** 2))


def _length(x: Array, y: Array) -> Array:
    return jnp.sqrt(x**2 + y**2)  # jnp.hypot guards against overflow, which takes several times as long


def _to_arm(x: Array, y: Array, hand: Array) -> Array:
    """Return the distance of every pixel to the segment from the base to the hand, ``(size, size)``."""
    base = jnp.asarray(BASE, jnp.float32)
    along = hand - base
    share = ((x - base[0]) * along[0] + (y - base[1]) * along[1]) / jnp.maximum(jnp.sum(along**2), 1e-6)
    share = jnp.clip(share, 0, 1)
    return _length(x - base[0] - share * along[0], y - base[1] - share * along[1])
