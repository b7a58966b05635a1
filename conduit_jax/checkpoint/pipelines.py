"""What a table is at run time, as arrays and plain data: control, carry, rows, batches drawn, units waiting, account, key."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable
from fractions import Fraction
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from conduit_jax.checkpoint import rows
from conduit_jax.checkpoint.arrays import Reader, Reference, Writer
from conduit_jax.checkpoint.folder import damaged
from conduit_jax.checkpoint.leaves import load_tree, save_tree
from conduit_jax.errors import CheckpointError, refuse
from conduit_jax.replay.drawing import stores_of, with_store
from conduit_jax.replay.slots import SlotsControl
from conduit_jax.schedule.iteration import IterationPipeline
from conduit_jax.schedule.lag import LagPipeline, Span
from conduit_jax.schedule.ledger import Ledger
from conduit_jax.schedule.minibatches import Epochs, Finalized
from conduit_jax.schedule.pipeline import ReplayPipeline
from conduit_jax.schedule.programs import Drawn, Unit
from conduit_jax.schedule.semantics import Schedule
from conduit_jax.schedule.trace import Recorder
from conduit_jax.schedule.worker import Pending
from conduit_jax.sharding.lift import in_own_mesh
from conduit_jax.sharding.placement import Placement
from conduit_jax.types import Sample

PyTree = Any
Data = dict[str, Any]


def like(reader: Reader, references: list[Reference], example: PyTree, what: str) -> PyTree:
    """Return the referenced leaves in the tree of ``example``; ``CheckpointError`` for other shapes or dtypes."""
    leaves, structure = jax.tree.flatten(example)
    if len(leaves) != len(references):
        damaged(what, f"{len(references)} leaves, {len(leaves)} expected")
    for one, leaf in zip(references, leaves, strict=True):
        if (one.get("dtype"), one.get("shape")) != (leaf.dtype.name, list(leaf.shape)):
            damaged(what, f"{one.get('dtype')}{one.get('shape')}, {leaf.dtype.name}{list(leaf.shape)} expected")
    return structure.unflatten([reader.get(one) for one in references])


def save_replay(writer: Writer, pipeline: ReplayPipeline, placement: Placement) -> Data:
    """Write what a replay's pipeline holds. The caller holds its lock."""
    ledger, (storage, control) = pipeline.ledger, pipeline.state
    return {
        "ledger": _ledger_as_data(ledger),
        "key": writer.put(pipeline._key),
        "control": [writer.put(leaf) for leaf in jax.tree.leaves(control)],
        "carry": [writer.put(leaf) for leaf in jax.tree.leaves(pipeline._carry)],
        "rows": [
            rows.save_rows(writer, one, spans, placement)
            for one, spans in zip(stores_of(storage), _live(control, storage, ledger), strict=True)
        ],
        "drawn": [_save_drawn(writer, one) for one in pipeline._drawn],
        "waiting": [_save_unit(writer, unit) for unit in pipeline._waiting],
    }


def _ledger_as_data(ledger: Ledger) -> Data:
    return {
        name: sorted(value.items())
        if isinstance(value, Counter)
        else list(value)
        if isinstance(value, deque)
        else value
        for name, value in vars(ledger).items()
        if name not in ledger.SETTINGS
    }


def _ledger_from_data(data: Data, present: Ledger) -> Ledger:
    """Return the saved account, of the kind that is there."""
    known: Data = dict(data)
    for name, value in vars(present).items():
        if isinstance(value, Counter):
            known[name] = Counter(dict(data[name]))
        elif isinstance(value, deque):
            known[name] = deque(Span(*one) for one in data[name])
    return dataclasses.replace(present, **known)


def _save_drawn(writer: Writer, drawn: Drawn) -> Data:
    sample: Any = drawn.sample
    on_host = isinstance(sample, Pending)
    saved = save_tree(writer, sample.result() if on_host else sample)
    if on_host and saved["structure"] is None:
        refuse(
            CheckpointError,
            "A batch drawn ahead, made by a host hook, is of a kind that has no form on the disk.",
            want="dicts, lists, tuples or this package's own types from a host delivery hook",
            fix="schedule='sequential' draws no batch ahead",
        )
    return {**saved, "before": drawn.delivered_before, "versions": drawn.versions, "host": on_host}


