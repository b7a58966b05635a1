"""Returns and lengths of episodes, counted in numpy as a host actor steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from conduit_jax.envs import EpisodeStatistics


SEEDS_APART = 1_000_003  # between the seeds of a run and of the one that resumes it: more than there are lanes


class Episodes:
    """The numpy twin of ``EpisodeStatistics``: the same fields, counted in place."""

    def __init__(self, num_lanes: int) -> None:
        self.episode_return = np.zeros(num_lanes, np.float32)
        self.episode_length = np.zeros(num_lanes, np.int32)
        self.last_return = np.zeros(num_lanes, np.float32)
        self.last_length = np.zeros(num_lanes, np.int32)
        self.episodes = np.zeros(num_lanes, np.int32)
        self.return_sum = np.zeros(num_lanes, np.float32)

    def record(self, reward: np.ndarray, ended: np.ndarray, played: np.ndarray | bool = True) -> None:
        """Count one step of every lane, or of those that ``played``."""
        self.episode_return += reward
        self.episode_length += played
        self.last_return[ended] = self.episode_return[ended]
        self.last_length[ended] = self.episode_length[ended]
        self.return_sum[ended] += self.episode_return[ended]
        self.episodes += ended
        self.episode_return[ended] = 0
        self.episode_length[ended] = 0

    def statistics(self) -> EpisodeStatistics:
        """Return a copy as the pure worlds' statistics: the actor goes on counting."""
        from conduit_jax.envs import EpisodeStatistics

        return EpisodeStatistics(**self.kept())

    def kept(self) -> dict[str, Any]:
        """Return a copy of every field, for a checkpoint."""
        return {name: array.copy() for name, array in vars(self).items()}

    def restore(self, kept: dict[str, Any]) -> None:
        """Go on counting from what was kept; episodes that were running then are not counted: they were not saved."""
        for name, value in kept.items():
            begun = name in ("episode_return", "episode_length")
            setattr(self, name, np.zeros_like(value) if begun else np.array(value))
