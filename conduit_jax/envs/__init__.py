"""Pure-JAX environments, and the actors that run policies in them."""

from __future__ import annotations

from conduit_jax.envs.acrobot import make_acrobot
from conduit_jax.envs.autoreset import AutoResetState, AutoResetStep, autoreset
from conduit_jax.envs.cartpole import make_cartpole
from conduit_jax.envs.core import Environment, EnvironmentSpec, TimeStep, discrete_actions
from conduit_jax.envs.mountain_car import make_mountain_car
from conduit_jax.envs.mountain_car_continuous import make_mountain_car_continuous
from conduit_jax.envs.pendulum import make_pendulum
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
    "discrete_actions",
    "evaluate",
    "make",
    "make_acrobot",
    "make_cartpole",
    "make_mountain_car",
    "make_mountain_car_continuous",
    "make_pendulum",
    "make_rollout",
    "recent_return",
]

ENVIRONMENTS = {
    "acrobot": make_acrobot,
    "cartpole": make_cartpole,
    "mountain_car": make_mountain_car,
    "mountain_car_continuous": make_mountain_car_continuous,
    "pendulum": make_pendulum,
}


def make(name: str) -> Environment:
    """Return the environment of that name, one of ``ENVIRONMENTS``, with its usual time limit.

    Raises:
        ConfigError: there is no such environment; the message has the nearest name.
    """
    check_choice("environment", name, ENVIRONMENTS)
    return ENVIRONMENTS[name]()
