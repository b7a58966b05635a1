"""The first slot in order of (key, touch) in O(1), kept in O(log n): a tournament with eight children a node.

The lowest key wins, and of equal keys the one touched (inserted or updated) least recently. ``winners[0]`` holds the
winning slot of every eight slots, a node of ``winners[k + 1]`` that of eight nodes of ``winners[k]``, the last level the
winner of all. Winners are always recomputed from their children, so duplicates in an update cannot disagree. Touches are
numbered with 64 bits, two words, since a table may keep an item for longer than 2**32 of them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.replay.duplicates import in_order

Array = jax.Array

FANOUT = 8


class OrderedTree(NamedTuple):
    """``keys`` float32 ``(slots,)``, infinite where nothing lives; ``touched`` uint32 ``(2, slots)``, high words first.

    ``winners``: int32 arrays of slots, each padded to whole families; ``clock`` uint32 ``(2,)``, the next touch.
    """

    keys: Array
    touched: Array
    winners: tuple[Array, ...]
    clock: Array


def level_sizes(slots: int) -> tuple[int, ...]:
    """Return the number of nodes in use of each level of winners, down to 1."""
    sizes = [-(-slots // FANOUT)]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // FANOUT))
    return tuple(sizes)


def init(slots: int) -> OrderedTree:
    """Return the empty tree over ``slots`` slots."""
    padded = -(-slots // FANOUT) * FANOUT
    winners = []
    for level, size in enumerate(level_sizes(slots)):
        # Any slot of the subtree will do where nothing lives; of a node that only pads, any slot at all.
        count = 1 if size == 1 else -(-size // FANOUT) * FANOUT
        first = np.arange(count, dtype=np.int64) * FANOUT ** (level + 1)
        winners.append(jnp.asarray(np.minimum(first, padded - 1), jnp.int32))
    empty = jnp.full((padded,), jnp.inf, jnp.float32)
    return OrderedTree(empty, jnp.zeros((2, padded), jnp.uint32), tuple(winners), jnp.zeros((2,), jnp.uint32))


def first(tree: OrderedTree) -> Array:
    """Return the first slot in order, int32; meaningless where nothing lives."""
    return tree.winners[-1][0]


def touch(tree: OrderedTree, slots: Array, keys: Array) -> OrderedTree:
    """Return the tree with finite ``keys`` float32 ``(n,)`` in ``slots`` int32 ``(n,)``, touched in this order.

    The last of equal slots wins; a slot out of range is left out. Cost O(n log slots).
    """
    count = slots.shape[0]
    order = jnp.arange(count, dtype=jnp.int32)
    slots = in_order(slots)
    low = tree.clock[1] + order.astype(jnp.uint32)
    high = tree.clock[0] + (low < tree.clock[1]).astype(jnp.uint32)
    after = tree.clock[1] + jnp.uint32(count)
    clock = jnp.stack([tree.clock[0] + (after < tree.clock[1]).astype(jnp.uint32), after])
    touched = tree.touched.at[:, slots].set(jnp.stack([high, low]), mode="drop")
    return _replay(tree._replace(touched=touched, clock=clock), slots, keys)


def remove(tree: OrderedTree, slots: Array) -> OrderedTree:
    """Return the tree without ``slots`` int32 ``(n,)``; a slot out of range is left out."""
    return _replay(tree, slots, jnp.full(slots.shape, jnp.inf, jnp.float32))


def _replay(tree: OrderedTree, slots: Array, keys: Array) -> OrderedTree:
    """Set ``keys`` and play again every match on the way from ``slots`` to the root."""
    own = tree.keys.at[slots].set(keys, mode="drop")
    node = jnp.minimum(slots, own.shape[0] - 1) // FANOUT
    winners = []
    for level, nodes in enumerate(tree.winners):
        entrants = [FANOUT * node + child for child in range(FANOUT)]
        if level:
            entrants = [_at(winners[-1], entrant) for entrant in entrants]
        best = _play(own, tree.touched, entrants)
        winners.append(nodes.at[node].set(best, mode="promise_in_bounds"))
        node = node // FANOUT
    return tree._replace(keys=own, winners=tuple(winners))


def _play(keys: Array, touched: Array, entrants: list[Array]) -> Array:
    """Return the winners among ``entrants``, arrays of slots: by key, then by touch."""
    best, *others = [(slot, _at(keys, slot), *(_at(word, slot) for word in touched)) for slot in entrants]
    for other in others:
        older = (other[2] < best[2]) | ((other[2] == best[2]) & (other[3] < best[3]))
        wins = (other[1] < best[1]) | ((other[1] == best[1]) & older)
        best = tuple(jnp.where(wins, one, two) for one, two in zip(other, best, strict=True))
    return best[0]


def _at(array: Array, index: Array) -> Array:
    return array.at[index].get(mode="promise_in_bounds")
