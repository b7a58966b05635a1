"""Random delays between a plane and its devices: a run must deliver the same bits whatever the timing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.plane import ExperiencePlane
from conduit_jax.testing.shadow import shadow

_CALLS = ("push", "pull", "update_priorities", "flush")
_PROGRAMS = (
    "ingest",
    "ingest_group",
    "deliver",
    "deliver_group",
    "update_priorities",
    "batch_to_learner",
    "to_placement",
)
_ITERATION_PROGRAMS = ("_ingest", "_finalize", "_permute", "_gather")


@contextmanager
def delayed(
    plane: ExperiencePlane, *, pause: Callable[[float], object], seed: int = 0, longest_s: float = 0.002
) -> Iterator[None]:
    """Delay ``plane`` at random inside the block: before its calls, between its programs, and on its devices.

    Host delays make the device wait for the plane; device delays (idle work queued in front of a program) make the plane
    run ahead of the device. Half of all places are delayed. Programs of tables built inside the block are not delayed,
    only the calls to them.

    Args:
        plane: the plane, built or not; used by one thread while it is entered and left.
        pause: what waits, ``time.sleep``; a value, so that a test may also only record.
        seed: of the delays, which are the same for the same sequence of calls.
        longest_s: the longest host delay, seconds.
    """
    delay = _Delay(np.random.default_rng(seed), pause, longest_s)
    undo = [shadow(plane, name, delay.before(getattr(plane, name))) for name in _CALLS]
    for built in plane._tables.values():
        pipeline: Any = built.pipeline
        if hasattr(pipeline, "_programs"):
            programs = pipeline._programs
            slow = {name: delay.before(getattr(programs, name)) for name in _PROGRAMS}
            undo.append(shadow(pipeline, "_programs", programs._replace(**slow)))
        else:
            undo += [shadow(pipeline, name, delay.before(getattr(pipeline, name))) for name in _ITERATION_PROGRAMS]
    try:
        yield
    finally:
        for restore in reversed(undo):
            restore()


class _Delay:
    def __init__(self, draws: np.random.Generator, pause: Callable[[float], object], longest_s: float):
        self._draws, self._pause, self._longest_s = draws, pause, longest_s
        self._idle_work = jax.jit(_idle_work)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` behind a delay."""

        def slow(*arguments: Any, **named: Any) -> Any:
            place = self._draws.integers(4)
            if place == 0:
                self._pause(float(self._draws.uniform(0, self._longest_s)))
            elif place == 1:
                self._occupy(arguments)
            return function(*arguments, **named)

        return slow

    def _occupy(self, arguments: Any) -> None:
        """Queue work on the devices of the first array among ``arguments``."""
        arrays = [leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.Array)]
        devices = sorted(arrays[0].devices(), key=lambda device: device.id) if arrays else [jax.devices()[0]]
        for device in devices[:: max(1, len(devices) // 2)]:
            with jax.default_device(device):
                self._idle_work(np.float32(0), np.int32(self._draws.integers(1, 8)))


def _idle_work(start: jax.Array, rounds: jax.Array) -> jax.Array:
    square = jnp.full((96, 96), start)
    return jax.lax.fori_loop(0, rounds, lambda _, value: jnp.tanh(value @ value + 1), square)[0, 0]
