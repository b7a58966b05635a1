"""Episodes that know what they are, cut anywhere, and a model in plain Python of which transitions may come back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

ENDS = ("terminated", "truncated", "open")


def observation(episode: int, time: int, shape: tuple[int, ...] = (3,), dtype: str = "float32") -> np.ndarray:
    """Return an observation in whose first two numbers its episode and time stand."""
    value = np.full(shape, 7, dtype)
    value.reshape(-1)[:2] = episode, time
    return value


def reward(episode: int, time: int) -> float:
    return float((episode * 31 + time * 7) % 11) - 5.0


def chunk(
    episode: int,
    start: int,
    stop: int,
    end: str = "open",
    *,
    lookback: int = 0,
    module: str | None = None,
    listed: bool = False,
    **form: Any,
) -> Any:
    """Return the steps from ``start`` to ``stop`` as what RLlib's ``SingleAgentEpisode`` looks like from outside."""
    first = max(0, start - lookback)
    seen = [observation(episode, time, **form) for time in range(first, stop + 1)]
    acted = [np.int64(100 * episode + time) for time in range(first, stop)]
    earned = [reward(episode, time) for time in range(first, stop)]

    def column(values: list[Any]) -> Any:
        data = values if listed else np.array(values)
        return SimpleNamespace(data=data, lookback=start - first)

    return _Episode(
        id_=f"episode {episode}",
        t_started=start,
        observations=column(seen),
        actions=column(acted),
        rewards=column(earned),
        is_terminated=end == "terminated",
        is_truncated=end == "truncated",
        module_id=module,
        steps=stop - start,
    )


class _Episode(SimpleNamespace):
    def __len__(self) -> int:
        return self.steps


class Model:
    """What a ring of ``capacity`` rows holds: rows by their observation, in the order they were first written."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.rows: list[tuple[int, int]] = []
        self.known: dict[int, int] = {}
        self.ends: dict[int, str] = {}

    def add(self, episode: int, start: int, stop: int, end: str) -> None:
        for time in range(start, stop + 1):
            if (episode, time) not in self.rows:
                self.rows.append((episode, time))
        self.known[episode] = stop
        if end != "open":
            self.ends[episode] = end

    @property
    def drawable(self) -> set[tuple[int, int]]:
        return {(episode, time) for episode, time in self.rows[-self.capacity :] if time < self.known[episode]}

    def transition(self, episode: int, time: int, n: int, gamma: float) -> dict[str, Any]:
        """Return the transition of at most ``n`` steps from an episode's ``time``, as far as the episode is known."""
        steps = min(n, self.known[episode] - time)
        ended = time + steps == self.known[episode]
        return {
            "new_obs": (episode, time + steps),
            "actions": 100 * episode + time,
            "rewards": sum(np.float32(gamma**k) * np.float32(reward(episode, time + k)) for k in range(steps)),
            "n_step": steps,
            "terminateds": ended and self.ends.get(episode) == "terminated",
            "truncateds": ended and self.ends.get(episode) == "truncated",
        }
