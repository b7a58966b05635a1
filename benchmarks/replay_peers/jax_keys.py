"""Keys for the JAX systems, made ahead: each call gets one ``(2,)`` key, or ``(g, 2)`` where it draws g batches."""

from __future__ import annotations

from typing import Any

import jax

from benchmarks.replay_peers.workloads import KEYS, in_turn


def keys_in_turn(batches: int) -> Any:
    """Return a function that yields raw threefry keys, which every system takes at least as fast as typed ones."""
    if batches == 1:
        keys = [jax.random.key_data(jax.random.key(number, impl="threefry2x32")) for number in range(KEYS)]
    else:
        keys = [
            jax.random.key_data(jax.random.split(jax.random.key(number, impl="threefry2x32"), batches))
            for number in range(KEYS)
        ]
    return in_turn(jax.block_until_ready(keys))
