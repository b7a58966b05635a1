"""Names of worlds, ``source:name``, and what stands behind each: a pure-JAX ``Environment``, or an actor on the host.

Importing this module needs neither JAX nor any of the packages it knows.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from conduit_jax.adapters.gymnasium_lanes import Lane, lane_maker, registered
from conduit_jax.errors import ConfigError, check_choice, refuse

if TYPE_CHECKING:
    from conduit_jax.envs import Environment, EnvironmentSpec

PURE_SOURCES = ("jax", "gymnax", "brax")
HOST_SOURCES = ("gymnasium", "metaworld", "pettingzoo")


def parse_environment_name(name: str) -> tuple[str, str]:
    """Return ``("gymnasium", id)`` for ``"gymnasium:CartPole-v1"`` and ``("jax", name)`` for ``"cartpole"``.

    ``"jax:cartpole"`` is the long form of ``"cartpole"``. A Gymnasium id may name the module that registers it:
    ``"gymnasium:ale_py:ALE/Pong-v5"``. Whether a name of another source exists is found out when the world is made.

    Raises:
        ConfigError: there is no such source or environment (with the nearest name, where there is one), or Gymnasium is missing.
    """
    source, colon, rest = name.partition(":")
    if not colon:
        source, rest = "jax", name
    check_choice("environment source", source, (*PURE_SOURCES, *HOST_SOURCES))
    if source == "gymnasium":
        registered(rest)
    elif source == "jax":
        _check_jax_name(rest)
    return source, rest


def without_source(name: str) -> str:
    """Return ``name`` without its source: the word by which an example's preset for that world is found, whoever runs it."""
    return name.partition(":")[2] or name


def make_pure(name: str, **options: Any) -> Environment:
    """Return the pure-JAX world of that name: this package's, gymnax's or brax's; ``options`` are its constructor's.

    Raises:
        ConfigError: no such world, one that runs on the host, or its package is missing (the message names the extra).
    """
    from conduit_jax import envs

    source, rest = parse_environment_name(name)
    if source not in PURE_SOURCES:
        want = f"{', '.join(envs.ENVIRONMENTS)}, gymnax:<id> or brax:<name>"
        refuse(ConfigError, "This needs a world in pure JAX.", got=name, want=want)
    if source == "gymnax":
        from conduit_jax.adapters.gymnax import make_gymnax

        return make_gymnax(rest, **options)
    if source == "brax":
        from conduit_jax.adapters.brax import make_brax

        return make_brax(rest, **options)
    return envs.make(rest, **options)


def make_actor(name: str, num_lanes: int, length: int, seed: int = 0) -> Any:
    """Return an actor of the world of that name that runs on the host: a ``GymnasiumActor`` or a ``ParallelActor``.

    Raises:
        ConfigError: no such world, or its package is missing (the message names the extra).
    """
    source, rest = parse_environment_name(name)
    if source == "pettingzoo":
        from conduit_jax.adapters.pettingzoo import ParallelActor, make_parallel

        make_parallel(rest)().close()  # a wrong name is told before anything else
        return ParallelActor(make_parallel(rest), num_lanes, length, seed)
    from conduit_jax.adapters.gymnasium import GymnasiumActor

    actor = functools.partial(GymnasiumActor, rest, num_lanes, length, seed=seed)
    if source == "metaworld":
        from conduit_jax.adapters.metaworld import metaworld_lane

        return actor(lane=metaworld_lane(rest))
    return actor(lane=gymnasium_lane(rest))


def gymnasium_lane(env_id: str) -> Lane:
    """Return how a lane of a Gymnasium id is built for training: Atari games see four grey frames, others what they show."""
    if env_id.startswith("ALE/"):
        from conduit_jax.adapters.atari import STACK, atari_lane

        return atari_lane(env_id, stack=STACK)
    return lane_maker(env_id)


def find_spec(name: str) -> EnvironmentSpec:
    """Return the spec of the world of that name, wherever it runs; raises as ``make_pure`` and ``make_actor``."""
    if parse_environment_name(name)[0] in PURE_SOURCES:
        return make_pure(name).spec
    actor = make_actor(name, 1, 1)
    try:
        return actor.spec
    finally:
        actor.close()


def _check_jax_name(name: str) -> None:
    """Raise ``ConfigError`` unless ``name`` is a pure-JAX environment; one that reads as a Gymnasium id is told so."""
    from conduit_jax.envs import ENVIRONMENTS

    if name not in ENVIRONMENTS and re.search(r"-v\d+$", name):
        wanted = ", ".join(sorted(ENVIRONMENTS))
        refuse(
            ConfigError, "Unknown environment.", got=repr(name), want=wanted, fix=f"did you mean 'gymnasium:{name}'?"
        )
    check_choice("environment", name, ENVIRONMENTS)
