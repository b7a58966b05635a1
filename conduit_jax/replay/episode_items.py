"""Whole episodes as the items of a table: what ``ReplayConfig(items=Episodes(...))`` comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from conduit_jax.config import ReplayConfig, Uniform
from conduit_jax.errors import ConfigError, refuse
from conduit_jax.items import Items
from conduit_jax.replay.episode_batches import Packed, Padded
from conduit_jax.replay.episode_config import ByLength, EpisodesConfig
from conduit_jax.replay.episodes import make_episodes
from conduit_jax.replay.interface import Replay


@dataclass(frozen=True, kw_only=True)
class Episodes(Items):
    """Complete episodes of at most ``max_length`` steps, each drawn as one item.

    ``delivery``: ``Padded()`` or ``Packed(...)``; length buckets are chosen by the host for each batch and used by hand
    (``make_episodes``). ``by_length`` draws an episode with a probability proportional to its length. ``max_episodes``,
    ``overlong`` and ``ended``: see ``EpisodesConfig``.
    """

    noun: ClassVar[str] = "episodes"

    max_length: int
    delivery: Padded | Packed = field(default_factory=Padded)
    by_length: bool = False
    max_episodes: int | None = None
    overlong: str = "drop"
    ended: tuple[str, ...] = ("terminated", "truncated")

    def __post_init__(self) -> None:
        if not isinstance(self.delivery, Padded | Packed):
            fix = "make_episodes(delivery=Buckets(...)) by hand, with draw_bucket"
            want = "Padded() or Packed(...)"
            refuse(ConfigError, "Episodes(delivery=) cannot be told ahead.", got=self.delivery, want=want, fix=fix)
        self.over(1, 1, Uniform())  # refuses what no capacity makes right

    def check(self, config: Any) -> None:
        """Raise ``ConfigError`` for a limiter, which counts no episodes, and for two laws of drawing."""
        if config.limiter is not None:
            fix = "leave ReplayConfig(limiter=) out; min_size counts episodes"
            refuse(
                ConfigError, "Whole episodes have no rate limiter.", got=config.limiter, want="limiter=None", fix=fix
            )
        if self.by_length and not isinstance(config.sampler, Uniform):
            refuse(
                ConfigError, "Episodes have two laws of drawing.", got=f"by_length=True, {config.sampler}", want="one"
            )

    def most_lost(self, steps: int) -> int:
        """Return ``steps``: an episode goes with its first step."""
        return steps

    def over(self, capacity_steps: int, min_episodes: int, sampler: Any) -> EpisodesConfig:
        """Return the configuration of such episodes by hand."""
        return EpisodesConfig(
            capacity_steps=capacity_steps,
            max_length=self.max_length,
            max_episodes=self.max_episodes,
            min_episodes=min_episodes,
            sampler=ByLength() if self.by_length else sampler,
            overlong=self.overlong,
            ended=self.ended,
        )


def make_episode_table(config: ReplayConfig, episodes: Episodes, **shape: Any) -> Replay:
    """Return the replay of ``episodes`` that ``config`` describes; see ``make_episodes``."""
    own = episodes.over(config.capacity, config.min_size, config.sampler)
    return make_episodes(own, delivery=episodes.delivery, **shape)


__all__ = ["Episodes", "make_episode_table"]
