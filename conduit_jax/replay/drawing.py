"""What a draw comes to, told by tracing it: the shapes of a batch, and the bytes that are read for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.replay.interface import Replay
from conduit_jax.replay.storage import Storage, in_device_memory

PyTree = Any


class Draw(NamedTuple):
    """Of one partition: the shapes of a batch's ``data``, and ``read_bytes`` of storage."""

    data: PyTree
    read_bytes: int


def draw_of(make: Callable[..., Replay], item: PyTree) -> Draw:
    """Return what a draw comes to of the replay that ``make(storage_access=...)`` makes for such an ``item`` (shapes)."""
    read: list[int] = []

    def note(array: jax.Array, slots: jax.Array) -> jax.Array:
        rows = in_device_memory.gather(array, slots)
        read.append(rows.size * rows.dtype.itemsize)
        return rows

    replay = make(storage_access=Storage(in_device_memory.scatter, note))
    state = jax.eval_shape(replay.init, item)
    _, sample = jax.eval_shape(replay.sample, state.control, state.storage, jax.ShapeDtypeStruct((2,), jnp.uint32))
    return Draw(sample.data, sum(read))


__all__ = ["Draw", "draw_of"]
