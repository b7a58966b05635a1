"""What the off-policy examples share and what makes none of them that algorithm: the replay and the plane around it."""

from __future__ import annotations

from typing import Protocol

import conduit_jax as conduit
from conduit_jax.errors import ConfigError, refuse
from conduit_jax.examples.worlds import Ingestion


class ReplaySettings(Protocol):
    """What a replay needs to know of an example's settings."""

    @property
    def seed(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def lanes(self) -> int: ...
    @property
    def rollout_length(self) -> int: ...
    @property
    def iterations(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def updates_per_rollout(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def min_size(self) -> int: ...
    @property
    def sampler(self) -> str: ...
    @property
    def max_staleness(self) -> int: ...
    @property
    def placement(self) -> str: ...
    @property
    def schedule(self) -> str | conduit.Schedule: ...


def check_trains(settings: ReplaySettings, agents: int = 1, held_back: int = 0) -> int:
    """Return the iteration that makes the first updates, from 1; ``ConfigError`` where a run of ``steps`` ends before it.

    ``agents``: lanes that each lane is to the replay; ``held_back``: items that windows hold back.
    """
    unit = settings.lanes * settings.rollout_length
    first = -(-(settings.min_size + held_back) // (unit * agents))
    if settings.iterations < first:
        refuse(
            ConfigError,
            "The run ends before the replay may be sampled: no update would be made.",
            got=f"steps={settings.steps}, min_size={settings.min_size}",
            want=f"steps >= {first * unit}",
        )
    return first


def make_replay_config(settings: ReplaySettings) -> conduit.ReplayConfig:
    """Return the replay: uniform or prioritized."""
    sampler = conduit.Prioritized() if settings.sampler == "prioritized" else conduit.Uniform()
    return conduit.ReplayConfig(capacity=settings.capacity, min_size=settings.min_size, sampler=sampler)


def make_replay_plane(settings: ReplaySettings, ingestion: Ingestion) -> conduit.ExperiencePlane:
    """Return the plane: what ``ingestion`` makes of rollouts in, prioritized or uniform batches out."""
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(
            batch_size=settings.batch_size,
            updates_per_rollout=settings.updates_per_rollout,
            max_staleness=settings.max_staleness,
        ),
        replay=make_replay_config(settings),
        placement=settings.placement,
        schedule=settings.schedule,
        seed=settings.seed,
    )
    plane.register_ingestion(ingestion.hook, init_carry=ingestion.init_carry)
    return plane
