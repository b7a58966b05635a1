"""What PPO normalizes by running statistics, where it is asked to: the observations its policy sees, the values its network says."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

import conduit_jax as conduit


class Statistics(NamedTuple):
    """Running statistics of observations and of value targets (scalars); ``None`` for what is not normalized."""

    observations: conduit.ObservationStatistics | None = None
    targets: conduit.ObservationStatistics | None = None


class ValueUnit(NamedTuple):
    """A value is ``mean + spread`` times what the network says."""

    mean: jax.Array
    spread: jax.Array


def as_seen(statistics: Statistics, observation: jax.Array) -> jax.Array:
    """Return observations as a policy with those ``statistics`` sees them: normalized where there are any."""
    seen = statistics.observations
    return observation if seen is None else conduit.normalize_observations(seen, observation)


def value_unit(statistics: Statistics) -> ValueUnit | None:
    """Return what the network's values are counted in: mean 0 and spread 1 until targets were seen."""
    targets = statistics.targets
    if targets is None:
        return None
    variance = jnp.where(targets.squares > 0, targets.squares / jnp.maximum(targets.seen, 1), 1)
    return ValueUnit(targets.mean, jnp.sqrt(variance + 1e-8))
