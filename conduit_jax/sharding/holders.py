"""Who holds the storage of some partitions: arrays in one memory of one device, read and written a piece at a time."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from conduit_jax.sharding.lift import in_own_mesh
from conduit_jax.sharding.memory import DEVICE, PINNED_HOST
from conduit_jax.sharding.mesh import single_device_mesh
from conduit_jax.types import Device

Array = jax.Array
Pieces = tuple[Any, ...]


class Holder(Protocol):
    """Storage of ``partitions`` partitions from number ``first`` on; ``device`` is where its pieces come from and go to.

    ``read(partition, start, count)`` returns slots ``start`` to ``start + count`` of each array, ``(count, ...)``;
    ``write(partition, start, pieces)`` puts them there and returns what to wait for, or ``None``. One thread at a time
    writes, under ``lock``. ``expect(count)`` prepares reads of that size and returns such pieces, of zeros.
    ``discard()`` gives the memory back at once, ``let_go()`` the reference to it.
    """

    device: Device
    first: int
    partitions: int
    lock: threading.Lock

    def read(self, partition: int, start: int, count: int) -> Pieces: ...

    def write(self, partition: int, start: int, pieces: Pieces) -> Any: ...

    def expect(self, count: int) -> Pieces: ...

    def discard(self) -> None: ...

    def let_go(self) -> None: ...


class ArrayHolder:
    """``arrays`` ``(partitions, slots, ...)`` of ``shapes``, each in its one of ``kinds`` of ``device``; writes happen in place."""

    def __init__(self, device: Device, kinds: tuple[str, ...], first: int, shapes: Sequence[jax.ShapeDtypeStruct]):
        self.device, self.kinds, self.first = device, kinds, first
        self.shapes, self.partitions = tuple(shapes), shapes[0].shape[0]
        self.arrays: tuple[Array, ...] = ()
        self.lock = threading.Lock()

    def read(self, partition: int, start: int, count: int) -> Pieces:
        cut = _reader(self.device, count, self.kinds)
        return cut(self.arrays, np.int32(partition - self.first), np.int32(start))

    def write(self, partition: int, start: int, pieces: Pieces) -> Array:
        put = _writer(self.device, self.kinds)
        self.arrays, written = put(self.arrays, pieces, np.int32(partition - self.first), np.int32(start))
        return written

    def discard(self) -> None:
        for array in self.arrays:
            array.delete()

    def let_go(self) -> None:
        self.arrays = ()

    def expect(self, count: int) -> Pieces:
        """Compile the read of ``count`` slots; return pieces of zeros of that size, where it would leave them."""
        arrays = tuple(
            jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=whole)
            for one, whole in zip(self.shapes, self.whole, strict=True)
        )
        _reader(self.device, count, self.kinds).ahead(arrays, np.int32(0), np.int32(0))
        pieces = tuple(_of(one, (count, *one.shape[2:])) for one in self.shapes)
        return _zeros(pieces, (on_device(self.device),) * len(pieces))

    @property
    def memory_kind(self) -> str:
        """The memory that has most of it."""
        sizes = dict.fromkeys(self.kinds, 0)
        for shape, kind in zip(self.shapes, self.kinds, strict=True):
            sizes[kind] += math.prod(shape.shape) * shape.dtype.itemsize
        return max(sizes, key=lambda kind: sizes[kind])

    @property
    def whole(self) -> tuple[NamedSharding, ...]:
        """The sharding of each array, whole on the device."""
        return tuple(on_device(self.device, kind) for kind in self.kinds)


def on_device(device: Device, memory_kind: str = DEVICE) -> NamedSharding:
    """Return the sharding of a whole array in ``memory_kind`` of ``device``."""
    return NamedSharding(single_device_mesh(device), PartitionSpec(), memory_kind=memory_kind)


def outlined(shapes: Sequence[jax.ShapeDtypeStruct], shardings: Sequence[NamedSharding]) -> list[ArrayHolder]:
    """Return the holders, one a device, of arrays of ``shapes`` laid out as ``shardings``, without arrays.

    All are split alike along the first axis; their memories may differ.
    """
    holders, kinds = [], tuple(sharding.memory_kind or DEVICE for sharding in shardings)
    for device, index in shardings[0].addressable_devices_indices_map(shapes[0].shape).items():
        first, end, _ = (index or (slice(None),))[0].indices(shapes[0].shape[0])
        own = [_of(one, (end - first, *one.shape[1:])) for one in shapes]
        holders.append(ArrayHolder(device, kinds, first, own))
    return holders


def held(arrays: Sequence[Array], shardings: Sequence[NamedSharding]) -> list[ArrayHolder]:
    """Return the holders of placed ``arrays``."""
    holders = outlined(arrays, shardings)  # type: ignore[arg-type]  # only shapes and dtypes are looked at
    shards = [{shard.device: shard.data for shard in array.addressable_shards} for array in arrays]
    for holder in holders:
        own = [one[holder.device] for one in shards]
        holder.arrays = tuple(
            jax.make_array_from_single_device_arrays(one.shape, whole, [one])
            for one, whole in zip(own, holder.whole, strict=True)
        )
    return holders


def allocated(shapes: Sequence[jax.ShapeDtypeStruct], shardings: Sequence[NamedSharding]) -> list[ArrayHolder]:
    """Return the holders of new arrays, all zeros."""
    holders = outlined(shapes, shardings)
    for holder in holders:
        holder.arrays = zeroed(holder)
    jax.block_until_ready([holder.arrays for holder in holders])  # not while a table pauses
    return holders


def zeroed(holder: ArrayHolder) -> tuple[Array, ...]:
    """Return new arrays for ``holder``, all zeros."""
    return _zeros(holder.shapes, holder.whole)


def assembled(holders: Sequence[ArrayHolder], partitions: int, shardings: Sequence[NamedSharding]) -> list[Array]:
    """Return the arrays that ``holders`` make together, laid out as ``shardings``: nothing is copied."""
    columns = (list(arrays) for arrays in zip(*(holder.arrays for holder in holders), strict=True))
    return [
        jax.make_array_from_single_device_arrays((partitions, *own[0].shape[1:]), sharding, own)
        for own, sharding in zip(columns, shardings, strict=True)
    ]


def _of(like: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, like.dtype)


def _zeros(shapes: tuple[jax.ShapeDtypeStruct, ...], shardings: tuple[NamedSharding, ...]) -> tuple[Array, ...]:
    """Return zeros made by a program: the first donated write then finds memory of JAX's own and copies nothing."""
    return _zero_maker(shapes, shardings)()


