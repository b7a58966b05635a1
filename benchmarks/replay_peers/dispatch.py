"""The bound under every JAX system's figures: what one call costs beside what it computes.

XLA on CPU runs a program of fewer than about 1000 operations in the caller and hands any other to a thread of its own. A
caller who waits for more than a few microseconds sleeps meanwhile, and both threads have to be woken: time that a replay
written in JAX saves only by counting few operations, and cpprb and numpy do not pay.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_REPEATS, _CALLS = 15, 100
_ITEMS, _ROWS, _WIDTH = 100_000, 256, 128


def _shortest_us(program: Callable[..., Any], *arguments: jax.Array) -> float:
    """Return the microseconds of the shortest of repeated calls of ``program``."""
    compiled, best = jax.jit(program), float("inf")
    jax.block_until_ready(compiled(*arguments))
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for _ in range(_CALLS):
            jax.block_until_ready(compiled(*arguments))
        best = min(best, (time.perf_counter() - start) / _CALLS)
    return best * 1e6


def dispatch_bounds() -> dict[str, float]:
    """Return the shortest calls that run in the caller and that are handed over, in microseconds.

    ``call_*``: of next to nothing. ``read_*``: of 256 rows of 512 bytes.
    """
    values = jnp.arange(2 * 1024, dtype=jnp.float32)
    array = jnp.zeros((_ITEMS, _WIDTH), jnp.float32)
    slots = jnp.asarray(np.random.default_rng(0).integers(0, _ITEMS, _ROWS), jnp.int32)

    def read(array: jax.Array, slots: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.take(array, slots, axis=0, mode="clip"), values[:1]

    def read_and_count(array: jax.Array, slots: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.take(array, slots, axis=0, mode="clip"), values * 1.5

    return {
        "call_inline_us": _shortest_us(lambda values: values[:256] * 1.5, values),
        "call_handed_over_us": _shortest_us(lambda values: values * 1.5, values),
        "read_inline_us": _shortest_us(read, array, slots, values),
        "read_handed_over_us": _shortest_us(read_and_count, array, slots, values),
    }
