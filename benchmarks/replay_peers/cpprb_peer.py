"""cpprb: C++ trees and numpy arrays; every sample is a dict of new arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cpprb
import numpy as np

from benchmarks.replay_peers.workloads import BATCH, KEYS, Workload, in_turn, priorities

Call = Callable[[], Any]


class Cpprb:
    """Uniform draws."""

    name = "cpprb"

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.buffer = self.make(workload)
        rows, times = workload.fill_chunks()
        for _ in range(times):
            self.buffer.add(**rows)

    def make(self, workload: Workload) -> Any:
        return cpprb.ReplayBuffer(workload.capacity, self.fields(workload))

    def fields(self, workload: Workload) -> dict[str, Any]:
        return {name: {"shape": shape or 1, "dtype": dtype} for name, (shape, dtype) in workload.fields.items()}

    def add(self, rows: int) -> Call:
        chunk = self.workload.rows(rows)
        return lambda: self.buffer.add(**chunk)

    def sample(self, batches: int) -> Call:
        return lambda: [self.buffer.sample(BATCH) for _ in range(batches)]


class CpprbPrioritized(Cpprb):
    """Draws by priority, with importance weights."""

    name = "cpprb prioritized"

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        slots = np.arange(workload.capacity)
        self.buffer.update_priorities(slots, priorities(workload.capacity))

    def make(self, workload: Workload) -> Any:
        return cpprb.PrioritizedReplayBuffer(workload.capacity, self.fields(workload), alpha=0.6)

    def sample(self, batches: int) -> Call:
        return lambda: [self.buffer.sample(BATCH, beta=0.4) for _ in range(batches)]

    def sample_and_update(self, batches: int) -> Call:
        following = in_turn(np.split(priorities(KEYS * BATCH), KEYS))
        draw = self.sample(batches)

        def call() -> None:
            for sample in draw():
                self.buffer.update_priorities(sample["indexes"], following())

        return call


UNIFORM, PRIORITIZED = (Cpprb,), (CpprbPrioritized,)
