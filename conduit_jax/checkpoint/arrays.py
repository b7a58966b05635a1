"""Arrays of a checkpoint: small ones side by side in one file, large ones in chunks that are written and read apart.

Every array is stored as unsigned integers of its item size, so that each bit pattern comes back, whatever its dtype.
Chunks carry checksums and a missing one is an error: a damaged file is found when it is read.
"""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from conduit_jax.checkpoint.folder import damaged

CHUNK_BYTES = 16 << 20
SMALL_BYTES = 64 << 10
_NAME = re.compile(r"a[0-9]+")
_SMALL = "a0"

Reference = dict[str, Any]
Where = tuple[slice, ...]


class Writer:
    """Writes arrays into ``folder``; references to them are plain data. ``close`` writes the small ones."""

    def __init__(self, folder: Path):
        self._folder, self._open = folder, {}
        self._small: list[np.ndarray] = []
        self._offset = 0

    def put(self, leaf: Any) -> Reference:
        """Write one array, number or typed key; a device array larger than a chunk crosses to the host in chunks."""
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return {**self.put(jax.random.key_data(leaf)), "key": str(jax.random.key_impl(leaf))}
        if getattr(leaf, "nbytes", 0) > SMALL_BYTES:
            return self._put_large(leaf)
        value = np.asarray(leaf)
        raw = np.frombuffer(value.tobytes(), np.uint8)
        reference = {"dtype": value.dtype.name, "shape": list(value.shape), "at": self._offset}
        self._small.append(raw)
        self._offset += raw.size
        return reference

    def _put_large(self, leaf: Any) -> Reference:
        axis = int(np.argmax(leaf.shape))
        rows = max(1, CHUNK_BYTES * leaf.shape[axis] // leaf.nbytes)
        reference = self.begin(leaf.shape, leaf.dtype, axis, rows)
        for start in range(0, leaf.shape[axis], rows):
            stop = min(start + rows, leaf.shape[axis])
            self.fill(reference, (*[slice(None)] * axis, slice(start, stop)), _piece(leaf, start, stop, axis))
        return reference

    def begin(self, shape: tuple[int, ...], dtype: Any, axis: int, rows: int) -> Reference:
        """Return the reference of a large array to be filled, cut into files of ``rows`` indices of ``axis`` each."""
        name = f"a{len(self._open) + 1}"
        grid = [1] * axis + [rows] + [max(1, length) for length in shape[axis + 1 :]]
        self._open[name] = self._create(name, shape, np.dtype(dtype).itemsize, grid)
        return {"dtype": np.dtype(dtype).name, "shape": list(shape), "array": name}

    def fill(self, reference: Reference, where: Where, block: np.ndarray) -> None:
        """Write ``block`` to a part of a large array and wait until it is on the disk."""
        carried = np.ascontiguousarray(block).view(_carrier(block.dtype.itemsize))
        self._open[reference["array"]][where].write(carried).result()

    def close(self) -> None:
        """Write the small arrays."""
        array = self._create(_SMALL, (self._offset,), 1, [max(1, self._offset)])
        array.write(np.concatenate([np.zeros(0, np.uint8), *self._small])).result()

    def _create(self, name: str, shape: tuple[int, ...], itemsize: int, grid: list[int]) -> Any:
        import tensorstore

        codecs = [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "zstd", "configuration": {"level": 1}},
            {"name": "crc32c"},
        ]
        metadata = {
            "shape": list(shape),
            "data_type": _carrier(itemsize).name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": grid}},
            "codecs": codecs,
        }
        return tensorstore.open(
            {**_spec(self._folder / name), "metadata": metadata, "store_data_equal_to_fill_value": True}, create=True
        ).result()


