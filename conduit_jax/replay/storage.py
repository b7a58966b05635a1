"""Storage of one partition: rows of packed records and the large leaves beside them, ``slots = lanes * length`` of each.

A slot is ``lane * length + time``, so one lane's steps are contiguous. Writing and gathering are values (``Storage``):
memory that needs another way of being touched (host memory, say) brings its own functions, and nothing above changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.replay import records
from conduit_jax.replay.piecewise import piecewise
from conduit_jax.replay.reads import read_rows
from conduit_jax.replay.records import RecordLayout
from conduit_jax.replay.window_writes import Arrays, Window, write_steps

Array = jax.Array
PyTree = Any

PACKED_WORDS = 160  # of a piece
FEWEST_ROWS = 4  # of a piece to unpack: a kernel for each leaf takes less time than so many turns of a loop


@partial(jax.tree_util.register_dataclass, data_fields=["rows", "apart"], meta_fields=["layout"])
class Experience:
    """The gigabytes: ``rows`` uint32 ``(slots, words)`` and ``apart``, a tuple of ``(slots, ...)`` leaves; ``layout`` is static."""

    def __init__(self, rows: Array, apart: tuple[Array, ...], layout: RecordLayout):
        self.rows, self.apart, self.layout = rows, apart, layout

    def __repr__(self) -> str:
        arrays = (self.rows, *self.apart)  # or what a tree map has put in their place
        shapes = (f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else repr(leaf) for leaf in arrays)
        return f"Experience({', '.join(shapes)})"


class Storage(NamedTuple):
    """How arrays of slots are touched.

    ``scatter(array, slots, values)`` drops slots out of range; ``gather(array, slots)`` wants them in range.
    ``write_window(arrays, window, values)``, values step by step, ``(steps * lanes, ...)``, where whole windows of all arrays
    are written otherwise than scattered slots; without it they are scattered too.
    """

    scatter: Callable[[Array, Array, Array], Array]
    gather: Callable[[Array, Array], Array]
    write_window: Callable[[Arrays, Window, Arrays], Arrays] | None = None


def _scatter(array: Array, slots: Array, values: Array) -> Array:
    return array.at[slots].set(values, mode="drop", unique_indices=True)


in_device_memory = Storage(_scatter, read_rows, write_steps)


def allocate(layout: RecordLayout, slots: int) -> Experience:
    """Return zeroed storage; call it under ``jit`` (``out_shardings``), or the first donated insert copies all of it."""
    rows = jnp.zeros((slots, layout.words), jnp.uint32)
    return Experience(rows, tuple(jnp.zeros((slots, *leaf.shape), leaf.dtype) for leaf in layout.apart), layout)


def write(
    storage: Storage,
    experience: Experience,
    slots: Array,
    items: PyTree,
    version: Array,
    window: Window | None = None,
) -> Experience:
    """Return ``experience`` with ``items`` ``(n, ...)`` in ``slots`` int32 ``(n,)``; slots out of range are left out.

    ``window`` says that the slots are exactly those of a window, in its order.
    """

    small, apart = records.split(experience.layout, items)
    first = slots if window is None else window.head
    rows = _pack_small(experience.layout, small, version, first, slots.shape[0])

    arrays, values = (experience.rows, *experience.apart), (rows, *apart)
    if window is None or storage.write_window is None:
        arrays = (storage.scatter(array, slots, new) for array, new in zip(arrays, values, strict=True))
    else:
        arrays = storage.write_window(arrays, window, values)
    rows, *apart = arrays
    return Experience(rows, tuple(apart), experience.layout)


def gather(storage: Storage, experience: Experience, slots: Array) -> tuple[PyTree, Array]:
    """Return the items in ``slots`` int32 ``(n,)`` (all in range) and their policy versions uint32 ``(n,)``."""
    rows = storage.gather(experience.rows, slots)
    apart = tuple(storage.gather(array, slots) for array in experience.apart)
    return unpack(experience.layout, rows, apart), records.row_versions(rows)


@partial(jax.jit, static_argnums=(0, 4), inline=True)
def _pack_small(layout: RecordLayout, small: tuple[Array, ...], version: Array, after: Array, count: int) -> Array:
    def few(numbers: Array, *leaves: Array) -> Array:
        versions = jnp.broadcast_to(version.astype(jnp.uint32), (numbers.shape[0], records.VERSION_WORDS))
        return records.pack_small(layout, leaves, versions)

    piece = _rows_a_piece(layout)
    return piecewise(few, after, *small, count=count, piece=piece) if piece else few(jnp.arange(count), *small)


def _rows_a_piece(layout: RecordLayout) -> int:
    """Return how many rows are packed or unpacked at a time; 0 where there is nothing to pack, or too much in one row."""
    small = sum(segment is not None for segment in layout.segments)
    piece = PACKED_WORDS // (layout.words * (small + 1)) if small else 0  # each of their leaves reads or writes rows
    return piece if piece >= 4 else 0


def unpack(layout: RecordLayout, rows: Array, apart: tuple[Array, ...]) -> PyTree:
    """Return ``records.unpack`` of ``rows`` ``(n, words)``, piece by piece."""
    return records.join(layout, _unpack_small(layout, rows), apart)


@partial(jax.jit, static_argnums=0, inline=True)
def _unpack_small(layout: RecordLayout, rows: Array) -> tuple[Array, ...]:
    piece = _rows_a_piece(layout)
    if piece < FEWEST_ROWS:
        return records.unpack_small(layout, rows)
    return piecewise(lambda _, few: records.unpack_small(layout, few), rows, rows, count=rows.shape[0], piece=piece)
