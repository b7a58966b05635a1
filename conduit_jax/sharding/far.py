"""Storage out of a program's reach (on disk, or scattered over devices): what stands for its arrays in a tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np


class FarStorage(Protocol):
    """Arrays of ``shapes`` ``(partitions, slots, ...)`` that are told which rows to find or write.

    ``gather(slots)``, int ``(partitions, n)`` all in range, returns ``(partitions, n, ...)`` of each array;
    ``scatter(slots, values)`` writes such values and leaves out what is out of range. ``stand_in`` is what programs take in
    its place: a tree like that of the storage, with one slot. ``close`` gives the memory back. ``rehearse_gather(n)`` and
    ``rehearse_scatter(n)`` compile what ``n`` rows a partition need and leave everything as it is.
    """

    shapes: Sequence[jax.ShapeDtypeStruct]
    partitions: int
    slots: int
    stand_in: Any

    def gather(self, slots: Any) -> list[Any]: ...

    def scatter(self, slots: Any, values: Sequence[Any]) -> None: ...

    def rehearse_gather(self, count: int) -> None: ...

    def rehearse_scatter(self, count: int) -> None: ...

    def close(self) -> None: ...


class FarArray:
    """Array ``number`` of a ``FarStorage``, where JAX arrays would be: a leaf that tells its shape and holds nothing."""

    def __init__(self, storage: Any, number: int):
        self.storage, self.number = storage, number
        self.shape, self.dtype = storage.shapes[number].shape, np.dtype(storage.shapes[number].dtype)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"FarArray({self.dtype}{list(self.shape)})"


def far_storage(tree: Any) -> Any:
    """Return the ``FarStorage`` behind a tree of ``FarArray``s."""
    return jax.tree.leaves(tree)[0].storage