def _load_unit(reader: Reader, saved: Data, rollout: Any, context: PyTree) -> Unit:
    leaves = [reader.get(one) for one in saved["rollout"]]
    own = load_tree(reader, saved["context"], lambda: jax.tree.structure(context))
    return Unit(rollout.unflatten(leaves), own, saved["version"], None)


def _save_unit(writer: Writer, unit: Unit) -> Data:
    context = save_tree(writer, unit.context)
    leaves = [writer.put(leaf) for leaf in jax.tree.leaves(unit.rollout)]
    return {"rollout": leaves, "context": context, "version": int(unit.version)}


def _live(control: Any, storage: PyTree, ledger: Ledger) -> list[list[rows.Spans]]:
    """Return the live slots of each partition, of each group of arrays; what is kept beside the steps is small: all of it."""
    (partitions, *_), *beside = (jax.tree.leaves(one)[0].shape for one in stores_of(storage))
    whole = [[np.array([[0, slots]], np.int64)] * partitions for _, slots, *_ in beside]
    return [_live_steps(control, partitions, ledger), *whole]


def _live_steps(control: Any, partitions: int, ledger: Ledger) -> list[rows.Spans]:
    if isinstance(control, SlotsControl):
        places, sizes = (np.asarray(leaf) for leaf in (control.table.live.places, control.table.live.size))
        return [rows.slot_spans(own[0, :size]) for own, size in zip(places, sizes, strict=True)]
    ring = control.ring
    ring = jax.tree.map(np.asarray, ring)  # reading on the device asks for its own mesh
    return rows.ring_spans(ring.head, ring.filled, ledger.length, ledger.lanes // partitions)


def finished(value: Any) -> Pending:
    """Return what a host hook made, as one that is waited for no longer."""
    pending = Pending(lambda: value, (), Recorder(), "restored")
    pending.run()
    return pending


class ReplayLoader:
    """Restores a saved pipeline in two steps: the constructor reads and checks, ``commit`` changes the pipeline.

    ``commit`` overwrites rows first and says which are live last, so an error of the disk leaves an empty table empty; of
    a table that holds items all chunks are read beforehand.
    """

    def __init__(
        self, reader: Reader, saved: Data, pipeline: ReplayPipeline, placement: Placement, unit: Any, context: PyTree
    ):
        self._reader, self._saved, self._pipeline, self._placement = reader, saved, pipeline, placement
        storage, control = pipeline.state
        self._control = like(reader, saved["control"], control, "control")
        self._carry = like(reader, saved["carry"], pipeline._carry, "carry")
        self._key = like(reader, [saved["key"]], pipeline._key, "key")
        stores = stores_of(storage)
        if len(stores) != len(saved["rows"]):
            damaged("storage", f"{len(saved['rows'])} groups of arrays, {len(stores)} expected")
        for one, store in zip(saved["rows"], stores, strict=True):
            rows.check_rows(reader, one, store)
        if pipeline.ledger.size:
            for one in [reference for own in saved["rows"] for reference in rows.all_references(own)]:
                reader.check(one)
        self._waiting = [_load_unit(reader, one, unit, context) for one in saved["waiting"]]
        self._drawn = [
            Drawn(
                load_tree(reader, one, lambda: self._sample_structure(context)),
                one["before"],
                tuple((made, count) for made, count in one["versions"]),
            )
            for one in saved["drawn"]
        ]
        self._ledger = _ledger_from_data(saved["ledger"], pipeline.ledger)

    def _sample_structure(self, context: PyTree) -> Any:
        """Trace what a batch looks like here: a hook's own NamedTuples have no form on the disk."""
        pipeline = self._pipeline
        storage, control = pipeline.state
        try:
            deliver: Any = pipeline._programs.deliver
            values = (np.uint32(0), context)
            if isinstance(pipeline, LagPipeline):
                values = (np.zeros(pipeline._batch_size, np.int32), (np.uint32(0), np.int32(0), context))
            shapes = deliver.shapes(control, storage, pipeline._key, *values)
        except Exception as error:
            raise CheckpointError(
                "Batches drawn ahead were saved, and the delivery hook says what they look like only with its context: "
                "plane.restore(path, context=...)."
            ) from error
        return jax.tree.structure(shapes[1])

    def commit(self, settle: Callable[[Unit], Unit]) -> None:
        """Put everything in its place; ``settle`` brings a waiting unit to the placement."""
        pipeline, placement = self._pipeline, self._placement
        for number, saved in enumerate(self._saved["rows"]):
            for store in rows.load_rows(self._reader, saved, stores_of(pipeline._storage)[number], placement):
                pipeline._storage = with_store(pipeline._storage, number, store)
        pipeline._control = _as_allocated(self._control, pipeline._control, placement)
        pipeline._carry = _as_allocated(self._carry, pipeline._carry, placement)
        pipeline._key = jax.device_put(self._key, placement.sharding())
        pipeline._waiting = deque(map(settle, self._waiting))
        pipeline._drawn = deque(
            one._replace(sample=finished(one.sample) if saved["host"] else self._delivered(one.sample))
            for one, saved in zip(self._drawn, self._saved["drawn"], strict=True)
        )
        pipeline.ledger = self._ledger
        pipeline._none_applied = None

    def _delivered(self, sample: Sample) -> Sample:
        placement = self._placement
        if placement.mesh.size == 1:
            sharding: Any = jax.sharding.SingleDeviceSharding(placement.part.devices[0])
        else:
            sharding = placement.sharding(placement.axis)
        return self._pipeline._programs.batch_to_learner((jax.device_put(sample, sharding),))[0]


def _as_allocated(values: PyTree, present: PyTree, placement: Placement) -> PyTree:
    """Return ``values`` in buffers that JAX has allocated: one born from numpy is copied by its first donation."""
    if not jax.tree.leaves(present):
        return present
    shardings = jax.tree.map(lambda leaf: leaf.sharding, present)
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings)
    return in_own_mesh(copy, placement.mesh)(jax.device_put(values, shardings))


