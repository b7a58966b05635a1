"""From what the user said and the shapes of one rollout to a running table: spec, placement, allocation, compiled programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from conduit_jax.config import BoundedLag, OffPolicy, OnPolicy, Prioritized, ReplayConfig
from conduit_jax.delivery import check_delivery, check_finalize
from conduit_jax.errors import ConfigError, nearest_multiples, refuse
from conduit_jax.ingestion import IngestionShapes, allocate_carry, ingestion_shapes, partition_view
from conduit_jax.registry import Hooks
from conduit_jax.replay.buffer import make_replay
from conduit_jax.replay.records import RecordLayout, record_layout
from conduit_jax.schedule.iteration import Home, IterationPipeline
from conduit_jax.schedule.lag import lag_pipeline, queue_config
from conduit_jax.schedule.ledger import Ledger
from conduit_jax.schedule.pipeline import ReplayPipeline
from conduit_jax.schedule.programs import compile_programs, stays
from conduit_jax.schedule.semantics import Schedule, resolve_schedule
from conduit_jax.sharding.choice import Traffic, Wanted, choose_placement, where_made
from conduit_jax.sharding.intake import Intake
from conduit_jax.sharding.memory import storage_access
from conduit_jax.sharding.mesh import single_device_mesh, with_auto_axes
from conduit_jax.sharding.place import allocate
from conduit_jax.sharding.placement import LearnerSite, Placement
from conduit_jax.sharding.planner import Plan
from conduit_jax.trees import tree_spec

PyTree = Any


class ReplayTable(NamedTuple):
    """A built table of replayed experience."""

    pipeline: ReplayPipeline
    intake: Intake
    config: ReplayConfig
    layout: RecordLayout
    placement: Placement
    schedule: Schedule
    storage_bytes: int
    plan: Plan | None = None


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
    _check_served(config)
    partitions = config.partitions or site.default_partitions
    shapes = ingestion_shapes(hooks.ingestion, rollout, context, partitions)
    if isinstance(algorithm, BoundedLag):
        _check_full_records(shapes, "Records in a queue of bounded lag cannot have lengths yet.")
        config = queue_config(algorithm, config, shapes.steps * shapes.lanes)
    _check_batch(algorithm.batch_size, config.capacity, partitions)
    _check_share(algorithm.batch_size, site)
    config = _with_ragged(config, ragged=shapes.ragged or config.ragged)
    layout = record_layout(shapes.item)
    length = -(-config.capacity // shapes.lanes)
    _check_unit(shapes.steps, shapes.lanes, length, config)
    storage_bytes = layout.bytes_per_item * length * shapes.lanes
    inserted, sampled = shapes.steps * shapes.lanes, algorithm.batch_size * getattr(algorithm, "updates_per_rollout", 1)
    capacity, actors = length * shapes.lanes, where_made(rollout)
    traffic = Traffic(layout.bytes_per_item, capacity, inserted, sampled, actors)
    placement, plan = choose_placement(wanted[0], site, partitions, traffic)
    schedule = resolve_schedule(wanted[1], algorithm, own_device=site.device not in placement.part.devices)
    replay = make_replay(
        config,
        batch_size=algorithm.batch_size,
        lanes=shapes.lanes,
        partitions=partitions,
        storage_access=storage_access(placement.part.memory_kind),
    )
    check_delivery(hooks.delivery, shapes.item.shapes(algorithm.batch_size // partitions), context)
    transfers = (_batch_transfer(placement, site), _info_transfer(placement))
    prioritized = isinstance(config.sampler, Prioritized)
    programs = compile_programs(hooks.ingestion, hooks.delivery, replay, placement, transfers, prioritized)
    state, carry = (
        allocate(replay, placement, shapes.item.shapes()),
        allocate_carry(hooks.ingestion, placement, rollout),
    )
    own_key = jax.device_put(jax.random.key_data(key), placement.sharding())
    if isinstance(algorithm, BoundedLag):
        parts, steps = (programs, replay, state, carry), (own_key, shapes.steps)
        pipeline = lag_pipeline(algorithm, parts, hooks.delivery, placement, schedule, steps, wanted[2])
    else:
        ledger = Ledger(length=length, lanes=shapes.lanes, min_size=config.limits.min_size, exact=not shapes.counted)
        pipeline = ReplayPipeline(programs, state, carry, ledger, schedule, own_key, shapes.steps)
    return ReplayTable(
        pipeline,
        Intake(rollout, placement.mesh, placement.axis),
        config,
        layout,
        placement,
        schedule,
        storage_bytes,
        plan,
    )


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
    _check_full_records(shapes, "On-policy records cannot have lengths yet.")
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
    _check_share(pipeline.batch_size, site)
    records = shapes.item.shapes(shapes.steps * algorithm.units_per_iteration, shapes.lanes)
    final = check_finalize(hooks.finalize, records, context)
    check_delivery(hooks.delivery, tree_spec(final, drop=2).shapes(pipeline.batch_size), context)
    return IterationTable(pipeline, Intake(rollout, mesh, axis), resolved, record_layout(shapes.item))


def _check_full_records(shapes: IngestionShapes, what: str) -> None:
    if shapes.counted:
        refuse(ConfigError, what, got="Records(lengths=)", want="full (T, lanes) records")


def _check_served(config: ReplayConfig) -> None:
    """Refuse replays whose readiness is not decided by how much was pushed: the plane's ledger cannot tell it yet."""
    limits, by_hand = config.limits, "by hand: conduit.make_replay(config, ...) and conduit.place, which serve it"
    if config.resolved_storage != "ring":
        refuse(
            ConfigError,
            "A plane does not run replays of slots yet.",
            got=str(config),
            want="remover=Fifo(), sampler=Uniform() or Prioritized(), max_times_sampled=0, storage='auto' or 'ring'",
            fix=by_hand,
        )
    if limits.min_diff is not None or limits.max_diff is not None:
        refuse(
            ConfigError,
            "A plane does not run limiters of samples per insert yet.",
            got=f"limiter={config.limiter}",
            want="limiter=None or MinSize(...); OffPolicy(updates_per_rollout=) fixes the ratio in a loop",
            fix=by_hand,
        )


