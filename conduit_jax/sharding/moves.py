"""The transfers a profile times, as closures over real arrays: each call moves one message and returns what to wait for."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from conduit_jax.sharding.disk import Disk
from conduit_jax.sharding.memory import storage_access
from conduit_jax.sharding.mesh import PARTITION_AXIS, single_device_mesh
from conduit_jax.sharding.staging import Stager, aligned_empty
from conduit_jax.sharding.topology import DEVICE, DISK, PAGEABLE, PINNED_HOST
from conduit_jax.types import Device

Move = Callable[[], Any]
_STORAGE_BATCHES = 4  # storage that rows are gathered from holds so many messages
_DISK_BATCHES = 2


class System(NamedTuple):
    """The endpoints of this process: ``devices`` in order of rank, and the tiers that work."""

    devices: tuple[Device, ...]
    tiers: tuple[str, ...]

    @property
    def host_names(self) -> tuple[str, ...]:
        return tuple(tier for tier in self.tiers if tier != DEVICE)


def link_names(system: System) -> list[str]:
    """Return the links of the system: every pair of devices, and the host tiers with the first device."""
    count = len(system.devices)
    pairs = [f"device:{i}->device:{j}" for i in range(count) for j in range(count) if i != j]
    ends = [f"{tier}->{DEVICE}" for tier in system.host_names] + [f"{DEVICE}->{tier}" for tier in system.host_names]
    between = [f"{PAGEABLE}->{tier}" for tier in (PINNED_HOST, DISK) if tier in system.tiers]
    return [*pairs, *{*ends, f"{PAGEABLE}->{DEVICE}"}, *between, f"{PAGEABLE}->self"]


def message(size_bytes: int, rows: int) -> np.ndarray:
    """Return ``rows`` rows of uint32 of ``size_bytes`` together, as near as whole words allow."""
    block = aligned_empty((rows, max(1, size_bytes // (4 * rows))), np.dtype(np.uint32))
    block[:] = np.arange(block.shape[1], dtype=np.uint32)
    return block


def transfer(name: str, system: System, block: np.ndarray) -> Move:
    """Return the move of ``block`` over the link ``name``, as the plane makes it.

    What leaves pageable memory goes through a slab of ``Stager``; what goes to pinned memory from there takes the road the
    plane takes, by way of the device.
    """
    source, destination = name.split("->")
    if DISK in (source, destination):
        return _over_disk(source, destination, system, block)
    if source == PAGEABLE:
        return _staged(destination, system, block)
    start = jax.block_until_ready(jax.device_put(block, _home(source, system)))
    target = _home(destination, system)
    return lambda: jax.device_put(start, target)


def _staged(destination: str, system: System, block: np.ndarray) -> Move:
    stager, slab = Stager(depth=1), aligned_empty(block.shape, block.dtype)
    if destination == "self":
        return lambda: np.copyto(slab, block)
    pinned = _home(PINNED_HOST, system) if destination == PINNED_HOST else None
    device = _home(DEVICE if pinned else destination, system)

    def move() -> Any:
        (arrived,), ticket = stager.stage([block], [block.dtype], [device])
        ticket.reader = arrived
        return arrived if pinned is None else jax.device_put(arrived, pinned)

    return move


class RowsOnDisk:
    """Scattered rows like those of ``block`` in a nameless file of ``folder``, which holds a few such messages.

    Writes wait for the disk and reads find nothing in the kernel's cache: a buffer larger than RAM would not either.
    """

    def __init__(self, block: np.ndarray, folder: Path | None = None):
        with tempfile.TemporaryFile(dir=folder or Disk().folder, prefix="conduit_jax_") as file:
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self._row_bytes, slots = block.nbytes // len(block), _DISK_BATCHES * len(block)
        self._slots = np.random.default_rng(0).permutation(slots)[: len(block)].tolist()
        self._shape, self._dtype = block.shape, block.dtype
        for number in range(_DISK_BATCHES):  # written once: space that never was is read without the disk
            os.pwrite(self._file, block.tobytes(), number * block.nbytes)
        os.fsync(self._file)

    def write(self, rows: np.ndarray) -> None:
        """Write ``rows``, and wait until they are on the disk."""
        for slot, row in zip(self._slots, rows, strict=True):
            os.pwrite(self._file, row, slot * self._row_bytes)
        os.fdatasync(self._file)

    def read(self) -> np.ndarray:
        """Return the rows, read from the disk."""
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        rows = aligned_empty(self._shape, self._dtype)
        for slot, row in zip(self._slots, rows, strict=True):
            os.preadv(self._file, [row], slot * self._row_bytes)
        return rows


def _over_disk(source: str, destination: str, system: System, block: np.ndarray) -> Move:
    """Return the move from or to the disk as the plane makes it: what comes from the host goes by way of the device."""
    file, device = RowsOnDisk(block), _home(DEVICE, system)
    if source == DISK:
        return lambda: jax.device_put(file.read(), device)
    start = jax.block_until_ready(jax.device_put(block, device))
    bring = _staged(DEVICE, system, block) if source == PAGEABLE else lambda: jnp.copy(start)  # no cached host copy

    def move() -> Any:
        arrived = bring()
        file.write(np.asarray(arrived))
        return arrived

    return move


def _home(name: str, system: System) -> Any:
    """Return the sharding of an endpoint: ``device:3``, a host tier, or ``device`` (the first)."""
    kind, _, rank = name.partition(":")
    device = system.devices[int(rank or 0)]
    if kind == PAGEABLE:
        return NamedSharding(single_device_mesh(jax.devices("cpu")[0]), PartitionSpec())
    return NamedSharding(single_device_mesh(device), PartitionSpec(), memory_kind=kind)


def within(tier: str, what: str, system: System, block: np.ndarray) -> Move:
    """Return the move of ``what`` (``"gather"`` or ``"write"``) of scattered rows within storage of ``tier``.

    A gather ends in device memory, a write begins there: what a host tier costs beyond its link is the difference.
    """
    kept, plain = _home(tier, system), _home(PAGEABLE if tier == PAGEABLE else DEVICE, system)
    access = storage_access(tier if tier == PINNED_HOST else DEVICE)
    slots = _STORAGE_BATCHES * len(block)
    shape = (slots, *block.shape[1:])
    storage = jax.jit(lambda: jnp.zeros(shape, jnp.uint32), out_shardings=kept)()
    order = np.random.default_rng(0).permutation(slots)[: len(block)].astype(np.int32)
    chosen, values = jax.device_put(order, plain), jax.device_put(block, plain)
    if what == "gather":
        gather = jax.jit(access.gather, out_shardings=plain)
        return lambda: gather(storage, chosen)
    write = jax.jit(access.scatter, donate_argnums=0, out_shardings=kept)
    state = [storage]

    def move() -> Any:
        state[0] = write(state[0], chosen, values)
        return state[0]

    return move


def launch(system: System, count: int) -> Move:
    """Return an iteration's programs over ``count`` devices with hardly any data: insert, draw, and bring to the first device."""
    mesh = Mesh(np.array(system.devices[:count]), (PARTITION_AXIS,), axis_types=(AxisType.Auto,))
    spread, home = NamedSharding(mesh, PartitionSpec(PARTITION_AXIS)), _home(DEVICE, system)
    spec = PartitionSpec(PARTITION_AXIS)
    insert = jax.jit(
        jax.shard_map(lambda kept, new: kept.at[:, 0].set(new), mesh=mesh, in_specs=(spec, spec), out_specs=spec),
        donate_argnums=0,
    )
    draw = jax.jit(
        jax.shard_map(lambda kept: jnp.take(kept, jnp.arange(4), axis=1), mesh=mesh, in_specs=spec, out_specs=spec)
    )
    state, new = [jax.device_put(np.zeros((8 * count, 16), np.float32), spread)], np.zeros(8 * count, np.float32)

    def move() -> Any:
        state[0] = insert(state[0], jax.device_put(new, spread))
        return jax.device_put(draw(state[0]), home)

    return move
