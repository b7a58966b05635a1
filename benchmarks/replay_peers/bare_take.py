"""What XLA allows: one jitted gather a leaf at indices given, and one update of a slice a leaf. No buffer at all.

No replay written in JAX can take less, but by reading or writing fewer leaves (ours packs small ones) or on fewer threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.replay_peers.workloads import BATCH, KEYS, Workload, in_turn

Call = Callable[[], Any]


@jax.jit
def _take(arrays: dict[str, jax.Array], slots: jax.Array) -> dict[str, jax.Array]:
    return {name: jnp.take(array, slots, axis=0, mode="clip") for name, array in arrays.items()}


@partial(jax.jit, donate_argnums=0)
def _write(arrays: dict[str, jax.Array], chunk: dict[str, jax.Array], head: Any) -> dict[str, jax.Array]:
    return {name: jax.lax.dynamic_update_slice_in_dim(array, chunk[name], head, 0) for name, array in arrays.items()}


class BareTake:
    """Items that stand alone."""

    name = "bare take"
    length = 1
    kept = staticmethod(lambda leaves: leaves)

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        rows, times = workload.fill_chunks()
        made = {name: jnp.concatenate([jnp.asarray(leaf)] * times) for name, leaf in self.kept(rows).items()}
        self.arrays, self.head = jax.block_until_ready(made), 0

    def add(self, rows: int) -> Call:
        chunk = {name: jnp.asarray(leaf) for name, leaf in self.kept(self.workload.rows(rows)).items()}
        last = self.workload.capacity - rows

        def call() -> None:
            head = self.head if self.head <= last else 0
            self.arrays = jax.block_until_ready(_write(self.arrays, chunk, head))
            self.head = head + rows

        return call

    def slots(self, generator: np.random.Generator) -> jax.Array:
        """Return ``BATCH`` rows, or as many runs of ``length`` as a batch has of them."""
        begin = generator.integers(0, self.workload.capacity - self.length, self.items)
        slots = begin if self.length == 1 else begin[:, None] + np.arange(self.length)
        return jnp.asarray(slots, jnp.int32)

    @property
    def items(self) -> int:
        return BATCH

    def sample(self, batches: int) -> Call:
        generator = np.random.default_rng(3)
        where = in_turn([[self.slots(generator) for _ in range(batches)] for _ in range(KEYS)])
        several = jax.jit(lambda arrays, slots: [_take(arrays, one) for one in slots])
        return lambda: jax.block_until_ready(several(self.arrays, where()))


class BareTakePairs(BareTake):
    """Two neighbouring steps an item."""

    name = "bare take pairs"
    length = 2
    kept = staticmethod(lambda leaves: {name: leaf for name, leaf in leaves.items() if name != "next_observation"})


class BareTakeWindows(BareTake):
    """Runs of 16 steps."""

    name = "bare take windows"
    length = 16

    @property
    def items(self) -> int:
        return BATCH // self.length


UNIFORM, PRIORITIZED = (BareTake, BareTakePairs, BareTakeWindows), ()
