"""Laws of planes over windows, views and episodes: what is delivered is what the pure replay by hand delivers."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conduit_jax as conduit
from conduit_jax.checkpoint.structure import settings_as_data
from tests.reference_items import (
    BATCH,
    CAPACITY,
    GOALS,
    LANES,
    PRIORITIZED,
    STEPS,
    TABLES,
    ByHand,
    assert_same,
    config_of,
    distance,
    hidden_of,
    plane_of,
    run,
    step_unit,
    unit,
    unit_of,
)
from tests.sharding.places import uneven


def some_tables(*names: str) -> Any:
    """The tables ``names``; the others, which are as slow to compile as there are programs, where slow tests run."""
    slow = pytest.mark.slow
    return pytest.mark.parametrize("name", [one if one in names else pytest.param(one, marks=slow) for one in TABLES])


@some_tables("pad", "cross", "three steps", "stacked, n drawn", "hindsight", "padded", "packed")
def test_a_plane_delivers_what_the_pure_replay_delivers_by_hand(name: str) -> None:
    config = TABLES[name]
    by_hand, plane = ByHand(config), plane_of(config)
    assert_same(run(plane, 12), run(by_hand, 12))


@some_tables("pad", "stacked, n drawn", "hindsight", "padded", "packed")
def test_over_the_devices_of_a_mesh_too(name: str) -> None:
    mesh = jax.make_mesh((8,), ("data",))
    plane = plane_of(TABLES[name], mesh=mesh)
    assert_same(run(plane, 12), run(ByHand(TABLES[name], 8), 12))
    sample = plane.pull()
    assert {len(shard.data) for shard in jax.tree.leaves(sample.data)[0].addressable_shards} == {BATCH // 8}


@some_tables("never", "stacked, n drawn", "packed")
@pytest.mark.parametrize("partitions", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_in_pinned_host_memory_too(name: str, partitions: int) -> None:
    config = dataclasses.replace(TABLES[name], partitions=partitions)
    assert_same(run(plane_of(config, placement="pinned_host")), run(ByHand(config, partitions)))


@pytest.mark.parametrize(
    "name", ["recurrent", *(pytest.param(one, marks=pytest.mark.slow) for one in ("never", "hindsight"))]
)
def test_on_disk_and_scattered_too(name: str) -> None:
    config = dataclasses.replace(TABLES[name], partitions=4)
    by_hand = run(ByHand(config, 4))
    for placement in ("disk", uneven(3, 1)):
        assert_same(run(plane_of(config, placement=placement)), by_hand)


@some_tables("pad")
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


@some_tables("pad", "stacked, n drawn", "hindsight", "packed")
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


def test_items_are_saved_so_that_another_process_knows_them_again() -> None:
    for config in TABLES.values():
        assert " at 0x" not in str(settings_as_data(config))
    states = [conduit.Windows(length=2, state=hidden) for hidden in (hidden_of, partial(hidden_of), distance)]
    assert len({str(settings_as_data(one)) for one in states}) == len(states)


def test_a_checkpoint_of_other_items_is_refused_by_name(tmp_path: Any) -> None:
    saved, other = plane_of(TABLES["pad"]), plane_of(config_of(conduit.Windows(length=3), sampler=PRIORITIZED))
    run(saved, 2)
    saved.save(tmp_path)
    with pytest.raises(conduit.ConfigError, match=r"items\.length: saved 4, here 3"):
        other.restore(tmp_path)


@some_tables("pad", "stacked, n drawn", "packed")
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


@some_tables("stacked, n drawn", "never")
def test_an_insert_takes_no_more_items_away_than_the_account_says(name: str) -> None:
    config, rng = TABLES[name], np.random.default_rng(0)
    by_hand, make, size = ByHand(config), unit_of(config), 0
    allowed = config.items.most_lost(STEPS) if config.items is not None else None
    for number in range(40):
        ended = rng.random((STEPS, LANES)) < rng.choice([0.0, 0.1, 0.5, 1.0])
        flags = {"terminated": ended, "truncated": np.zeros_like(ended)}
        chunk = make(number)
        by_hand.push(chunk._replace(**flags) if isinstance(chunk, conduit.Step) else chunk | flags)
        before, size = size, int(by_hand.replay.size(by_hand.states[0].control))
        assert before - size <= (0 if allowed is None else allowed * LANES)


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


def test_a_limiter_counts_steps_and_a_minimum_size_windows_and_both_hold() -> None:
    limiter = conduit.SampleToInsertRatio(samples_per_insert=1.0, min_size=48, error_buffer=48)
    for steps, least, blocked in ((48, 8, "inserts"), (24, 50, "windows")):
        plane = plane_of(config_of(conduit.Windows(length=3), limiter=replace(limiter, min_size=steps), min_size=least))
        plane.push(without_ends(0))  # 24 steps, 8 windows that are whole
        with pytest.raises(conduit.NotReadyError, match=blocked):
            plane.pull()
        plane.push(without_ends(1)), plane.push(without_ends(2))
        assert np.asarray(plane.pull().valid).all()


def test_a_limiter_that_stops_inserts_before_the_minimum_of_windows_is_refused() -> None:
    limiter = conduit.SampleToInsertRatio(samples_per_insert=1.0, min_size=24, error_buffer=24)
    plane = plane_of(config_of(conduit.Windows(length=3), limiter=limiter, min_size=80))
    with pytest.raises(conduit.ConfigError, match="stops inserts before enough items may be drawn"):
        plane.push(unit(0))


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


def test_measuring_a_fused_loop_ends_before_a_batch_that_is_not_there() -> None:
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=BATCH),
        replay=config_of(conduit.Windows(length=3, boundary="never")),
        schedule="fused",
    )
    valid: list[bool] = []

    def rollout(actor: jax.Array, policy: jax.Array, key: jax.Array) -> Any:
        step = actor + jnp.arange(STEPS, dtype=jnp.int32)[:, None]
        ended = jnp.broadcast_to(step > 20 * STEPS, (STEPS, LANES))  # from then on no window is left
        return actor + STEPS, {"terminated": ended, "truncated": jnp.zeros_like(ended)}

    def train_step(learner: jax.Array, sample: conduit.Sample) -> Any:
        jax.debug.callback(lambda whole: valid.append(bool(whole)), sample.valid.all())
        return learner + 1, {}

    loop = conduit.wrap(train_step, rollout=jax.jit(rollout), policy=lambda learner: learner, plane=plane)
    learner, actor, _ = loop.run(jnp.int32(0), jnp.int32(0), 15)
    with pytest.raises(conduit.NotReadyError, match="Nothing could be measured"):
        loop.measure(learner, actor, iterations=10, blocks=2)
    loop.run(learner, actor, 12)  # goes on, and comes to where no window is left
    jax.effects_barrier()
    assert all(valid)
    assert len(valid) > 15
    assert not plane.ready()


def test_transitions_whose_final_observation_was_lost_are_not_drawn() -> None:
    view = conduit.TransitionView(discount=0.5, final_observations=2)
    plane, by_hand = plane_of(config_of(view)), ByHand(config_of(view))
    assert_same(run(plane, 12), run(by_hand, 12))
    control = plane.running().state.control  # type: ignore[union-attr]
    assert int(np.asarray(control.selector.finals.overwritten).sum()) > 0


def test_steps_of_a_rollout_are_an_ingestion() -> None:
    plane = plane_of(config_of(conduit.TransitionView(discount=0.9, n=2), min_size=8))
    plane.register_ingestion(conduit.steps_of)
    shape, flags = (6, LANES), np.zeros((6, LANES), bool)
    seen = np.arange(6 * LANES, dtype=np.float32).reshape(shape)
    rollout = conduit.Rollout(
        observation=seen,
        action=seen.astype(np.int32),
        reward=np.ones(shape, np.float32),
        terminated=flags,
        truncated=flags,
        final_observation=seen,
    )
    plane.push(rollout)
    data = plane.pull().data
    assert (np.asarray(data.next_observation) == np.asarray(data.observation) + 2 * LANES).all()
    assert np.allclose(np.asarray(data.reward), 1.9)


# ---------------------------------------------------------------- what is told, and what is refused


def test_observations_stored_once_take_half() -> None:
    stats = {}
    for name, items in (("view", conduit.TransitionView(discount=0.9, final_observations=6)), ("plain", None)):
        plane = plane_of(conduit.ReplayConfig(capacity=CAPACITY, items=items))
        step = step_unit(0)
        wide = np.zeros((STEPS, LANES, 1000), np.float32)
        step = step._replace(observation=wide, final_observation=wide)
        plane.push(step if name == "view" else step._asdict())
        stats[name] = plane.stats().tables["experience"]
    assert stats["view"].bytes_per_item < 0.55 * stats["plain"].bytes_per_item
    assert abs(stats["view"].storage_bytes - CAPACITY * stats["view"].bytes_per_item) < CAPACITY


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
        (lambda: config_of(conduit.Hindsight(**GOALS), limiter=conduit.MinSize(min_size=9)), "both count items"),
        (lambda: config_of(WINDOWS, min_size=10**6, limiter=conduit.MinSize(min_size=9)), "min_size=1000000, capacity"),
        (lambda: config_of(WINDOWS, remover=conduit.Lifo()), "ring storage keeps"),
        (lambda: config_of(WINDOWS, max_times_sampled=1), "ring storage keeps"),
        (
            lambda: config_of(conduit.Episodes(max_length=4), limiter=conduit.MinSize(min_size=8), min_size=1),
            "rate limiter",
        ),
        (lambda: config_of(conduit.Episodes(max_length=4, by_length=True), sampler=PRIORITIZED), "two laws"),
        (lambda: conduit.Episodes(max_length=4, delivery=conduit.Buckets(lengths=(2, 4))), r"Padded[\s\S]*by hand"),  # type: ignore[arg-type]
        (lambda: config_of("windows"), r"Unknown items[\s\S]*Windows"),
        (lambda: conduit.Windows(length=4, ended="terminated"), r"Windows\(ended=\)[\s\S]*function"),  # type: ignore[arg-type]
        (lambda: conduit.Windows(length=4, state="hidden"), r"Windows\(state=\)[\s\S]*function"),  # type: ignore[arg-type]
        (lambda: conduit.Episodes(max_length=4, ended="terminated"), r"\(ended=\)[\s\S]*tuple of paths"),  # type: ignore[arg-type]
        (lambda: conduit.Episodes(max_length=4, ended=["done"]), r"\(ended=\)[\s\S]*tuple of paths"),  # type: ignore[arg-type]
        (lambda: conduit.Hindsight(**{**GOALS, "achieved": 1}), r"\(achieved=\)[\s\S]*path"),  # type: ignore[arg-type]
        (lambda: conduit.Hindsight(**{**GOALS, "desired": (1,)}), r"\(desired=\)[\s\S]*tuple of paths"),  # type: ignore[arg-type]
        (lambda: conduit.Hindsight(**{**GOALS, "recompute": distance}), r"\(recompute=\)[\s\S]*pairs"),  # type: ignore[arg-type]
        (lambda: conduit.Hindsight(**{**GOALS, "recompute": ("reward", distance)}), r"\(recompute=\)[\s\S]*pairs"),  # type: ignore[arg-type]
        (lambda: conduit.Hindsight(**{**GOALS, "recompute": [("reward", distance)]}), r"\(recompute=\)[\s\S]*pairs"),  # type: ignore[arg-type]
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


@pytest.mark.parametrize("name", ["three steps", "padded"])
def test_what_has_to_be_read_to_know_what_to_read_is_not_kept_far_away(name: str) -> None:
    with pytest.raises(conduit.PlacementError, match=r"placement=disk[\s\S]*pinned host memory"):
        plane_of(TABLES[name], placement="disk")
    plane, by_hand = plane_of(TABLES[name]), ByHand(TABLES[name])
    assert_same(run(plane, 6), run(by_hand, 6))
    with pytest.raises(conduit.PlacementError, match="must reach all of it"):
        plane.migrate("disk")
    assert_same(run(plane, 3, 6), run(by_hand, 3, 6))


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
