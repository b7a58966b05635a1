"""Priorities in O(log n), exact at millions of items: a tree of weight sums with eight children a node.

``weight(p) = 0 if p == 0 else p ** exponent``, at most 2**96 so that no sum overflows. Level 0 holds the weights of all
slots, a node of level k + 1 the sum of its eight children on level k, the last level the total. Parents are always
recomputed from their children, never moved by deltas: float32 then stays exact to its rounding whatever the history,
and duplicates in an update cannot be counted twice. A draw never reaches a slot of weight zero: only positive
children are entered. All levels stand in one array, because every array that enters or leaves a compiled call costs
a microsecond or two.

Eight children because XLA on CPU pays a level more than a child: at 2**20 items and 256 draws, draw + update cost
160 us with two children, 80 with four, 63 with eight, 180 with sixteen (jax 0.10.2).
"""

from __future__ import annotations

from functools import partial, reduce
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.replay import random_bits
from conduit_jax.replay.in_turns import in_turns
from conduit_jax.replay.live_list import read_once
from conduit_jax.replay.piecewise import zero_of
from conduit_jax.replay.reads import read_rows, unsplit_read

Array = jax.Array

FANOUT = 8
_CROWN = 2**12  # nodes
_MOST_TURNS = 1024  # more slots take as long level by level
_PAD = 128  # see `_power`
_MAX_WEIGHT = np.float32(2.0**96)
_BEYOND = np.int32(2**31 - 1)


class SumTree(NamedTuple):
    """``levels`` float32: one level after the other, from the slots' weights to the root, each padded with zeros to whole families.

    ``priorities`` float32 ``(slots,)`` are kept as they were given; both are zero where nothing lives.
    """

    levels: Array
    priorities: Array


def level_sizes(slots: int) -> tuple[int, ...]:
    """Return the number of nodes of each level that are in use, from ``slots`` to 1 (at least two levels)."""
    sizes = [slots]
    while len(sizes) == 1 or sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // FANOUT))
    return tuple(sizes)


