"""Windows of a ring written step by step.

XLA on CPU (jax 0.10.2) computes the index of every row of a scatter, which it counts as operations: 256 rows are enough for
the program to be handed to another thread. In a loop each step is a slice of the ring updated in place, and one lane's steps
are one slice where they end before the ring does: 256 rows of 512 bytes take half the time in two arrays. A ``cond`` on
whether they do copies the array, a loop that runs once or never does not.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.replay import ring
from conduit_jax.replay.in_turns import in_turns
from conduit_jax.replay.piecewise import renewed, zero_of

Array = jax.Array
Arrays = tuple[Array, ...]

STEP_BYTES = 2048  # of one row


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


def write_steps(arrays: Arrays, window: Window, values: Arrays) -> Arrays:
    """Return ``arrays`` ``(slots, ...)`` of device memory with ``values``, step by step ``(steps * lanes, ...)``, in a window."""
    return _write(arrays, window.head, values, window.lanes, window.length)


@partial(jax.jit, static_argnums=(3, 4), inline=True)
def _write(arrays: Arrays, head: Array, values: Arrays, lanes: int, length: int) -> Arrays:
    def at_once(arrays: Arrays, head: Array, values: Arrays) -> Arrays:
        window = Window(lanes, length, head)
        return tuple(scatter_steps(array, window, new) for array, new in zip(arrays, values, strict=True))

    def turns(arrays: Arrays, head: Array, values: Arrays) -> Arrays:
        return write_in_turns(arrays, Window(lanes, length, head), values)

    return in_turns(turns, at_once, arrays, head, values) if values[0].shape[0] else arrays


def write_in_turns(arrays: Arrays, window: Window, values: Arrays) -> Arrays:
    """Write a step of all lanes a turn, one lane's steps in one turn where they end before the ring does.

    One loop writes all arrays: more of them would be ready at once, for which XLA on CPU wakes a thread.
    """
    lanes, length, head = window
    if jnp.issubdtype(values[0].dtype, jnp.integer):  # packed rows are made first, and nothing is ready beside them
        head = head + zero_of(values[0])
    zero, steps = np.int32(0), np.int32(values[0].shape[0] // lanes)  # indices of one dtype, with 64 bits enabled too
    rows = [math.prod(array.shape[1:]) for array in arrays]
    kept = [array.reshape(lanes, length, row) for array, row in zip(arrays, rows, strict=True)]
    new = [value.reshape(steps, lanes, row) for value, row in zip(values, rows, strict=True)]

    def put(own: Array, part: Array, time: Array) -> Array:
        return jax.lax.dynamic_update_slice(own, part.reshape(lanes, -1, own.shape[-1]), (zero, time, zero))

    def step(number: Array, kept: list[Array]) -> list[Array]:
        time = ring.wrap(renewed(head, number), length, number)
        return [
            put(own, jax.lax.dynamic_slice_in_dim(part, number, 1), time) for own, part in zip(kept, new, strict=True)
        ]

    def whole(_: Array, kept: list[Array]) -> list[Array]:
        return [put(own, part, head) for own, part in zip(kept, new, strict=True)]

    done = jnp.zeros((), jnp.int32)
    if lanes == 1:
        fits = head <= length - steps
        kept, done = jax.lax.fori_loop(zero, fits.astype(jnp.int32), whole, kept), jnp.where(fits, steps, zero)
    kept = jax.lax.fori_loop(done, steps, step, kept)
    return tuple(own.reshape(array.shape) for own, array in zip(kept, arrays, strict=True))


def scatter_steps(array: Array, window: Window, values: Array) -> Array:
    """Scatter a window.

    Small rows are scattered as steps of all lanes, 16 times fewer updates from 16 lanes: on CPU 256 rows of 512 bytes take 49 us
    instead of 95, but 256 rows of 12 KB 3.6 ms instead of 0.7 (jax 0.10.2).
    """
    lanes, length, _ = window
    rest, steps = array.shape[1:], values.shape[0] // lanes
    if math.prod(rest) * array.dtype.itemsize > STEP_BYTES:
        return array.at[window_slots(window, steps)].set(values, mode="drop", unique_indices=True)
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
