"""Compiling ahead: all that a table will run where it is going to live, before anything pauses.

Programs are compiled for the shapes and layouts they will be called with. Transfers are rehearsed with zeros: JAX compiles one
that splits or joins arrays for each of their shapes (jax 0.10.2).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from conduit_jax.blueprint import Blueprint, Compiled
from conduit_jax.build import ReplayTable
from conduit_jax.config import BoundedLag
from conduit_jax.hooks import Hook
from conduit_jax.ingestion import partition_view
from conduit_jax.schedule.semantics import Schedule
from conduit_jax.sharding.lift import Kind, result_sharding
from conduit_jax.sharding.mesh import with_auto_axes
from conduit_jax.sharding.placement import Placement

PyTree = Any


def compile_ahead(
    compiled: Compiled, table: ReplayTable, blueprint: Blueprint, target: Placement, storage: PyTree
) -> None:
    """Compile inserts, draws and priority updates on ``target``; ``storage`` has the new arrays, which stay as they are."""
    programs = cast(Any, compiled.programs)
    split, whole = target.sharding(target.axis), target.sharding()
    control, carry = (laid_out(shapes, split) for shapes in small_shapes(compiled, blueprint))
    key = laid_out(table.pipeline.key, whole)
    storage = storage if target.far else laid_out(storage)
    units = [(one, laid_out(blueprint.context, whole), np.uint32(0)) for one in compiled.door.shapes(table.intake)]
    schedule = table.pipeline.schedule
    for unit in units:
        programs.ingest.ahead(storage, control, carry, *unit)
    for unit in units if schedule.g_ingestion > 1 and not target.far else ():
        programs.ingest_group.ahead(storage, control, carry, *((part,) * int(schedule.g_ingestion) for part in unit))
    compiled.door.rehearse(table.intake)
    if not isinstance(blueprint.algorithm, BoundedLag):  # what that takes is named by the host, in shapes of its own
        _compile_draws(programs, schedule, (control, storage, key), units[0][1], target)
        _rehearse_batch(programs, (control, storage, key, np.uint32(0), units[0][1]), table, target)


def _compile_draws(programs: Any, schedule: Schedule, state: tuple, context: PyTree, target: Placement) -> None:
    programs.deliver.ahead(*state, np.uint32(0), context)
    if schedule.g_delivery > 1 and not target.far:
        programs.deliver_group.ahead(*state, (np.uint32(0),) * int(schedule.g_delivery), context)


def _rehearse_batch(programs: Any, drawn: tuple, table: ReplayTable, target: Placement) -> None:
    """Send a batch of zeros to the learner and its priorities back, and compile their update."""
    _, sample = programs.deliver.shapes(*drawn)
    zeros = _zeros(sample, result_sharding(Kind.BATCH, target), target)
    (arrived,) = programs.batch_to_learner((zeros,))
    if programs.keeps_priorities:
        for on_host in table.pipeline.updated_from or {False}:
            priorities = np.zeros(arrived.weights.shape, np.float32) if on_host else arrived.weights
            programs.update_priorities.ahead(drawn[0], *programs.to_placement((arrived.info, priorities)))
    jax.block_until_ready(arrived)


def rehearse_small(table: ReplayTable, compiled: Compiled, blueprint: Blueprint, target: Placement) -> None:
    """Send zeros the way control and carry will go."""
    present = table.placement.sharding(table.placement.axis)
    zeros = _zeros(small_shapes(compiled, blueprint), present, table.placement)
    jax.block_until_ready(jax.device_put(zeros, target.sharding(target.axis)))


def compiled_for(function: Callable[[PyTree], PyTree], tree: PyTree) -> Callable[[PyTree], PyTree]:
    """Return ``function`` jitted and compiled for arrays laid out as ``tree``, on their mesh with Auto axes."""
    jitted = jax.jit(function)
    shapes = jax.tree.map(lambda leaf: laid_out(leaf, _untyped(leaf.sharding)), tree)
    meshes: list[Any] = [
        leaf.sharding.mesh for leaf in jax.tree.leaves(shapes) if isinstance(leaf.sharding, NamedSharding)
    ]

    def own_mesh() -> AbstractContextManager[Any]:
        return jax.set_mesh(meshes[0]) if meshes else nullcontext()

    with own_mesh():  # whatever mesh the caller has set
        jitted.lower(shapes).compile()

    def call(values: PyTree) -> PyTree:
        retyped = jax.device_put(values, jax.tree.map(lambda leaf: _untyped(leaf.sharding), values))
        with own_mesh():
            return jitted(retyped)

    return call


def _untyped(sharding: Any) -> Any:
    """Return ``sharding`` on its mesh with Auto axes: a function then need not say how every result is laid out."""
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return sharding.update(mesh=with_auto_axes(mesh)) if isinstance(mesh, Mesh) else sharding


def small_shapes(compiled: Compiled, blueprint: Blueprint) -> tuple[PyTree, PyTree]:
    """Return the shapes of control and carry over all partitions."""
    control = jax.eval_shape(compiled.replay.init, blueprint.shapes.item.shapes()).control
    carry = carry_shapes(blueprint.hooks.ingestion, blueprint)
    count = blueprint.partitions
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), (control, carry))


def carry_shapes(hook: Hook, blueprint: Blueprint) -> PyTree:
    """Return the shapes of the carry of one partition."""
    return jax.eval_shape(hook.init_carry, partition_view(blueprint.rollout, blueprint.partitions))


def laid_out(tree: PyTree, sharding: Any = None) -> PyTree:
    """Return the shapes of the arrays in ``tree``, laid out as ``sharding``, else as they are; anything else as it is."""

    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return leaf
        where = leaf.sharding if sharding is None else sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where, weak_type=leaf.weak_type)

    return jax.tree.map(shape, tree)


def _zeros(shapes: PyTree, sharding: Any, placement: Placement) -> PyTree:
    def make() -> PyTree:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    with jax.set_mesh(placement.mesh):
        return jax.jit(make, out_shardings=sharding)()


__all__ = ["carry_shapes", "compile_ahead", "compiled_for", "laid_out", "rehearse_small", "small_shapes"]
