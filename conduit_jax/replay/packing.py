"""Several short episodes in one row: first fit over a drawn sequence, inside ``jit`` with static shapes."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Packing(NamedTuple):
    """Where each of ``n`` episodes went: int32 ``row`` and ``begin`` ``(n,)``, and bool ``placed``, False where none had room."""

    row: Array
    begin: Array
    placed: Array


class Rows(NamedTuple):
    """What stands in every place of the rows, int32 ``(rows, row_length)``.

    ``segment``: 1, 2, … in the order of the row, 0 on padding. ``position``: the step of its episode, 0 on padding.
    ``episode``: which of the packed episodes, -1 on padding.
    """

    segment: Array
    position: Array
    episode: Array


def first_fit(lengths: Array, rows: int, row_length: int) -> Packing:
    """Put episodes of ``lengths`` int32 ``(n,)``, in this order, each into the first row that has room for it.

    Length 0 is placed nowhere. An episode that fits nowhere is left out, and later, shorter ones may still be placed.
    """

    def place(used: Array, length: Array) -> tuple[Array, Packing]:
        fits = used <= row_length - length
        row = jnp.argmax(fits).astype(jnp.int32)
        placed = jnp.any(fits) & (length > 0)
        begin = used[row]
        return used.at[row].add(jnp.where(placed, length, 0)), Packing(row, begin, placed)

    return jax.lax.scan(place, jnp.zeros((rows,), jnp.int32), lengths)[1]


def lay_out(packing: Packing, lengths: Array, rows: int, row_length: int) -> Rows:
    """Return the contents of the rows. Within a row later episodes stand further right, so numbers only grow along it."""
    count = lengths.shape[0]
    number = jnp.arange(count, dtype=jnp.int32)
    row = jnp.where(packing.placed, packing.row, rows + number)  # out of range
    marks = jnp.full((rows, row_length), -1, jnp.int32)
    marks = marks.at[row, packing.begin].set(number, mode="drop", unique_indices=True)
    episode = jax.lax.cummax(marks, axis=1)
    segment = jnp.cumsum(marks >= 0, axis=1, dtype=jnp.int32)
    own = jnp.maximum(episode, 0)
    position = jnp.arange(row_length, dtype=jnp.int32) - packing.begin[own]
    filled = (episode >= 0) & (position < lengths[own])
    return Rows(jnp.where(filled, segment, 0), jnp.where(filled, position, 0), jnp.where(filled, episode, -1))
