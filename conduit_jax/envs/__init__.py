"""Pure-JAX environments, and the actors that run policies in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conduit_jax.envs.acrobot import make_acrobot
from conduit_jax.envs.agents import agent_spec, agents_as_lanes, has_agents, stack_agents
from conduit_jax.envs.autoreset import AutoResetState, AutoResetStep, autoreset
from conduit_jax.envs.cartpole import make_cartpole
from conduit_jax.envs.core import Environment, EnvironmentSpec, TimeStep, continuous_actions, discrete_actions
from conduit_jax.envs.mountain_car import make_mountain_car
from conduit_jax.envs.mountain_car_continuous import make_mountain_car_continuous
from conduit_jax.envs.multi_agent_cartpole import make_multi_agent_cartpole
from conduit_jax.envs.pendulum import make_pendulum
from conduit_jax.envs.reach import make_reach, make_reach_128, make_reach_256, make_reach_continuous
from conduit_jax.envs.rollout import (
    ActorState,
    EpisodeStatistics,
    RolloutFunctions,
    evaluate,
    make_rollout,
    recent_return,
)
from conduit_jax.envs.synthetic import make_synthetic
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
    "agent_spec",
    "agents_as_lanes",
    "autoreset",
    "continuous_actions",
    "discrete_actions",
    "evaluate",
    "has_agents",
    "make",
    "make_acrobot",
    "make_cartpole",
    "make_mountain_car",
    "make_mountain_car_continuous",
    "make_multi_agent_cartpole",
    "make_pendulum",
    "make_reach",
    "make_reach_continuous",
    "make_rollout",
    "make_synthetic",
    "recent_return",
    "stack_agents",
]

ENVIRONMENTS: dict[str, Callable[..., Environment]] = {
    "acrobot": make_acrobot,
    "cartpole": make_cartpole,
    "mountain_car": make_mountain_car,
    "mountain_car_continuous": make_mountain_car_continuous,
    "multi_agent_cartpole": make_multi_agent_cartpole,
    "pendulum": make_pendulum,
    "reach_128": make_reach_128,
    "reach_256": make_reach_256,
    "reach_continuous": make_reach_continuous,
    "synthetic": make_synthetic,
}


def make(name: str, **options: Any) -> Environment:
    """Return the environment of that name, one of ``ENVIRONMENTS``; ``options`` are its constructor's (``max_steps=``, ...).

    Raises:
        ConfigError: there is no such environment (the message has the nearest name), or an option is out of range.
    """
    check_choice("environment", name, ENVIRONMENTS)
    return ENVIRONMENTS[name](**options)
