"""The ring that a JAX user writes in an evening: a dict of arrays, ``randint``, one gather and one write a leaf."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.replay_peers.jax_keys import keys_in_turn
from benchmarks.replay_peers.workloads import BATCH, Workload

Call = Callable[[], Any]


@partial(jax.jit, donate_argnums=0)
def write(state: Any, rows: Any) -> Any:
    arrays, head, size = state
    capacity, count = arrays["reward"].shape[0], rows["reward"].shape[0]
    where = (head + jnp.arange(count)) % capacity
    arrays = {name: array.at[where].set(rows[name], unique_indices=True) for name, array in arrays.items()}
    return arrays, (head + count) % capacity, jnp.minimum(size + count, capacity)


def read(state: Any, key: jax.Array) -> Any:
    arrays, _, size = state
    where = jax.random.randint(key, (BATCH,), 0, size)
    return {name: array[where] for name, array in arrays.items()}


class Naive:
    """A uniform ring with no record of what was drawn."""

    name = "naive jax ring"

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        fields, zero = workload.fields, jnp.zeros((), jnp.int32)
        arrays = {name: jnp.zeros((workload.capacity, *shape), dtype) for name, (shape, dtype) in fields.items()}
        self.state = jax.jit(lambda tree: tree)((arrays, zero, zero))
        rows, times = workload.fill_chunks()
        for _ in range(times):
            self.state = jax.block_until_ready(write(self.state, rows))

    def add(self, rows: int) -> Call:
        chunk = jax.block_until_ready({name: jnp.asarray(leaf) for name, leaf in self.workload.rows(rows).items()})

        def call() -> None:
            self.state = jax.block_until_ready(write(self.state, chunk))

        return call

    def sample(self, batches: int) -> Call:
        key = keys_in_turn(batches)

        @jax.jit
        def draw(state: Any, keys: jax.Array) -> Any:
            return read(state, keys) if batches == 1 else [read(state, keys[number]) for number in range(batches)]

        return lambda: jax.block_until_ready(draw(self.state, key()))


UNIFORM, PRIORITIZED = (Naive,), ()
