"""Pure-JAX environments, and the actors that run policies in them."""

from __future__ import annotations

from conduit_jax.envs.autoreset import AutoResetState, AutoResetStep, autoreset
from conduit_jax.envs.cartpole import make_cartpole
from conduit_jax.envs.core import Environment, EnvironmentSpec, TimeStep
from conduit_jax.envs.mountain_car import make_mountain_car
from conduit_jax.envs.rollout import (
    ActorState,
    EpisodeStatistics,
    RolloutFunctions,
    evaluate,
    make_rollout,
    recent_return,
)
from conduit_jax.errors import check_choice

__all__ = [
    "ENVIRONMENTS",
    "ActorState",
    "AutoResetState",
    "AutoResetStep",
    "Environment",
    "EnvironmentSpec",
    "EpisodeStatistics",
    "RolloutFunctions",
    "TimeStep",
    "autoreset",
    "evaluate",
    "make",
    "make_cartpole",
    "make_mountain_car",
    "make_rollout",
    "recent_return",
]

ENVIRONMENTS = {"cartpole": make_cartpole, "mountain_car": make_mountain_car}


def make(name: str) -> Environment:
    """Return the environment of that name, one of ``ENVIRONMENTS``, with its usual time limit.

    Raises:
        ConfigError: there is no such environment; the message has the nearest name.
    """
    check_choice("environment", name, ENVIRONMENTS)
    return ENVIRONMENTS[name]()
