"""The programs of a table whose storage is far: the device says which rows, others fetch or write them.

Draws, priorities and everything else that is small stay on the device. An insert is one program that returns rows and
slots to be written. A delivery is two: the first draws and returns the slots of all that is going to be read, the second
draws the same again, takes the rows that were found there, and runs the hook, all in program order: what is delivered is the
same as from any memory, bit for bit. What is read may not depend on what is stored (``Items.slots_known``). Storage on disk
is touched by the host, which waits for the device; scattered storage by programs of its own devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from conduit_jax.delivery import (
    compile_delete,
    compile_delivery,
    compile_priority_update,
    compile_reset,
    compile_size,
)
from conduit_jax.hooks import Hook
from conduit_jax.ingestion import compile_ingestion
from conduit_jax.replay import random_bits
from conduit_jax.replay.interface import Replay
from conduit_jax.replay.storage import Experience, Storage
from conduit_jax.schedule.programs import Programs
from conduit_jax.sharding.far import far_storage
from conduit_jax.sharding.lift import Kind, lift
from conduit_jax.sharding.place import as_partition
from conduit_jax.sharding.placement import Placement
from conduit_jax.sharding.pressure import watched
from conduit_jax.types import AddInfo, Sample

Array = jax.Array
PyTree = Any
MakeReplay = Callable[..., Replay]


def _unused(*_: Any) -> Any:
    raise AssertionError("this storage is not touched here")


_writes = Storage(lambda array, slots, values: (slots, values), _unused)  # type: ignore[arg-type]  # what to write, and where


def _given_rows(make: MakeReplay) -> Replay:
    """Return the replay whose storage, when it samples, are the rows that it reads, one read after the other."""
    at: dict[str, Any] = {}

    def gather(array: Array, slots: Array) -> Array:
        if array is at["rows"]:  # a read begins with them; large leaves follow, or some of them
            at["span"] = slice(at["span"].stop, at["span"].stop + slots.shape[0])
        return array[at["span"]]

    replay = make(storage_access=Storage(_unused, gather))

    def sample(control: PyTree, storage: Experience, key: Array) -> tuple[PyTree, Sample]:
        at.update(rows=storage.rows, span=slice(0, 0))
        return replay.sample(control, storage, key)

    return replay._replace(sample=sample)


def staged_programs(
    ingestion: Hook,
    delivery: Hook,
    make: MakeReplay,
    placement: Placement,
    transfers: tuple[Callable[[PyTree], PyTree], Callable[[PyTree], PyTree]],
    keeps_priorities: bool,
    key: np.ndarray | None = None,
) -> Programs:
    """Return the programs of a table whose storage is an ``Experience`` of far arrays.

    ``make(storage_access=...)`` is one partition's replay, ``transfers`` are to the learner and back, ``key`` is what a
    remover that draws is given.
    """
    home = placement.part.devices  # whose memory is watched, as it is for storage within reach
    writing = compile_ingestion(ingestion, make(storage_access=_writes), placement, donate=(1, 2), key=key)
    ingest = _ingest(watched(writing, home))
    given = _given_rows(make)
    deliver = _deliver(delivery, make, placement)

    def ingest_group(storage: Experience, control: PyTree, carry: PyTree, *units: tuple) -> tuple:
        infos = []
        for unit in zip(*units, strict=True):
            storage, control, carry, info = ingest(storage, control, carry, *unit)
            infos.append(info)
        total = functools.reduce(lambda one, other: jax.tree.map(jax.numpy.add, one, other), infos)
        return storage, control, carry, AddInfo(*total)

    def deliver_group(control: PyTree, storage: Experience, key: Array, numbers: tuple, context: PyTree) -> tuple:
        samples = []
        for number in numbers:
            control, sample = deliver(control, storage, key, number, context)
            samples.append(sample)
        return control, tuple(samples)

    return Programs(
        ingest=ingest,
        ingest_group=ingest_group,
        deliver=deliver,
        deliver_group=deliver_group,
        update_priorities=compile_priority_update(given, placement),
        delete=compile_delete(given, placement),
        reset=compile_reset(given, placement),
        size=compile_size(given, placement),
        batch_to_learner=transfers[0],
        to_placement=transfers[1],
        keeps_priorities=keeps_priorities,
        mesh=placement.mesh,
        one_site=False,
    )


def _ingest(compiled: Any) -> Callable[..., tuple]:
    def ingest(storage: Experience, control: PyTree, carry: PyTree, *unit: PyTree) -> tuple:
        far = far_storage(storage)
        writes, control, carry, info = compiled(far.stand_in, control, carry, *unit)
        far.scatter(writes.rows[0], [values for _, values in (writes.rows, *writes.apart)])
        return storage, control, carry, info

    ingest.shapes = lambda storage, *rest: compiled.shapes(far_storage(storage).stand_in, *rest)  # type: ignore[attr-defined]

    def ahead(storage: Experience, *rest: PyTree) -> Any:
        far = far_storage(storage)
        writes, *_ = compiled.shapes(far.stand_in, *rest)
        far.rehearse_scatter(writes.rows[0].shape[1])
        return compiled.ahead(far.stand_in, *rest)

    ingest.ahead = ahead  # type: ignore[attr-defined]
    return ingest


def _deliver(hook: Hook, make: MakeReplay, placement: Placement) -> Callable[..., tuple]:
    partitions = placement.part.partitions

    def find(partition: Array, control: PyTree, storage: PyTree, key: Array, number: Array) -> tuple:
        found: list[Array] = []

        def note(array: Array, slots: Array) -> Array:
            if array is storage.rows:
                found.append(slots)
            return jax.numpy.zeros((slots.shape[0], *array.shape[1:]), array.dtype)

        noting = as_partition(make(storage_access=Storage(_unused, note)), partition, partitions)
        noting.sample(control, storage, random_bits.fold(key, number))
        return (jax.numpy.concatenate(found) if len(found) > 1 else found[0],)

    kinds = (Kind.CONTROL, Kind.STORAGE, Kind.SAME, Kind.SAME)
    finding: Any = lift(find, placement, kinds, (Kind.COUNT,))
    finishing: Any = watched(compile_delivery(hook, _given_rows(make), placement), placement.part.devices)

    def deliver(control: PyTree, storage: Experience, key: Array, number: Array, context: PyTree) -> tuple:
        far = far_storage(storage)
        (slots,) = finding(control, far.stand_in, key, number)
        rows, *apart = jax.device_put(far.gather(slots), placement.sharding(placement.axis))
        return finishing(control, Experience(rows, tuple(apart), storage.layout), key, number, context)

    def found(control: PyTree, storage: Experience, key: Array, number: Array) -> Experience:
        """Return the shapes of the rows that the second program takes."""
        far, sharding = far_storage(storage), placement.sharding(placement.axis)
        (slots,) = finding.shapes(control, far.stand_in, key, number)
        shapes = [(*slots.shape, *one.shape[2:]) for one in far.shapes]
        rows, *apart = (
            jax.ShapeDtypeStruct(shape, one.dtype, sharding=sharding)
            for shape, one in zip(shapes, far.shapes, strict=True)
        )
        return Experience(rows, tuple(apart), storage.layout)  # type: ignore[arg-type]  # shapes in place of arrays

    def ahead(control: PyTree, storage: Experience, key: Array, number: Array, context: PyTree) -> Any:
        far = far_storage(storage)
        finding.ahead(control, far.stand_in, key, number)
        (slots,) = finding.shapes(control, far.stand_in, key, number)
        far.rehearse_gather(slots.shape[1])
        return finishing.ahead(control, found(control, storage, key, number), key, number, context)

    def shapes(control: PyTree, storage: Experience, key: Array, number: Array, context: PyTree) -> Any:
        return finishing.shapes(control, found(control, storage, key, number), key, number, context)

    deliver.ahead, deliver.shapes = ahead, shapes  # type: ignore[attr-defined]
    return deliver
