"""The bound under every JAX system's figures: what one call costs that computes next to nothing.

XLA on CPU runs a program of fewer than about 1000 operations in the caller and hands any other to a thread of its own; the
way there and back is time that no replay written in JAX can save, and cpprb and numpy do not pay.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp

_REPEATS, _CALLS = 15, 100


def _shortest_us(operations: int) -> float:
    """Return the microseconds of the shortest of repeated calls of a program of one kernel over 256 numbers."""

    def program(values: jax.Array) -> jax.Array:
        for _ in range(operations):
            values = values * 1.5 + 0.5
        return values

    compiled, values, best = jax.jit(program), jnp.arange(256, dtype=jnp.float32), float("inf")
    jax.block_until_ready(compiled(values))
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for _ in range(_CALLS):
            jax.block_until_ready(compiled(values))
        best = min(best, (time.perf_counter() - start) / _CALLS)
    return best * 1e6


def dispatch_bounds() -> dict[str, float]:
    """Return the shortest call that runs in the caller and the shortest that is handed over, in microseconds."""
    return {"call_inline_us": _shortest_us(1), "call_handed_over_us": _shortest_us(8)}
