"""Slots in the order of their insertion: a doubly linked list, so oldest and newest are known in O(1).

It needs no sequence numbers, hence nothing that could wrap. A sentinel node, number ``slots``, closes the ring: what is
newer than it is the oldest item, what is older than it the newest.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class InsertionList(NamedTuple):
    """``newer`` and ``older``: int32 ``(slots + 1,)``, the neighbours of every live slot and of the sentinel."""

    newer: Array
    older: Array


def init(slots: int) -> InsertionList:
    """Return the empty list over ``slots`` slots."""
    return InsertionList(jnp.full((slots + 1,), slots, jnp.int32), jnp.full((slots + 1,), slots, jnp.int32))


def oldest(items: InsertionList) -> Array:
    """Return the slot inserted first, int32; ``slots`` where nothing lives."""
    return items.newer[-1]


def newest(items: InsertionList) -> Array:
    """Return the slot inserted last, int32; ``slots`` where nothing lives."""
    return items.older[-1]


def insert(items: InsertionList, slots: Array) -> InsertionList:
    """Return the list with ``slots`` int32 ``(n,)``, none live and no two alike, behind the newest; those out of range are left out."""
    sentinel = items.newer.shape[0] - 1
    count = slots.shape[0]
    present = slots < sentinel
    rank = jnp.cumsum(present, dtype=jnp.int32) - 1
    packed = jnp.full((count + 2,), sentinel, jnp.int32)
    packed = packed.at[0].set(newest(items))
    packed = packed.at[jnp.where(present, rank + 1, count + 2)].set(slots, mode="drop")
    # A chain from the newest over the packed slots back to the sentinel; links beyond it join the sentinel to itself.
    here, there = packed[:-1], packed[1:]
    linked = jnp.arange(count + 1, dtype=jnp.int32) <= jnp.sum(present, dtype=jnp.int32)
    newer = items.newer.at[jnp.where(linked, here, sentinel + 1)].set(there, mode="drop")
    older = items.older.at[jnp.where(linked, there, sentinel + 1)].set(here, mode="drop")
    return InsertionList(newer, older)


def append(items: InsertionList, slot: Array, present: Array) -> InsertionList:
    """``insert`` of one ``slot`` (int32 scalar), unchanged where ``present`` is False."""
    sentinel = items.newer.shape[0] - 1
    slot = jnp.where(present, slot, sentinel)
    last = newest(items)
    return InsertionList(
        newer=_put(
            _put(items.newer, slot, jnp.where(present, sentinel, oldest(items))),
            last,
            jnp.where(present, slot, sentinel),
        ),
        older=_put(_put(items.older, slot, last), jnp.asarray(sentinel), jnp.where(present, slot, last)),
    )


def remove(items: InsertionList, slot: Array, present: Array) -> InsertionList:
    """Return the list without the live ``slot`` (int32 scalar), unchanged where ``present`` is False."""
    slot = jnp.where(present, slot, items.newer.shape[0] - 1)
    before, after = _at(items.older, slot), _at(items.newer, slot)
    # The sentinel between its own neighbours: both writes then put back what stands there.
    newer = _put(items.newer, jnp.where(present, before, slot), after)
    older = _put(items.older, jnp.where(present, after, slot), before)
    return InsertionList(newer, older)


def _at(array: Array, index: Array) -> Array:
    return array.at[index].get(mode="promise_in_bounds")


def _put(array: Array, index: Array, value: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(array, value, index, 0)
