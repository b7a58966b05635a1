"""Fenced, aligned slabs between host arrays and JAX.

JAX may read a numpy array after the call that took it has returned, and on CPU it does not copy an aligned one at all
(jax 0.10.2; ``may_alias=False`` changes nothing): writing to such an array corrupts what was handed over. So a producer's
arrays are copied into slabs of our own, 64-byte aligned, and a slab is used again only after the program that read it has
finished (its *fence*).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np

PyTree = Any

_ALIGNMENT = 64
_SMALL_BYTES = 2**16  # of a tree that goes through a program: what its copy costs is less than what its leaves do


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised array whose data starts on a 64-byte boundary, so that CPU JAX takes it without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def bring(leaves: list[np.ndarray], shardings: list[Any]) -> list[Any]:
    """Return host arrays on their shardings; few bytes for one device as the arguments of one program.

    ``jax.device_put`` takes 40 us for each leaf, a program 3 (jax 0.10.2). A program does not alias what it returns to
    what it was given, and it is not called in a caller's mesh, which may be of other devices.
    """
    one_device = all(len(sharding.device_set) == 1 for sharding in shardings)
    small = sum(leaf.nbytes for leaf in leaves) <= _SMALL_BYTES
    # where nothing is compiled a program is plain Python, and returns what it was given
    compiled = not jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
    if small and one_device and compiled and jax.sharding.get_abstract_mesh().empty:
        return list(_through_a_program(tuple(shardings))(*leaves))
    return jax.device_put(leaves, shardings)


@lru_cache(maxsize=64)
def _through_a_program(shardings: tuple[Any, ...]) -> Callable[..., tuple]:
    return jax.jit(lambda *leaves: leaves, out_shardings=shardings)


class Ticket:
    """Held for a staged tree: whoever reads it enters an output of the reading program as ``reader``."""

    __slots__ = ("reader",)

    def __init__(self) -> None:
        self.reader: Any = None


class Stager:
    """``depth`` slabs in rotation for trees of one structure; ``put`` is the transfer (``bring`` unless emulated).

    ``depth`` must exceed the number of staged trees that may wait unread at once.
    """

    def __init__(self, depth: int = 4, put: Callable[[PyTree, Any], PyTree] = bring):
        self._slabs: list[list[np.ndarray] | None] = [None] * depth
        self._tickets: list[Ticket | None] = [None] * depth
        self._turn = 0
        self._put = put
        self._lock = threading.Lock()  # producers may push from several threads

    def stage(self, leaves: list[np.ndarray], dtypes: list[np.dtype], shardings: list[Any]) -> tuple[list[Any], Ticket]:
        """Return ``leaves`` as device arrays, copied through the next slab, and the ticket that fences it.

        Waits for the program that last read this slab.
        """
        with self._lock:
            return self._stage(leaves, dtypes, shardings)

    def _stage(
        self, leaves: list[np.ndarray], dtypes: list[np.dtype], shardings: list[Any]
    ) -> tuple[list[Any], Ticket]:
        turn, self._turn = self._turn, (self._turn + 1) % len(self._slabs)
        last = self._tickets[turn]
        if last is not None:
            jax.block_until_ready(last.reader)
        slab = self._slabs[turn]
        if (
            slab is None or last is None or last.reader is None
        ):  # a tree dropped unread may still be read: leave it its slab
            slab = [aligned_empty(np.shape(leaf), dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
            self._slabs[turn] = slab
        for block, leaf in zip(slab, leaves, strict=True):
            np.copyto(block, leaf, casting="same_kind")
        ticket = self._tickets[turn] = Ticket()
        return self._put(slab, shardings), ticket
