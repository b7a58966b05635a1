"""Storage in a file, for buffers larger than RAM: mapped, with a bound on how much of it is resident at a time.

The file has no name: it is made by ``tempfile`` exclusively, readable by its owner alone, and is gone when it is closed or
its process ends, however that happens. Its space is reserved when it is made, so a full disk is an error then and not a
crash later. It holds raw rows and nothing that is ever executed or unpickled.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import jax
import numpy as np

from conduit_jax.errors import ConfigError, PlacementError, check_integer, refuse
from conduit_jax.sharding.far import FarArray, far_storage
from conduit_jax.sharding.staging import aligned_empty
from conduit_jax.types import Device

Pieces = tuple[Any, ...]
_AROUND = 64 << 10  # a fault on Linux maps up to so much around the page that was touched
_ALIGNMENT = 64 << 10
MIN_CACHE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Disk:
    """``placement=Disk(...)``: the buffer in a file of ``directory`` behind a host cache of at most ``cache_bytes``.

    ``directory``: a local file system with room for the buffer; the system's own for temporary files (``TMPDIR``) unless
    given. One in memory (tmpfs) would hold the buffer in the RAM it is too large for.
    """

    directory: str | None = None
    cache_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if self.directory is not None and not isinstance(self.directory, str | os.PathLike):
            refuse(ConfigError, "Disk(directory=) is not a path.", got=repr(self.directory), want="a folder, or None")
        check_integer("Disk(cache_bytes=)", self.cache_bytes, MIN_CACHE_BYTES)

    @property
    def folder(self) -> Path:
        """Where files are made."""
        return Path(self.directory if self.directory is not None else tempfile.gettempdir())

    def available_bytes(self) -> int:
        """Return the bytes that may still be written there; ``PlacementError`` where there is no such folder."""
        _check_folder(self.folder)
        room = os.statvfs(self.folder)
        return room.f_bavail * room.f_frsize


def disk_memory() -> dict[str, int]:
    """Return the bytes the default folder of the disk tier has room for, as ``{"disk": bytes}``; nothing without a folder."""
    try:
        return {"disk": Disk().available_bytes()}
    except PlacementError:
        return {}


def _check_folder(folder: Path) -> None:
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        fix = "Disk(directory=...) with a folder that is there and may be written to"
        refuse(PlacementError, "The disk tier has no folder to write to.", got=str(folder), want="a folder", fix=fix)


class DiskStorage:
    """Arrays of ``shapes`` ``(partitions, slots, ...)`` in one file, all zeros at first; one thread at a time. A ``FarStorage``.

    What is read or written counts against ``disk.cache_bytes``; before they are exceeded the process gives back the pages
    it has mapped. What was written to them is the file's, and the kernel writes it out when it sees fit.
    ``stand_in`` is what programs take in its place.
    """

    def __init__(self, shapes: Sequence[jax.ShapeDtypeStruct], disk: Disk, stand_in: Any = None):
        self.shapes, self.disk, self.stand_in = tuple(shapes), disk, stand_in
        self.partitions, self.slots = self.shapes[0].shape[:2]
        ends = list(accumulate(-(-_bytes(shape) // _ALIGNMENT) * _ALIGNMENT for shape in self.shapes))
        _check_cache(self.shapes, disk)
        self.bytes = ends[-1]
        self._map = _mapped(self.bytes, disk)
        self._views = [
            np.frombuffer(self._map, shape.dtype, math.prod(shape.shape), end - -(-_bytes(shape) // _ALIGNMENT) * _ALIGNMENT)
            .reshape(self.partitions * self.slots, -1)
            for shape, end in zip(self.shapes, ends, strict=True)
        ]  # fmt: skip
        self._resident = 0

    def gather(self, slots: Any) -> list[np.ndarray]:
        """Return copies of the rows in ``slots`` int ``(partitions, n)``, all in range: ``(partitions, n, ...)`` of each array."""
        slots = np.asarray(slots)
        flat, results = self._flat(slots), []
        for view, shape in zip(self._views, self.shapes, strict=True):
            rows = aligned_empty((flat.size, view.shape[1]), np.dtype(shape.dtype))
            for own in self._admitted(view, flat.size, scattered=True):
                np.take(view, flat[own], axis=0, out=rows[own])
            results.append(rows.reshape(*slots.shape, *shape.shape[2:]))
        return results

    def scatter(self, slots: Any, values: Sequence[Any]) -> None:
        """Write ``values`` ``(partitions, n, ...)`` of each array to ``slots`` int ``(partitions, n)``; out of range is left out."""
        slots, values = np.asarray(slots), [np.asarray(own) for own in values]
        present = ((slots >= 0) & (slots < self.slots)).reshape(-1)
        flat = self._flat(slots)[present]
        for view, given in zip(self._views, values, strict=True):
            rows = given.reshape(present.size, view.shape[1])
            rows = rows if present.all() else rows[present]
            for own in self._admitted(view, flat.size, scattered=True):
                view[flat[own]] = rows[own]

    def read(self, partition: int, start: int, count: int) -> list[np.ndarray]:
        """Return copies of slots ``start`` to ``start + count`` of a partition: ``(count, ...)`` of each array."""
        first, results = partition * self.slots + start, []
        for view, shape in zip(self._views, self.shapes, strict=True):
            rows = aligned_empty((count, view.shape[1]), np.dtype(shape.dtype))
            for own in self._admitted(view, count, scattered=False):
                rows[own] = view[first + own.start : first + own.stop]
            results.append(rows.reshape(count, *shape.shape[2:]))
        return results

    def write(self, partition: int, start: int, pieces: Sequence[np.ndarray]) -> None:
        """Write ``pieces`` ``(count, ...)`` of each array to a partition's slots from ``start`` on."""
        first = partition * self.slots + start
        for view, piece in zip(self._views, pieces, strict=True):
            rows = piece.reshape(piece.shape[0], view.shape[1])
            for own in self._admitted(view, rows.shape[0], scattered=False):
                view[first + own.start : first + own.stop] = rows[own]

    def rehearse_gather(self, count: int) -> None:
        """The host needs no programs."""

    def rehearse_scatter(self, count: int) -> None:
        """The host needs no programs."""

    @property
    def arrays(self) -> tuple[FarArray, ...]:
        """What stands for each array where JAX arrays would be."""
        return tuple(FarArray(self, number) for number in range(len(self.shapes)))

    def close(self) -> None:
        """Give the file back; its content is gone."""
        self._views = []
        self._map.close()

    def _flat(self, slots: np.ndarray) -> np.ndarray:
        return (slots.astype(np.int64) + np.arange(self.partitions)[:, None] * self.slots).reshape(-1)

    def _admitted(self, view: np.ndarray, count: int, *, scattered: bool) -> Iterator[slice]:
        """Yield slices of ``count`` rows that fit the cache, each after room was made for it."""
        row = view.shape[1] * view.itemsize
        each = row + 2 * _AROUND if scattered else row
        most = max(1, (self.disk.cache_bytes - 2 * _AROUND) // each)
        for start in range(0, count, most):
            rows = slice(start, min(start + most, count))
            touched = (rows.stop - rows.start) * each + 2 * _AROUND * (not scattered)
            if self._resident + touched > self.disk.cache_bytes:
                self._map.madvise(mmap.MADV_DONTNEED)
                self._resident = 0
            self._resident += touched
            yield rows


def on_disk(storage: Any) -> DiskStorage:
    """Return the file behind a tree of ``FarArray``s."""
    return far_storage(storage)


class DiskHolder:
    """Storage on disk as an end of a move; its pieces come from and go to ``device``."""

    def __init__(self, storage: DiskStorage, device: Device):
        self.storage, self.device, self.first, self.partitions = storage, device, 0, storage.partitions
        self.lock = threading.Lock()  # of reads too: they share one account of what is resident

    def read(self, partition: int, start: int, count: int) -> Pieces:
        with self.lock:
            return tuple(self.storage.read(partition, start, count))

    def write(self, partition: int, start: int, pieces: Pieces) -> None:
        self.storage.write(partition, start, [np.asarray(piece) for piece in pieces])

    def discard(self) -> None:
        self.storage.close()

    def let_go(self) -> None:
        """Nothing to let go of: the file belongs to its table."""

    def expect(self, count: int) -> Pieces:
        return tuple(np.zeros((count, *shape.shape[2:]), shape.dtype) for shape in self.storage.shapes)


def _bytes(shape: jax.ShapeDtypeStruct) -> int:
    return math.prod(shape.shape) * np.dtype(shape.dtype).itemsize


def _check_cache(shapes: Sequence[jax.ShapeDtypeStruct], disk: Disk) -> None:
    largest = max(_bytes(shape) // math.prod(shape.shape[:2]) for shape in shapes) + 2 * _AROUND
    if largest > disk.cache_bytes:
        got, want = f"cache_bytes={disk.cache_bytes:,}", f"at least {largest:,}"
        refuse(ConfigError, "The host cache of the disk tier holds less than one item.", got=got, want=want)


def _mapped(size: int, disk: Disk) -> mmap.mmap:
    """Return a mapping of ``size`` bytes of a new nameless file whose space is reserved."""
    available = disk.available_bytes()
    try:
        with tempfile.TemporaryFile(dir=disk.folder, prefix="conduit_jax_") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        fix = "Disk(directory=...) on a disk with more room, or a lower capacity"
        got = f"{size:,} bytes wanted, {available:,} free in {disk.folder} ({error})"
        return refuse(PlacementError, "The buffer does not fit on disk.", got=got, want="room for all of it", fix=fix)
