"""Laws of lifting: a function of one partition, over all of them, on any number of devices; facts of what is compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import conduit_jax as conduit
from conduit_jax.sharding.lift import Kind, lift
from conduit_jax.sharding.placement import LearnerSite, Placement, resolve_placement
from conduit_jax.testing import assert_in_place, compiled_facts, count_traces
from tests.reference_plane import unit

PARTITIONS = 8


def placement_of(devices: int, kind: AxisType = AxisType.Auto, where: str = "device") -> Placement:
    if devices == 1:
        return resolve_placement(where, LearnerSite(jax.devices()[0]), PARTITIONS, 1)
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(kind,), devices=jax.devices()[:devices])
    return resolve_placement(where, LearnerSite(jax.devices()[0], mesh, "data"), PARTITIONS, 1)


def one_partition(number: Any, kept: Any, rollout: Any, batch: Any, scale: Any) -> tuple:
    """Use every kind of argument and result, with the partition's number in all of them."""
    kept = kept + rollout["x"].sum() * scale + number
    out = batch * 2 + kept.sum() + number
    return kept, out, scale + 1


@pytest.mark.parametrize(
    ("devices", "kind"), [(1, AxisType.Auto), (2, AxisType.Auto), (8, AxisType.Auto), (8, AxisType.Explicit)]
)
def test_a_lifted_function_equals_one_partition_at_a_time(devices: int, kind: AxisType) -> None:
    place = placement_of(devices, kind)
    lifted = lift(
        one_partition, place, (Kind.CONTROL, Kind.LANES, Kind.BATCH, Kind.SAME), (Kind.CONTROL, Kind.BATCH, Kind.SAME)
    )
    kept = np.arange(PARTITIONS * 3, dtype=np.float32).reshape(PARTITIONS, 3)
    x = np.arange(2 * 16, dtype=np.float32).reshape(2, 16)
    batch = np.arange(24, dtype=np.float32)
    put = jax.device_put
    arguments = (
        put(kept, place.sharding(place.axis)),
        {"x": put(x, place.sharding(None, place.axis))},
        put(batch, place.sharding(place.axis)),
        put(np.float32(3), place.sharding()),
    )
    got_kept, got_out, got_scale = lifted(*arguments)
    for number in range(PARTITIONS):
        own, lanes, share = kept[number], {"x": x[:, number * 2 : number * 2 + 2]}, batch[number * 3 : number * 3 + 3]
        want_kept, want_out, want_scale = one_partition(number, own, lanes, share, np.float32(3))
        np.testing.assert_array_equal(np.asarray(got_kept)[number], want_kept)
        np.testing.assert_array_equal(np.asarray(got_out)[number * 3 : number * 3 + 3], want_out)
        assert float(got_scale) == want_scale
    assert len(got_kept.sharding.device_set) == devices


def test_a_rollout_is_split_along_the_lane_axis_of_each_of_its_fields() -> None:
    place, lanes = placement_of(2), 16
    rollout = conduit.Rollout(
        observation=np.arange(3 * lanes, dtype=np.float32).reshape(3, lanes),
        action=np.zeros((3, lanes), np.int32),
        reward=np.zeros((3, lanes), np.float32),
        terminated=np.zeros((3, lanes), bool),
        truncated=np.zeros((3, lanes), bool),
        bootstrap_observation=np.arange(lanes, dtype=np.float32),
        policy_version=np.int32(9),
    )

    def share(number: Any, own: conduit.Rollout) -> tuple:
        return (own.observation.sum()[None], own.bootstrap_observation.sum()[None], own.policy_version[None] + number)

    lifted = lift(share, place, (Kind.LANES,), (Kind.BATCH, Kind.BATCH, Kind.BATCH))
    sums, bootstraps, versions = (np.asarray(leaf) for leaf in lifted(rollout))
    np.testing.assert_array_equal(sums, rollout.observation.reshape(3, PARTITIONS, 2).sum(axis=(0, 2)))
    np.testing.assert_array_equal(bootstraps, rollout.bootstrap_observation.reshape(PARTITIONS, 2).sum(axis=1))
    np.testing.assert_array_equal(versions, 9 + np.arange(PARTITIONS))


def test_lifted_calls_work_in_a_foreign_mesh_context() -> None:
    place = placement_of(1)
    lifted = lift(lambda _, batch: (batch + 1,), place, (Kind.BATCH,), (Kind.BATCH,))
    batch = jax.device_put(np.arange(8, dtype=np.float32), jax.devices()[0])
    with jax.set_mesh(jax.make_mesh((8,), ("other",))):
        (inside,) = lifted(batch)
    (outside,) = lifted(batch)
    np.testing.assert_array_equal(np.asarray(inside), np.arange(8) + 1)
    np.testing.assert_array_equal(np.asarray(outside), np.arange(8) + 1)


# ---------------------------------------------------------------- facts of the compiled path

FACTS_CAPACITY = 4096


