"""Which slots live, as a dense list: uniform draws, free slots and epochs without replacement, each in O(1).

``order`` is a permutation of all slots in three stretches: ``[0, drawn)`` lives and has been drawn in this epoch,
``[drawn, size)`` lives and has not, the rest is free. ``where`` is its inverse. An item comes, goes or is drawn by swaps
at the ends of the stretches. Without epochs ``drawn`` stays 0.

Both halves are rows of one array, read by ``read_once`` and written by one scatter. Otherwise a loop on CPU copies both
whole in every step (jax 0.10.2): a single element is read by a slice, which XLA fuses into all that use it, and a reader
that the write does not depend on makes it copy what is written, though the schedule has the read first.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

ORDER, WHERE = np.int32(0), np.int32(1)


class LiveList(NamedTuple):
    """``places`` int32 ``(2, slots)``, the rows ``order`` and ``where``; ``size`` and ``drawn`` int32 scalars."""

    places: Array
    size: Array
    drawn: Array

    @property
    def slots(self) -> int:
        return self.places.shape[1]


def init(slots: int) -> LiveList:
    """Return the list of ``slots`` free slots."""
    zero = jnp.zeros((), jnp.int32)
    return LiveList(jnp.tile(jnp.arange(slots, dtype=jnp.int32), (2, 1)), zero, zero)


def reset(live: LiveList) -> LiveList:
    """Free all slots."""
    return live._replace(size=jnp.zeros_like(live.size), drawn=jnp.zeros_like(live.drawn))


def is_live(live: LiveList, slots: Array) -> Array:
    """Return whether ``slots`` (int32, any values) hold items."""
    inside = (slots >= 0) & (slots < live.slots)
    return inside & (_at(live, WHERE, jnp.clip(slots, 0, live.slots - 1)) < live.size)


def insert(live: LiveList, count: Array) -> LiveList:
    """Return the list in which the next ``count`` free slots live: those of ranks ``size`` and on."""
    return live._replace(size=live.size + count)


def nth(live: LiveList, rank: Array) -> Array:
    """Return the slot of rank ``rank`` int32: live ones first, then free ones; some slot for a rank beyond."""
    return _at(live, ORDER, jnp.clip(rank, 0, live.slots - 1))


def remove(live: LiveList, slot: Array, present: Array) -> LiveList:
    """Return the list without the live ``slot`` (int32 scalar), unchanged where ``present`` is False.

    The last of the drawn stretch fills the gap, the last of all fills that one's, and the slot goes to the free ones.
    """
    last = jnp.maximum(live.size - 1, 0)
    place = jnp.where(present, _at(live, WHERE, slot), last)
    was_drawn = present & (place < live.drawn)
    edge = jnp.where(was_drawn, live.drawn - 1, place)
    own, second, third = _at(live, ORDER, jnp.stack([place, edge, last]))
    # Where positions coincide all writes to one of them say the same: which of them stays is then no question.
    to_edge = jnp.where(edge == last, own, third)
    to_place = jnp.where(place == edge, to_edge, second)
    of_third = jnp.where(place == last, last, jnp.where(edge == last, place, edge))
    of_second = jnp.where(place == edge, last, place)
    gone = present.astype(jnp.int32)
    written = _write(
        live, (place, edge, last), (to_place, to_edge, own), (own, second, third), (last, of_second, of_third)
    )
    return LiveList(written, live.size - gone, live.drawn - was_drawn.astype(jnp.int32))


def begin_epoch(live: LiveList, present: Array) -> LiveList:
    """Return the list with none drawn where all had been, unchanged where ``present`` is False."""
    return live._replace(drawn=jnp.where(present & (live.drawn >= live.size), 0, live.drawn))


def mark_drawn(live: LiveList, slot: Array, present: Array) -> LiveList:
    """Return the list in which the live, undrawn ``slot`` counts as drawn, unchanged where ``present`` is False."""
    edge = jnp.minimum(live.drawn, live.slots - 1)
    place = jnp.where(present, _at(live, WHERE, slot), edge)
    own, other = _at(live, ORDER, jnp.stack([place, edge]))
    written = _write(live, (place, edge), (other, own), (own, other), (edge, place))
    return LiveList(written, live.size, live.drawn + present.astype(jnp.int32))


def read_once(array: Array, *index: Array | np.int32) -> Array:
    """Return the element of ``array`` at a scalar ``index``, by a gather of two: XLA keeps that in one place."""
    twice = tuple(jnp.stack([axis, axis]) for axis in index)
    return array.at[twice].get(mode="promise_in_bounds")[0]


def after(value: Array, read: Array) -> Array:
    """Return ``value``, int32, made to depend on ``read``, an int32 that is never negative: what is written with it waits for that."""
    return value + jnp.minimum(read, 0)


def _at(live: LiveList, row: np.int32, column: Array) -> Array:
    if jnp.ndim(column) == 0:
        return read_once(live.places, row, column)
    return live.places.at[row, column].get(mode="promise_in_bounds")


def _write(live: LiveList, places: tuple, holders: tuple, slots: tuple, positions: tuple) -> Array:
    """Put ``holders`` at ``places`` of ``order`` and ``positions`` at ``slots`` of ``where``."""
    rows = np.repeat([ORDER, WHERE], len(places))
    columns, values = jnp.stack([*places, *slots]), jnp.stack([*holders, *positions])
    return live.places.at[rows, columns].set(values, mode="promise_in_bounds")
