"""Live rows of a replay's storage, in chunks: from the placement to the disk, and back into buffers that are there already.

A chunk is gathered and scattered by the programs' own storage access, one program each, so every memory kind and mesh that
a table can live on can be saved and restored; what crosses at a time is one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from conduit_jax.checkpoint.arrays import Reader, Reference, Writer, rows_per_chunk
from conduit_jax.checkpoint.folder import damaged
from conduit_jax.sharding.far import far_storage
from conduit_jax.sharding.lift import Kind, lift
from conduit_jax.sharding.memory import storage_access
from conduit_jax.sharding.placement import Placement

PyTree = Any
Spans = np.ndarray  # int64 (n, 2): first slot and number of slots, ascending and apart


class RowPrograms(NamedTuple):
    """``read(storage, slots) -> rows`` and ``write(storage, slots, rows) -> storage`` (donated), slots ``(partitions, n)``."""

    read: Any
    write: Any


@lru_cache(maxsize=32)
def row_programs(placement: Placement) -> RowPrograms:
    """Return the programs of a placement. Slots beyond the storage are read as anything and not written."""
    if placement.far:
        return RowPrograms(_read_far, _write_far)
    access = storage_access(*placement.memory_kinds)

    def read(_: Any, storage: PyTree, slots: jax.Array) -> tuple:
        return (jax.tree.map(lambda array: access.gather(array, jax.numpy.minimum(slots, len(array) - 1)), storage),)

    def write(_: Any, storage: PyTree, slots: jax.Array, rows: PyTree) -> tuple:
        return (jax.tree.map(lambda array, values: access.scatter(array, slots, values), storage, rows),)

    return RowPrograms(
        lift(read, placement, (Kind.STORAGE, Kind.CONTROL), (Kind.COUNT,)),
        lift(write, placement, (Kind.STORAGE, Kind.CONTROL, Kind.CONTROL), (Kind.STORAGE,), donate=(0,)),
    )


def _read_far(storage: PyTree, slots: jax.Array) -> tuple:
    far = far_storage(storage)
    return (far.gather(np.minimum(np.asarray(slots), far.slots - 1)),)


def _write_far(storage: PyTree, slots: jax.Array, rows: PyTree) -> tuple:
    far_storage(storage).scatter(np.asarray(slots), [np.asarray(leaf) for leaf in jax.tree.leaves(rows)])
    return (storage,)


def ring_spans(head: np.ndarray, filled: np.ndarray, length: int, lanes: int) -> list[Spans]:
    """Return each partition's live slots: ``head`` and ``filled`` are ``(partitions,)``, or ``(partitions, lanes)`` if ragged."""
    return [_spans_of_one(*both, length, lanes) for both in zip(head, filled, strict=True)]


def _spans_of_one(head: np.ndarray, filled: np.ndarray, length: int, lanes: int) -> Spans:
    head, filled = (np.broadcast_to(value, (lanes,)).astype(np.int64) for value in (head, filled))
    start, base = (head - filled) % length, np.arange(lanes) * length
    wrapped = np.maximum(start + filled - length, 0)  # steps that stand at the beginning of the ring
    spans = np.stack([np.stack([base, wrapped], 1), np.stack([base + start, filled - wrapped], 1)], 1).reshape(-1, 2)
    return spans[spans[:, 1] > 0]


def slot_spans(slots: np.ndarray) -> Spans:
    """Return the spans of live ``slots`` in any order, no two alike."""
    ordered = np.sort(slots.astype(np.int64))
    first = np.flatnonzero(np.diff(ordered, prepend=-2) != 1)  # where a span begins
    return np.stack([ordered[first], np.diff(first, append=len(ordered))], 1)


def slots_of(spans: Spans, start: int, stop: int) -> np.ndarray:
    """Return the slots of the live rows number ``start`` to ``stop``, int64."""
    ends = np.cumsum(spans[:, 1])
    numbers = np.arange(start, min(stop, int(ends[-1]) if len(ends) else 0))
    span = np.searchsorted(ends, numbers, side="right")
    return spans[span, 0] + numbers - (ends[span] - spans[span, 1])


