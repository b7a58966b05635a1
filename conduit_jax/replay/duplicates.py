"""Equal slots in one call: the last one counts, whatever the backend does with a scatter that names a slot twice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

BEYOND = np.int32(2**31 - 1)  # out of range of every table: scatters with mode="drop" leave it out


def keep_last(slots: Array) -> Array:
    """Return ``slots`` int32 ``(n,)`` with all but the last of equal ones moved to ``BEYOND``."""
    if slots.shape[0] < 2:
        return slots
    order = jnp.argsort(slots, stable=True)
    ordered = slots[order]
    repeated = jnp.concatenate([ordered[:-1] == ordered[1:], jnp.zeros((1,), bool)])
    return slots.at[order].set(jnp.where(repeated, BEYOND, ordered), unique_indices=True)


def in_order(slots: Array) -> Array:
    """Return ``slots`` such that scattering with them leaves the last of equal ones in place.

    XLA on CPU (jax 0.10.2) writes a scatter's rows in order, so there nothing needs doing; elsewhere the order is open.
    """
    if slots.shape[0] < 2:
        return slots
    return jax.lax.platform_dependent(slots, cpu=lambda own: own, default=keep_last)


def occurrences(slots: Array) -> Array:
    """Return how many of ``slots[: i + 1]`` equal ``slots[i]``, int32 ``(n,)``."""
    order = jnp.argsort(slots, stable=True)
    ordered = slots[order]
    number = jnp.arange(slots.shape[0], dtype=jnp.int32)
    begins = jnp.concatenate([jnp.ones((1,), bool), ordered[1:] != ordered[:-1]])
    start = jax.lax.cummax(jnp.where(begins, number, 0))
    return jnp.zeros_like(slots).at[order].set(number - start + 1, unique_indices=True)
