"""Windows written as runs of contiguous rows instead of row by row.

XLA on CPU makes a scatter a loop over its rows that reads each one before it writes it: 256 rows of 512 bytes in two
arrays take 85 us, runs of 32 rows 50 us (jax 0.10.2). Other backends scatter in parallel, and keep doing so.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from conduit_jax.replay import ring

Array = jax.Array
Arrays = tuple[Array, ...]

RUN = 32  # rows a write moves; windows of fewer than two runs are scattered


class Window(NamedTuple):
    """The next steps of all ``lanes`` at once, from time ``head`` int32 scalar on, around the end of rings of ``length``."""

    lanes: int
    length: int
    head: Array


def window_slots(window: Window, steps: int) -> Array:
    """Return the slots of a window of ``steps`` a lane, lane-major int32 ``(lanes * steps,)``."""
    times = ring.wrap(window.head, window.length, jnp.arange(steps, dtype=jnp.int32))
    return (jnp.arange(window.lanes, dtype=jnp.int32)[:, None] * window.length + times).reshape(-1)


def write_window(arrays: Arrays, window: Window, values: Arrays) -> Arrays:
    """Return ``arrays`` ``(slots, ...)`` with lane-major ``values`` ``(lanes * steps, ...)`` in the window's slots.

    Donated arrays stay in place. Under ``vmap`` it scatters: the number of runs depends on where the ring ends, and a
    batched loop of unknown length would copy the arrays.
    """
    steps = values[0].shape[0] // window.lanes

    def scatter(arrays: Arrays, head: Array, values: Arrays) -> Arrays:
        slots = window_slots(window._replace(head=head), steps)
        return tuple(
            array.at[slots].set(rows, mode="drop", unique_indices=True)
            for array, rows in zip(arrays, values, strict=True)
        )

    def runs(arrays: Arrays, head: Array, values: Arrays) -> Arrays:
        return _write_runs(arrays, window._replace(head=head), values)

    @custom_vmap
    def write(arrays: Arrays, head: Array, values: Arrays) -> Arrays:
        return jax.lax.platform_dependent(arrays, head, values, cpu=runs, default=scatter)

    @write.def_vmap
    def _(size: int, batched: list[Any], *operands: Any) -> tuple[Arrays, Any]:
        axes = jax.tree.map(lambda one: 0 if one else None, batched)
        written = jax.vmap(scatter, axes, axis_size=size)(*operands)
        return written, jax.tree.map(lambda _: True, written)

    return (write if steps >= 2 * RUN else scatter)(arrays, window.head, values)


def _write_runs(arrays: Arrays, window: Window, values: Arrays) -> Arrays:
    """Write what ``_moves`` lists. Its one table keeps the program short: XLA on CPU (jax 0.10.2) runs a program of more
    than ten kernels on several threads, and waking one takes longer than the whole insert.
    """
    steps = values[0].shape[0] // window.lanes
    table, singles, runs = _moves(window, steps)

    def move(kept: Arrays, number: Array, rows: int) -> Arrays:
        source, target = table[0, number], table[1, number]
        return tuple(_put(array, target, _take(new, source, rows)) for array, new in zip(kept, values, strict=True))

    def remaining(carry: tuple[Array, Arrays]) -> Array:
        return carry[0] < table[0, -1]

    def single(carry: tuple[Array, Arrays]) -> tuple[Array, Arrays]:
        return carry[0] + 1, move(carry[1], carry[0], 1)

    _, arrays = jax.lax.while_loop(remaining, single, (jnp.int32(0), arrays))
    return jax.lax.fori_loop(singles, singles + runs, lambda number, kept: move(kept, number, RUN), arrays)


def _moves(window: Window, steps: int) -> tuple[Array, int, int]:
    """Return ``(table, singles, runs)``: sources and targets int32 ``(2, singles + runs + 1)``, single rows before runs.

    Every lane's steps before the end of its ring and those behind it are two sides. A side of fewer than ``RUN`` steps
    goes row by row; the table's last entry counts those rows, 0 where no side is that short (two never are: ``steps >=
    2 * RUN``). A longer side goes in runs of which the last begins early. Moves left over repeat others: rows may be
    written twice.
    """
    lanes, length, head = window
    before = jnp.minimum(jnp.int32(steps), length - head)
    behind = steps - before
    early, late = before < RUN, behind < RUN  # which side is short
    singles, runs = lanes * (RUN - 1), lanes * (-(-steps // RUN) + 1)  # a run more: either side ends with its own
    kind, number = np.indices((2, singles + runs + 1), np.int32)
    single = number < singles  # all of this is known when it is traced
    lane = np.where(single, number // (RUN - 1), (number - singles) // (runs // lanes))
    row, piece = number % (RUN - 1), (number - singles) % (runs // lanes)

    short = jnp.where(early, jnp.minimum(row, jnp.maximum(before - 1, 0)), before + jnp.minimum(row, behind - 1))
    first = jnp.where(early, 0, (before + (RUN - 1)) // RUN)
    run = jnp.where(
        late | (piece < first),
        jnp.minimum(piece * RUN, before - RUN),
        before + jnp.minimum((piece - first) * RUN, behind - RUN),
    )
    source = jnp.where(single, short, run)
    target = lane * length + jnp.where(source < before, head + source, source - before)
    count = jnp.where((early & (before > 0)) | (late & (behind > 0)), singles, 0)
    moves = jnp.where(kind == 0, lane * steps + source, target)
    return jnp.where(number < singles + runs, moves, count), singles, runs


def _take(values: Array, start: Array, rows: int) -> Array:
    return jax.lax.dynamic_slice(values, (start, *_zeros(values)), (rows, *values.shape[1:]))


def _put(array: Array, start: Array, rows: Array) -> Array:
    return jax.lax.dynamic_update_slice(array, rows, (start, *_zeros(array)))


def _zeros(array: Array) -> tuple[np.int32, ...]:
    return (np.int32(0),) * (array.ndim - 1)
