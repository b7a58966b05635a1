"""Storage of one partition: rows of packed records and the large leaves beside them, ``slots = lanes * length`` of each.

A slot is ``lane * length + time``, so one lane's steps are contiguous. Writing and gathering are values (``Storage``):
memory that needs another way of being touched (host memory, say) brings its own functions, and nothing above changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.replay import records, ring
from conduit_jax.replay.reads import read_rows
from conduit_jax.replay.records import RecordLayout

Array = jax.Array
PyTree = Any

STEP_BYTES = 2048  # of one row


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
    """Return the slots of a window of ``steps`` a lane, step by step, int32 ``(steps * lanes,)``."""
    times = window_times(window, steps)
    return (times[:, None] + jnp.arange(window.lanes, dtype=jnp.int32) * window.length).reshape(-1)


def window_times(window: Window, steps: int) -> Array:
    """Return where in their rings the steps of a window stand, int32 ``(steps,)``."""
    return ring.wrap(window.head, window.length, jnp.arange(steps, dtype=jnp.int32))


class Storage(NamedTuple):
    """How arrays of slots are touched.

    ``scatter(array, slots, values)`` drops slots out of range; ``gather(array, slots)`` wants them in range.
    ``write_window(array, window, values)``, values step by step, ``(steps * lanes, ...)``, where whole windows are written
    otherwise than scattered slots; without it they are scattered too.
    """

    scatter: Callable[[Array, Array, Array], Array]
    gather: Callable[[Array, Array], Array]
    write_window: Callable[[Array, Window, Array], Array] | None = None


def _scatter(array: Array, slots: Array, values: Array) -> Array:
    return array.at[slots].set(values, mode="drop", unique_indices=True)


def write_steps(array: Array, window: Window, values: Array) -> Array:
    """Return ``array`` with ``values``, step by step, in a window.

    Small rows are scattered as steps of all lanes, 16 times fewer updates from 16 lanes: on CPU 256 rows of 512 bytes take 49 us
    instead of 95, but 256 rows of 12 KB 3.6 ms instead of 0.7 (jax 0.10.2).
    """
    lanes, length, _ = window
    rest, steps = array.shape[1:], values.shape[0] // lanes
    if math.prod(rest) * array.dtype.itemsize > STEP_BYTES:
        return _scatter(array, window_slots(window, steps), values)
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, array.ndim + 1)),
        inserted_window_dims=(1,),
        scatter_dims_to_operand_dims=(1,),
    )
    written = jax.lax.scatter(
        array.reshape(lanes, length, *rest),
        window_times(window, steps)[:, None],
        values.reshape(steps, lanes, *rest),
        dimensions,
        unique_indices=True,
        mode="promise_in_bounds",
    )
    return written.reshape(array.shape)


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

    rows, apart = records.pack(experience.layout, items, version)

    def put(array: Array, new: Array) -> Array:
        if window is None or storage.write_window is None:
            return storage.scatter(array, slots, new)
        return storage.write_window(array, window, new)

    written = tuple(map(put, experience.apart, apart))
    return Experience(put(experience.rows, rows), written, experience.layout)


def gather(storage: Storage, experience: Experience, slots: Array) -> tuple[PyTree, Array]:
    """Return the items in ``slots`` int32 ``(n,)`` (all in range) and their policy versions uint32 ``(n,)``."""
    rows = storage.gather(experience.rows, slots)
    apart = tuple(storage.gather(array, slots) for array in experience.apart)
    return records.unpack(experience.layout, rows, apart), records.row_versions(rows)
