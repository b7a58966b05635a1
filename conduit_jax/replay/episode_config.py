"""What a user chooses of a replay of whole episodes."""

from __future__ import annotations

from dataclasses import dataclass, field

from conduit_jax.config import Prioritized, Uniform
from conduit_jax.errors import ConfigError, check_choice, check_integer, refuse
from conduit_jax.replay import paths


@dataclass(frozen=True, kw_only=True)
class ByLength:
    """Draw an episode with probability length / sum of lengths: every stored step of a complete episode alike."""


@dataclass(frozen=True, kw_only=True)
class EpisodesConfig:
    """How many steps of experience are kept, and which of their complete episodes are drawn.

    ``capacity_steps`` is over all lanes and partitions. An episode of more than ``max_length`` steps is dropped and counted,
    or with ``overlong="split"`` kept as items of that length and a shorter last one. ``max_episodes`` bounds the index,
    which takes some 20 bytes an entry; unless given there is one entry a step, more than ever needed. ``min_episodes`` have
    to be complete before anything is drawn. ``ended``: paths of bools that say that a step was its episode's last.
    """

    capacity_steps: int
    max_length: int
    max_episodes: int | None = None
    min_episodes: int = 1
    sampler: Uniform | Prioritized | ByLength = field(default_factory=Uniform)
    overlong: str = "drop"
    ended: tuple[str, ...] = ("terminated", "truncated")

    def __post_init__(self) -> None:
        for name in ("capacity_steps", "max_length", "min_episodes"):
            check_integer(f"EpisodesConfig({name}=)", getattr(self, name), 1)
        if self.max_episodes is not None:
            check_integer("EpisodesConfig(max_episodes=)", self.max_episodes, 1)
        check_choice("EpisodesConfig(overlong=)", self.overlong, ("drop", "split"))
        paths.check_paths("EpisodesConfig(ended=)", self.ended)
        if not isinstance(self.sampler, Uniform | Prioritized | ByLength):
            wanted = "conduit.Uniform(), conduit.Prioritized() or ByLength()"
            refuse(ConfigError, "Unknown sampler.", got=repr(self.sampler), want=wanted)
