"""What a replay table is compiled from, and what that comes to on a placement: nothing here allocates or runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, SingleDeviceSharding

from conduit_jax.config import BoundedLag, OffPolicy, Prioritized, ReplayConfig
from conduit_jax.delivery import check_delivery
from conduit_jax.errors import ConfigError, PlacementError, nearest_multiples, refuse
from conduit_jax.growth import check_leaves
from conduit_jax.ingestion import IngestionShapes, ingestion_shapes
from conduit_jax.registry import Hooks
from conduit_jax.replay.drawing import Draw, draw_of
from conduit_jax.replay.interface import Replay
from conduit_jax.replay.items import make_replay
from conduit_jax.replay.rate_limiter import make_limiter
from conduit_jax.replay.records import RecordLayout, record_layout
from conduit_jax.replay.starts import ring_below
from conduit_jax.schedule.flow import check_flow, check_growth, check_reach, needs_gate
from conduit_jax.schedule.gates import Gate
from conduit_jax.schedule.lag import lag_programs, queue_config
from conduit_jax.schedule.programs import Programs, compile_programs, stays
from conduit_jax.schedule.staged import staged_programs
from conduit_jax.sharding.choice import where_made
from conduit_jax.sharding.intake import Intake
from conduit_jax.sharding.memory import storage_access
from conduit_jax.sharding.mesh import processes_of
from conduit_jax.sharding.placement import LearnerSite, Placement
from conduit_jax.sharding.pressure import watched
from conduit_jax.sharding.workload import Traffic
from conduit_jax.trees import TreeSpec, tree_spec

PyTree = Any


class Blueprint(NamedTuple):
    """What a replay table is compiled from, wherever it lives: ``rollout`` and ``context`` are shapes.

    ``key``: the two words that draws of a remover derive from, of one that draws.
    """

    config: ReplayConfig
    algorithm: OffPolicy | BoundedLag
    hooks: Hooks
    rollout: PyTree
    context: PyTree
    site: LearnerSite
    partitions: int
    shapes: IngestionShapes
    actors: str = "host"
    key: tuple[int, int] | None = None

    @property
    def make(self) -> Callable[..., Replay]:
        """What makes one partition's replay, given its ``storage_access=``."""
        return partial(
            make_replay,
            self.config,
            batch_size=self.algorithm.batch_size,
            lanes=self.shapes.lanes,
            partitions=self.partitions,
        )

    @property
    def draw(self) -> Draw:
        """What a draw comes to, of one partition."""
        shape = (self.algorithm.batch_size, self.shapes.lanes, self.partitions)
        return _draw(self.config, shape, self.shapes.item)

    @property
    def batch(self) -> PyTree:
        """The shapes of the data that a partition draws."""
        share = self.algorithm.batch_size // self.partitions
        return self.shapes.item.shapes(share) if self.config.items is None else self.draw.data

    @property
    def layout(self) -> RecordLayout:
        """How an item is stored."""
        return record_layout(self.shapes.item)

    @property
    def independent(self) -> bool:
        """Whether items stand in slots of their own, not in rings."""
        return self.config.resolved_storage == "slots"

    @property
    def length(self) -> int:
        """Time steps a lane holds, or items a partition of slots does: the capacity, rounded up so that it divides."""
        length = -(-self.config.capacity // (self.partitions if self.independent else self.shapes.lanes))
        return length if self.config.items is None else self.config.items.whole_length(length)

    @property
    def slots(self) -> int:
        """Slots of a partition; independent ones are one more than its items."""
        return self.length + 1 if self.independent else self.length * self.shapes.lanes // self.partitions

    @property
    def traffic(self) -> Traffic:
        """What an iteration inserts and samples, for the planner."""
        capacity, inserted = self.slots * self.partitions, self.shapes.steps * self.shapes.lanes
        each, rows, leaves = self.bytes_per_item, self.algorithm.batch_size, self.layout.stored
        if self.config.items is not None:  # of which each is several steps, or parts of them
            rows = -(-self.draw.read_bytes * self.partitions // each)
            leaves = leaves if self.draw.stores == 1 else ()
        sampled = rows * self.algorithm.updates_per_rollout
        return Traffic(each, capacity, inserted, sampled, self.actors, leaves)

    @property
    def bytes_per_item(self) -> int:
        """Bytes of storage that a step or an item takes, with its share of what is kept beside them, rounded up."""
        return self.layout.bytes_per_item if self.config.items is None else -(-self.draw.stored_bytes // self.slots)

    @property
    def storage_bytes(self) -> int:
        """Bytes of storage over all partitions."""
        if self.config.items is not None:
            return self.draw.stored_bytes * self.partitions
        return self.layout.bytes_per_item * self.slots * self.partitions

    @property
    def gate(self) -> Gate | None:
        """What judges whether the table may take a unit or give a batch; ``None`` where only its size does, which never shrinks."""
        if not needs_gate(self.config):
            return None
        share, items = self.algorithm.batch_size // self.partitions, self.config.items
        config = self.config if items is None else ring_below(self.config)
        lost = 0 if items is None else items.most_lost(self.shapes.steps)
        thins = items is not None and lost is not None
        return Gate(
            limiter=make_limiter(config.limits, partitions=self.partitions, batch_size=share),
            capacity=self.length if self.independent else self.slots,
            unit=self.shapes.steps * self.shapes.lanes // self.partitions,
            batch=share,
            max_times_sampled=self.config.max_times_sampled,
            counted=self.shapes.counted,
            independent=self.independent,
            least=-(-self.config.min_size // self.partitions) if thins else 0,
            loss=(lost or 0) * self.shapes.lanes // self.partitions,
            noun="items" if items is None else items.noun,
        )


class Compiled(NamedTuple):
    """What a blueprint comes to on one placement."""

    replay: Replay
    programs: Programs
    door: Intake


@lru_cache(maxsize=64)
def _draw(config: ReplayConfig, shape: tuple[int, int, int], item: TreeSpec) -> Draw:
    names = ("batch_size", "lanes", "partitions")
    return draw_of(partial(make_replay, config, **dict(zip(names, shape, strict=True))), item.shapes())


def draw_up(
    config: ReplayConfig,
    algorithm: OffPolicy | BoundedLag,
    hooks: Hooks,
    rollout: PyTree,
    context: PyTree,
    site: LearnerSite,
) -> Blueprint:
    """Return the blueprint of a table for rollouts shaped like ``rollout``; raises for what can never be built."""
    partitions = config.partitions or site.default_partitions
    shapes = ingestion_shapes(hooks.ingestion, rollout, context, partitions)
    if config.growth is not None:
        check_growth(config)
        check_leaves(tree_spec(rollout), config.growth)
    if isinstance(algorithm, BoundedLag):
        check_full_records(shapes, "Records in a queue of bounded lag cannot have lengths yet.")
        config = queue_config(algorithm, config, shapes.steps * shapes.lanes)
    _check_batch(algorithm.batch_size, config.capacity, partitions)
    check_share(algorithm.batch_size, site)
    config = _with_ragged(config, ragged=shapes.ragged or config.ragged)
    actors = where_made(rollout)
    rollout, context = jax.tree.map(_shape, rollout), jax.tree.map(_shape, context)
    blueprint = Blueprint(config, algorithm, hooks, rollout, context, site, partitions, shapes, actors)
    record_layout(shapes.item)  # refuses what cannot be stored
    if not blueprint.independent:  # a unit goes through slots of any number
        _check_unit(shapes.steps, shapes.lanes, blueprint.length, config)
    if (gate := blueprint.gate) is not None:
        check_flow(gate)
    check_delivery(hooks.delivery, blueprint.batch, context)
    return blueprint


def compile_on(blueprint: Blueprint, placement: Placement) -> Compiled:
    """Return the programs of ``blueprint`` on ``placement``; nothing is allocated."""
    config, hooks, make = blueprint.config, blueprint.hooks, blueprint.make
    transfers = (_batch_transfer(placement, blueprint.site), _info_transfer(placement))
    keeps_priorities = blueprint.independent or isinstance(config.sampler, Prioritized)
    key = None if blueprint.key is None else np.array(blueprint.key, np.uint32)
    door = Intake(blueprint.rollout, placement.mesh, placement.axis, growth=config.growth)
    if placement.far:
        _check_may_stage(blueprint, placement)
        ends = (hooks.ingestion, hooks.delivery, make, placement.in_reach)
        programs = staged_programs(*ends, transfers, keeps_priorities, key)
        return Compiled(make(), programs, door)
    replay = make(storage_access=storage_access(*placement.memory_kinds))
    ends = (hooks.ingestion, hooks.delivery, replay, placement)
    programs = compile_programs(*ends, transfers, keeps_priorities, key)
    if isinstance(blueprint.algorithm, BoundedLag):
        programs = lag_programs(programs, replay, hooks.delivery, placement)
    return Compiled(replay, _watched(programs, placement), door)


def _watched(programs: Programs, placement: Placement) -> Programs:
    """Return ``programs`` that raise ``MemoryPressure`` rather than be dispatched where they would not fit."""
    names = ("ingest", "ingest_group", "deliver", "deliver_group", "update_priorities")
    own = [device for device in placement.mesh.devices.flat if device.process_index == jax.process_index()]
    return programs._replace(**{name: watched(getattr(programs, name), own) for name in names})


def check_partitions(placement: Placement, blueprint: Blueprint) -> None:
    """Raise ``PlacementError`` for a placement of another number of partitions, or out of reach of some of the processes.

    What is drawn depends on the number of partitions.
    """
    if placement.part.partitions != blueprint.partitions:
        refuse(
            PlacementError,
            "A buffer keeps its partitions wherever it lives.",
            got=f"{placement.part.partitions} partitions",
            want=f"{blueprint.partitions}, as it was built with",
            fix="ReplayConfig(partitions=...)",
        )
    mesh = blueprint.site.mesh
    if mesh is None or len(over := processes_of(mesh.devices.flat)) == 1:
        return
    if placement.far or any(processes_of(part.devices) != over for part in placement.parts):
        refuse(
            PlacementError,
            "A buffer that several processes have is on the devices of all of them.",
            got=f"{placement}, learners in {len(over)} processes",
            want="the learners' mesh",
            fix="placement='device' or 'pinned_host'; or a plane in each process, on a mesh of jax.local_devices()",
        )


def _check_may_stage(blueprint: Blueprint, placement: Placement) -> None:
    if isinstance(blueprint.algorithm, BoundedLag):
        want = "a placement that one program reaches: a queue of bounded lag is small"
        refuse(PlacementError, "Experience of bounded lag is not kept far away.", got=str(placement), want=want)
    check_reach(blueprint.config, str(placement))


def _shape(leaf: Any) -> Any:
    """Return the shape of an array, anything else as it is."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype") or isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))


def check_full_records(shapes: IngestionShapes, what: str) -> None:
    if shapes.counted:
        refuse(ConfigError, what, got="Records(lengths=)", want="full (T, lanes) records")


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


def check_share(batch_size: int, site: LearnerSite) -> None:
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
        sharding = getattr(leaf, "sharding", None)
        return lets_host_through if sharding is None else sharding == target

    def move(tree: PyTree) -> PyTree:
        for leaf in jax.tree.leaves(tree):
            if not is_home(leaf):
                return jax.device_put(tree, target)
        return tree

    return move
