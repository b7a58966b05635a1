"""From what the user said and the shapes of one rollout to a running table: spec, placement, allocation, compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from conduit_jax.blueprint import (
    Blueprint,
    Compiled,
    check_full_records,
    check_partitions,
    check_share,
    compile_on,
    draw_up,
)
from conduit_jax.config import BoundedLag, OffPolicy, OnPolicy, Prioritized, ReplayConfig, Uniform
from conduit_jax.delivery import check_delivery, check_finalize
from conduit_jax.ingestion import allocate_carry, ingestion_shapes, partition_view
from conduit_jax.outlook import Outlook, look_ahead
from conduit_jax.registry import Hooks
from conduit_jax.replay.records import RecordLayout, record_layout
from conduit_jax.schedule.gated import GatedPipeline
from conduit_jax.schedule.gates import GatedLedger
from conduit_jax.schedule.iteration import Home, IterationPipeline
from conduit_jax.schedule.lag import lag_pipeline
from conduit_jax.schedule.ledger import Ledger
from conduit_jax.schedule.pipeline import ReplayPipeline
from conduit_jax.schedule.semantics import Schedule, resolve_schedule
from conduit_jax.sharding.choice import Wanted, choose_placement
from conduit_jax.sharding.far import far_storage
from conduit_jax.sharding.intake import Intake
from conduit_jax.sharding.mesh import single_device_mesh, with_auto_axes
from conduit_jax.sharding.place import allocate
from conduit_jax.sharding.placement import LearnerSite, Placement
from conduit_jax.sharding.plans import Plan
from conduit_jax.trees import tree_spec

PyTree = Any


class ReplayTable(NamedTuple):
    """A built table of replayed experience.

    ``blueprint`` is what it can be built from again elsewhere, ``known`` what it was compiled to where it has lived,
    ``wanted`` the placement last asked for, ``plan`` why it was chosen if it was, ``outlook`` where it will be as its items
    grow, and ``moves`` how it moved.
    """

    pipeline: ReplayPipeline
    intake: Intake
    config: ReplayConfig
    layout: RecordLayout
    placement: Placement
    schedule: Schedule
    storage_bytes: int
    blueprint: Blueprint
    known: Mapping[Placement, Compiled]
    wanted: Wanted = "auto"
    plan: Plan | None = None
    moves: tuple[Any, ...] = ()
    outlook: Outlook | None = None


class IterationTable(NamedTuple):
    """A built table of on-policy experience."""

    pipeline: IterationPipeline
    intake: Intake
    schedule: Schedule
    layout: RecordLayout


def build_replay_table(
    config: ReplayConfig,
    algorithm: OffPolicy | BoundedLag,
    hooks: Hooks,
    rollout: PyTree,
    context: PyTree,
    site: LearnerSite,
    wanted: tuple[Wanted, str | Schedule, Callable[[], int]],
    key: jax.Array,
) -> ReplayTable:
    """Build one table of replayed or queued experience for rollouts shaped like ``rollout``.

    ``wanted`` is (placement, schedule, the present policy version).
    """
    blueprint = draw_up(config, algorithm, hooks, rollout, context, site)
    blueprint = blueprint._replace(key=_remover_key(blueprint, key))
    placement, plan = choose_placement(wanted[0], site, blueprint.partitions, blueprint.traffic)
    check_partitions(placement, blueprint)
    outlook = look_ahead(blueprint, wanted[0], "when it was built")
    schedule = resolve_schedule(wanted[1], algorithm, own_device=site.device not in placement.part.devices)
    compiled = compile_on(blueprint, placement)
    replay, programs, door = compiled
    shapes, config = blueprint.shapes, blueprint.config
    state = allocate(replay, placement, shapes.item.shapes())
    carry = allocate_carry(hooks.ingestion, placement, blueprint.rollout)
    last = (jax.device_put(jax.random.key_data(key), placement.sharding()), shapes.steps, door)
    if isinstance(algorithm, BoundedLag):
        parts = (programs, replay, state, carry)
        pipeline = lag_pipeline(algorithm, parts, blueprint.partitions, schedule, last, wanted[2])
    else:
        pipeline = _replay_pipeline(blueprint, (programs, state, carry), schedule, last)
    stored, size = blueprint.layout, blueprint.storage_bytes
    known, why = {placement: compiled}, (wanted[0], plan, (), outlook)
    return ReplayTable(pipeline, door, config, stored, placement, schedule, size, blueprint, known, *why)


_REMOVER_STREAM = np.uint32(0x72656D76)  # keeps what a remover draws apart from the batches' draws


def _remover_key(blueprint: Blueprint, key: jax.Array) -> tuple[int, int] | None:
    """Return the words a remover's draws derive from, ``None`` for one that draws nothing."""
    if not isinstance(blueprint.config.remover, Uniform | Prioritized):
        return None
    high, low = np.asarray(jax.random.key_data(jax.random.fold_in(key, _REMOVER_STREAM))).tolist()
    return high, low


