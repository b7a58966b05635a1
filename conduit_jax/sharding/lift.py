"""Lift a function of one partition onto a placement: ``vmap`` over local partitions, ``shard_map`` over devices, donation, shardings.

Every argument and result has a *kind* that says how it is split:

* ``STORAGE``: a leading partition axis, in the placement's memory kind;
* ``CONTROL``: a leading partition axis, in device memory;
* ``LANES``: a rollout, split over partitions along the lane axis of each leaf;
* ``COUNT``: a leading partition axis, in device memory, for the caller: nothing of our own mesh is on it;
* ``BATCH``: a leading batch axis, ``batch / partitions`` from each partition, in partition order;
* ``SAME``: one value for all partitions.

No kind asks for a collective: a lifted function moves nothing between devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec, SingleDeviceSharding

from conduit_jax.sharding.parts import storage_shardings
from conduit_jax.sharding.placement import Placement
from conduit_jax.types import rollout_lane_axes

Array = jax.Array
PyTree = Any


class Kind(Enum):
    """How an argument or result of a lifted function is split over partitions."""

    STORAGE = "storage"
    CONTROL = "control"
    COUNT = "count"
    LANES = "lanes"
    BATCH = "batch"
    SAME = "same"


def lift(
    function: Callable[..., tuple],
    placement: Placement,
    arguments: Sequence[Kind],
    results: Sequence[Kind],
    donate: Sequence[int] = (),
) -> Callable[..., tuple]:
    """Return ``function(partition, *arguments) -> results`` of one partition, compiled over all of them.

    ``partition`` is the partition's number, int32; the lifted function does not take it. ``donate`` numbers the
    arguments whose buffers are handed over. Wrapped calls run in the placement's own mesh context.
    """
    part, axis = placement.part, placement.axis
    shards = placement.mesh.shape[axis]
    local = part.partitions // shards

    def over_local(first: Array, *values: PyTree) -> tuple:
        return _over_partitions(function, first, local, values, arguments, results)

    def over_all(*values: PyTree) -> tuple:
        if placement.mesh.size == 1:
            return over_local(jnp.int32(0), *values)
        specs = tuple(_spec(kind, value, axis) for kind, value in zip(arguments, values, strict=True))
        sharded = jax.shard_map(
            lambda *own: over_local(jax.lax.axis_index(axis).astype(jnp.int32) * local, *own),
            mesh=placement.mesh,
            in_specs=specs,
            out_specs=tuple(PartitionSpec() if kind is Kind.SAME else PartitionSpec(axis) for kind in results),
            check_vma=False,
        )
        return sharded(*values)

    def jitted(storage: PyTree = None) -> Any:
        out = tuple(result_sharding(kind, placement, storage) for kind in results)
        return jax.jit(over_all, donate_argnums=tuple(donate), out_shardings=out)

    several = len(placement.parts) > 1 and Kind.STORAGE in results
    return in_own_mesh(_ByStorage(jitted, arguments.index(Kind.STORAGE)) if several else jitted(), placement.mesh)


class _ByStorage:
    """A jitted function that is made when it sees its storage: which memory each array goes back to depends on its leaves."""

    def __init__(self, make: Callable[[PyTree], Any], argument: int):
        self._make, self._argument = make, argument
        self._known: dict[Any, Any] = {}

    def __call__(self, *values: PyTree) -> Any:
        return self._of(values)(*values)

    def lower(self, *values: PyTree) -> Any:
        return self._of(values).lower(*values)

    def _of(self, values: tuple[PyTree, ...]) -> Any:
        structure = jax.tree.structure(values[self._argument])
        if structure not in self._known:
            self._known[structure] = self._make(values[self._argument])
        return self._known[structure]


def in_own_mesh(compiled: Any, mesh: Mesh) -> Callable[..., Any]:
    """Run ``compiled`` on ``mesh``, whatever mesh context it is called in.

    Under a user's ``jax.set_mesh`` a program for other devices raises "Received incompatible devices for jitted
    computation" (jax 0.10.2), so ``mesh`` is set for the call; without a context nothing is done.
    """

    def call(*values: PyTree) -> Any:
        if jax.sharding.get_abstract_mesh().empty:
            return compiled(*values)
        with jax.set_mesh(mesh):
            return compiled(*values)

    def shapes(*values: PyTree) -> Any:
        with jax.set_mesh(mesh):
            return jax.eval_shape(compiled, *values)

    def ahead(*values: PyTree) -> Any:
        if jax.sharding.get_abstract_mesh().empty:
            return compiled.lower(*values).compile()
        with jax.set_mesh(mesh):
            return compiled.lower(*values).compile()

    call.ahead = ahead  # type: ignore[attr-defined]  # compiles for shapes; a later call of them finds it compiled
    call.compiled = compiled  # type: ignore[attr-defined]  # for memory analysis and tests
    call.shapes = shapes  # type: ignore[attr-defined]  # raises what tracing raises, and runs nothing
    return call


def result_sharding(kind: Kind, placement: Placement, storage: PyTree = None) -> Any:
    """Return the sharding of a result of ``kind``; ``storage`` tells the leaves of one that is split over memories."""
    if kind in (Kind.BATCH, Kind.COUNT) and placement.mesh.size == 1:
        return SingleDeviceSharding(placement.part.devices[0])  # leaves with nothing of our mesh on it
    if kind is Kind.SAME:
        return placement.sharding()
    if kind is not Kind.STORAGE:
        return placement.sharding(placement.axis)
    if len(placement.parts) > 1:
        return storage_shardings(placement, storage)
    return placement.sharding(placement.axis, memory_kind=placement.part.memory_kind)


def _spec(kind: Kind, value: PyTree, axis: str) -> PyTree:
    """Return the tree of partition specs of one argument."""
    if kind is Kind.LANES:
        return jax.tree.map(lambda lane_axis: _lane_spec(lane_axis, axis), rollout_lane_axes(value))
    return PartitionSpec() if kind is Kind.SAME else PartitionSpec(axis)


def _lane_spec(lane_axis: int, axis: str) -> PartitionSpec:
    return PartitionSpec() if lane_axis < 0 else PartitionSpec(*([None] * lane_axis), axis)


def _over_partitions(
    function: Callable[..., tuple],
    first: Array,
    count: int,
    values: Sequence[PyTree],
    arguments: Sequence[Kind],
    results: Sequence[Kind],
) -> tuple:
    """Apply ``function`` to ``count`` partitions numbered from ``first``: directly for one, by ``vmap`` for several."""
    if count == 1:
        own = [_squeeze(kind, value) for kind, value in zip(arguments, values, strict=True)]
        outputs = function(first, *own)
        return tuple(_unsqueeze(kind, output) for kind, output in zip(results, outputs, strict=True))
    split = [_split(kind, value, count) for kind, value in zip(arguments, values, strict=True)]
    axes = [_mapped_axes(kind, value) for kind, value in zip(arguments, values, strict=True)]
    outputs = jax.vmap(function, in_axes=(0, *axes))(first + jnp.arange(count, dtype=jnp.int32), *split)
    return tuple(_merge(kind, output) for kind, output in zip(results, outputs, strict=True))


def _squeeze(kind: Kind, value: PyTree) -> PyTree:
    stacked = kind in (Kind.STORAGE, Kind.CONTROL)
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[1:]), value) if stacked else value


def _unsqueeze(kind: Kind, value: PyTree) -> PyTree:
    stacked = kind in (Kind.STORAGE, Kind.CONTROL, Kind.COUNT)
    return jax.tree.map(lambda leaf: leaf.reshape(1, *leaf.shape), value) if stacked else value


def _split(kind: Kind, value: PyTree, count: int) -> PyTree:
    if kind is Kind.LANES:
        return jax.tree.map(
            lambda leaf, lane: leaf if lane < 0 else _divide(leaf, lane, count), value, rollout_lane_axes(value)
        )
    return jax.tree.map(lambda leaf: _divide(leaf, 0, count), value) if kind is Kind.BATCH else value


def _divide(leaf: Array, axis: int, count: int) -> Array:
    return leaf.reshape(*leaf.shape[:axis], count, leaf.shape[axis] // count, *leaf.shape[axis + 1 :])


def _mapped_axes(kind: Kind, value: PyTree) -> PyTree:
    if kind is Kind.LANES:
        return jax.tree.map(lambda lane: None if lane < 0 else lane, rollout_lane_axes(value))
    return None if kind is Kind.SAME else 0


def _merge(kind: Kind, value: PyTree) -> PyTree:
    if kind is Kind.BATCH:
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), value)
    return jax.tree.map(lambda leaf: leaf[0], value) if kind is Kind.SAME else value
