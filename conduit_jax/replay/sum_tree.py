"""Priorities in O(log n), exact at millions of items: a binary tree of weight sums over the priorities of all slots.

``weight(p) = 0 if p == 0 else p ** exponent``, at most 2**96 so that no sum overflows. ``sums[k]`` for
``1 <= k < leaves`` is ``sums[2k] + sums[2k + 1]``, the level below ``leaves / 2`` being the weights of ``priorities``
themselves, which are kept raw. Parents are always recomputed from their children, never moved by deltas: float32 then
stays exact to its rounding whatever the history, and duplicates in an update cannot be counted twice. A draw never
reaches a slot of weight zero: it turns right only where the right side is positive.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.replay import random_bits

Array = jax.Array

_PAD = 128  # see `_power`
_MAX_WEIGHT = np.float32(2.0**96)


class SumTree(NamedTuple):
    """``sums`` float32 ``(leaves,)``, the root at index 1; ``priorities`` float32 ``(leaves,)``, zero where nothing lives."""

    sums: Array
    priorities: Array


def leaf_count(slots: int) -> int:
    """Return the number of leaves: the power of two that holds ``slots``, at least 2."""
    return max(2, 1 << (slots - 1).bit_length())


def init(slots: int) -> SumTree:
    """Return the empty tree over ``slots`` slots."""
    zeros = jnp.zeros((leaf_count(slots),), jnp.float32)
    return SumTree(zeros, jnp.zeros_like(zeros))


def total(tree: SumTree) -> Array:
    """Return the sum of all weights, float32."""
    return tree.sums[1]


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

    A slot out of range (``leaves`` or more) is left out. Cost O(n log leaves).
    """
    return update_unique(tree, _keep_last(slots, tree.priorities.shape[0]), priorities, exponent)


def update_unique(tree: SumTree, slots: Array, priorities: Array, exponent: float) -> SumTree:
    """``update`` for ``slots`` of which no two in range are equal."""
    leaves = tree.priorities.shape[0]
    new = tree.priorities.at[slots].set(priorities, mode="drop", unique_indices=True)
    node = jnp.minimum(slots, leaves - 1) >> 1
    pair = weigh(new.reshape(-1, 2).at[node].get(mode="promise_in_bounds"), exponent)
    value, node = pair[:, 0] + pair[:, 1], node + leaves // 2
    sums = tree.sums.at[node].set(value, mode="promise_in_bounds")
    while leaves > 2:
        leaves //= 2
        node = node >> 1
        value = sums.at[2 * node].get(mode="promise_in_bounds") + sums.at[2 * node + 1].get(mode="promise_in_bounds")
        sums = sums.at[node].set(value, mode="promise_in_bounds")
    return SumTree(sums, new)


def _keep_last(slots: Array, leaves: int) -> Array:
    """Move all but the last of equal slots out of range: which of them a scatter keeps is otherwise left to the backend."""
    order = jnp.argsort(slots, stable=True)
    ordered = slots[order]
    repeated = jnp.concatenate([ordered[:-1] == ordered[1:], jnp.zeros((1,), bool)])
    beyond = leaves + jnp.arange(slots.shape[0], dtype=jnp.int32)
    return slots.at[order].set(jnp.where(repeated, beyond, ordered), unique_indices=True)


def draw(tree: SumTree, high: Array, low: Array, exponent: float, *, stratified: bool) -> Array:
    """Return one slot int32 a pair of uint32 words ``(n,)``, with probability weight / total.

    ``high`` steers the upper half of the descent (stratum ``i`` of ``n`` where ``stratified``) and ``low``, a fresh
    uniform on the subtree reached, the lower half: about 48 bits of choice, where one float32 has 24 and would leave
    half of 2**24 equal items undrawn. With no positive weight the slot returned is meaningless: check ``total``.
    """
    count, leaves = high.shape[0], tree.priorities.shape[0]
    depth = leaves.bit_length() - 1
    position = random_bits.unit_interval(high)
    if stratified:
        position = (jnp.arange(count, dtype=jnp.float32) + position) / np.float32(count)
    node, target = jnp.ones((count,), jnp.int32), position * total(tree)
    for level in range(depth - 1):
        if level == depth // 2:
            target = random_bits.unit_interval(low) * tree.sums.at[node].get(mode="promise_in_bounds")
        left = tree.sums.at[2 * node].get(mode="promise_in_bounds")
        right = tree.sums.at[2 * node + 1].get(mode="promise_in_bounds")
        node, target = _descend(node, target, left, right)
    pair = weigh(tree.priorities.reshape(-1, 2).at[node - leaves // 2].get(mode="promise_in_bounds"), exponent)
    node, _ = _descend(node, target, pair[:, 0], pair[:, 1])
    return node - leaves


def _descend(node: Array, target: Array, left: Array, right: Array) -> tuple[Array, Array]:
    """Take one step down: right where the target lies beyond the left sum and there is something on the right."""
    go_right = (target >= left) & (right > 0)
    return 2 * node + go_right, jnp.where(go_right, target - left, target)
