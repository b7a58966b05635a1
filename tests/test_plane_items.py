"""Laws of planes over windows, views and episodes: what is delivered is what the pure replay by hand delivers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conduit_jax as conduit
from tests.reference_items import (
    BATCH,
    CAPACITY,
    LANES,
    PRIORITIZED,
    STEPS,
    TABLES,
    ByHand,
    assert_same,
    config_of,
    plane_of,
    run,
    unit,
)

FEW = ("pad", "cross", "never")  # the others are as slow to compile as there are programs
every_table = pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in TABLES]
)


@every_table
def test_a_plane_delivers_what_the_pure_replay_delivers_by_hand(name: str) -> None:
    config = TABLES[name]
    by_hand, plane = ByHand(config), plane_of(config)
    assert_same(run(plane, 12), run(by_hand, 12))


@pytest.mark.parametrize("name", ["pad", "cross", pytest.param("recurrent", marks=pytest.mark.slow)])
def test_over_the_devices_of_a_mesh_too(name: str) -> None:
    mesh = jax.make_mesh((8,), ("data",))
    plane = plane_of(TABLES[name], mesh=mesh)
    assert_same(run(plane, 12), run(ByHand(TABLES[name], 8), 12))
    sample = plane.pull()
    assert {len(shard.data) for shard in jax.tree.leaves(sample.data)[0].addressable_shards} == {BATCH // 8}


@pytest.mark.parametrize("name", ["pad", "never", pytest.param("recurrent", marks=pytest.mark.slow)])
@pytest.mark.parametrize("partitions", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_in_pinned_host_memory_too(name: str, partitions: int) -> None:
    config = dataclasses.replace(TABLES[name], partitions=partitions)
    assert_same(run(plane_of(config, placement="pinned_host")), run(ByHand(config, partitions)))


@pytest.mark.parametrize("name", ["pad", pytest.param("cross", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("ahead", "g"), [(1, 1), pytest.param(0, 2, marks=pytest.mark.slow), (1, 2)])
def test_batches_drawn_ahead_and_several_a_call_are_those_of_the_program_order(name: str, ahead: int, g: int) -> None:
    schedule = conduit.Schedule(g_delivery=g, overlap_delivery=ahead > 0)
    plane = plane_of(TABLES[name], schedule=schedule)
    assert_same(run(plane), run(ByHand(TABLES[name], ahead=ahead, g=g)))


@pytest.mark.parametrize("schedule", ["overlap", conduit.Schedule(g_delivery=4, g_ingestion=2)])
def test_with_nothing_pushed_between_every_schedule_delivers_what_the_sequential_one_does(schedule: Any) -> None:
    batches = []
    for one in ("sequential", schedule):
        plane = plane_of(TABLES["pad"], schedule=one)
        for number in range(6):
            plane.push(unit(number))
        plane.flush()
        batches.append([jax.tree.map(np.asarray, plane.pull()) for _ in range(6)])
    assert_same(*batches)


@every_table
def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_never_ended(name: str, tmp_path: Any) -> None:
    saved, again = plane_of(TABLES[name], schedule="overlap"), plane_of(TABLES[name], schedule="overlap")
    run(saved, 6)
    saved.save(tmp_path)
    again.restore(tmp_path)
    assert_same(run(again, 7, start=6), run(saved, 7, start=6))


def test_a_checkpoint_of_one_device_goes_on_on_eight(tmp_path: Any) -> None:
    config = dataclasses.replace(TABLES["pad"], partitions=8)
    saved, again = plane_of(config), plane_of(config, mesh=jax.make_mesh((8,), ("data",)))
    run(saved, 6)
    saved.save(tmp_path)
    again.restore(tmp_path)
    assert_same(run(again, 4, start=6), run(saved, 4, start=6))


def test_a_checkpoint_of_other_items_is_refused_by_name(tmp_path: Any) -> None:
    saved, other = plane_of(TABLES["pad"]), plane_of(config_of(conduit.Windows(length=3), sampler=PRIORITIZED))
    run(saved, 2)
    saved.save(tmp_path)
    with pytest.raises(conduit.ConfigError, match=r"items\.length: saved 4, here 3"):
        other.restore(tmp_path)


@pytest.mark.parametrize("name", ["pad", "cross"])
def test_a_table_moves_and_goes_on(name: str) -> None:
    plane, by_hand = plane_of(TABLES[name]), ByHand(TABLES[name])
    assert_same(run(plane, 6), run(by_hand, 6))
    for start, placement in ((6, "pinned_host"), (9, "device")):
        plane.migrate(placement)
        assert_same(run(plane, 3, start), run(by_hand, 3, start))


# ---------------------------------------------------------------- how many there are


def without_ends(number: int) -> dict[str, Any]:
    return {**unit(number), **{name: np.zeros((STEPS, LANES), bool) for name in ("terminated", "truncated")}}


def all_ends(number: int) -> dict[str, Any]:
    return {**unit(number), "terminated": np.ones((STEPS, LANES), bool), "truncated": np.zeros((STEPS, LANES), bool)}


def test_a_minimum_size_counts_windows_that_may_be_drawn() -> None:
    plane = plane_of(config_of(conduit.Windows(length=4, boundary="never"), min_size=3 * LANES))
    for number in range(3):  # 3, 6 and 9 steps a lane: 0, 3 and 6 windows
        assert plane.ready() is (number >= 2)
        plane.push(without_ends(number))
    assert plane.ready()
    fresh = plane_of(config_of(conduit.Windows(length=4, boundary="never"), min_size=3 * LANES))
    fresh.push(all_ends(0)), fresh.push(all_ends(1))
    with pytest.raises(conduit.NotReadyError, match=r"windows that may be drawn >= min_size does not hold \(0 < 24\)"):
        fresh.pull()


@pytest.mark.parametrize("schedule", ["sequential", "overlap"])
def test_where_short_episodes_leave_no_window_nothing_is_made_up(schedule: str) -> None:
    plane = plane_of(config_of(conduit.Windows(length=3, boundary="never")), schedule=schedule)
    for number in range(4):
        plane.push(without_ends(number))
    assert np.asarray(plane.pull().valid).all()
    for number in range(4, 8):
        plane.push(all_ends(number))
    plane.flush()
    if schedule == "overlap":
        assert np.asarray(plane.pull().valid).all()  # the one that was ahead
    assert not plane.ready()
    with pytest.raises(conduit.NotReadyError, match="0 < 8"):
        plane.pull()
    for number in range(8, 12):
        plane.push(without_ends(number))
    assert np.asarray(plane.pull().valid).all()


def test_the_device_is_asked_only_where_the_account_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    plane = plane_of(conduit.ReplayConfig(capacity=4_000, min_size=10, items=conduit.Windows(length=4)))
    for number in range(100):
        plane.push(unit(number))
    asked: list[int] = []
    pipeline: Any = plane.running()
    accounts = pipeline._accounts
    monkeypatch.setattr(pipeline, "_accounts", lambda: asked.append(1) or accounts())
    for number in range(100, 200):
        plane.push(unit(number))
        plane.pull()
    assert len(asked) <= 3


def test_a_limiter_counts_steps_inserted_and_windows_drawn() -> None:
    limiter = conduit.SampleToInsertRatio(samples_per_insert=1.0, min_size=48, error_buffer=48)
    config = config_of(conduit.Windows(length=2), limiter=limiter, min_size=1)
    plane, by_hand = plane_of(config), ByHand(config)
    pulled: list[int] = []
    for number in range(6):
        plane.push(unit(number)), by_hand.push(unit(number))
        pulled.append(0)
        while plane.ready():
            assert by_hand.ready()
            plane.pull(), by_hand.pull()
            pulled[-1] += 1
        assert not by_hand.ready()
    assert sum(pulled) * BATCH == 6 * LANES * STEPS


def test_a_fused_loop_has_the_bits_of_the_sequential_one() -> None:
    ends = []
    for schedule in ("sequential", "fused"):
        plane = conduit.ExperiencePlane(
            algorithm=conduit.OffPolicy(batch_size=BATCH, updates_per_rollout=2),
            replay=config_of(conduit.Windows(length=3, boundary="never")),
            schedule=schedule,
        )

        def rollout(actor: jax.Array, policy: jax.Array, key: jax.Array) -> Any:
            step = actor + jnp.arange(STEPS, dtype=jnp.int32)[:, None]
            ended = (step + jnp.arange(LANES)) % 5 == 4
            ids = step * LANES + jnp.arange(LANES, dtype=jnp.int32)
            return actor + STEPS, {"id": ids, "terminated": ended, "truncated": jnp.zeros_like(ended)}

        def train_step(learner: jax.Array, sample: conduit.Sample) -> Any:
            return learner * 31 + sample.data["id"].sum() + sample.valid.all(), {}

        loop = conduit.wrap(train_step, rollout=jax.jit(rollout), policy=lambda learner: learner, plane=plane)
        ends.append(int(loop.run(jnp.int32(0), jnp.int32(0), 20)[0]))
    assert ends[0] == ends[1] != 0


# ---------------------------------------------------------------- what is told, and what is refused


def test_a_plane_tells_what_its_items_are_and_take() -> None:
    plane = plane_of(config_of(conduit.Windows(length=5, period=2), capacity=90))
    run(plane, 2)
    stats, text = plane.stats().tables["experience"], plane.explain()
    assert stats.capacity_items == 96  # 12 steps a lane: whole periods
    assert (stats.live_items, stats.inserted_items) == (2 * STEPS * LANES, 2 * STEPS * LANES)
    assert stats.storage_bytes == 96 * stats.bytes_per_item
    assert "items       Windows(length=5, period=2" in text
    assert "drawn from 8 windows on" in text
    assert "96 steps (asked for 90" in text


def test_a_delivery_hook_sees_windows() -> None:
    plane = plane_of(TABLES["pad"])

    @plane.register_delivery
    def delivery(data: Any) -> Any:
        assert data["id"].shape == (BATCH, 4)
        return data | {"first": data["id"][:, 0]}

    batches = run(plane, 4)
    assert (batches[0].data["first"] == batches[0].data["id"][:, 0]).all()


def test_a_planner_counts_what_windows_read() -> None:
    plane = plane_of(TABLES["pad"])
    run(plane, 1)
    assert plane._tables["experience"].blueprint.traffic.sampled_items == BATCH * 4  # type: ignore[union-attr]


WINDOWS = conduit.Windows(length=4)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: config_of(WINDOWS, storage="slots"), "ring storage keeps"),
        (lambda: config_of(WINDOWS, remover=conduit.Lifo()), "ring storage keeps"),
        (lambda: config_of(WINDOWS, max_times_sampled=1), "ring storage keeps"),
        (lambda: config_of("windows"), r"Unknown items[\s\S]*Windows"),
        (
            lambda: conduit.ExperiencePlane(
                algorithm=conduit.BoundedLag(batch_size=BATCH, max_policy_lag=1), replay=config_of(WINDOWS, min_size=1)
            ),
            "bounded lag",
        ),
    ],
)
def test_what_can_never_work_is_refused_when_it_is_set(make: Any, match: str) -> None:
    with pytest.raises(conduit.ConfigError, match=match):
        make()


def test_windows_longer_than_a_lane_are_refused_when_the_lanes_are_known() -> None:
    plane = plane_of(config_of(conduit.Windows(length=13)))
    with pytest.raises(conduit.ConfigError, match=r"length=13\) over 12 steps a lane"):
        plane.push(unit(0))


def test_windows_do_not_grow_and_nothing_has_changed_then() -> None:
    plane, by_hand = plane_of(TABLES["pad"]), ByHand(TABLES["pad"])
    run(plane, 3), run(by_hand, 3)
    with pytest.raises(conduit.ConfigError, match=r"single steps[\s\S]*items=None"):
        plane.grow(capacity=2 * CAPACITY)
    assert_same(run(plane, 3, 3), run(by_hand, 3, 3))


def test_an_emptied_table_begins_anew() -> None:
    plane = plane_of(TABLES["never"])
    run(plane, 5)
    plane.reset()
    assert not plane.ready()
    for number in range(5, 8):
        plane.push(without_ends(number))
    assert np.asarray(plane.pull().data["id"]).min() >= 5 * STEPS * LANES