@cache
def _zero_maker(
    shapes: tuple[jax.ShapeDtypeStruct, ...], shardings: tuple[NamedSharding, ...]
) -> Callable[[], tuple[Array, ...]]:
    make = jax.jit(lambda: tuple(jnp.zeros(one.shape, one.dtype) for one in shapes), out_shardings=shardings)
    return in_own_mesh(make, shardings[0].mesh)  # type: ignore[arg-type]  # a concrete one: it was made of a device


@cache
def _reader(device: Device, count: int, kinds: tuple[str, ...]) -> Any:
    def cut(arrays: tuple[Array, ...], partition: Array, start: Array) -> Pieces:
        return tuple(
            _slice(array, partition, start, count, kind == PINNED_HOST)
            for array, kind in zip(arrays, kinds, strict=True)
        )

    return in_own_mesh(jax.jit(cut), single_device_mesh(device))


def _slice(array: Array, partition: Array, start: Array, count: int, on_host: bool) -> Array:
    rest = array.shape[2:]
    piece = jax.lax.dynamic_slice(array, _corner(partition, start, rest), (1, count, *rest))
    piece = jax.device_put(piece, jax.memory.Space.Device) if on_host else piece
    return piece.reshape(count, *rest)


@cache
def _writer(device: Device, kinds: tuple[str, ...]) -> Any:
    def put(arrays: tuple[Array, ...], pieces: Pieces, partition: Array, start: Array) -> tuple:
        return tuple(
            jax.lax.dynamic_update_slice(
                array,
                jax.device_put(piece[None], jax.memory.Space.Host) if kind == PINNED_HOST else piece[None],
                _corner(partition, start, array.shape[2:]),
            )
            for array, piece, kind in zip(arrays, pieces, kinds, strict=True)
        ), start

    shardings = (tuple(on_device(device, kind) for kind in kinds), on_device(device))
    return in_own_mesh(jax.jit(put, donate_argnums=0, out_shardings=shardings), single_device_mesh(device))


def _corner(partition: Array, start: Array, rest: tuple[int, ...]) -> tuple:
    return partition, start, *(np.int32(0) for _ in rest)
