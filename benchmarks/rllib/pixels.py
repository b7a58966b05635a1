"""A world that costs next to nothing: frames from a bank, rewards from a table."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

_FRAMES, _EPISODE = 64, 100


class Pixels(gym.Env):
    """Frames ``(size, size, 3)`` of ``dtype`` (both from 0 to 255), two actions or, where ``continuous``, one number."""

    def __init__(self, config: Any):
        size, dtype = config["size"], np.dtype(config["dtype"])
        self._bank = np.random.default_rng(0).integers(0, 256, (_FRAMES, size, size, 3)).astype(dtype)
        high = np.ones(1, np.float32)
        self.observation_space = gym.spaces.Box(0, 255, (size, size, 3), dtype)
        self.action_space = gym.spaces.Box(-high, high) if config["continuous"] else gym.spaces.Discrete(2)
        self._time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self._time = 0
        return self._bank[0].copy(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._time += 1
        frame = self._bank[self._time % _FRAMES].copy()
        return frame, float(self._time % 3), False, self._time == _EPISODE, {}
