"""Reads of few rows, on one thread.

XLA on CPU (jax 0.10.2) splits a gather over threads by the size of the array it reads from, not by what it reads: 256 rows
of 48 bytes from a 5 MB array go to two threads, and waking the second costs several times what the rows do. What a loop
writes into its stacked output is never split, so few rows are read in a loop over a few equal blocks (a count that no small
number divides is read as it is). Many rows gain from threads, and on other backends a loop costs a launch an iteration:
both are read as they are.

Callers are jitted, inlined where they are traced: called by hand, a loop would be compiled anew in every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax

Array = jax.Array

WHOLE_BYTES = 2**17  # arrays whose reads are never split
FEWEST_ROWS = 64  # of a read worth a loop: an insert of 32 items into a tree takes four times as long with loops
FEW_BYTES = 2**16  # one leaf of 256 rows: at 128 KB two threads are as fast as one, at 1 MB they win


Gather = Callable[[Array], Array]
Read = Callable[[Array, Gather, Array], Array]


def as_it_is(array: Array, gather: Gather, index: Array) -> Array:
    """Return ``gather(index)``, which reads one row of ``array`` for each entry of ``index`` ``(n, ...)``."""
    return gather(index)


def unsplit_read(array: Array, gather: Gather, index: Array) -> Array:
    """Return ``gather(index)`` as ``as_it_is`` does, ``unsplit`` where ``array`` is large."""
    if array.size * array.dtype.itemsize <= WHOLE_BYTES:
        return gather(index)
    return unsplit(gather, index)


def unsplit(function: Callable[[Array], Array], index: Array) -> Array:
    """Return ``function(index)``, row by row; where it is little, on one thread and computed once for all who use it."""
    rows, count = jax.eval_shape(function, index), index.shape[0]
    blocks = next((number for number in (2, 3, 5, 7) if count % number == 0), 1)
    if count < FEWEST_ROWS or blocks == 1 or math.prod(rows.shape) * rows.dtype.itemsize > FEW_BYTES:
        return function(index)

    def in_blocks(index: Array) -> Array:
        made = jax.lax.map(function, index.reshape(blocks, count // blocks, *index.shape[1:]))
        return made.reshape(rows.shape)

    return jax.lax.platform_dependent(index, cpu=in_blocks, default=function)


@partial(jax.jit, inline=True)
def read_rows(array: Array, index: Array) -> Array:
    """Return the rows ``index`` int32 ``(n,)``, all in range, of ``array`` ``(slots, ...)``."""
    return unsplit_read(
        array, lambda index: array.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False), index
    )
