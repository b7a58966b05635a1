"""Small data sets that tests write themselves, and the plain list of transitions each of them holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import h5py
import numpy as np

TERMINATED, TRUNCATED, UNFLAGGED = "terminated", "truncated", "unflagged"


class Move(NamedTuple):
    """A transition as a plain value."""

    pixels: bytes
    state: tuple
    action: int
    reward: float
    terminated: bool
    next_pixels: bytes
    next_state: tuple


def episodes_of(lengths, ends=None, seed=0):
    """Episodes as dicts of arrays: observations one longer than the rest, every reward a number of its own."""
    rng, made, first = np.random.default_rng(seed), [], 0
    for number, length in enumerate(lengths):
        end = (ends or [TERMINATED, TRUNCATED])[number % len(ends or "ab")]
        flags = np.zeros((2, length), bool)
        if length:
            flags[:, -1] = end == TERMINATED, end == TRUNCATED
        observations = {
            "pixels": rng.integers(0, 256, (length + 1, 4, 4, 3), dtype=np.uint8),
            "state": rng.normal(size=(length + 1, 2)).astype(np.float32),
        }
        actions, rewards = rng.integers(0, 9, length), np.arange(first, first + length, dtype=np.float64)
        made.append(SimpleNamespace(observations=observations, actions=actions, rewards=rewards, flags=flags))
        first += length
    return made


def moves_of(episode):
    seen, ended = episode.observations, episode.flags[0]
    at = lambda t: (seen["pixels"][t].tobytes(), tuple(seen["state"][t].tolist()))  # noqa: E731
    steps = range(len(episode.rewards))
    return [Move(*at(t), int(episode.actions[t]), float(episode.rewards[t]), bool(ended[t]), *at(t + 1)) for t in steps]


def write_minari(path, episodes):
    with h5py.File(path, "w") as file:
        for number, episode in enumerate(episodes):
            group = file.create_group(f"episode_{number}")
            for key, value in episode.observations.items():
                group[f"observations/{key}"] = value
            group["actions"], group["rewards"] = episode.actions, episode.rewards
            group["terminations"], group["truncations"] = episode.flags
            group.create_dataset("infos", (0,), h5py.string_dtype())
    return path


def rlds_of(episodes):
    """RLDS's own layout: one step more than transitions, the last one holds what was seen last and is not acted in."""
    return ({"steps": _steps(episode), "episode_metadata": {"file_path": "somewhere"}} for episode in episodes)


def _steps(episode):
    count = len(episode.rewards)
    for t in range(count + 1):
        yield {
            "observation": {key: value[t] for key, value in episode.observations.items()},
            "action": np.int32(episode.actions[t] if t < count else -1),
            "reward": np.float32(episode.rewards[t] if t < count else np.nan),
            "discount": np.float32(t < count),
            "is_first": t == 0,
            "is_last": t == count,
            "is_terminal": t == count and bool(count and episode.flags[0, -1]),
            "language_instruction": b"reach",
        }


def flat_record(count=3, **last):
    """One episode with array observations, t at step t."""
    steps = [
        {
            "observation": np.full(2, t, np.float32),
            "action": np.int32(t),
            "reward": np.float32(10 + t),
            "discount": np.float32(1),
            "is_first": t == 0,
            "is_last": t == count,
            "is_terminal": False,
        }
        for t in range(count + 1)
    ]
    steps[-1] |= last
    return {"steps": steps}
