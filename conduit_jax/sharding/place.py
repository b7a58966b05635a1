"""Lift a one-partition ``Replay`` onto a placement: ``Replay`` in, ``Replay`` out."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.replay import random_bits
from conduit_jax.replay.interface import Replay, ReplayState
from conduit_jax.sharding.disk import DiskHolder, DiskStorage
from conduit_jax.sharding.far import far_storage
from conduit_jax.sharding.lift import Kind, lift
from conduit_jax.sharding.parts import storage_shardings, stored_names
from conduit_jax.sharding.placement import Placement
from conduit_jax.sharding.scattered import ScatteredHolder, ScatteredStorage, shelves_of
from conduit_jax.types import AddInfo, Sample, SampleInfo

Array = jax.Array
PyTree = Any


def as_partition(replay: Replay, partition: Array, partitions: int) -> Replay:
    """Return ``replay`` as number ``partition`` of ``partitions``: draws keyed by it, slots counted over all, probability a share."""
    offset = partition * replay.geometry.slots

    def sample(control: PyTree, storage: PyTree, key: Array) -> tuple[PyTree, Sample]:
        control, batch = replay.sample(control, storage, random_bits.fold(key, partition))
        info = batch.info._replace(slot=batch.info.slot + offset, probability=batch.info.probability / partitions)
        return control, batch._replace(info=info)

    def update_priorities(control: PyTree, info: SampleInfo, priorities: Array) -> tuple[PyTree, Array]:
        return replay.update_priorities(control, info._replace(slot=info.slot - offset), priorities)

    def delete(control: PyTree, info: SampleInfo) -> tuple[PyTree, Array]:
        return replay.delete(control, info._replace(slot=info.slot - offset))

    return replay._replace(sample=sample, update_priorities=update_priorities, delete=delete)


def allocate(replay: Replay, placement: Placement, item: PyTree) -> ReplayState:
    """Return the empty state of all partitions on ``placement``, allocated there (never copied to it)."""
    partitions = placement.part.partitions
    if placement.far:
        return _allocate_far(replay, placement, item)

    def all_partitions() -> tuple:
        state = replay.init(item)
        return tuple(
            jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (partitions, *leaf.shape)), part) for part in state
        )

    storage = jax.eval_shape(replay.init, item).storage
    shardings = (storage_shardings(placement, storage), placement.sharding(placement.axis))
    with jax.set_mesh(placement.mesh):
        return ReplayState(*jax.jit(all_partitions, out_shardings=shardings)())


def _allocate_far(replay: Replay, placement: Placement, item: PyTree) -> ReplayState:
    storage = far_away(jax.eval_shape(replay.init, item).storage, placement)
    sharding = placement.sharding(placement.axis)

    def controls() -> PyTree:
        one = replay.init(item).control
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (placement.part.partitions, *leaf.shape)), one)

    with jax.set_mesh(placement.mesh):
        return ReplayState(storage, jax.jit(controls, out_shardings=sharding)())


def far_away(shapes: PyTree, placement: Placement) -> PyTree:
    """Return the tree of one partition's ``shapes`` ``(slots, ...)`` as far arrays of all partitions: on disk, or scattered."""
    partitions, sharding = placement.part.partitions, placement.sharding(placement.axis)
    leaves, structure = jax.tree.flatten(shapes)
    rows = [jax.ShapeDtypeStruct((partitions, *leaf.shape), leaf.dtype) for leaf in leaves]

    def one_row_each() -> list[Array]:
        return [jnp.zeros((partitions, 1, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]

    with jax.set_mesh(placement.mesh):
        stand_in = structure.unflatten(jax.jit(one_row_each, out_shardings=sharding)())
    if placement.disk is not None:
        return structure.unflatten(DiskStorage(rows, placement.disk, stand_in).arrays)
    home, shelves = placement.part.devices[0], shelves_of(placement, stored_names(shapes), rows)
    return structure.unflatten(ScatteredStorage(rows, home, shelves, stand_in).arrays)


def far_holder(storage: PyTree, placement: Placement) -> DiskHolder | ScatteredHolder:
    """Return far storage as an end of a move."""
    far = far_storage(storage)
    return ScatteredHolder(far) if placement.scattered else DiskHolder(far, placement.part.devices[0])


def place(replay: Replay, placement: Placement) -> Replay:
    """Return ``replay`` (one partition's) with every function compiled onto ``placement``.

    States have a leading partition axis. ``add`` donates its state; ``sample``, ``update_priorities``, ``delete`` and
    ``reset`` donate their control. Slots are counted over all partitions and probabilities include the factor 1/partitions.
    """
    partitions = placement.part.partitions
    storage, control, lanes, batch, same = Kind.STORAGE, Kind.CONTROL, Kind.LANES, Kind.BATCH, Kind.SAME
    count = Kind.COUNT

    def add_one(
        number: Array, kept: PyTree, own: PyTree, chunk: PyTree, lengths: PyTree, priorities: PyTree, version: PyTree
    ) -> tuple:
        key = random_bits.fold(
            jnp.zeros((2,), jnp.uint32), number
        )  # what a drawing remover evicts differs by partition
        state, info = replay.add(ReplayState(kept, own), chunk, lengths, priorities, version, key)
        return state.storage, state.control, info

    add_with, add_alike = (  # one length a lane is split with the lanes, one for all of them is not
        lift(add_one, placement, (storage, control, lanes, kind, lanes, same), (storage, control, count), donate=(0, 1))
        for kind in (batch, same)
    )
    lifted_sample = lift(
        lambda number, own, kept, key: as_partition(replay, number, partitions).sample(own, kept, key),
        placement,
        (control, storage, same),
        (control, batch),
        donate=(0,),
    )
    lifted_update = lift(
        lambda number, own, info, priorities: as_partition(replay, number, partitions).update_priorities(
            own, info, priorities
        ),
        placement,
        (control, batch, batch),
        (control, count),
        donate=(0,),
    )
    lifted_delete = lift(
        lambda number, own, info: as_partition(replay, number, partitions).delete(own, info),
        placement,
        (control, batch),
        (control, count),
        donate=(0,),
    )
    lifted_reset = lift(lambda _, own: (replay.reset(own),), placement, (control,), (control,), donate=(0,))

    def add(
        state: ReplayState,
        chunk: PyTree,
        lengths: Array | None = None,
        priorities: Array | None = None,
        version: Array | None = None,
    ) -> tuple[ReplayState, AddInfo]:
        lifted_add = add_alike if lengths is None or np.ndim(lengths) == 0 else add_with
        kept, own, info = lifted_add(state.storage, state.control, chunk, lengths, priorities, version)
        return ReplayState(kept, own), info

    def over_partitions(predicate: Any) -> Any:
        return lambda own, n: jnp.all(jax.vmap(lambda one: predicate(one, -(-n // partitions)))(own))

    def explain_blocked(own: PyTree, operation: str, n: int) -> str:
        share = -(-n // partitions)
        for number in range(partitions):
            one = jax.tree.map(partial(jnp.take, indices=number, axis=0), own)
            if reason := replay.explain_blocked(one, operation, share):
                return reason
        return ""

    return Replay(
        init=lambda item: allocate(replay, placement, item),
        can_add=over_partitions(replay.can_add),
        add=add,
        can_sample=over_partitions(replay.can_sample),
        sample=lifted_sample,
        update_priorities=lifted_update,
        delete=lifted_delete,
        reset=lambda own: lifted_reset(own)[0],
        explain_blocked=explain_blocked,
        size=lambda own: jnp.sum(jax.vmap(replay.size)(own)),
        geometry=replay.geometry,
    )