def save_iteration(writer: Writer, pipeline: IterationPipeline) -> Data:
    """Write what an on-policy pipeline holds. The caller holds its lock."""
    versions = [writer.put(version) for version in pipeline._versions]
    return {
        "counts": {name: getattr(pipeline, name) for name in _COUNTS},
        "key": writer.put(pipeline._key),
        "carry": [writer.put(leaf) for leaf in jax.tree.leaves(pipeline._carry)],
        "units": [_save_records(writer, unit) for unit in pipeline._units],
        "versions": versions,
        "waiting": [_save_unit(writer, unit) for unit in pipeline._waiting],
        "epochs": _save_epochs(writer, pipeline.delivering),
    }


def _save_epochs(writer: Writer, epochs: Epochs | None) -> Data | None:
    """Write the iteration whose mini-batches are being delivered; those that are left are gathered anew."""
    if epochs is None or epochs.iteration is None:
        return None
    of = epochs.iteration
    return {
        "records": _save_records(writer, of.records),
        "version": writer.put(of.version),
        "context": save_tree(writer, of.context),
        "number": of.number,
        "handed": epochs.handed,
    }


_COUNTS = ("iteration", "pushed_units", "delivered_batches")


def _save_records(writer: Writer, unit: PyTree) -> Data:
    specs = [_spec_as_data(leaf) for leaf in jax.tree.leaves(unit)]
    return {**save_tree(writer, unit), "specs": specs}


def _spec_as_data(leaf: jax.Array) -> list[Any]:
    sharding = leaf.sharding
    spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
    return [list(axis) if isinstance(axis, tuple) else axis for axis in spec]


