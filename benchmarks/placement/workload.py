"""The paper's synthetic transitions (Fig. 12), smaller in number: capacity and limits scaled so that both regimes appear."""

from __future__ import annotations

from typing import Any

import numpy as np

DIMENSIONS = (128, 1000, 2000, 5000, 10_000, 20_000)
QUICK_DIMENSIONS = (128, 5000, 20_000)
LANES, BATCH, CAPACITY, PARTITIONS, DEVICES = 8, 32, 256, 8, 8
# As in the paper a device holds the buffer through dimension 5,000 and not from 10,000 on.
DEVICE_LIMIT_BYTES = int(1.2 * CAPACITY * (8 * 5000 + 16))
LIMITS = {"device": DEVICE_LIMIT_BYTES}


def rollout(dimension: int, number: int) -> dict[str, Any]:
    """Return one step of ``LANES`` lanes: observation and next observation of ``dimension`` floats and three words."""
    draws = np.random.default_rng(number)
    observation = draws.standard_normal((1, LANES, dimension), np.float32)
    return {
        "observation": observation,
        "next_observation": observation + 1,
        "action": np.full((1, LANES), number % 7, np.int32),
        "reward": draws.standard_normal((1, LANES), np.float32),
        "discount": np.ones((1, LANES), np.float32),
    }
