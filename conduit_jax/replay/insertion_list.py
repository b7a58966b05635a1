"""Slots in the order of their insertion: a doubly linked list, so oldest and newest are known in O(1).

It needs no sequence numbers, hence nothing that could wrap. A sentinel node, number ``slots``, closes the ring: what is
newer than it is the oldest item, what is older than it the newest. Both directions are rows of one array, for the reason
given in ``live_list``.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.replay.live_list import read_once

Array = jax.Array

NEWER, OLDER = np.int32(0), np.int32(1)


class InsertionList(NamedTuple):
    """``neighbours`` int32 ``(2, slots + 1)``: of every live slot and of the sentinel, the next newer one and the next older."""

    neighbours: Array

    @property
    def sentinel(self) -> int:
        return self.neighbours.shape[1] - 1


def init(slots: int) -> InsertionList:
    """Return the empty list over ``slots`` slots."""
    return InsertionList(jnp.full((2, slots + 1), slots, jnp.int32))


def oldest(items: InsertionList) -> Array:
    """Return the slot inserted first, int32; ``slots`` where nothing lives."""
    return _at(items, NEWER, np.int32(items.sentinel))


def newest(items: InsertionList) -> Array:
    """Return the slot inserted last, int32; ``slots`` where nothing lives."""
    return _at(items, OLDER, np.int32(items.sentinel))


def insert(items: InsertionList, slots: Array) -> InsertionList:
    """Return the list with ``slots`` int32 ``(n,)``, none live and no two alike, behind the newest; those out of range are left out."""
    count, sentinel = slots.shape[0], np.int32(items.sentinel)
    present = slots < sentinel
    rank = jnp.cumsum(present, dtype=jnp.int32) - 1
    chain = jnp.full((count + 2,), sentinel, jnp.int32)
    chain = chain.at[jnp.where(present, rank + 1, count + 2)].set(slots, mode="drop")
    chain = chain.at[0].set(newest(items))
    # From the newest over the new slots back to the sentinel; links further on would join the sentinel to itself.
    linked = jnp.arange(count + 1, dtype=jnp.int32) <= jnp.sum(present, dtype=jnp.int32)
    here, there = jnp.where(linked, chain[:-1], sentinel + 1), jnp.where(linked, chain[1:], sentinel + 1)
    return InsertionList(_write(items, here, there))


def remove(items: InsertionList, slot: Array, present: Array) -> InsertionList:
    """Return the list without the live ``slot`` (int32 scalar), unchanged where ``present`` is False."""
    slot = jnp.where(present, slot, items.sentinel)
    before, after = _at(items, OLDER, slot), _at(items, NEWER, slot)
    beyond = jnp.int32(items.sentinel + 1)
    return InsertionList(
        _write(items, jnp.where(present, before, beyond)[None], jnp.where(present, after, beyond)[None])
    )


def _at(items: InsertionList, row: np.int32, column: Array | np.int32) -> Array:
    return read_once(items.neighbours, row, column)


def _write(items: InsertionList, here: Array, there: Array) -> Array:
    """Make ``there`` int32 ``(n,)`` the newer neighbours of ``here`` and ``here`` the older ones of ``there``; drop those out of range."""
    rows = np.repeat([NEWER, OLDER], here.shape[0])
    columns, values = jnp.concatenate([here, there]), jnp.concatenate([there, here])
    return items.neighbours.at[rows, columns].set(values, mode="drop")