def _with_ragged(config: ReplayConfig, *, ragged: bool) -> ReplayConfig:
    return dataclasses.replace(config, ragged=ragged)


def _check_batch(batch_size: int, capacity: int, partitions: int) -> None:
    if batch_size > capacity:
        refuse(
            ConfigError,
            "A batch is larger than the replay.",
            got=f"batch_size={batch_size}, capacity={capacity}",
            want="batch_size <= capacity",
        )
    if batch_size % partitions:
        refuse(
            ConfigError,
            "The batch does not divide over the partitions.",
            got=f"batch_size={batch_size}, partitions={partitions}",
            want=f"batch_size={nearest_multiples(batch_size, partitions)}",
        )


def _check_share(batch_size: int, site: LearnerSite) -> None:
    if batch_size % site.default_partitions:
        refuse(
            ConfigError,
            "The batch does not divide over the learner's data axis.",
            got=f"batch_size={batch_size}, axis {site.axis!r} of size {site.default_partitions}",
            want=f"batch_size={nearest_multiples(batch_size, site.default_partitions)}",
        )


def _check_unit(steps: int, lanes: int, length: int, config: ReplayConfig) -> None:
    if steps > length:
        refuse(
            ConfigError,
            "One rollout is larger than the replay: it would overwrite itself.",
            got=f"{steps} steps x {lanes} lanes = {steps * lanes} items, capacity={config.capacity}",
            want=f"capacity >= {steps * lanes}",
            fix="raise ReplayConfig(capacity=) or push shorter rollouts",
        )


def _batch_transfer(placement: Placement, site: LearnerSite) -> Callable[[PyTree], PyTree]:
    """Return how a batch gets from the placement to the learner: not at all where it is there already."""
    if site.mesh is None or (site.mesh.size == 1 and AxisType.Explicit not in site.mesh.axis_types):
        if placement.part.devices == (site.device,):
            return stays
        target = SingleDeviceSharding(site.device)
        return lambda sample: jax.device_put(sample, target)
    if placement.mesh is site.mesh:
        return stays
    sharding = site.batch_sharding()
    return lambda sample: jax.device_put(sample, sharding)


def _info_transfer(placement: Placement) -> Callable[[PyTree], PyTree]:
    """Return how infos and priorities get back from the learner to the placement: not at all where they are there already.

    Being on the device is not enough: an array typed with the learner's own mesh does not go with those of ours.
    """
    if placement.mesh.size == 1:
        target: Any = SingleDeviceSharding(placement.part.devices[0])
    else:
        target = placement.sharding(placement.axis)
    lets_host_through = placement.mesh.size == 1

    def is_home(leaf: Any) -> bool:
        return leaf.sharding == target if isinstance(leaf, jax.Array) else lets_host_through

    return lambda tree: tree if all(map(is_home, jax.tree.leaves(tree))) else jax.device_put(tree, target)


__all__ = ["Hooks", "IterationTable", "ReplayTable", "build_iteration_table", "build_replay_table"]
