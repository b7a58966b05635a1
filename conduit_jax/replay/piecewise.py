"""What is computed item by item, a few items at a time, so that a program runs where it is called.

XLA on CPU (jax 0.10.2) runs a program in the calling thread where it counts fewer than 1000 operations in it (reads, writes
and copies count nothing) and hands every other to a thread of its own. A caller who waits sleeps meanwhile, and to wake one
thread and then the other takes 30 to 60 us on two cores, which is what 256 rows of 1 KB take. It counts the body of a loop
once, however often it runs, so items are drawn and described in a loop over pieces of them: 64 turns of four random words
take 1 us more than one kernel of 256, and a draw alone in its program, with its reads, is never handed over.

Callers are jitted, inlined where they are traced: called by hand, a loop would be compiled in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.replay import records

Array = jax.Array
PyTree = Any

COUNTED = 1000  # operations of a program that is handed over
DRAWN, DERIVED = 4, 4  # items a piece: random words take 130 operations each, index arithmetic about 10
MOST_TURNS = 1024  # more gain from one kernel, or from threads


def piecewise(
    function: Callable[..., PyTree], after: Array, *arrays: Array, count: int, piece: int = DERIVED
) -> PyTree:
    """Return ``function(numbers, *arrays)`` of ``numbers`` int32 from 0 to ``count``, ``piece`` of them at a time on CPU.

    ``arrays`` and results are ``(count, ...)``; a row of the results must depend on its number and the same row of ``arrays``
    alone. All of it waits for ``after``, an array of 32-bit integers: XLA on CPU wakes a thread where much is ready at once.
    """

    def at_once(after: Array, *arrays: Array) -> PyTree:
        return function(jnp.arange(count, dtype=jnp.int32), *arrays)

    def pieces(after: Array, *arrays: Array) -> PyTree:
        """Small floats go through the loop as integers: XLA on CPU slices and updates them through float32 (see ``on_bits``)."""
        zero, arrays = zero_of(after), tuple(_as_bits(array) for array in arrays)

        def turn(number: Array, made: PyTree) -> PyTree:
            start = jnp.minimum(number * np.int32(piece), np.int32(count - piece))  # the last piece may repeat a few
            parts = (jax.lax.dynamic_slice_in_dim(array, start, piece) for array in arrays)
            whole = (_as_values(part, own.dtype) for part, own in zip(parts, given, strict=True))
            new = jax.tree.map(_as_bits, function(start + jnp.arange(piece, dtype=jnp.int32), *whole))
            return jax.tree.map(
                lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, start, 0), made, new
            )

        empty = jax.tree.map(lambda leaf: jnp.broadcast_to(zero.astype(_stored(leaf.dtype)), leaf.shape), shapes)
        made = jax.lax.fori_loop(zero, np.int32(-(-count // piece)), turn, empty)
        return jax.tree.map(lambda leaf, own: _as_values(leaf, own.dtype), made, shapes)

    if not piece < count <= piece * MOST_TURNS:
        return at_once(after, *arrays)
    given, shapes = arrays, jax.eval_shape(at_once, after, *arrays)
    return jax.lax.platform_dependent(after, *arrays, cpu=pieces, default=at_once)


def _stored(dtype: Any) -> Any:
    return records.carrier(dtype) if records.carries(dtype) else dtype


def _as_bits(array: Array) -> Array:
    return jax.lax.bitcast_convert_type(array, _stored(array.dtype)) if records.carries(array.dtype) else array


def _as_values(array: Array, dtype: Any) -> Array:
    return jax.lax.bitcast_convert_type(array, dtype) if records.carries(dtype) else array


def renewed(tree: PyTree, number: Array) -> PyTree:
    """Return ``tree`` of integers as it is, for a function of ``number`` that computes with it anew in every piece.

    What does not change from one turn to the next XLA computes before the loop, in kernels of their own, all of them ready
    at the same time.
    """
    zero = zero_of(number)
    return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), tree)


def zero_of(unknown: Array) -> Array:
    """Return an int32 0 that waits for the first of ``unknown``, an array of 32-bit integers, as far as XLA can tell."""
    if not unknown.size:
        return jnp.zeros((), jnp.int32)
    first = unknown.reshape(-1)[0]
    return (jax.lax.population_count(first) >> 6).astype(jnp.int32)
