"""Meta-World's robot tasks as lanes of a ``GymnasiumActor``: ``conduit-jax train sac --env metaworld:reach-v3``.

Nothing of Meta-World is imported until a lane is made by name. Every episode's goal is one of the 50 of the task's benchmark
(MT1), drawn anew at each reset; the observation shows it. The real package runs MuJoCo on the host.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

from conduit_jax.adapters.gymnasium_lanes import Lane
from conduit_jax.adapters.optional import required
from conduit_jax.errors import ConfigError, check_choice, refuse

__all__ = ["metaworld_lane"]

PIXELS = "pixels"
IMAGE_SIZE = 128  # 48 KB an observation, as in the paper
DRAW_TIMEOUT_S = 120
GOALS_SEED = 0  # of the benchmark's 50 goals: the same in every lane and process


def metaworld_lane(name: str) -> Lane:
    """Return how a lane of task ``name`` (``"reach-v3"``) is built; ``"reach-v3:pixels"`` sees 128 x 128 x 3 uint8 images.

    Raises:
        ConfigError: Meta-World is missing, has no such task (with the nearest name), or pixels were asked for and there is
            no OpenGL to draw them with.
    """
    metaworld = required("metaworld", "Meta-World", "metaworld")
    task, _, seen = name.partition(":")
    check_choice("Meta-World task", task, metaworld.ALL_V3_ENVIRONMENTS)
    if seen:
        check_choice("Meta-World observation", seen, (PIXELS,))
        _check_drawable(task)
    return Lane(functools.partial(_make, task, seen == PIXELS), _benchmark(task)[0].max_path_length)


@functools.cache
def _benchmark(task: str) -> tuple[Any, list[Any]]:
    """Return the class of the task's environment and its tasks, one a goal."""
    metaworld = required("metaworld", "Meta-World", "metaworld")
    benchmark = metaworld.MT1(task, seed=GOALS_SEED)
    return benchmark.train_classes[task], list(benchmark.train_tasks)


def _make(task: str, pixels: bool) -> Any:
    """Return one environment; a worker process builds its own, with the same goals."""
    import numpy as np
    from gymnasium import Wrapper
    from gymnasium.wrappers import AddRenderObservation

    build, tasks = _benchmark(task)

    class DrawnGoals(Wrapper):
        """Draws the goal of each episode; equal seeds draw equal goals."""

        draws = np.random.default_rng(0)

        def reset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[Any, dict[str, Any]]:
            if seed is not None:
                self.draws = np.random.default_rng(seed)
            self.unwrapped.set_task(tasks[self.draws.integers(len(tasks))])  # type: ignore[attr-defined]
            return self.env.reset(seed=seed, options=options)

    if not pixels:
        return DrawnGoals(build())
    drawn = build(render_mode="rgb_array", width=IMAGE_SIZE, height=IMAGE_SIZE, camera_name="corner2")
    return AddRenderObservation(DrawnGoals(drawn), render_only=True)


def draw_once(task: str) -> None:
    """Draw one picture, or print why not and end the process with 1, before MuJoCo tears a half built context down."""
    try:
        _make(task, pixels=True).reset(seed=0)
    except Exception as error:  # MuJoCo's own FatalError among others: which one depends on what of OpenGL is missing
        print(error, flush=True)
        os._exit(1)


def _check_drawable(task: str) -> None:
    """Raise ``ConfigError`` unless a picture of the task can be drawn here; tried in a process of its own, as drivers may abort."""
    program = f"from conduit_jax.adapters.metaworld import draw_once; draw_once({task!r})"
    command = [sys.executable, "-W", "ignore", "-c", program]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DRAW_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        reason = f"no picture within {DRAW_TIMEOUT_S} s"
    else:
        if not done.returncode:
            return
        reason = (done.stdout or done.stderr or f"exit status {done.returncode}").strip().splitlines()[-1]
    refuse(
        ConfigError,
        f"Pixels of metaworld:{task} cannot be drawn here.",
        got=reason,
        want="an OpenGL that MuJoCo can use without a screen",
        fix="set MUJOCO_GL=egl (a GPU's driver) or MUJOCO_GL=osmesa (libosmesa6), or take states: leave ':pixels' out",
    )
