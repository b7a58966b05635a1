"""The compiled side of the replay behind RLlib: rows of a ring that are linked into episodes, drawn through a sum tree.

A row is one observation with, once it is known, the step taken from it: action, reward, flags and the slot of the row that
follows. Observations are stored once: a step's next observation is the row that follows, a finished episode's last row has
no step. Rows are written in ring order, so what follows a row is always younger and never goes before it; a chunk that
continues an episode fills the open row at its end, wherever the ring has got to since. A row without a step has weight zero.

All work between two draws is one program: priority updates, then inserts, then the draw of several batches.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.replay import random_bits, records, sum_tree
from conduit_jax.replay.sum_tree import SumTree

Array = jax.Array

STEP, TERMINATED, TRUNCATED = np.uint32(1), np.uint32(2), np.uint32(4)
NEXT, FLAGS, REWARD, HEAD_WORDS = 0, 1, 2, 3
BEYOND = np.int32(2**31 - 1)  # a slot that does not exist: left out


class Leaf(NamedTuple):
    """One array of an observation or action: ``start`` is its first word in a row, ``None`` where it is kept apart."""

    shape: tuple[int, ...]
    dtype: np.dtype
    start: int | None

    @property
    def words(self) -> int:
        return -(-math.prod(self.shape) * self.dtype.itemsize // 4)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Layout(NamedTuple):
    """Where the arrays of an observation and of an action stand in a row of ``words`` uint32 words; hashable."""

    observation: tuple[Leaf, ...]
    action: tuple[Leaf, ...]
    words: int

    @property
    def apart(self) -> tuple[Leaf, ...]:
        """The large observation leaves, each an array of its own."""
        return tuple(leaf for leaf in self.observation if leaf.start is None)

    @property
    def row_bytes(self) -> int:
        return 4 * self.words + sum(leaf.bytes for leaf in self.apart)


class State(NamedTuple):
    """``rows`` uint32 ``(slots, words)``, ``apart`` ``(slots, ...)``, the ``tree`` and the ``highest`` priority ever given."""

    rows: Array
    apart: tuple[Array, ...]
    tree: SumTree
    highest: Array


class Draw(NamedTuple):
    """What a draw is made of: ``groups`` batches of ``batch`` transitions over ``low`` to ``high`` steps; hashable.

    ``exponent`` turns priorities into weights, ``beta`` corrects for them (``None``: draws are uniform). ``cast`` names the
    dtype observations are delivered in.
    """

    batch: int
    groups: int
    low: int
    high: int
    gamma: float
    exponent: float
    beta: float | None
    cast: str | None


def init(layout: Layout, slots: int, device: Any) -> State:
    """Return an empty state on ``device``."""
    make = jax.jit(
        lambda: State(
            jnp.zeros((slots, layout.words), jnp.uint32),
            tuple(jnp.zeros((slots, *leaf.shape), records.carrier(leaf.dtype)) for leaf in layout.apart),
            sum_tree.init(slots),
            jnp.ones((), jnp.float32),
        ),
        out_shardings=jax.sharding.SingleDeviceSharding(device),
    )
    return make()


@functools.partial(jax.jit, static_argnames=("exponent",), donate_argnames=("state",))
def insert(state: State, staged: Array, apart: tuple[Array, ...], *, exponent: float) -> State:
    """Write ``staged`` uint32 ``(n, 1 + words)``, slot first, and the large leaves beside them ``(n, ...)``."""
    return _insert(state, staged, apart, exponent)


@functools.partial(jax.jit, static_argnames=("layout", "draw"), donate_argnames=("state", "spent"), keep_unused=True)
def advance(
    state: State,
    staged: Array,
    apart: tuple[Array, ...],
    updates: Array,
    key: Array,
    spent: tuple[tuple[Array, ...], ...] = (),
    *,
    layout: Layout,
    draw: Draw,
) -> tuple[State, dict[str, Any]]:
    """Update priorities, insert, draw.

    ``updates`` uint32 ``(m, 2)``: slots and float32 priorities; ``key`` uint32 ``(3,)``: two words and the draw's number.
    ``spent`` are observations of an earlier draw, to be overwritten by this one's: fresh memory costs ten times the copy, and
    giving it back costs the caller. Where a tensor still looks at them JAX takes fresh memory after all.
    Returns columns ``(groups, batch, ...)``.
    """
    if draw.beta is not None:
        state = _update(state, updates, draw.exponent)
    state = _insert(state, staged, apart, draw.exponent)
    return state, _draw(state, key, layout, draw)


def _update(state: State, updates: Array, exponent: float) -> State:
    slots, priorities = (
        jax.lax.bitcast_convert_type(updates[:, n], kind) for n, kind in enumerate(("int32", "float32"))
    )
    given = jnp.where(slots < state.rows.shape[0], priorities, 0)
    highest = jnp.maximum(state.highest, jnp.max(given, initial=0.0))
    return state._replace(tree=sum_tree.update(state.tree, slots, priorities, exponent), highest=highest)


def _insert(state: State, staged: Array, apart: tuple[Array, ...], exponent: float) -> State:
    slots, rows = jax.lax.bitcast_convert_type(staged[:, 0], jnp.int32), staged[:, 1:]
    priorities = jnp.where(rows[:, FLAGS] & STEP > 0, state.highest, 0)
    return State(
        _put(state.rows, slots, rows),
        tuple(_put(whole, slots, _carried(part)) for whole, part in zip(state.apart, apart, strict=True)),
        sum_tree.update_unique(state.tree, slots, priorities, exponent),
        state.highest,
    )


def _put(whole: Array, slots: Array, part: Array) -> Array:
    return whole.at[slots].set(part, mode="drop", unique_indices=True)


def _carried(leaf: Array) -> Array:
    dtype = np.dtype(leaf.dtype)
    return jax.lax.bitcast_convert_type(leaf, records.carrier(dtype)) if records.carries(dtype) else leaf


def _draw(state: State, key: Array, layout: Layout, draw: Draw) -> dict[str, Any]:
    count = draw.groups * draw.batch
    words = random_bits.bits(random_bits.fold(key[:2], key[2]), 3 * count)
    start = sum_tree.draw(state.tree, words[:count], words[count : 2 * count], stratified=False)[0]
    spans = draw.low + random_bits.below(words[2 * count :], jnp.uint32(draw.high - draw.low + 1))
    walk = _walk(state.rows, start, spans, draw)
    columns = {
        "obs": _read(state, layout.observation, walk.first, start, draw.cast),
        "new_obs": _read(state, layout.observation, _rows(state.rows, walk.following), walk.following, draw.cast),
        "actions": _read(state, layout.action, walk.first, start, None),
        "rewards": walk.reward,
        "terminateds": walk.flags & TERMINATED > 0,
        "truncateds": walk.flags & TRUNCATED > 0,
    }
    if draw.high > 1:
        columns["n_step"] = walk.steps
    if draw.beta is not None:
        priority = state.tree.priorities.at[start].get(mode="promise_in_bounds")
        weight = sum_tree.weigh(priority, draw.exponent)
        columns |= {"weights": _weights(state.tree, weight, draw.beta), "slots": start}
    return jax.tree.map(lambda leaf: leaf.reshape(draw.groups, draw.batch, *leaf.shape[1:]), columns)


class _Walk(NamedTuple):
    """From ``first`` rows over ``steps`` steps to the ``following`` slots: discounted ``reward``, ``flags`` of the last step."""

    first: Array
    reward: Array
    flags: Array
    following: Array
    steps: Array


def _walk(rows: Array, start: Array, spans: Array, draw: Draw) -> _Walk:
    """Go ``spans`` steps on from ``start``, as far as the episode goes or is known: then fewer, and ``steps`` says how many."""
    first = _rows(rows, start)
    reward, flags, following = _reward(first), first[:, FLAGS], _following(first)
    steps, going = jnp.ones_like(start), jnp.ones(start.shape, bool)
    for number in range(1, draw.high):
        row = _rows(rows, following)
        going = going & (number < spans) & (flags & (TERMINATED | TRUNCATED) == 0) & (row[:, FLAGS] & STEP > 0)
        reward = jnp.where(going, reward + np.float32(draw.gamma**number) * _reward(row), reward)
        flags = jnp.where(going, row[:, FLAGS], flags)
        following, steps = jnp.where(going, _following(row), following), steps + going
    return _Walk(first, reward, flags, following, steps)


def _rows(rows: Array, slots: Array) -> Array:
    return rows.at[slots].get(mode="promise_in_bounds")


def _reward(rows: Array) -> Array:
    return jax.lax.bitcast_convert_type(rows[:, REWARD], jnp.float32)


def _following(rows: Array) -> Array:
    return jax.lax.bitcast_convert_type(rows[:, NEXT], jnp.int32)


def _read(state: State, leaves: tuple[Leaf, ...], rows: Array, slots: Array, cast: str | None) -> tuple[Array, ...]:
    """Return ``leaves`` of the packed ``rows`` and of what is kept apart in ``slots``."""
    apart, found = iter(state.apart), []
    for leaf in leaves:
        if leaf.start is None:
            value = _rows(next(apart), slots)
            value = jax.lax.bitcast_convert_type(value, leaf.dtype) if records.carries(leaf.dtype) else value
        else:
            words = jax.lax.slice_in_dim(rows, leaf.start, leaf.start + leaf.words, axis=1)
            value = records.from_words(words, math.prod(leaf.shape), leaf.dtype).reshape(-1, *leaf.shape)
        found.append(value if cast is None else value.astype(cast))
    return tuple(found)


def _weights(tree: SumTree, weight: Array, beta: float) -> Array:
    """Return ``(N * P)**-beta`` divided by the largest that any live item would have, as RLlib does."""
    own = tree.levels[: tree.priorities.shape[0]]
    least = jnp.min(jnp.where(own > 0, own, jnp.inf))
    return jnp.power(weight / least, -jnp.float32(beta))


__all__ = ["BEYOND", "STEP", "TERMINATED", "TRUNCATED", "Draw", "Layout", "Leaf", "State", "advance", "init", "insert"]