def built_plane(where: str, devices: int, sampler: Any) -> conduit.ExperiencePlane:
    mesh = None if devices == 1 else jax.make_mesh((devices,), ("data",))
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=16),
        replay=conduit.ReplayConfig(capacity=FACTS_CAPACITY, sampler=sampler, partitions=devices),
        placement=where,
        schedule="sequential",
        mesh=mesh,
    )
    plane.build(unit(0))
    return plane


@pytest.mark.parametrize(("where", "devices"), [("device", 1), ("device", 8), ("pinned_host", 1), ("pinned_host", 8)])
def test_ingestion_and_delivery_move_nothing_between_devices_and_copy_no_storage(where: str, devices: int) -> None:
    plane = built_plane(where, devices, conduit.Prioritized())
    table = plane._tables["experience"]
    pipeline, programs = table.pipeline, table.pipeline._programs
    rollout, _ = table.intake(unit(0))
    state = pipeline.state
    shard_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) // devices
    storage_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.storage)) // devices
    control_bytes = shard_bytes - storage_bytes

    arguments = (state.storage, state.control, pipeline._carry, rollout, (), np.uint32(0))
    facts = compiled_facts(programs.ingest.compiled, *arguments)
    assert not facts.collectives
    assert facts.alias_bytes == shard_bytes
    assert facts.temp_bytes < storage_bytes / 8
    assert_in_place(programs.ingest.compiled, *arguments, max_temp_fraction=0.125)

    facts = compiled_facts(programs.deliver.compiled, state.control, state.storage, pipeline._key, np.uint32(0), ())
    assert not facts.collectives
    assert facts.alias_bytes == control_bytes
    assert facts.temp_bytes < storage_bytes / 8
    assert facts.output_bytes - facts.alias_bytes < storage_bytes / 8, "storage must not be among the outputs"

    sample = plane_sample(plane)
    facts = compiled_facts(programs.update_priorities.compiled, pipeline.state.control, *sample)
    assert not facts.collectives
    assert facts.alias_bytes == control_bytes


def plane_sample(plane: conduit.ExperiencePlane) -> tuple[Any, Any]:
    plane.push(unit(0))
    sample = plane.pull()
    return plane._tables["experience"].pipeline._programs.to_placement((sample.info, sample.weights))


def test_storage_is_allocated_in_place_and_the_first_insert_already_reuses_it() -> None:
    plane = built_plane("device", 1, conduit.Uniform())
    pipeline = plane._tables["experience"].pipeline
    before = pipeline.state.storage.rows.unsafe_buffer_pointer()
    for number in range(5):
        plane.push(unit(number))
        assert pipeline.state.storage.rows.unsafe_buffer_pointer() == before


def test_programs_are_traced_once() -> None:
    plane = built_plane("device", 8, conduit.Prioritized())
    for number in range(3):
        plane.push(unit(number))
        sample = plane.pull()
        plane.update_priorities(sample.info, sample.weights)
    programs = plane._tables["experience"].pipeline._programs
    for program in (programs.ingest, programs.deliver, programs.update_priorities):
        assert program.compiled._cache_size() == 1
    with count_traces() as traces:
        for number in range(3, 40):
            plane.push(unit(number))
            sample = plane.pull()
            plane.update_priorities(sample.info, sample.weights)
    assert (traces.count, traces.compiled) == (0, 0)


def test_a_placed_replay_is_a_replay() -> None:
    """``place`` takes a one-partition replay and gives one over all partitions, with the same functions."""
    config = conduit.ReplayConfig(capacity=64, min_size=32, sampler=conduit.Prioritized())
    replay = conduit.place(conduit.make_replay(config, batch_size=16, lanes=8, partitions=8), placement_of(8))
    item = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), unit(0))
    state = replay.init(item)
    assert not bool(replay.can_sample(state.control, 16))
    assert bool(replay.can_add(state.control, 8))
    state, info = replay.add(state, unit(0))
    assert int(info.added.sum()) == 32
    assert bool(replay.can_sample(state.control, 16))
    control, sample = replay.sample(state.control, state.storage, jax.random.key(0, impl="threefry2x32"))
    assert sorted(np.asarray(sample.info.slot) // 8) == sorted(np.repeat(np.arange(8), 2)), (
        "two draws from each partition"
    )
    control, applied = replay.update_priorities(control, sample.info, jnp.full((16,), 5.0))
    assert int(applied.sum()) == 16
    assert float(control.selector.max_priority.max()) == 5.0
    control = replay.reset(control)
    assert not bool(replay.can_sample(control, 16))


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("lengths", [3, np.int32(3), np.full(8, 3, np.int32), None])
def test_a_placed_replay_takes_one_length_for_all_lanes_or_one_a_lane(devices: int, lengths: Any) -> None:
    config = conduit.ReplayConfig(capacity=64, ragged=True)
    replay = conduit.place(conduit.make_replay(config, batch_size=16, lanes=8, partitions=8), placement_of(devices))
    item = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), unit(0))
    _, info = replay.add(replay.init(item), unit(0), lengths if lengths is None else jnp.asarray(lengths))
    assert np.asarray(info.added).tolist() == [4 if lengths is None else 3] * 8
