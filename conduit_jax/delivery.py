"""The second compiled end of the path: draw -> gather -> hook, one program that reads storage and donates control."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from conduit_jax.errors import HookError, refuse
from conduit_jax.hooks import Hook, trace
from conduit_jax.replay import random_bits
from conduit_jax.replay.buffer import Replay
from conduit_jax.sharding.lift import Kind, lift
from conduit_jax.sharding.place import as_partition
from conduit_jax.sharding.placement import Placement

Array = jax.Array
PyTree = Any

_HOOK_STREAM = np.uint32(0x686F6F6B)  # keeps a hook's random numbers apart from the draw's


def check_delivery(hook: Hook, items: PyTree, context: PyTree) -> None:
    """Trace ``hook`` on the shapes of one batch; ``HookError`` if it raises or loses the batch axis."""
    count = jax.tree.leaves(items)[0].shape[0]
    shapes = trace(hook, items, jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")), context)
    for path, leaf in jax.tree.leaves_with_path(shapes):
        if leaf.shape[:1] != (count,):
            refuse(
                HookError,
                f"Delivery hook {hook.name!r} returns a leaf without the batch axis: {jax.tree_util.keystr(path) or '<root>'}.",
                got=f"shape {leaf.shape}",
                want=f"a leading axis of {count}",
                fix="work on each item of the batch; statistics of a batch belong to train_step",
            )


def check_finalize(hook: Hook, records: PyTree, context: PyTree) -> PyTree:
    """Trace ``hook`` on the shapes of one iteration's records and return what it makes of them; ``HookError`` as for others."""
    lead = jax.tree.leaves(records)[0].shape[:2]
    shapes = trace(hook, records, context)
    for path, leaf in jax.tree.leaves_with_path(shapes):
        if leaf.shape[:2] != lead:
            refuse(
                HookError,
                f"Finalize hook {hook.name!r} returns a leaf without (T, lanes): {jax.tree_util.keystr(path) or '<root>'}.",
                got=f"shape {leaf.shape}",
                want=f"leading axes {lead}",
            )
    return shapes


def deliver_batch(hook: Hook, replay: Replay, partitions: int) -> Callable[..., tuple]:
    """Return ``(partition, control, storage, key, number, context) -> (control, Sample)`` of one partition.

    The key of a draw is ``key`` folded with the batch number and the partition, never with a device, so every placement
    draws the same items.
    """

    def deliver(
        partition: Array, control: PyTree, storage: PyTree, key: Array, number: Array, context: PyTree
    ) -> tuple:
        batch_key = random_bits.fold(key, number)
        control, sample = as_partition(replay, partition, partitions).sample(control, storage, batch_key)
        return control, sample._replace(data=delivered(hook, sample.data, batch_key, partition, context))

    return deliver


def delivered(hook: Hook, data: PyTree, batch_key: Array, partition: Array, context: PyTree) -> PyTree:
    """Return what ``hook`` makes of one partition's ``data``, with a key of its own apart from the draw's."""
    hook_key = random_bits.fold(random_bits.fold(batch_key, partition), _HOOK_STREAM)
    return hook.function(data, jax.random.wrap_key_data(hook_key, impl="threefry2x32"), context)


_KINDS = (Kind.CONTROL, Kind.STORAGE, Kind.SAME, Kind.SAME, Kind.SAME)


def compile_delivery(hook: Hook, replay: Replay, placement: Placement) -> Callable[..., tuple]:
    """Return ``(control, storage, key, number, context) -> (control, Sample)``: batch ``number`` of the run; control is donated."""
    deliver = deliver_batch(hook, replay, placement.part.partitions)
    return lift(deliver, placement, _KINDS, (Kind.CONTROL, Kind.BATCH), donate=(0,))


def compile_group_delivery(hook: Hook, replay: Replay, placement: Placement) -> Callable[..., tuple]:
    """Return ``compile_delivery`` for g batches in one call: ``number`` is a tuple of g, and so is the result's ``Sample``."""
    deliver = deliver_batch(hook, replay, placement.part.partitions)

    def deliver_group(
        partition: Array, control: PyTree, storage: PyTree, key: Array, numbers: tuple, context: PyTree
    ) -> tuple:
        samples = []
        for number in numbers:
            control, sample = deliver(partition, control, storage, key, number, context)
            samples.append(sample)
        return control, tuple(samples)

    return lift(deliver_group, placement, _KINDS, (Kind.CONTROL, Kind.BATCH), donate=(0,))


def compile_priority_update(replay: Replay, placement: Placement) -> Callable[..., tuple]:
    """Return ``(control, info, priorities) -> (control, applied)`` with ``applied`` int32 a partition; control is donated."""
    partitions = placement.part.partitions

    def update(partition: Array, control: PyTree, info: PyTree, priorities: Array) -> tuple:
        return as_partition(replay, partition, partitions).update_priorities(control, info, priorities)

    return lift(update, placement, (Kind.CONTROL, Kind.BATCH, Kind.BATCH), (Kind.CONTROL, Kind.COUNT), donate=(0,))


def compile_delete(replay: Replay, placement: Placement) -> Callable[..., tuple]:
    """Return ``(control, info) -> (control, deleted)`` with ``deleted`` int32 a partition; control is donated."""
    partitions = placement.part.partitions

    def delete(partition: Array, control: PyTree, info: PyTree) -> tuple:
        return as_partition(replay, partition, partitions).delete(control, info)

    return lift(delete, placement, (Kind.CONTROL, Kind.BATCH), (Kind.CONTROL, Kind.COUNT), donate=(0,))


def compile_reset(replay: Replay, placement: Placement) -> Callable[..., tuple]:
    """Return ``(control,) -> (control,)``, empty; control is donated."""
    return lift(lambda _, control: (replay.reset(control),), placement, (Kind.CONTROL,), (Kind.CONTROL,), donate=(0,))


def compile_size(replay: Replay, placement: Placement) -> Callable[..., tuple]:
    """Return ``(control,) -> (size,)``, int32 a partition: how many items may be drawn; control is only read."""
    return lift(lambda _, control: (replay.size(control),), placement, (Kind.CONTROL,), (Kind.COUNT,))
