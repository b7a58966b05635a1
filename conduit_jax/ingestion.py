"""The first compiled end of the path: rollout unit -> hook -> insert, one program with storage, control and carry donated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.errors import ConduitError, ConfigError, HookError, SpecError, nearest_multiples, refuse
from conduit_jax.hooks import Hook, trace
from conduit_jax.replay import random_bits
from conduit_jax.replay.buffer import Replay, ReplayState
from conduit_jax.sharding.lift import Kind, lift
from conduit_jax.sharding.placement import Placement
from conduit_jax.trees import TreeSpec, leaf_dtype, leaf_shape, tree_spec
from conduit_jax.types import Records, Rollout, rollout_lane_axes

Array = jax.Array
PyTree = Any


_KINDS = (Kind.STORAGE, Kind.CONTROL, Kind.CONTROL, Kind.LANES, Kind.SAME, Kind.SAME)
_RESULTS = (Kind.STORAGE, Kind.CONTROL, Kind.CONTROL, Kind.CONTROL)


class IngestionShapes(NamedTuple):
    """What tracing a hook on one unit tells.

    ``item``: the stored item; ``steps`` and ``lanes`` of its records over all partitions; ``counted``: whether the hook
    says on the device how many steps are real; ``ragged``: whether it says so for each lane.
    """

    item: TreeSpec
    steps: int
    lanes: int
    counted: bool
    ragged: bool


def partition_view(rollout: PyTree, partitions: int) -> PyTree:
    """Return the shapes of ``rollout`` as one of ``partitions`` partitions sees it: its share of the lanes.

    Raises ``SpecError`` naming the leaf that is no array or has no steps or no lanes, ``ConfigError`` with the nearest
    legal numbers where lanes do not divide by ``partitions``.
    """

    def share(path: Any, leaf: Any, axis: int) -> jax.ShapeDtypeStruct:
        name = jax.tree_util.keystr(path) or "<root>"
        shape, dtype = list(leaf_shape(leaf, name)), leaf_dtype(leaf, name)
        _check_lane_axis(name, leaf, tuple(shape), axis)
        if axis >= 0:
            if shape[axis] % partitions:
                refuse(
                    ConfigError,
                    "Lanes do not divide over the partitions.",
                    got=f"{shape[axis]} lanes, {partitions} partitions",
                    want=f"{nearest_multiples(shape[axis], partitions)} lanes",
                )
            shape[axis] //= partitions
        return jax.ShapeDtypeStruct(tuple(shape), dtype)

    return jax.tree.map_with_path(share, rollout, rollout_lane_axes(rollout))


def _check_lane_axis(name: str, leaf: Any, shape: tuple[int, ...], axis: int) -> None:
    if axis < 0:
        if shape:
            refuse(SpecError, f"Leaf {name} is one number a rollout.", got=f"shape {shape}", want="shape ()")
        return
    want = "(T, lanes, ...)" if axis == 1 else "(lanes, ...)"
    if len(shape) <= axis:
        fix = None if hasattr(leaf, "shape") else "np.asarray(...): lists and numbers are trees of single leaves"
        refuse(SpecError, f"Leaf {name} has no lane axis.", got=f"shape {shape}", want=want, fix=fix)
    if 0 in shape[: axis + 1]:
        refuse(
            SpecError, f"Leaf {name} has no steps or no lanes.", got=f"shape {shape}", want=f"{want}, none of them 0"
        )


def ingestion_shapes(hook: Hook, rollout: PyTree, context: PyTree, partitions: int) -> IngestionShapes:
    """Trace ``hook`` on the shapes of one unit and return what it yields; ``HookError`` for what cannot be stored."""
    view = partition_view(rollout, partitions)
    carry = _initial_carry(hook, view)
    carry_after, records = trace(hook, carry, view, context)
    _check_carry(hook, carry, carry_after)
    items, lengths = records.items, records.lengths
    if isinstance(items, Rollout):
        refuse(
            HookError,
            "A Rollout cannot be stored as it is.",
            fix="register an ingestion hook, for instance conduit.n_step_transitions(rollout, n=1, discount=0.99)",
        )
    leads = {leaf.shape[:2] for leaf in jax.tree.leaves(items)}
    if len(leads) != 1 or len(next(iter(leads), ())) != 2:
        refuse(
            HookError,
            f"Records of hook {hook.name!r} do not share a leading (T, lanes).",
            got=sorted(leads),
            want="one (T, lanes) for all leaves",
        )
    steps, lanes = leads.pop()
    _check_records(hook, records, steps, lanes)
    ragged = lengths is not None and lengths.ndim == 1
    return IngestionShapes(tree_spec(items, drop=2), steps, lanes * partitions, lengths is not None, ragged)


def _initial_carry(hook: Hook, view: PyTree) -> PyTree:
    """Return the shapes of the carry ``hook`` begins with; ``HookError`` if its ``init_carry`` raises."""
    try:
        return jax.eval_shape(hook.init_carry, view)
    except ConduitError:
        raise
    except Exception as error:
        raise HookError(f"init_carry of hook {hook.name!r} raised: {type(error).__name__}: {error}") from error


def _check_carry(hook: Hook, before: PyTree, after: PyTree) -> None:
    """Raise ``HookError`` naming the leaf unless the carry a hook returns is shaped like the one it was given."""
    fix = "return the carry with the structure, shapes and dtypes of init_carry(rollout)"
    wanted, got = jax.tree.structure(before), jax.tree.structure(after)
    if wanted != got:
        refuse(HookError, f"Hook {hook.name!r} returns a carry of another structure.", got=got, want=wanted, fix=fix)
    for (path, old), new in zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            refuse(
                HookError,
                f"Hook {hook.name!r} changes the carry's leaf {jax.tree_util.keystr(path) or '<root>'}.",
                got=f"{new.dtype}{list(new.shape)}",
                want=f"{old.dtype}{list(old.shape)}",
                fix=fix,
            )


def _check_records(hook: Hook, records: Records, steps: int, lanes: int) -> None:
    """Raise ``HookError`` naming the field unless lengths are integers and priorities floats, of the shapes of ``Records``."""
    fields = (
        ("lengths", records.lengths, jnp.integer, ((), (lanes,))),
        ("priorities", records.priorities, jnp.floating, ((steps, lanes),)),
    )
    for name, value, kind, shapes in fields:
        if value is None:
            continue
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape not in shapes or dtype is None or not jnp.issubdtype(dtype, kind):
            refuse(
                HookError,
                f"Hook {hook.name!r} returns Records({name}=) that cannot be used.",
                got=f"shape {shape}, dtype {dtype}",
                want=f"shape {' or '.join(map(str, shapes))}, {'integers' if kind is jnp.integer else 'floats'}",
            )


def over_units(hook: Hook, carry: PyTree, rollouts: tuple, contexts: tuple) -> tuple[PyTree, list[Records]]:
    """Return the carry after all units and the records of each; a batched hook sees them stacked, any other one by one."""
    if hook.together is not None and len(rollouts) > 1:
        stacked = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees) for trees in (rollouts, contexts)]
        carry, records = hook.together(carry, *stacked)
        return carry, [jax.tree.map(lambda leaf, at=at: leaf[at], records) for at in range(len(rollouts))]
    each = []
    for rollout, context in zip(rollouts, contexts, strict=True):
        carry, records = hook.function(carry, rollout, context)
        each.append(records)
    return carry, each


def ingest_units(hook: Hook, replay: Replay, key: np.ndarray | None = None) -> Callable[..., tuple]:
    """Return ``(partition, storage, control, carry, rollouts, contexts, versions) -> (storage, control, carry, AddInfo)``.

    The last three are tuples; units enter one by one, and ``AddInfo`` is summed over them. ``key`` uint32 ``(2,)``, folded
    with the partition, is what a remover that draws is given.
    """

    def ingest(
        partition: Array,
        storage: PyTree,
        control: PyTree,
        carry: PyTree,
        rollouts: tuple,
        contexts: tuple,
        versions: tuple,
    ) -> tuple:
        carry, each = over_units(hook, carry, rollouts, contexts)
        own = () if key is None else (random_bits.fold(jnp.asarray(key), partition),)
        infos = []
        for records, rollout, version in zip(each, rollouts, versions, strict=True):
            stamped = rollout.policy_version if isinstance(rollout, Rollout) else None
            state, info = replay.add(
                ReplayState(storage, control),
                records.items,
                records.lengths,
                records.priorities,
                version if stamped is None else stamped,
                *own,
            )
            storage, control = state
            infos.append(info)
        return storage, control, carry, jax.tree.map(lambda *counts: sum(counts[1:], counts[0]), *infos)

    return ingest


def compile_ingestion(
    hook: Hook,
    replay: Replay,
    placement: Placement,
    donate: tuple[int, ...] = (0, 1, 2),
    key: np.ndarray | None = None,
) -> Callable[..., tuple]:
    """Return ``(storage, control, carry, rollout, context, version) -> (storage, control, carry, AddInfo)``.

    The first three are donated, unless ``donate`` numbers others. ``key``: see ``ingest_units``.
    """
    ingest = ingest_units(hook, replay, key)

    def ingest_one(partition: Array, storage: PyTree, control: PyTree, carry: PyTree, *unit: PyTree) -> tuple:
        return ingest(partition, storage, control, carry, *((part,) for part in unit))

    return lift(ingest_one, placement, _KINDS, _RESULTS, donate=donate)


def compile_group_ingestion(
    hook: Hook, replay: Replay, placement: Placement, key: np.ndarray | None = None
) -> Callable[..., tuple]:
    """Return ``compile_ingestion`` over g units in one call: rollouts, contexts and versions are tuples of g.

    Unless it is batched the hook still sees one unit after the other, with the carry the last one left: what is stored
    does not depend on g.
    """
    return lift(ingest_units(hook, replay, key), placement, _KINDS, _RESULTS, donate=(0, 1, 2))


def allocate_carry(hook: Hook, placement: Placement, rollout: PyTree) -> PyTree:
    """Return the initial carries of all partitions, on the placement."""
    partitions = placement.part.partitions
    view = partition_view(rollout, partitions)

    def all_partitions() -> PyTree:
        carry = jax.tree.map(jnp.asarray, hook.init_carry(view))
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (partitions, *leaf.shape)), carry)

    with jax.set_mesh(placement.mesh):
        return jax.jit(all_partitions, out_shardings=placement.sharding(placement.axis))()