def _replay_pipeline(
    blueprint: Blueprint, parts: tuple[Any, Any, PyTree], schedule: Schedule, last: tuple[Any, int, Intake]
) -> ReplayPipeline:
    """Return the running table of ``parts``: programs, state and carry; ``last``: key, steps a unit, door."""
    shapes, min_size = blueprint.shapes, blueprint.config.limits.min_size
    account: dict[str, Any] = {"length": blueprint.length, "lanes": shapes.lanes, "min_size": min_size}
    if (gate := blueprint.gate) is not None:
        gated = GatedLedger(**account, gate=gate, partitions=blueprint.partitions)
        return GatedPipeline(*parts, gated, schedule, *last)
    return ReplayPipeline(*parts, Ledger(**account, exact=not shapes.counted), schedule, *last)


def release(table: ReplayTable | IterationTable) -> None:
    """Give back what does not go with the last reference: the file of a table on disk, arrays that are scattered."""
    if isinstance(table, ReplayTable):
        table.pipeline.close()
        if table.placement.far:
            far_storage(table.pipeline.state.storage).close()


def build_iteration_table(
    algorithm: OnPolicy,
    hooks: Hooks,
    rollout: PyTree,
    context: PyTree,
    site: LearnerSite,
    schedule: str | Schedule,
    key: jax.Array,
) -> IterationTable:
    """Build one on-policy table for rollouts shaped like ``rollout``."""
    resolved = resolve_schedule(schedule, algorithm, own_device=False)
    shapes = ingestion_shapes(hooks.ingestion, rollout, context, 1)
    check_full_records(shapes, "On-policy records cannot have lengths yet.")
    partition_view(rollout, site.default_partitions)  # refuses lanes that do not divide over the data axis
    mesh, axis = (with_auto_axes(site.mesh), site.axis) if site.mesh else (single_device_mesh(site.device), None)
    with jax.set_mesh(mesh):
        carry = jax.tree.map(jax.numpy.array, hooks.ingestion.init_carry(rollout))  # copies: each is donated
    items = shapes.steps * shapes.lanes
    pipeline = IterationPipeline(
        algorithm,
        hooks.ingestion,
        hooks.finalize,
        hooks.delivery,
        carry,
        resolved,
        jax.device_put(jax.random.key_data(key), NamedSharding(mesh, PartitionSpec())),
        items,
        Home(mesh, site.batch_sharding()),
    )
    check_share(pipeline.batch_size, site)
    records = shapes.item.shapes(shapes.steps * algorithm.units_per_iteration, shapes.lanes)
    final = check_finalize(hooks.finalize, records, context)
    check_delivery(hooks.delivery, tree_spec(final, drop=2).shapes(pipeline.batch_size), context)
    return IterationTable(pipeline, Intake(rollout, mesh, axis), resolved, record_layout(shapes.item))


__all__ = ["Hooks", "IterationTable", "ReplayTable", "build_iteration_table", "build_replay_table"]
