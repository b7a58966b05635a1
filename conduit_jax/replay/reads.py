"""Reads of few rows, on one thread.

XLA on CPU (jax 0.10.2) splits a gather over threads by the size of the array it reads from, not by what it reads: 256 rows
of 48 bytes from a 5 MB array go to two threads, and waking the second costs several times what the rows do. It never splits
what updates a slice of another array in place, so few rows are read as two updates of an array of their size (256 rows of
512 bytes take 16 us instead of 37), in a branch of their own, with which nothing is fused. Many rows gain from threads, and
on other backends an update is a launch more: both are read as they are.

Callers are jitted, inlined where they are traced: called by hand, the choice of a backend would be compiled in every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.replay.piecewise import zero_of

Array = jax.Array

WHOLE_BYTES = 2**17  # arrays whose reads are never split
FEWEST_ROWS = 64  # of a read worth two kernels more
FEW_BYTES = 2**17  # of one leaf: waking a thread takes as long as 256 rows of 512 bytes; at 1 MB two threads win


Gather = Callable[[Array], Array]


def unsplit_read(array: Array, gather: Gather, index: Array) -> Array:
    """Return ``gather(index)``, a row of ``array`` for each entry of ``index`` ``(n, ...)``, ``unsplit`` where ``array`` is large."""
    if array.size * array.dtype.itemsize <= WHOLE_BYTES:
        return gather(index)
    return unsplit(gather, index, index[:1])


def unsplit(function: Callable[[Array], Array], index: Array, unknown: Array) -> Array:
    """Return ``function(index)``, row by row; where it is little, on one thread and computed once for all who use it.

    ``unknown`` is an array of integers that the compiler cannot compute: what is updated where is then not known to it
    either, or it would not be an update.
    """
    rows, count = jax.eval_shape(function, index), index.shape[0]
    if count < FEWEST_ROWS or math.prod(rows.shape) * rows.dtype.itemsize > FEW_BYTES:
        return function(index)

    def in_place(start: Array, index: Array) -> Array:
        half, rest = count // 2, (np.int32(0),) * (len(rows.shape) - 1)
        made = jnp.broadcast_to(start.astype(rows.dtype), rows.shape)
        made = jax.lax.dynamic_update_slice(made, function(index[:half]), (start, *rest))
        return jax.lax.dynamic_update_slice(made, function(index[half:]), (start + np.int32(half), *rest))

    def alone(index: Array, unknown: Array) -> Array:
        start = zero_of(unknown)
        return jax.lax.cond(start == 0, in_place, lambda start, index: jnp.zeros(rows.shape, rows.dtype), start, index)

    return jax.lax.platform_dependent(index, unknown, cpu=alone, default=lambda index, unknown: function(index))


@partial(jax.jit, inline=True)
def read_rows(array: Array, index: Array) -> Array:
    """Return the rows ``index`` int32 ``(n,)``, all in range, of ``array`` ``(slots, ...)`` in device memory."""
    return unsplit_read(array, partial(gather_rows, array), index)


def gather_rows(array: Array, index: Array) -> Array:
    """Return what ``read_rows`` does in one gather, of an ``array`` in any memory."""
    return array.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)
