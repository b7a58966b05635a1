"""Brax's and MJX's environments as this package's pure worlds: ``conduit-jax train sac --env brax:inverted_pendulum``.

Nothing of brax is imported until an environment is asked for by name; ``from_brax`` takes any object with brax's ``reset(key)``
and ``step(state, action)``, both giving a state with ``obs``, ``reward``, ``done`` and ``info``, as MuJoCo Playground's have.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.adapters.optional import required
from conduit_jax.adapters.pure_worlds import check_one_array, scalar, settled, spec_of
from conduit_jax.envs.core import Environment, EnvironmentSpec, TimeStep
from conduit_jax.errors import ConfigError, check_choice, check_integer, refuse
from conduit_jax.types import Array, Key, PyTree

__all__ = ["BraxState", "from_brax", "make_brax"]

EPISODE_STEPS = 1000  # brax's own default for the length of an episode


class BraxState(NamedTuple):
    """Brax's own state, and ``steps`` (int32) of this episode."""

    environment: PyTree
    steps: Array


def make_brax(name: str, max_steps: int = EPISODE_STEPS, **options: Any) -> Environment:
    """Return brax's environment ``name``, or ``name:backend`` (``"ant:spring"``); ``options`` go to its constructor.

    Raises:
        ConfigError: brax is missing, has no such environment or backend (with the nearest name).
    """
    brax = required("brax.envs", "brax", "brax")
    name, _, backend = name.partition(":")
    known = getattr(brax, "_envs", None)
    if known is not None:
        check_choice("brax environment", name, known)
    if backend:
        check_choice("brax backend", backend, ("generalized", "spring", "positional", "mjx"))
        options["backend"] = backend
    return from_brax(brax.get_environment(name, **options), max_steps=max_steps, name=name)


def from_brax(
    env: Any, *, max_steps: int = EPISODE_STEPS, name: str | None = None, observation_key: str | None = None
) -> Environment:
    """Return ``env`` as an ``Environment``; actions are a box of [-1, 1], as brax's and Playground's are.

    ``done`` terminates; the time limit truncates. An ``EpisodeWrapper`` around ``env`` is understood: where its
    ``info["truncation"]`` is set, ``done`` was a time limit.

    Args:
        env: one environment of one lane, not wrapped to reset itself and not vmapped.
        max_steps: steps after which an episode is truncated.
        name: what errors and reports call it.
        observation_key: of observations that are a dict, the key to keep (Playground's ``"state"``).

    Raises:
        ConfigError: ``max_steps`` is no positive integer, ``env`` resets itself, has lanes, or observations that are not one array.
    """
    check_integer("max_steps", max_steps, 1)
    name = name or type(getattr(env, "unwrapped", env)).__name__
    held = spec_of(jax.eval_shape(env.reset, jax.random.key(0)))
    _check_one_lane(name, held)

    def looked_at(state: Any) -> Any:
        return state.obs if observation_key is None else state.obs[observation_key]

    if observation_key is not None and not (isinstance(held.obs, dict) and observation_key in held.obs):
        got = ", ".join(held.obs) if isinstance(held.obs, dict) else "one array"
        refuse(ConfigError, f"{name} has no such observation.", got=got, want=observation_key)
    check_one_array(name, looked_at(held), 'from_brax(env, observation_key="state")')

    def reset(key: Key) -> tuple[BraxState, PyTree]:
        state = settled(env.reset(key), held)
        return BraxState(state, jnp.zeros((), jnp.int32)), looked_at(state)

    def step(state: BraxState, action: Array) -> tuple[BraxState, TimeStep]:
        inner, steps = settled(env.step(state.environment, action), held), state.steps + 1
        cut = scalar(inner.info.get("truncation", 0), jnp.bool_)
        terminated = scalar(inner.done, jnp.bool_) & ~cut
        given = TimeStep(looked_at(inner), scalar(inner.reward, jnp.float32), terminated, cut | (steps >= max_steps))
        return BraxState(inner, steps), given

    action = jax.ShapeDtypeStruct((int(env.action_size),), jnp.float32)
    spec = EnvironmentSpec(looked_at(held), None, action, max_steps, -1.0, 1.0)
    return Environment(name, spec, reset, step)


def _check_one_lane(name: str, state: Any) -> None:
    """Refuse environments that have lanes, or reset themselves: the observation that ended an episode would be lost."""
    if state.done.shape != ():
        what = f"{name} has lanes of its own."
        refuse(ConfigError, what, got=f"done {state.done.shape}", want="one lane", fix="leave VmapWrapper out")
    if any(str(key).startswith("first_") for key in state.info):
        fix = "leave AutoResetWrapper out: brax.envs.get_environment(...), not brax.envs.create(...)"
        refuse(ConfigError, f"{name} resets itself already.", want="an environment that ends its episodes", fix=fix)
