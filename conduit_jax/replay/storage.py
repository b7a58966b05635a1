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

from conduit_jax.replay import records, ring
from conduit_jax.replay.reads import read_rows
from conduit_jax.replay.records import RecordLayout

Array = jax.Array
Arrays = tuple[Array, ...]
PyTree = Any


@partial(jax.tree_util.register_dataclass, data_fields=["rows", "apart"], meta_fields=["layout"])
class Experience:
    """The gigabytes: ``rows`` uint32 ``(slots, words)`` and ``apart``, a tuple of ``(slots, ...)`` leaves; ``layout`` is static."""

    def __init__(self, rows: Array, apart: tuple[Array, ...], layout: RecordLayout):
        self.rows, self.apart, self.layout = rows, apart, layout

    def __repr__(self) -> str:
        arrays = (self.rows, *self.apart)  # or what a tree map has put in their place
        shapes = (f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else repr(leaf) for leaf in arrays)
        return f"Experience({', '.join(shapes)})"


class Window(NamedTuple):
    """The next steps of all ``lanes`` at once, from time ``head`` int32 scalar on, around the end of rings of ``length``."""

    lanes: int
    length: int
    head: Array


def window_slots(window: Window, steps: int) -> Array:
    """Return the slots of a window of ``steps`` a lane, lane-major int32 ``(lanes * steps,)``."""
    times = ring.wrap(window.head, window.length, jnp.arange(steps, dtype=jnp.int32))
    return (jnp.arange(window.lanes, dtype=jnp.int32)[:, None] * window.length + times).reshape(-1)


class Storage(NamedTuple):
    """How arrays of slots are touched.

    ``scatter(array, slots, values)`` drops slots out of range; ``gather(array, slots)`` wants them in range.
    ``write_window(arrays, window, values)``, tuples of both and lane-major values ``(lanes * steps, ...)``, where whole
    windows are written otherwise than scattered slots; without it they are scattered too.
    """

    scatter: Callable[[Array, Array, Array], Array]
    gather: Callable[[Array, Array], Array]
    write_window: Callable[[Arrays, Window, Arrays], Arrays] | None = None


def _scatter(array: Array, slots: Array, values: Array) -> Array:
    return array.at[slots].set(values, mode="drop", unique_indices=True)


in_device_memory = Storage(_scatter, read_rows)


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

    rows, apart = records.pack(experience.layout, items, version)
    arrays, values = (experience.rows, *experience.apart), (rows, *apart)
    if window is None or storage.write_window is None:
        written = tuple(storage.scatter(array, slots, new) for array, new in zip(arrays, values, strict=True))
    else:
        written = storage.write_window(arrays, window, values)
    return Experience(written[0], written[1:], experience.layout)


def gather(storage: Storage, experience: Experience, slots: Array) -> tuple[PyTree, Array]:
    """Return the items in ``slots`` int32 ``(n,)`` (all in range) and their policy versions uint32 ``(n,)``."""
    rows = storage.gather(experience.rows, slots)
    apart = tuple(storage.gather(array, slots) for array in experience.apart)
    return records.unpack(experience.layout, rows, apart), records.row_versions(rows)
