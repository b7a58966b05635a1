"""Returns and lengths of episodes, counted in numpy as a host actor steps."""

from __future__ import annotations

import numpy as np


class Episodes:
    """The numpy twin of ``EpisodeStatistics``: the same fields, counted in place."""

    def __init__(self, num_lanes: int) -> None:
        self.episode_return = np.zeros(num_lanes, np.float32)
        self.episode_length = np.zeros(num_lanes, np.int32)
        self.last_return = np.zeros(num_lanes, np.float32)
        self.last_length = np.zeros(num_lanes, np.int32)
        self.episodes = np.zeros(num_lanes, np.int32)
        self.return_sum = np.zeros(num_lanes, np.float32)

    def record(self, reward: np.ndarray, ended: np.ndarray) -> None:
        """Count one step of every lane."""
        self.episode_return += reward
        self.episode_length += 1
        self.last_return[ended] = self.episode_return[ended]
        self.last_length[ended] = self.episode_length[ended]
        self.return_sum[ended] += self.episode_return[ended]
        self.episodes += ended
        self.episode_return[ended] = 0
        self.episode_length[ended] = 0