def level_starts(slots: int) -> tuple[int, ...]:
    """Return where each level begins in ``levels``, and last where they end."""
    starts = [0]
    for size in level_sizes(slots):
        starts.append(starts[-1] + -(-size // FANOUT) * FANOUT)
    return tuple(starts)


def init(slots: int) -> SumTree:
    """Return the empty tree over ``slots`` slots."""
    return SumTree(jnp.zeros((level_starts(slots)[-1],), jnp.float32), jnp.zeros((slots,), jnp.float32))


def total(tree: SumTree) -> Array:
    """Return the sum of all weights, float32."""
    root = level_starts(tree.priorities.shape[0])[-2]
    return read_once(tree.levels, np.int32(root))


def weigh(priorities: Array, exponent: float) -> Array:
    """Return the weights of ``priorities`` (any shape), float32: zero stays zero for every exponent."""
    powers = priorities if exponent == 1.0 else jnp.where(priorities > 0, _power(priorities, exponent), jnp.float32(0))
    return jnp.minimum(powers, _MAX_WEIGHT)


def _power(values: Array, exponent: float) -> Array:
    """Return ``values ** exponent`` with bits that do not depend on how many values there are.

    XLA on CPU (jax 0.10.2) rounds ``pow`` differently in the vector body of a loop and in its remainder, so the values
    are padded to whole vectors behind a barrier: a slot's weight is the same in every placement and batch.
    """
    flat = values.reshape(-1)
    padded = jax.lax.optimization_barrier(jnp.pad(flat, (0, -flat.size % _PAD), constant_values=1.0))
    powers = jax.lax.optimization_barrier(jnp.power(padded, jnp.float32(exponent)))
    return powers[: flat.size].reshape(values.shape)


def update(tree: SumTree, slots: Array, priorities: Array, exponent: float) -> SumTree:
    """Return the tree with ``priorities`` float32 ``(n,)`` in ``slots`` int32 ``(n,)``; the last of equal slots wins.

    A slot out of range, below it too, is left out. Cost O(n log slots).
    """
    last = jax.lax.platform_dependent(slots, cpu=lambda own: own, default=_keep_last)
    return update_unique(tree, last, priorities, exponent)


@partial(jax.jit, static_argnums=3, inline=True)
def update_unique(tree: SumTree, slots: Array, priorities: Array, exponent: float) -> SumTree:
    """``update`` for ``slots`` of which no two in range are equal."""
    count, weights = tree.priorities.shape[0], weigh(priorities, exponent)

    def at_once(tree: SumTree, slots: Array, priorities: Array, weights: Array) -> SumTree:
        own = jnp.where((slots >= 0) & (slots < count), slots, _BEYOND)  # a negative index would count from the end
        kept = tree.priorities.at[own].set(priorities, mode="drop")
        return SumTree(_set_by_levels(count, tree.levels, slots, weights), kept)

    def turns(tree: SumTree, slots: Array, priorities: Array, weights: Array) -> SumTree:
        def turn(number: Array, tree: SumTree) -> SumTree:
            kept, _ = _put(tree.priorities, count, slots, priorities, number)
            return SumTree(_set_one(count, tree.levels, slots, weights, number), kept)

        return jax.lax.fori_loop(zero_of(slots), np.int32(slots.shape[0]), turn, tree)

    if not 0 < slots.shape[0] <= _MOST_TURNS:
        return at_once(tree, slots, priorities, weights)
    return in_turns(turns, at_once, tree, slots, priorities, weights)


@partial(jax.jit, static_argnums=1, inline=True)
def set_weights(levels: Array, count: int, slots: Array, weights: Array) -> Array:
    """Return ``levels`` of a tree over ``count`` slots with ``weights`` in ``slots`` and every sum above them recomputed.

    A slot out of range, below it too, is left out; of equal slots in range the last wins on CPU and the backend's scatter
    decides elsewhere.
    """

    def turns(levels: Array, slots: Array, weights: Array) -> Array:
        def turn(number: Array, levels: Array) -> Array:
            return _set_one(count, levels, slots, weights, number)

        return jax.lax.fori_loop(zero_of(slots), np.int32(slots.shape[0]), turn, levels)

    at_once = partial(_set_by_levels, count)
    if not 0 < slots.shape[0] <= _MOST_TURNS:
        return at_once(levels, slots, weights)
    return in_turns(turns, at_once, levels, slots, weights)


def _set_one(count: int, levels: Array, slots: Array, weights: Array, number: Array) -> Array:
    """Set the weight of that ``number`` and the sums above it.

    One slot after the other is a loop that XLA on CPU makes one kernel: 25 us for 256 slots, where levels take 90.
    """
    starts = level_starts(count)
    levels, node = _put(levels, count, slots, weights, number)
    for below, start in pairwise(starts[:-1]):
        node = jax.lax.div(node, np.int32(FANOUT))
        family = jax.lax.dynamic_slice_in_dim(levels, below + FANOUT * node, FANOUT)
        levels = jax.lax.dynamic_update_slice_in_dim(levels, _sums(family[None]), start + node, 0)
    return levels


def _put(array: Array, count: int, slots: Array, values: Array, number: Array) -> tuple[Array, Array]:
    """Put the value of that ``number`` in its slot unless that is not below ``count``; return also the slot, clipped to it."""
    slot = jax.lax.dynamic_index_in_dim(slots, number, keepdims=False)
    place, value = jnp.clip(slot, 0, count - 1), jax.lax.dynamic_slice_in_dim(values, number, 1)
    value = jnp.where(slot == place, value, jax.lax.dynamic_slice_in_dim(array, place, 1))
    return jax.lax.dynamic_update_slice_in_dim(array, value, place, 0), place


def _set_by_levels(count: int, levels: Array, slots: Array, weights: Array) -> Array:
    """Set all slots, then every level's sums."""
    levels = levels.at[jnp.where((slots >= 0) & (slots < count), slots, _BEYOND)].set(weights, mode="drop")
    node, starts = jnp.clip(slots, 0, count - 1), level_starts(count)
    for (below, start), size in zip(pairwise(starts[:-1]), level_sizes(count)[1:], strict=True):
        node = node // FANOUT
        if size <= 2 * slots.shape[0]:  # the whole level, without gather and scatter
            families = jax.lax.slice_in_dim(levels, below, below + FANOUT * size).reshape(size, FANOUT)
            levels = jax.lax.dynamic_update_slice(levels, _sums(families), (np.int32(start),))
        else:
            sums = _sums(_families(levels, below + FANOUT * node))
            levels = levels.at[start + node].set(sums, mode="promise_in_bounds")
    return levels


def _sums(families: Array) -> Array:
    """Return the sum of each row, from left to right: a node has one value, however many are summed at a time."""
    first, *others = families.T
    return reduce(jnp.add, others, first)


def _keep_last(slots: Array) -> Array:
    """Move all but the last of equal slots out of range.

    XLA on CPU writes a scatter's rows in order, so there the last one wins by itself; elsewhere the order is open.
    """
    order = jnp.argsort(slots, stable=True)
    ordered = slots[order]
    repeated = jnp.concatenate([ordered[:-1] == ordered[1:], jnp.zeros((1,), bool)])
    return slots.at[order].set(jnp.where(repeated, _BEYOND, ordered), unique_indices=True)


def draw(tree: SumTree, high: Array, low: Array, *, stratified: bool) -> tuple[Array, Array]:
    """Return one slot int32 a pair of uint32 words ``(n,)``, with probability weight / total, and ``total`` of the tree.

    ``high`` steers the upper half of the descent (stratum ``i`` of ``n`` where ``stratified``) and ``low``, a fresh
    uniform on the subtree reached, the lower half: about 48 bits of choice, where one float32 has 24 and would leave
    half of 2**24 equal items undrawn. With no positive weight the slot returned is meaningless: check the total.
    """
    count, starts = high.shape[0], level_starts(tree.priorities.shape[0])
    depth = len(starts) - 2
    top = next(start for start in starts if starts[-1] - start <= _CROWN)
    crown = _families(tree.levels, jnp.arange(top, starts[-1], FANOUT, dtype=jnp.int32) + zero_of(high)).reshape(-1)
    everything = crown[starts[-2] - top]

    def within(start: int) -> tuple[Array, int]:
        return (crown, start - top) if start >= top else (tree.levels, start)

    position = random_bits.unit_interval(high)
    if stratified:
        position = (jnp.arange(count, dtype=jnp.float32) + position) / np.float32(count)
    node, target = jnp.zeros((count,), jnp.int32), position * everything
    for level in range(depth - 1, -1, -1):
        if level == depth // 2 - 1:
            levels, start = within(starts[level + 1])
            target = random_bits.unit_interval(low) * read_rows(levels, start + node)
        levels, start = within(starts[level])
        node, target = _descend(levels, start, node, target)
    return jnp.minimum(node, tree.priorities.shape[0] - 1), everything


def _descend(levels: Array, start: int, node: Array, target: Array) -> tuple[Array, Array]:
    """Take one step down, to the level at ``start``: into the last positive child that begins at or before the target."""
    begin, entered = jnp.zeros_like(target), jnp.zeros_like(target)
    child = jnp.zeros_like(node)
    for number, weight in enumerate(_families(levels, start + FANOUT * node).T):
        here = (target >= begin) & (weight > 0)
        child, entered = jnp.where(here, number, child), jnp.where(here, begin, entered)
        begin = begin + weight
    rest = jax.lax.bitcast_convert_type(target - entered, jnp.int32)
    node, rest = jax.lax.optimization_barrier(jnp.stack([FANOUT * node + child, rest]))
    return node, jax.lax.bitcast_convert_type(rest, jnp.float32)


@partial(jax.jit, inline=True)
def _families(levels: Array, first: Array) -> Array:
    """Return the eight siblings from each of ``first`` int32 ``(n,)`` on, float32 ``(n, 8)``, read as one gather."""
    rows = jax.lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(), start_index_map=(0,))
    return unsplit_read(
        levels,
        lambda first: jax.lax.gather(levels, first[:, None], rows, (FANOUT,), mode="promise_in_bounds"),
        first,
    )