def save_rows(writer: Writer, storage: PyTree, spans: list[Spans], placement: Placement) -> dict[str, Any]:
    """Write the live rows of ``storage`` and return what ``load_rows`` needs."""
    leaves, partitions = jax.tree.leaves(storage), len(spans)
    counts = [int(own[:, 1].sum()) for own in spans]
    size = _chunk_rows(storage)
    references = [
        writer.begin((partitions, max(counts), *leaf.shape[2:]), leaf.dtype, 1, min(size, max(1, *counts, 1)))
        for leaf in leaves
    ]
    read = row_programs(placement).read
    for start, slots in _chunks(spans, size, leaves[0].shape[1], placement):
        (rows,) = read(storage, slots)
        kept = min(size, max(counts) - start)
        for reference, block in zip(references, jax.tree.leaves(rows), strict=True):
            where = (slice(None), slice(start, start + kept))
            writer.fill(reference, where, np.asarray(block)[:, :kept])
    return {"spans": [writer.put(own) for own in spans], "leaves": references}


def load_rows(reader: Reader, saved: dict[str, Any], storage: PyTree, placement: Placement) -> Iterator[PyTree]:
    """Yield ``storage`` with one chunk more of the saved rows each time; each is donated to make the next."""
    leaves, structure = jax.tree.flatten(storage)
    spans = saved_spans(reader, saved, leaves[0].shape[1])
    most, size = max(int(own[:, 1].sum()) for own in spans), _chunk_rows(storage)
    write = row_programs(placement).write
    sharding = placement.sharding(placement.axis)
    del leaves
    for start, slots in _chunks(spans, size, jax.tree.leaves(storage)[0].shape[1], placement):
        stop = min(start + size, most)
        blocks = [_padded(reader.part(one, (slice(None), slice(start, stop))), size) for one in saved["leaves"]]
        rows = structure.unflatten(jax.device_put(blocks, [sharding] * len(blocks)))
        (storage,) = write(storage, slots, rows)
        yield storage


def check_rows(reader: Reader, saved: dict[str, Any], storage: PyTree) -> None:
    """Raise ``CheckpointError`` unless the saved rows are whole and are those of a storage like ``storage``."""
    leaves = jax.tree.leaves(storage)
    spans = saved_spans(reader, saved, leaves[0].shape[1])
    most = max(int(own[:, 1].sum()) for own in spans)
    if len(saved["leaves"]) != len(leaves) or len(spans) != leaves[0].shape[0]:
        damaged("storage", f"{len(saved['leaves'])} leaves of {len(spans)} partitions")
    for reference, leaf in zip(saved["leaves"], leaves, strict=True):
        wanted = [leaf.shape[0], most, *leaf.shape[2:]]
        if reference.get("shape") != wanted or reference.get("dtype") != leaf.dtype.name:
            damaged("storage", f"rows of {reference}, {leaf.dtype.name}{wanted} expected")


def saved_spans(reader: Reader, saved: dict[str, Any], slots: int) -> list[Spans]:
    """Return the saved spans; ``CheckpointError`` unless they are ascending and lie within ``slots``."""
    spans = [reader.get(one) for one in saved["spans"]]
    for own in spans:
        ends = own.sum(axis=1) if own.ndim == 2 and own.shape[1] == 2 else np.array([-1])
        whole = (own >= 0).all() and (own[1:, 0] >= ends[:-1]).all() if own.size else True
        if not whole or (ends < 0).any() or (ends > slots).any():
            damaged("storage", "live rows that cannot be")
    return spans


def all_references(saved: dict[str, Any]) -> list[Reference]:
    """Return the references of the saved rows."""
    return [*saved["spans"], *saved["leaves"]]


def _chunk_rows(storage: PyTree) -> int:
    """Return how many rows of each partition make up a chunk of all of them."""
    leaves = jax.tree.leaves(storage)
    row_bytes = sum(leaf.nbytes // max(1, leaf.shape[1]) for leaf in leaves)  # of all partitions together
    return min(rows_per_chunk(row_bytes), leaves[0].shape[1])


def _chunks(spans: list[Spans], size: int, slots: int, placement: Placement) -> Iterator[tuple[int, jax.Array]]:
    """Yield the first row and the slots int32 ``(partitions, size)`` of each chunk; beyond the storage where there are fewer."""
    sharding = placement.sharding(placement.axis)
    most = max(int(own[:, 1].sum()) for own in spans)
    for start in range(0, most, size):
        numbers = np.tile(slots + np.arange(size, dtype=np.int32), (len(spans), 1))  # apart, as scatters want them
        for row, own in zip(numbers, spans, strict=True):
            live = slots_of(own, start, start + size)
            row[: len(live)] = live
        yield start, jax.device_put(numbers, sharding)


def _padded(block: np.ndarray, size: int) -> np.ndarray:
    return np.pad(block, [(0, 0), (0, size - block.shape[1])] + [(0, 0)] * (block.ndim - 2))
