"""Planes on every placement, and two loops like the services the paper compares with, as cases of one iteration each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import conduit_jax as conduit
from benchmarks.placement.workload import BATCH, CAPACITY, DEVICES, LANES, LIMITS, PARTITIONS, rollout
from conduit_jax.sharding.layout import Layout
from conduit_jax.sharding.memory import storage_access
from conduit_jax.sharding.mesh import PARTITION_AXIS, single_device_mesh
from conduit_jax.sharding.staging import Stager
from conduit_jax.sharding.topology import Topology
from conduit_jax.testing.links import ShapedLinks

Case = Callable[[int], None]


def stored_bytes(dimension: int) -> int:
    """Return the bytes an item takes in storage: two observations, three words and the version."""
    return 8 * dimension + 16


def workload_of(dimension: int) -> conduit.Workload:
    """Return an iteration's traffic: one rollout in, one batch out."""
    return conduit.Workload(
        item_bytes=stored_bytes(dimension),
        capacity_items=CAPACITY,
        inserted_items=LANES,
        sampled_items=BATCH,
        actors="host",
        partitions=PARTITIONS,
    )


def candidates(topology: Topology, dimension: int) -> tuple[conduit.Plan, dict[str, tuple[Layout, float]]]:
    """Return the plan, and every placement that fits with its predicted seconds."""
    decided = conduit.plan(topology.limited(LIMITS), workload_of(dimension), admits=_dealt_evenly)
    feasible = {decided.layout.name: (decided.layout, decided.total_s)}
    feasible |= {one.layout.name: (one.layout, one.seconds) for one in decided.rejected if one.seconds is not None}
    return decided, feasible


def _dealt_evenly(layout: Layout) -> str:
    return "" if len(set(layout.parts[0].partitions)) == 1 else f"{PARTITIONS} partitions do not divide evenly over it"


def placed(layout: Layout) -> conduit.Placement:
    """Return ``layout`` on this process' devices; the ninth stands for pageable host memory."""
    part = layout.parts[0]
    ranks = (
        [DEVICES]
        if part.tier == "pageable"
        else [holder.rank for holder in part.holders]
        if part.tier == "device"
        else [0]
    )
    devices = tuple(jax.devices()[rank] for rank in ranks)
    kind = "pinned_host" if part.tier == "pinned_host" else "device"
    mesh = Mesh(np.array(devices), (PARTITION_AXIS,), axis_types=(AxisType.Auto,))
    return conduit.Placement(layout.name, (conduit.Part(devices, kind, PARTITIONS),), mesh, PARTITION_AXIS)


def filled_plane(layout: Layout, dimension: int) -> conduit.ExperiencePlane:
    """Return a full plane on ``layout`` whose learner is on the first device."""
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=BATCH),
        replay=conduit.ReplayConfig(capacity=CAPACITY, partitions=PARTITIONS),
        placement=placed(layout),
        schedule="sequential",
        seed=1,
    )
    plane.consumed_by(jax.device_put(np.zeros(1, np.float32), jax.devices()[0]))
    for number in range(CAPACITY // LANES):
        plane.push(rollout(dimension, number))
    jax.block_until_ready(plane.pull().data)
    return plane


def plane_case(plane: conduit.ExperiencePlane, unit: Any) -> Case:
    """Return iterations of a plane: push a rollout, pull a batch, wait for it."""

    def run(iterations: int) -> None:
        for _ in range(iterations):
            plane.push(unit)
            jax.block_until_ready(plane.pull())

    return run


def shaped(case: Case, links: ShapedLinks, plane: conduit.ExperiencePlane) -> Case:
    """Return ``case`` with the plane's transfers taking the links' time."""

    def run(iterations: int) -> None:
        with links.on(plane):
            case(iterations)

    return run


def reverb_like(dimension: int, put: Any) -> Case:
    """Return a loop like Reverb's: pageable host memory, every item taken up by itself, a batch assembled for each request."""
    unit, draws = rollout(dimension, 0), np.random.default_rng(0)
    table: list[dict[str, np.ndarray]] = []
    learner = NamedSharding(single_device_mesh(jax.devices()[0]), PartitionSpec())

    def insert() -> None:
        for lane in range(LANES):
            table.append({name: leaf[0, lane].copy() for name, leaf in unit.items()})
        del table[:-CAPACITY]

    while len(table) < CAPACITY:
        insert()

    def run(iterations: int) -> None:
        for _ in range(iterations):
            insert()
            items = [table[index] for index in draws.integers(len(table), size=BATCH)]
            batch = [np.stack([item[name] for item in items]) for name in unit]
            jax.block_until_ready(put(batch, [learner] * len(batch)))

    return run


def gear_like(dimension: int, links: ShapedLinks | None) -> Case:
    """Return a loop like GEAR's: pinned host memory, indices drawn on the device, which gathers from the host at each request."""
    device = jax.devices()[0]
    mesh = single_device_mesh(device)
    pinned = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
    plain = NamedSharding(mesh, PartitionSpec())
    access, unit = storage_access("pinned_host"), rollout(dimension, 0)
    shapes = {name: (CAPACITY, *leaf.shape[2:]) for name, leaf in unit.items()}
    storage = jax.jit(
        lambda: {name: jnp.zeros(shape, unit[name].dtype) for name, shape in shapes.items()}, out_shardings=pinned
    )()
    insert = jax.jit(
        lambda kept, at, new: ({name: access.scatter(kept[name], at, new[name]) for name in kept}, at[0] + 0),
        donate_argnums=0,
        out_shardings=(pinned, plain),
    )
    draw = jax.jit(lambda key: jax.random.randint(key, (BATCH,), 0, CAPACITY), out_shardings=plain)
    gather = jax.jit(lambda kept, at: {name: access.gather(kept[name], at) for name in kept}, out_shardings=plain)
    put = jax.device_put if links is None else links.put_into("pinned_host")
    take = gather if links is None else links._from_host(lambda kept, at: (None, gather(kept, at)))
    stager, state = Stager(put=put), [storage, 0]

    def run(iterations: int) -> None:
        names = list(unit)
        for _ in range(iterations):
            rows = [unit[name][0] for name in names]
            staged, ticket = stager.stage(rows, [row.dtype for row in rows], [plain] * len(rows))
            at = jax.device_put((np.arange(LANES, dtype=np.int32) + LANES * state[1]) % CAPACITY, plain)
            state[0], ticket.reader = insert(state[0], at, dict(zip(names, staged, strict=True)))
            state[1] += 1
            chosen = draw(jax.random.fold_in(jax.random.key(0), state[1]))
            got = take(state[0], chosen)
            jax.block_until_ready(got)

    return run