class IterationLoader:
    """Restores a saved on-policy pipeline, as ``ReplayLoader`` does."""

    def __init__(self, reader: Reader, saved: Data, pipeline: IterationPipeline, unit: Any, context: PyTree):
        self._saved, self._pipeline = saved, pipeline
        self._carry = like(reader, saved["carry"], pipeline._carry, "carry")
        self._key = like(reader, [saved["key"]], pipeline._key, "key")

        def structure() -> Any:
            shapes = pipeline._shapes_of_ingest(pipeline._carry, (unit.shapes(),), (context,))
            return jax.tree.structure(shapes[1][0])

        self._units = [load_tree(reader, one, structure) for one in saved["units"]]
        self._versions = [reader.get(one)[()] for one in saved["versions"]]
        self._waiting = [_load_unit(reader, one, unit, context) for one in saved["waiting"]]
        self._delivering = (
            None if saved["epochs"] is None else self._load_epochs(reader, saved["epochs"], unit, context)
        )

    def _load_epochs(self, reader: Reader, saved: Data, unit: Any, context: PyTree) -> Finalized:
        pipeline = self._pipeline

        def structure() -> Any:
            count, version = pipeline.algorithm.units_per_iteration, np.uint32(0)
            _, (records,) = pipeline._shapes_of_ingest(pipeline._carry, (unit.shapes(),), (context,))
            finalize: Any = pipeline.programs[1]
            return jax.tree.structure(finalize.shapes((records,) * count, (version,) * count, context)[0])

        records = load_tree(reader, saved["records"], structure)
        own = load_tree(reader, saved["context"], lambda: jax.tree.structure(context))
        return Finalized(records, reader.get(saved["version"])[()], own, saved["number"])

    def commit(self, settle: Callable[[Unit], Unit]) -> None:
        """Put everything in its place; ``settle`` brings a waiting unit there."""
        pipeline = self._pipeline
        mesh = cast(NamedSharding, pipeline._key.sharding).mesh
        pipeline._carry = jax.tree.map(
            lambda value, present: jax.device_put(value, present.sharding), self._carry, pipeline._carry
        )
        pipeline._key = jax.device_put(self._key, pipeline._key.sharding)
        pipeline._units = [
            _laid_out(unit, saved["specs"], mesh) for unit, saved in zip(self._units, self._saved["units"], strict=True)
        ]
        pipeline._versions, pipeline._waiting = list(self._versions), [settle(unit) for unit in self._waiting]
        for name in _COUNTS:
            setattr(pipeline, name, int(self._saved["counts"][name]))
        pipeline._restored = None
        if (of := self._delivering) is not None:
            records = _laid_out(of.records, self._saved["epochs"]["records"]["specs"], mesh)
            context = jax.device_put(of.context, NamedSharding(mesh, PartitionSpec()))
            pipeline.go_on_with(of._replace(records=records, context=context), self._saved["epochs"]["handed"])


def _laid_out(unit: PyTree, specs: list[Any], mesh: Any) -> PyTree:
    """Return a unit's records laid out as they were, where this mesh has the axes."""
    leaves, structure = jax.tree.flatten(unit)
    placed = []
    for leaf, spec in zip(leaves, specs, strict=True):
        axes = [tuple(axis) if isinstance(axis, list) else axis for axis in spec]
        names = {name for axis in axes for name in (axis if isinstance(axis, tuple) else (axis,)) if name}
        known = PartitionSpec(*axes) if names <= set(mesh.axis_names) else PartitionSpec()
        placed.append(jax.device_put(leaf, NamedSharding(mesh, known)))
    return structure.unflatten(placed)


def schedule_as_data(schedule: Schedule) -> Data:
    """Return a schedule as plain data."""
    return {name: str(value) if isinstance(value, Fraction) else value for name, value in vars(schedule).items()}


def schedule_from_data(data: Data) -> Schedule:
    """Return the schedule ``data`` speaks of."""
    values: Data = {name: Fraction(value) if isinstance(value, str) else value for name, value in data.items()}
    return Schedule(**values)
