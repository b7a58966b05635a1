"""What memory allows: ``np.take`` into preallocated arrays at indices drawn ahead, and a slice copy. No buffer at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.replay_peers.workloads import BATCH, KEYS, Workload, in_turn

Call = Callable[[], Any]


class NumpyRoofline:
    """Arrays, and nothing that decides what is read or written."""

    name = "numpy roofline"

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        rows, times = workload.fill_chunks()
        self.arrays = {name: np.concatenate([leaf] * times) for name, leaf in rows.items()}
        self.head = 0

    def add(self, rows: int) -> Call:
        chunk, last = self.workload.rows(rows), self.workload.capacity - rows

        def call() -> None:
            head = self.head if self.head <= last else 0
            for name, array in self.arrays.items():
                array[head : head + rows] = chunk[name]
            self.head = head + rows

        return call

    def sample(self, batches: int) -> Call:
        generator = np.random.default_rng(3)
        where = in_turn([generator.integers(0, self.workload.capacity, BATCH) for _ in range(KEYS)])
        out = [
            {name: np.empty((BATCH, *array.shape[1:]), array.dtype) for name, array in self.arrays.items()}
            for _ in range(batches)
        ]

        def call() -> Any:
            for taken in out:
                slots = where()
                for name, array in self.arrays.items():
                    np.take(array, slots, axis=0, out=taken[name], mode="clip")
            return out

        return call


UNIFORM, PRIORITIZED = (NumpyRoofline,), ()
