"""What actors of worlds on the host share, in numpy: returns and lengths of episodes, the frames a policy sees, what is saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from conduit_jax.adapters.gymnasium_spaces import environment_spec

if TYPE_CHECKING:
    from conduit_jax.envs import EnvironmentSpec, EpisodeStatistics


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


class Frames:
    """The last ``stack`` frames of every lane, the newest last; before an episode's first frame stands that frame."""

    def __init__(self, first: np.ndarray, stack: int) -> None:
        self._kept = None if stack == 1 else np.repeat(np.asarray(first)[:, None], stack, axis=1)
        self._now = first

    def push(self, frame: np.ndarray, begun: np.ndarray) -> None:
        """Add what each lane sees next, ``(lanes, ...)``; where an episode has ``begun`` it is the only frame there is."""
        self._now = frame
        if self._kept is not None:
            self._kept[:, :-1] = self._kept[:, 1:]
            self._kept[:, -1] = frame
            self._kept[begun] = np.asarray(frame)[begun][:, None]

    def stacked(self, dtype: np.dtype) -> np.ndarray:
        """Return a copy, ``(lanes, stack, ...)``, or ``(lanes, ...)`` where frames are not stacked."""
        return np.array(self._now if self._kept is None else self._kept, dtype)


class HostActor(ABC):
    """What every actor on the host tells of its lanes and saves; a world of its own kind says how all lanes begin anew.

    It has ``observation_shape`` and ``observation_dtype`` of one lane, what its ``actions`` are, and ``max_steps``, the time
    limit or ``None``.
    """

    observation_shape: tuple[int, ...]
    observation_dtype: np.dtype
    actions: Any
    max_steps: int | None = None
    _seed: int
    _episodes: Episodes

    @property
    def spec(self) -> EnvironmentSpec:
        """What a policy sees of one lane, and its limits, as the pure-JAX environments give them."""
        return environment_spec(self._seen_shape, self.observation_dtype, self.actions, self.max_steps)

    @property
    def statistics(self) -> EpisodeStatistics:
        """Returns and lengths of each lane's episodes, numpy ``(lanes,)``, copied: the actor goes on counting."""
        return self._episodes.statistics()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: statistics, and the seed to go on from; the worlds themselves cannot be saved."""
        return {"seed": self._seed + SEEDS_APART, "episodes": self._episodes.kept()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin new episodes in all lanes, other ones than before, and go on counting."""
        self._seed = int(state["seed"])
        self._reset_all()
        self._episodes.restore(state["episodes"])

    @property
    def _seen_shape(self) -> tuple[int, ...]:
        return self.observation_shape

    @abstractmethod
    def _reset_all(self) -> None:
        """Begin an episode in every lane, seeded from ``_seed`` on."""
