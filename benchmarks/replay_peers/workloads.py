"""What every system is asked to hold: the items, how many, and the rows that are added; all random, all made ahead."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

BATCH = 256
ADD_ROWS = (32, 256)
KEYS = 64  # keys, index sets and priority vectors are made ahead and used in turn

Rows = dict[str, np.ndarray]


class Workload(NamedTuple):
    """``capacity`` transitions with observations of ``shape`` and ``dtype``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    capacity: int

    @property
    def small(self) -> Workload:
        """The same with a fraction of the items, for a smoke run."""
        return self._replace(capacity=2**14 if self.capacity == 2**20 else max(2000, self.capacity // 10))

    @property
    def fields(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of every leaf of one transition."""
        observation = (self.shape, np.dtype(self.dtype))
        scalar = ((), np.dtype(np.float32))
        return {
            "observation": observation,
            "action": ((), np.dtype(np.int32)),
            "reward": scalar,
            "discount": scalar,
            "next_observation": observation,
        }

    @property
    def item_bytes(self) -> int:
        """Bytes of one transition, nothing shared and nothing padded."""
        return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.fields.values())

    def rows(self, count: int, seed: int = 0) -> Rows:
        """Return ``count`` random transitions, leaves ``(count, ...)``."""
        generator = np.random.default_rng(seed)
        made = {}
        for name, (shape, dtype) in self.fields.items():
            if dtype.kind == "f":
                made[name] = generator.standard_normal((count, *shape), np.float32).astype(dtype)
            else:
                made[name] = generator.integers(0, 256, (count, *shape), np.uint8).astype(dtype)
        return made

    def fill_chunks(self) -> tuple[Rows, int]:
        """Return a chunk of rows and how often it is added until the capacity is reached."""
        times = 5 if self.capacity % 5 == 0 else 8  # whole multiples of 16 rows: one peer has 16 lanes
        return self.rows(self.capacity // times, seed=1), times


WORKLOADS = (
    Workload("4 floats", (4,), "float32", 100_000),
    Workload("128 floats", (128,), "float32", 100_000),
    Workload("1000 floats", (1000,), "float32", 10_000),
    Workload("64x64x3 image", (64, 64, 3), "uint8", 10_000),
)
PRIORITIZED = Workload("4 floats, prioritized", (4,), "float32", 2**20)


def priorities(count: int, seed: int = 2) -> np.ndarray:
    """Return ``count`` positive priorities float32, spread as TD errors are."""
    return np.random.default_rng(seed).lognormal(0.0, 1.0, count).astype(np.float32)


def in_turn(values: Any) -> Any:
    """Return a function that yields ``values`` one after the other, for ever."""
    state = [0]

    def following() -> Any:
        state[0] = (state[0] + 1) % len(values)
        return values[state[0]]

    return following
