"""The first compiled end of the path: rollout unit -> hook -> insert, one program with storage, control and carry donated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.errors import ConfigError, HookError, SpecError, nearest_multiples, refuse
from conduit_jax.hooks import Hook, trace
from conduit_jax.replay.buffer import Replay, ReplayState
from conduit_jax.sharding.lift import Kind, lift
from conduit_jax.sharding.placement import Placement
from conduit_jax.trees import TreeSpec, tree_spec
from conduit_jax.types import Records, Rollout, rollout_lane_axes

Array = jax.Array
PyTree = Any


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

    Raises ``ConfigError`` with the nearest legal numbers where lanes do not divide by ``partitions``.
    """

    def share(leaf: Any, axis: int) -> jax.ShapeDtypeStruct:
        shape, dtype = list(np.shape(leaf)), jax.dtypes.canonicalize_dtype(leaf.dtype)
        if axis >= 0:
            if len(shape) <= axis:
                refuse(
                    SpecError, "A rollout leaf has no lane axis.", got=f"shape {tuple(shape)}", want="(T, lanes, ...)"
                )
            if shape[axis] % partitions:
                refuse(
                    ConfigError,
                    "Lanes do not divide over the partitions.",
                    got=f"{shape[axis]} lanes, {partitions} partitions",
                    want=f"{nearest_multiples(shape[axis], partitions)} lanes",
                )
            shape[axis] //= partitions
        return jax.ShapeDtypeStruct(tuple(shape), dtype)

    return jax.tree.map(share, rollout, rollout_lane_axes(rollout))


def ingestion_shapes(hook: Hook, rollout: PyTree, context: PyTree, partitions: int) -> IngestionShapes:
    """Trace ``hook`` on the shapes of one unit and return what it yields; ``HookError`` for what cannot be stored."""
    view = partition_view(rollout, partitions)
    carry = jax.eval_shape(hook.init_carry, view)
    records: Records = trace(hook, carry, view, context)[1]
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
    ragged = lengths is not None and lengths.ndim == 1
    return IngestionShapes(tree_spec(items, drop=2), steps, lanes * partitions, lengths is not None, ragged)


def compile_ingestion(hook: Hook, replay: Replay, placement: Placement) -> Callable[..., tuple]:
    """Return ``(storage, control, carry, rollout, context, version) -> (storage, control, carry, AddInfo)``.

    The first three are donated.
    """

    def ingest(
        _: Array, storage: PyTree, control: PyTree, carry: PyTree, rollout: PyTree, context: PyTree, version: Array
    ) -> tuple:
        carry, records = hook.function(carry, rollout, context)
        stamped = rollout.policy_version if isinstance(rollout, Rollout) else None
        version = version if stamped is None else stamped
        state, info = replay.add(
            ReplayState(storage, control), records.items, records.lengths, records.priorities, version
        )
        return state.storage, state.control, carry, info

    kinds = (Kind.STORAGE, Kind.CONTROL, Kind.CONTROL, Kind.LANES, Kind.SAME, Kind.SAME)
    return lift(ingest, placement, kinds, (Kind.STORAGE, Kind.CONTROL, Kind.CONTROL, Kind.CONTROL), donate=(0, 1, 2))


def allocate_carry(hook: Hook, placement: Placement, rollout: PyTree) -> PyTree:
    """Return the initial carries of all partitions, on the placement."""
    partitions = placement.part.partitions
    view = partition_view(rollout, partitions)

    def all_partitions() -> PyTree:
        carry = jax.tree.map(jnp.asarray, hook.init_carry(view))
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (partitions, *leaf.shape)), carry)

    with jax.set_mesh(placement.mesh):
        return jax.jit(all_partitions, out_shardings=placement.sharding(placement.axis))()
