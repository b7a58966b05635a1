"""What is measured apart from training: what a wait costs, and how much of the path contends with the learner."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import jax
import numpy as np

from conduit_jax.schedule.latency import contention
from conduit_jax.sharding.mesh import single_device_mesh

PyTree = Any
_ROUNDS = 30


def measure_wake(device: Any) -> float:
    """Return the seconds a blocked call costs beyond dispatch and work: the least a wait takes until the host goes on."""
    with jax.set_mesh(single_device_mesh(device)):  # whatever mesh the caller computes in
        square = jax.device_put(np.ones((8, 8), np.float32), device)
        program = jax.jit(lambda value: value @ value)  # with a product, so that the CPU runs it asynchronously
        jax.block_until_ready(program(square))
        waits = []
        for _ in range(_ROUNDS):
            result = program(square)
            start = time.perf_counter()
            jax.block_until_ready(result)
            waits.append(time.perf_counter() - start)
    return statistics.median(waits)


def devices_of(tree: PyTree) -> set[Any]:
    """Return the devices the arrays of ``tree`` are on."""
    return {device for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array) for device in leaf.devices()}


def contention_between(learner_devices: set[Any], path_devices: set[Any]) -> float:
    """Return how much of the path occupies what the learner computes with: all on its devices; on CPUs, what cores lack."""
    shared = bool(learner_devices & path_devices)
    on_cpu = any(device.platform == "cpu" for device in path_devices)
    return contention(1.0, 1.0, (os.cpu_count() or 1) if on_cpu else 2.0, same_device=shared)