class Reader:
    """Reads arrays of ``folder`` by their references; ``CheckpointError`` for what is missing, changed or of another shape."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._small: np.ndarray | None = None

    def get(self, reference: Reference) -> Any:
        """Return one array in host memory, or the typed key it was."""
        if "key" in reference:
            plain = {name: value for name, value in reference.items() if name != "key"}
            return jax.random.wrap_key_data(jnp.asarray(self.get(plain)), impl=reference["key"])
        dtype, shape = _described(self._folder, reference)
        if "array" in reference:
            return self.part(reference, ())
        if self._small is None:
            self._small = self._read(_SMALL, ())
        start, size = reference["at"], math.prod(shape) * dtype.itemsize
        raw = self._small[start : start + size]
        if raw.size != size:
            damaged(self._folder / _SMALL, f"{self._small.size} bytes, {start + size} expected")
        return np.frombuffer(raw.tobytes(), dtype).reshape(shape)

    def part(self, reference: Reference, where: Where) -> np.ndarray:
        """Return a part of a large array in host memory."""
        dtype, shape = _described(self._folder, reference)
        name = str(reference["array"])
        array = self._array(name)
        if tuple(array.shape) != shape or array.dtype.numpy_dtype != _carrier(dtype.itemsize):
            damaged(self._folder / name, f"{array.dtype.name}{list(array.shape)}, {dtype}{list(shape)} expected")
        return self._read(name, where).view(dtype)

    def check(self, reference: Reference) -> None:
        """Read all of an array in chunks and forget it: raises what is wrong with it."""
        if "array" not in reference:
            self.get(reference)
            return
        dtype, shape = _described(self._folder, reference)
        self.part(reference, tuple(slice(0, 0) for _ in shape))
        axis = int(np.argmax(shape))
        rows = max(1, CHUNK_BYTES * shape[axis] // max(1, math.prod(shape) * dtype.itemsize))
        for start in range(0, shape[axis], rows):
            self.part(reference, (*[slice(None)] * axis, slice(start, min(start + rows, shape[axis]))))

    def _array(self, name: str) -> Any:
        import tensorstore

        if name not in self._open:
            if not _NAME.fullmatch(name):
                damaged(self._folder, f"an array named {name!r}")
            try:
                self._open[name] = tensorstore.open(_spec(self._folder / name), open=True).result()
            except ValueError as error:
                damaged(self._folder / name, _first_line(error), error)
        return self._open[name]

    def _read(self, name: str, where: Where) -> np.ndarray:
        array = self._array(name)
        try:
            return np.asarray((array[where] if where else array).read().result())
        except ValueError as error:
            return damaged(self._folder / name, _first_line(error), error)


def _spec(folder: Path) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "fill_missing_data_reads": False,
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
    }


def _carrier(itemsize: int) -> np.dtype:
    return np.dtype(f"uint{8 * itemsize}")


def _described(folder: Path, reference: Reference) -> tuple[np.dtype, tuple[int, ...]]:
    """Return dtype and shape of a reference."""
    try:
        return jnp.dtype(reference["dtype"]), tuple(map(int, reference["shape"]))
    except (KeyError, TypeError, ValueError) as error:
        return damaged(folder, f"a reference that is none: {reference}", error)


def _piece(leaf: Any, start: int, stop: int, axis: int) -> np.ndarray:
    """Return a part of ``leaf`` in host memory; of a device array no more than that crosses."""
    if not isinstance(leaf, jax.Array):
        return leaf[(*[slice(None)] * axis, slice(start, stop))]
    sharding = leaf.sharding
    explicit = isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types
    if stop - start == leaf.shape[axis] or explicit:  # a slice along an explicitly sharded axis is refused
        return np.asarray(leaf)[(*[slice(None)] * axis, slice(start, stop))]
    if not (isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)):
        return np.asarray(_slice(leaf, start, stop - start, axis))
    with jax.set_mesh(sharding.mesh):  # whatever mesh the caller computes on
        return np.asarray(_slice(leaf, start, stop - start, axis))


@partial(jax.jit, static_argnums=(2, 3))
def _slice(leaf: jax.Array, start: int, size: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(leaf, start, size, axis)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def rows_per_chunk(item_bytes: int) -> int:
    """Return how many items of ``item_bytes`` make up a chunk, at least one."""
    return max(1, CHUNK_BYTES // max(1, item_bytes))
