"""brax's uniform queue: every item raveled to one row of one dtype; a full queue is rolled at every insert.

Only the buffer's module is loaded, so ``pip install --no-deps brax`` will do: the package's own ``__init__`` wants a
physics engine.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.replay_peers.workloads import BATCH, Workload


def _load() -> ModuleType:
    spec = importlib.util.find_spec("brax")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'brax'", name="brax")
    root = Path(next(iter(spec.submodule_search_locations)))
    for name, folder in (("brax", root), ("brax.training", root / "training")):
        if name not in sys.modules:
            package = ModuleType(name)
            package.__path__ = [str(folder)]
            sys.modules[name] = package
    return importlib.import_module("brax.training.replay_buffers")


replay_buffers = _load()
Call = Callable[[], Any]


class BraxQueue:
    """``UniformSamplingQueue``, its state donated to both functions as brax's own training loops do."""

    name = "brax queue"

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        item = {name: jnp.zeros(shape, dtype) for name, (shape, dtype) in workload.fields.items()}
        self.queue = replay_buffers.UniformSamplingQueue(workload.capacity, item, BATCH)
        self.state = jax.jit(self.queue.init)(jax.random.PRNGKey(0))
        self.insert = jax.jit(self.queue.insert, donate_argnums=0)
        rows, times = workload.fill_chunks()
        for _ in range(times):
            self.state = jax.block_until_ready(self.insert(self.state, rows))

    def add(self, rows: int) -> Call:
        chunk = jax.block_until_ready({name: jnp.asarray(leaf) for name, leaf in self.workload.rows(rows).items()})

        def call() -> None:
            self.state = jax.block_until_ready(self.insert(self.state, chunk))

        return call

    def sample(self, batches: int) -> Call:
        def several(state: Any) -> tuple[Any, list[Any]]:
            samples = []
            for _ in range(batches):
                state, sample = self.queue.sample(state)
                samples.append(sample)
            return state, samples

        draw = jax.jit(several, donate_argnums=0)

        def call() -> Any:
            self.state, samples = draw(self.state)
            return jax.block_until_ready(samples)

        return call


UNIFORM, PRIORITIZED = (BraxQueue,), ()
