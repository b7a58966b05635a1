"""Names, and the vector environments behind them: all that touches Gymnasium's own interface, in one place.

Worker processes import this module to build their lane, so it stays free of JAX.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import re
from types import ModuleType
from typing import Any

import numpy as np

from conduit_jax.errors import ConduitError, ConfigError, check_choice, refuse


def parse_environment_name(name: str) -> tuple[str, str]:
    """Return ``("gymnasium", id)`` for ``"gymnasium:CartPole-v1"`` and ``("jax", name)`` for ``"cartpole"``.

    ``"jax:cartpole"`` is the long form of ``"cartpole"``. A Gymnasium id may name the module that registers it:
    ``"gymnasium:ale_py:ALE/Pong-v5"``.

    Raises:
        ConfigError: there is no such environment (with the nearest name, where there is one), or Gymnasium is missing.
    """
    source, colon, rest = name.partition(":")
    if not colon:
        source, rest = "jax", name
    check_choice("environment source", source, ("jax", "gymnasium"))
    if source == "gymnasium":
        registered(rest)
    else:
        _check_jax_name(rest)
    return source, rest


def registered(env_id: str) -> Any:
    """Return Gymnasium's ``EnvSpec`` of ``env_id``, importing the module it names, if it names one.

    Raises:
        ConfigError: no such environment (the fix is Gymnasium's own), no such module, or Gymnasium is missing.
    """
    gymnasium = _import_gymnasium()
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gymnasium.spec(name)
    except (gymnasium.error.Error, ImportError) as error:
        fix = str(error)
    refuse(ConfigError, "Unknown Gymnasium environment.", got=repr(env_id), want="a registered id", fix=fix)


def make_lanes(env_id: str, num_lanes: int, workers: int) -> Any:
    """Return a vector environment of ``num_lanes`` lanes that reset within the step that ended an episode.

    ``workers=0`` steps them here. Otherwise each lane has a process, and ``workers`` of them step at a time. Buffers
    are not copied: what ``reset`` and ``step`` return is overwritten by the next call.
    """
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

    makers = [functools.partial(_make_lane, env_id)] * num_lanes
    if not workers:
        return SyncVectorEnv(makers, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    # Named only where it limits anything: Gymnasium knows it since 1.4.
    limit: dict[str, Any] = {"max_concurrency": workers} if workers < num_lanes else {}
    return AsyncVectorEnv(makers, copy=False, context="spawn", autoreset_mode=AutoresetMode.SAME_STEP, **limit)


def step_lanes(lanes: Any, action: np.ndarray, timeout_s: float) -> tuple:
    """Step ``lanes`` and return Gymnasium's five values, waiting at most ``timeout_s`` where there are workers.

    Raises:
        ConduitError: a worker did not answer in time; all of them have been ended.
    """
    if not hasattr(lanes, "step_async"):
        return lanes.step(action)
    lanes.step_async(action)
    try:
        return lanes.step_wait(timeout=timeout_s)
    except multiprocessing.TimeoutError:
        lanes.close(terminate=True)
    refuse(ConduitError, "A worker did not answer.", want=f"a step within {timeout_s} s", fix="raise timeout_s=")


def close_lanes(lanes: Any) -> None:
    """End the environments of ``lanes``, by force where a worker is gone already."""
    try:
        lanes.close()
    except (EOFError, OSError):
        lanes.close(terminate=True)


def _make_lane(env_id: str) -> Any:
    return _import_gymnasium().make(env_id)


def _import_gymnasium() -> ModuleType:
    try:
        return importlib.import_module("gymnasium")
    except ImportError:
        refuse(ConfigError, "Gymnasium is not installed.", fix="pip install 'conduit_jax[gymnasium]'")


def _check_jax_name(name: str) -> None:
    """Raise ``ConfigError`` unless ``name`` is a pure-JAX environment; one that reads as a Gymnasium id is told so."""
    from conduit_jax.envs import ENVIRONMENTS

    if name not in ENVIRONMENTS and re.search(r"-v\d+$", name):
        wanted = ", ".join(sorted(ENVIRONMENTS))
        refuse(
            ConfigError, "Unknown environment.", got=repr(name), want=wanted, fix=f"did you mean 'gymnasium:{name}'?"
        )
    check_choice("environment", name, ENVIRONMENTS)
