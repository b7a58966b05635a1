"""Storage that no one program can hold: leaves on different devices, and partitions dealt unevenly.

A *shelf* is some arrays of some partitions, in memories of one device. What is small stays together on a device of its own, the
home, which says which rows; all shelves find or write theirs at once, asynchronously. What is delivered is the same as from any
memory, bit for bit: the home draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from conduit_jax.sharding.far import FarArray
from conduit_jax.sharding.holders import ArrayHolder, Pieces, on_device, zeroed
from conduit_jax.sharding.lift import in_own_mesh
from conduit_jax.sharding.memory import storage_access
from conduit_jax.sharding.mesh import PARTITION_AXIS, single_device_mesh
from conduit_jax.sharding.placement import Placement, dealt_over, leaf_parts
from conduit_jax.types import Device

Array = jax.Array


class Shelf(NamedTuple):
    """The arrays numbered ``numbers`` of the partitions that ``holder`` has."""

    numbers: tuple[int, ...]
    holder: ArrayHolder

    @property
    def end(self) -> int:
        """The number of the partition behind the last one."""
        return self.holder.first + self.holder.partitions


def shelves_of(placement: Placement, names: Sequence[str], shapes: Sequence[jax.ShapeDtypeStruct]) -> list[Shelf]:
    """Return the empty shelves of ``placement`` for arrays of ``shapes`` ``(partitions, slots, ...)``, by name."""
    parts = leaf_parts(placement, names)
    shelves = []
    for part in placement.parts:
        numbers = tuple(number for number, name in enumerate(names) if parts[name] is part)
        first = 0
        for device, count in zip(part.devices, dealt_over(part), strict=True):
            own = [jax.ShapeDtypeStruct((count, *shapes[number].shape[1:]), shapes[number].dtype) for number in numbers]
            if numbers and count:
                holder = ArrayHolder(device, (part.memory_kind,) * len(numbers), first, own)
                holder.arrays = zeroed(holder)
                shelves.append(Shelf(numbers, holder))
            first += count
    jax.block_until_ready([shelf.holder.arrays for shelf in shelves])  # not while a table pauses
    return shelves


def _as_it_is(rows: Any, _kinds: tuple[str, ...], _arriving: bool) -> Any:
    return rows


class ScatteredStorage:
    """Arrays of ``shapes`` on ``shelves``; rows come from and go to the device ``home``. A ``FarStorage``.

    ``put`` is the transfer between devices, ``jax.device_put`` unless links are emulated; ``beside`` is given rows that a shelf
    of memory ``kinds`` has found, or is about to keep (``arriving``), for who emulates what lies between these and the device.
    """

    def __init__(
        self, shapes: Sequence[jax.ShapeDtypeStruct], home: Device, shelves: Sequence[Shelf], stand_in: Any = None
    ):
        self.shapes, self.home, self.shelves, self.stand_in = tuple(shapes), home, tuple(shelves), stand_in
        self.partitions, self.slots = self.shapes[0].shape[:2]
        self.put: Callable[[Any, Any], Any] = jax.device_put
        self.beside: Callable[[Any, tuple[str, ...], bool], Any] = _as_it_is

    def gather(self, slots: Any) -> list[Array]:
        """Return the rows in ``slots`` int ``(partitions, n)``, all in range: ``(partitions, n, ...)`` of each array, at home."""
        found: list[list[tuple[int, Array]]] = [[] for _ in self.shapes]
        for shelf in self.shelves:
            take = _taker(shelf.holder.device, shelf.holder.kinds)
            rows = take(shelf.holder.arrays, self._named(slots, shelf))
            rows = self.beside(rows, shelf.holder.kinds, False)
            for number, own in zip(shelf.numbers, self.put(rows, on_device(self.home)), strict=True):
                found[number].append((shelf.holder.first, own))
        ordered = [tuple(own for _, own in sorted(parts, key=lambda part: part[0])) for parts in found]
        return [parts[0] if len(parts) == 1 else _joiner(self.home)(parts) for parts in ordered]

    def scatter(self, slots: Any, values: Sequence[Any]) -> None:
        """Write ``values`` ``(partitions, n, ...)`` of each array to ``slots`` int ``(partitions, n)``; out of range is left out."""
        for shelf in self.shelves:
            put = _putter(shelf.holder.device, shelf.holder.kinds)
            cut = tuple(self._cut(values[number], shelf) for number in shelf.numbers)
            own = self.beside(self.put(cut, on_device(shelf.holder.device)), shelf.holder.kinds, True)
            with shelf.holder.lock:
                shelf.holder.arrays = put(shelf.holder.arrays, self._named(slots, shelf), own)

    def rehearse_gather(self, count: int) -> None:
        """Find ``count`` rows a partition, for nobody: every program of ``gather`` is compiled then."""
        slots = jax.device_put(jnp.zeros((self.partitions, count), jnp.int32), SingleDeviceSharding(self.home))
        jax.block_until_ready(self.gather(slots))

    def rehearse_scatter(self, count: int) -> None:
        """Write ``count`` rows a partition out of range, where they are left out."""
        home = NamedSharding(single_device_mesh(self.home), PartitionSpec(PARTITION_AXIS))
        nowhere = jax.device_put(jnp.full((self.partitions, count), self.slots, jnp.int32), home)
        rows = [jnp.zeros((self.partitions, count, *one.shape[2:]), one.dtype) for one in self.shapes]
        self.scatter(nowhere, jax.device_put(rows, home))
        jax.block_until_ready([shelf.holder.arrays for shelf in self.shelves])

    @property
    def arrays(self) -> tuple[FarArray, ...]:
        """What stands for each array where JAX arrays would be."""
        return tuple(FarArray(self, number) for number in range(len(self.shapes)))

    def close(self) -> None:
        """Give the memory back; its content is gone."""
        for shelf in self.shelves:
            shelf.holder.discard()

    def _cut(self, value: Any, shelf: Shelf) -> Any:
        """Return what of ``value`` ``(partitions, ...)`` concerns a shelf."""
        first, end = shelf.holder.first, shelf.end
        if end - first == self.partitions:
            return value
        return _cutter(self.home, first, end)(value) if isinstance(value, jax.Array) else value[first:end]

    def _named(self, slots: Any, shelf: Shelf) -> Array:
        """Return the slots that concern a shelf, on its device: a handful of bytes."""
        return jax.device_put(self._cut(slots, shelf), on_device(shelf.holder.device))


class ScatteredHolder:
    """Scattered storage as an end of a move: its pieces come from and go to the home."""

    def __init__(self, storage: ScatteredStorage):
        self.storage, self.device, self.first, self.partitions = storage, storage.home, 0, storage.partitions
        self.lock = storage.shelves[0].holder.lock

    def read(self, partition: int, start: int, count: int) -> Pieces:
        pieces: dict[int, Any] = {}
        for shelf in self._with(partition):
            own = shelf.holder.read(partition, start, count)
            pieces |= dict(zip(shelf.numbers, jax.device_put(own, on_device(self.device)), strict=True))
        return tuple(pieces[number] for number in sorted(pieces))

    def write(self, partition: int, start: int, pieces: Pieces) -> Any:
        return [
            shelf.holder.write(
                partition,
                start,
                jax.device_put(tuple(pieces[number] for number in shelf.numbers), on_device(shelf.holder.device)),
            )
            for shelf in self._with(partition)
        ]

    def expect(self, count: int) -> Pieces:
        pieces: dict[int, Any] = {}
        for shelf in self.storage.shelves:
            own = shelf.holder.expect(count)
            pieces |= dict(zip(shelf.numbers, jax.device_put(own, on_device(self.device)), strict=True))
        return tuple(pieces[number] for number in sorted(pieces))

    def discard(self) -> None:
        self.storage.close()

    def let_go(self) -> None:
        """Nothing to let go of: the arrays belong to their table."""

    def _with(self, partition: int) -> list[Shelf]:
        return [shelf for shelf in self.storage.shelves if shelf.holder.first <= partition < shelf.end]


@cache
def _taker(device: Device, kinds: tuple[str, ...]) -> Any:
    def take(arrays: tuple[Array, ...], slots: Array) -> tuple[Array, ...]:
        pairs = zip(arrays, kinds, strict=True)
        return tuple(jax.vmap(storage_access(kind).gather)(array, slots) for array, kind in pairs)

    return in_own_mesh(jax.jit(take, out_shardings=on_device(device)), single_device_mesh(device))


@cache
def _putter(device: Device, kinds: tuple[str, ...]) -> Any:
    def put(arrays: tuple[Array, ...], slots: Array, values: tuple[Array, ...]) -> tuple[Array, ...]:
        triples = zip(arrays, values, kinds, strict=True)
        return tuple(jax.vmap(storage_access(kind).scatter)(array, slots, own) for array, own, kind in triples)

    out = tuple(on_device(device, kind) for kind in kinds)
    return in_own_mesh(jax.jit(put, donate_argnums=0, out_shardings=out), single_device_mesh(device))


@cache
def _cutter(home: Device, first: int, end: int) -> Any:
    return in_own_mesh(jax.jit(lambda value: value[first:end]), single_device_mesh(home))


@cache
def _joiner(home: Device) -> Any:
    return in_own_mesh(jax.jit(lambda parts: jnp.concatenate(parts)), single_device_mesh(home))
