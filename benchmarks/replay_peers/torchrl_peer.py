"""TorchRL on one thread: its plain buffer over tensors in memory and over a memory map.

Its prioritized sampler needs a C++ extension that the wheel for this torch cannot load, so it is reported, not timed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, ReplayBuffer

from benchmarks.replay_peers.workloads import BATCH, KEYS, Rows, Workload, in_turn, priorities

Call = Callable[[], Any]
torch.set_num_threads(1)


def as_tensors(rows: Rows) -> TensorDict:
    """Return rows as one tensordict."""
    tensors: dict[str, Any] = {name: torch.from_numpy(leaf) for name, leaf in rows.items()}
    return TensorDict(tensors, batch_size=[len(rows["reward"])])


class TorchrlTensor:
    """Tensors in memory."""

    name = "torchrl tensor"

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.buffer = ReplayBuffer(storage=self.storage(workload), batch_size=BATCH, **self.options(workload))
        rows, times = workload.fill_chunks()
        for _ in range(times):
            self.buffer.extend(as_tensors(rows))

    def storage(self, workload: Workload) -> Any:
        return LazyTensorStorage(workload.capacity)

    def options(self, workload: Workload) -> dict[str, Any]:
        return {}

    def add(self, rows: int) -> Call:
        chunk = as_tensors(self.workload.rows(rows))
        return lambda: self.buffer.extend(chunk)

    def sample(self, batches: int) -> Call:
        return lambda: [self.buffer.sample() for _ in range(batches)]


class TorchrlMemmap(TorchrlTensor):
    """Tensors in a memory-mapped file."""

    name = "torchrl memmap"

    def storage(self, workload: Workload) -> Any:
        self.folder = tempfile.TemporaryDirectory(prefix="replay_peers_")
        return LazyMemmapStorage(workload.capacity, scratch_dir=self.folder.name)


class TorchrlPrioritized(TorchrlTensor):
    """Draws by priority."""

    name = "torchrl prioritized"

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        slots = torch.arange(workload.capacity)
        self.buffer.update_priority(slots, torch.from_numpy(priorities(workload.capacity)))

    def options(self, workload: Workload) -> dict[str, Any]:
        return {"sampler": PrioritizedSampler(workload.capacity, alpha=0.6, beta=0.4)}

    def sample_and_update(self, batches: int) -> Call:
        following = in_turn(torch.from_numpy(priorities(KEYS * BATCH)).split(BATCH))

        def call() -> None:
            for _, info in [self.buffer.sample(return_info=True) for _ in range(batches)]:
                self.buffer.update_priority(info["index"], following())

        return call


UNIFORM, PRIORITIZED = (TorchrlTensor, TorchrlMemmap), (TorchrlPrioritized,)
