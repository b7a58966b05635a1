"""Vector environments: all that touches Gymnasium's own interface, in one place.

Worker processes import this module to build their lane, so it stays free of JAX.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from conduit_jax.adapters.optional import required
from conduit_jax.errors import ConduitError, ConfigError, refuse


class Lane(NamedTuple):
    """How one lane is built: ``make() -> gymnasium.Env``, which worker processes can unpickle, and its time limit in steps.

    Options of ``make`` (``render_mode=``) are Gymnasium's.
    """

    make: Callable[..., Any]
    max_steps: int | None


def lane_maker(env_id: str) -> Lane:
    """Return how a registered id is built; ``ConfigError`` as ``registered``."""
    return Lane(functools.partial(_make_lane, env_id), registered(env_id).max_episode_steps)


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
        elif name.startswith("ALE/"):
            required("ale_py", "ale-py", "atari")  # importing it registers its games
        return gymnasium.spec(name)
    except (gymnasium.error.Error, ImportError) as error:
        fix = str(error)
    refuse(ConfigError, "Unknown Gymnasium environment.", got=repr(env_id), want="a registered id", fix=fix)


def make_lanes(make: Callable[[], Any], num_lanes: int, workers: int) -> Any:
    """Return a vector environment of ``num_lanes`` lanes that reset within the step that ended an episode.

    ``workers=0`` steps them here. Otherwise each lane has a process, and ``workers`` of them step at a time. Buffers
    are not copied: what ``reset`` and ``step`` return is overwritten by the next call.
    """
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

    makers = [make] * num_lanes
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


def _make_lane(env_id: str, **options: Any) -> Any:
    registered(env_id)  # in a worker, too, the module that registers it has to be imported
    return _import_gymnasium().make(env_id.rpartition(":")[2], **options)


def _import_gymnasium() -> ModuleType:
    return required("gymnasium", "Gymnasium", "gymnasium")
