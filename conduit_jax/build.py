"""From what the user said and the shapes of one rollout to a running table: spec, placement, allocation, compiled programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from conduit_jax.config import OffPolicy, OnPolicy, Prioritized, ReplayConfig
from conduit_jax.delivery import check_delivery, check_finalize, compile_delivery, compile_priority_update
from conduit_jax.errors import ConfigError, nearest_multiples, refuse
from conduit_jax.ingestion import IngestionShapes, allocate_carry, compile_ingestion, ingestion_shapes, partition_view
from conduit_jax.registry import Hooks
from conduit_jax.replay.buffer import make_replay
from conduit_jax.replay.interface import Replay
from conduit_jax.replay.records import RecordLayout, record_layout
from conduit_jax.schedule.iteration import Home, IterationPipeline
from conduit_jax.schedule.ledger import Ledger
from conduit_jax.schedule.pipeline import Programs, ReplayPipeline
from conduit_jax.schedule.semantics import Schedule, resolve_schedule
from conduit_jax.sharding.intake import Intake
from conduit_jax.sharding.memory import storage_access
from conduit_jax.sharding.mesh import single_device_mesh, with_auto_axes
from conduit_jax.sharding.place import allocate
from conduit_jax.sharding.placement import LearnerSite, Placement, resolve_placement
from conduit_jax.trees import tree_spec
from conduit_jax.types import Sample

PyTree = Any


class Blueprint(NamedTuple):
    """What a replay table is compiled from, wherever it lives: ``rollout`` and ``context`` are shapes."""

    config: ReplayConfig
    algorithm: OffPolicy
    hooks: Hooks
    rollout: PyTree
    context: PyTree
    site: LearnerSite
    partitions: int
    shapes: IngestionShapes

    @property
    def layout(self) -> RecordLayout:
        """How an item is stored."""
        return record_layout(self.shapes.item)

    @property
    def length(self) -> int:
        """Time steps a lane holds: the capacity, rounded up so that it divides by the lanes."""
        return -(-self.config.capacity // self.shapes.lanes)

    @property
    def storage_bytes(self) -> int:
        """Bytes of storage over all partitions."""
        return self.layout.bytes_per_item * self.length * self.shapes.lanes


class Compiled(NamedTuple):
    """What a blueprint comes to on one placement."""

    replay: Replay
    programs: Programs
    door: Intake


class ReplayTable(NamedTuple):
    """A built table of replayed experience.

    ``blueprint`` is what it can be built from again elsewhere, ``known`` what it was compiled to where it has lived, and
    ``moves`` how it moved.
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
    moves: tuple[Any, ...] = ()


class IterationTable(NamedTuple):
    """A built table of on-policy experience."""

    pipeline: IterationPipeline
    intake: Intake
    schedule: Schedule
    layout: RecordLayout


def build_replay_table(
    config: ReplayConfig,
    algorithm: OffPolicy,
    hooks: Hooks,
    rollout: PyTree,
    context: PyTree,
    site: LearnerSite,
    wanted: tuple[str | Placement, str | Schedule],
    key: jax.Array,
) -> ReplayTable:
    """Build one off-policy table for rollouts shaped like ``rollout``; ``wanted`` is (placement, schedule)."""
    blueprint = draw_up(config, algorithm, hooks, rollout, context, site)
    placement = resolve_placement(wanted[0], site, blueprint.partitions, blueprint.storage_bytes)
    schedule = resolve_schedule(wanted[1], algorithm, own_device=site.device not in placement.part.devices)
    compiled = compile_on(blueprint, placement)
    replay, programs, door = compiled
    shapes, config = blueprint.shapes, blueprint.config
    pipeline = ReplayPipeline(
        programs,
        allocate(replay, placement, shapes.item.shapes()),
        allocate_carry(hooks.ingestion, placement, blueprint.rollout),
        Ledger(length=blueprint.length, lanes=shapes.lanes, min_size=config.limits.min_size, exact=not shapes.counted),
        schedule,
        jax.device_put(jax.random.key_data(key), placement.sharding()),
        shapes.steps,
        door,
    )
    stored, size = blueprint.layout, blueprint.storage_bytes
    known = {placement: compiled}
    return ReplayTable(pipeline, door, config, stored, placement, schedule, size, blueprint, known)


def draw_up(
    config: ReplayConfig, algorithm: OffPolicy, hooks: Hooks, rollout: PyTree, context: PyTree, site: LearnerSite
) -> Blueprint:
    """Return the blueprint of a table for rollouts shaped like ``rollout``; raises for what can never be built."""
    _check_served(config)
    partitions = config.partitions or site.default_partitions
    _check_batch(algorithm.batch_size, config.capacity, partitions)
    _check_share(algorithm.batch_size, site)
    shapes = ingestion_shapes(hooks.ingestion, rollout, context, partitions)
    config = _with_ragged(config, ragged=shapes.ragged or config.ragged)
    rollout, context = jax.tree.map(_shape, rollout), jax.tree.map(_shape, context)
    blueprint = Blueprint(config, algorithm, hooks, rollout, context, site, partitions, shapes)
    record_layout(shapes.item)  # refuses what cannot be stored
    _check_unit(shapes.steps, shapes.lanes, blueprint.length, config)
    check_delivery(hooks.delivery, shapes.item.shapes(algorithm.batch_size // partitions), context)
    return blueprint


def compile_on(blueprint: Blueprint, placement: Placement) -> Compiled:
    """Return the programs of ``blueprint`` on ``placement``; nothing is allocated."""
    config, hooks = blueprint.config, blueprint.hooks
    replay = make_replay(
        config,
        batch_size=blueprint.algorithm.batch_size,
        lanes=blueprint.shapes.lanes,
        partitions=blueprint.partitions,
        storage_access=storage_access(placement.part.memory_kind),
    )
    programs = Programs(
        ingest=compile_ingestion(hooks.ingestion, replay, placement),
        deliver=compile_delivery(hooks.delivery, replay, placement),
        update_priorities=compile_priority_update(replay, placement),
        batch_to_learner=_batch_transfer(placement, blueprint.site),
        to_placement=_info_transfer(placement),
        keeps_priorities=isinstance(config.sampler, Prioritized),
    )
    return Compiled(replay, programs, Intake(blueprint.rollout, placement.mesh, placement.axis))


def _shape(leaf: Any) -> Any:
    """Return the shape of an array, anything else as it is."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype") or isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))


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
    if shapes.counted:
        refuse(
            ConfigError,
            "On-policy records cannot have lengths yet.",
            got="Records(lengths=)",
            want="full (T, lanes) records",
        )
    partition_view(rollout, site.default_partitions)  # refuses lanes that do not divide over the data axis
    mesh, axis = (with_auto_axes(site.mesh), site.axis) if site.mesh else (single_device_mesh(site.device), None)
    with jax.set_mesh(mesh):
        carry = jax.tree.map(jax.numpy.asarray, hooks.ingestion.init_carry(rollout))
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


def _batch_transfer(placement: Placement, site: LearnerSite) -> Callable[[Sample], Sample]:
    """Return how a batch gets from the placement to the learner: not at all where it is there already."""
    if site.mesh is None or (site.mesh.size == 1 and AxisType.Explicit not in site.mesh.axis_types):
        if placement.part.devices == (site.device,):
            return lambda sample: sample
        target = SingleDeviceSharding(site.device)
        return lambda sample: jax.device_put(sample, target)
    if placement.mesh is site.mesh:
        return lambda sample: sample
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
