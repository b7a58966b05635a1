"""Which slots live, as a dense list: uniform draws, free slots and epochs without replacement, each in O(1).

``order`` is a permutation of all slots in three stretches: ``[0, drawn)`` lives and has been drawn in this epoch,
``[drawn, size)`` lives and has not, the rest is free. ``where`` is its inverse. An item comes, goes or is drawn by swaps
at the ends of the stretches. Without epochs ``drawn`` stays 0.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class LiveList(NamedTuple):
    """``order`` and ``where`` int32 ``(slots,)``; ``size`` and ``drawn`` int32 scalars."""

    order: Array
    where: Array
    size: Array
    drawn: Array


def init(slots: int) -> LiveList:
    """Return the list of ``slots`` free slots."""
    zero = jnp.zeros((), jnp.int32)
    return LiveList(jnp.arange(slots, dtype=jnp.int32), jnp.arange(slots, dtype=jnp.int32), zero, zero)


def reset(live: LiveList) -> LiveList:
    """Free all slots."""
    return live._replace(size=jnp.zeros_like(live.size), drawn=jnp.zeros_like(live.drawn))


def is_live(live: LiveList, slots: Array) -> Array:
    """Return whether ``slots`` (int32, any values) hold items."""
    capacity = live.order.shape[0]
    inside = (slots >= 0) & (slots < capacity)
    return inside & (_at(live.where, jnp.clip(slots, 0, capacity - 1)) < live.size)


def next_free(live: LiveList, count: int) -> Array:
    """Return the slots of the next ``count`` inserts, int32 ``(count,)``; fewer than ``count`` free ones: the last repeats."""
    positions = jnp.minimum(live.size + jnp.arange(count, dtype=jnp.int32), live.order.shape[0] - 1)
    return _at(live.order, positions)


def insert(live: LiveList, count: Array) -> LiveList:
    """Return the list in which the next ``count`` free slots live."""
    return live._replace(size=live.size + count)


def nth(live: LiveList, rank: Array) -> Array:
    """Return the slot of the ``rank``-th live item; any slot for a rank beyond."""
    return _at(live.order, jnp.clip(rank, 0, live.order.shape[0] - 1))


def remove(live: LiveList, slot: Array, present: Array) -> LiveList:
    """Return the list without the live ``slot`` (int32 scalar), unchanged where ``present`` is False."""
    last = jnp.maximum(live.size - 1, 0)
    place = jnp.where(present, _at(live.where, slot), last)
    was_drawn = present & (place < live.drawn)
    edge = jnp.where(was_drawn, live.drawn - 1, place)
    # The last of the drawn stretch fills the gap, the last of all fills that one's, and the slot goes to the free ones.
    own, second, third = _at(live.order, place), _at(live.order, edge), _at(live.order, last)
    order = _put(_put(_put(live.order, place, second), edge, third), last, own)
    where = _put(_put(_put(live.where, third, edge), second, place), own, last)
    gone = present.astype(jnp.int32)
    return LiveList(order, where, live.size - gone, live.drawn - was_drawn.astype(jnp.int32))


def mark_drawn(live: LiveList, slot: Array, present: Array) -> LiveList:
    """Return the list in which the live, undrawn ``slot`` counts as drawn, unchanged where ``present`` is False."""
    edge = jnp.minimum(live.drawn, live.order.shape[0] - 1)
    place = jnp.where(present, _at(live.where, slot), edge)
    own, other = _at(live.order, place), _at(live.order, edge)
    order = _put(_put(live.order, place, other), edge, own)
    where = _put(_put(live.where, other, place), own, edge)
    return LiveList(order, where, live.size, live.drawn + present.astype(jnp.int32))


def begin_epoch(live: LiveList, present: Array) -> LiveList:
    """Return the list with none drawn where all had been, unchanged where ``present`` is False."""
    return live._replace(drawn=jnp.where(present & (live.drawn >= live.size), 0, live.drawn))


def _at(array: Array, index: Array) -> Array:
    return array.at[index].get(mode="promise_in_bounds")


def _put(array: Array, index: Array, value: Array) -> Array:
    """Set one element; a slice, because XLA on CPU (jax 0.10.2) makes a loop of every scatter."""
    return jax.lax.dynamic_update_index_in_dim(array, value, index, 0)
