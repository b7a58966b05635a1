"""What a draw comes to, told by tracing it: the shapes of a batch, and the bytes that are read for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.replay.interface import Replay
from conduit_jax.replay.storage import Experience, Storage, in_device_memory

PyTree = Any


class Draw(NamedTuple):
    """Of one partition: the shapes of a batch's ``data``, the bytes read for it, and those of all storage.

    ``stores`` says in how many groups of arrays that is, each with slots of its own.
    """

    data: PyTree
    read_bytes: int
    stored_bytes: int
    stores: int


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
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.storage))
    return Draw(sample.data, sum(read), stored, len(stores_of(state.storage)))


def stores_of(storage: PyTree) -> list[Experience]:
    """Return the groups of arrays of ``storage``: first that of the steps, then what is kept beside them."""
    return jax.tree.leaves(storage, is_leaf=lambda node: isinstance(node, Experience))


def with_store(storage: PyTree, number: int, store: Experience) -> PyTree:
    """Return ``storage`` with ``store`` in the place of group ``number``."""
    groups, structure = jax.tree.flatten(storage, is_leaf=lambda node: isinstance(node, Experience))
    return structure.unflatten([*groups[:number], store, *groups[number + 1 :]])


__all__ = ["Draw", "draw_of", "stores_of", "with_store"]
