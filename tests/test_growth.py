"""Laws of growth: what was stored stays what it was, padded or dropped as declared, and nothing undeclared gets in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conduit_jax as conduit
from conduit_jax import relocation
from conduit_jax.replay import ring
from conduit_jax.replay.resize import kept_runs, resized
from conduit_jax.replay.selectors import Geometry
from conduit_jax.schedule.residence import relocate
from conduit_jax.testing import count_traces

LANES, STEPS, BATCH = 4, 2, 16
GROWTH = conduit.Growth(axes={"observation": {0: 300}}, optional=("mask",), fill=-1)


class Step(NamedTuple):
    observation: Any
    reward: Any
    mask: Any = None


def unit(number: int, size: int, *, mask: bool = False) -> Step:
    """Every item holds its own number, ``size`` times over."""
    ids = (number * STEPS * LANES + np.arange(STEPS * LANES)).reshape(STEPS, LANES)
    observation = np.broadcast_to(ids[..., None], (STEPS, LANES, size)).astype(np.float32)
    return Step(observation, ids.astype(np.int32), (ids % 2).astype(np.int8) if mask else None)


def assert_padded(data: Step, sizes: dict[int, int], now: int) -> None:
    """Every delivered item is its number over the size it was pushed with, and the fill behind that."""
    for row, reward in zip(np.asarray(data.observation), np.asarray(data.reward), strict=True):
        size = sizes[int(reward) // (STEPS * LANES)]
        want = np.concatenate([np.full(size, reward), np.full(now - size, -1)]).astype(np.float32)
        np.testing.assert_array_equal(row, want)


def make_plane(
    growth: conduit.Growth | None = GROWTH, capacity: int = 32, **settings_given: Any
) -> conduit.ExperiencePlane:
    replay = conduit.ReplayConfig(capacity=capacity, sampler=conduit.Prioritized(), growth=growth)
    algorithm = conduit.OffPolicy(batch_size=BATCH)
    return conduit.ExperiencePlane(algorithm=algorithm, replay=replay, **({"schedule": "sequential"} | settings_given))


@pytest.mark.parametrize("schedule", ["sequential", pytest.param("overlap", marks=pytest.mark.slow)])
def test_a_larger_rollout_grows_the_table_and_old_items_are_padded(schedule: str) -> None:
    plane, sizes = make_plane(schedule=schedule, placement="device"), {}
    for number, size in enumerate((3, 3, 5, 4, 300)):
        sizes[number] = size
        plane.push(unit(number, size))
        sample = plane.pull()
        assert_padded(sample.data, sizes, sample.data.observation.shape[1])
        plane.update_priorities(sample.info, np.asarray(sample.data.reward, np.float32))
    plane.flush()
    while plane.pull().data.observation.shape[1] != 300:
        pass
    stats = plane.stats().tables["experience"]
    assert [move.reason for move in stats.moves] == ["growth", "growth"]
    assert (stats.inserted_items, stats.live_items) == (5 * 8, 32)
    assert stats.bytes_per_item >= 1200
    assert len(plane.pull().data.observation[0]) == 300


def test_dropping_old_items_leaves_new_ones_alone_and_keeps_the_count() -> None:
    plane = make_plane(conduit.Growth(axes={"observation": {0: 9}}, old_items="drop"))
    plane.push(unit(0, 3))
    stale = plane.pull()
    plane.push(unit(1, 9))
    sample = plane.pull()
    assert set(np.asarray(sample.data.reward) // 8) == {1}
    assert sample.data.observation.shape == (BATCH, 9)
    assert int(plane.update_priorities(stale.info, np.ones(BATCH, np.float32)).sum()) == 0
    stats = plane.stats().tables["experience"]
    assert (stats.inserted_items, stats.live_items, stats.moves[-1].bytes) == (16, 8, 0)


def test_a_table_on_a_mesh_with_explicit_axes_changes_its_capacity_and_drops_old_items() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    plane = make_plane(conduit.Growth(axes={"observation": {0: 9}}, old_items="drop"), mesh=mesh, placement="device")
    with jax.set_mesh(mesh):
        plane.push(unit(0, 3))
        plane.grow(capacity=64)
        assert set(np.asarray(plane.pull().data.reward) // 8) == {0}
        plane.push(unit(1, 9))
        assert set(np.asarray(plane.pull().data.reward) // 8) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("order", ["sequential", "overlap", "arrival"])
def test_a_host_hook_whose_records_grow_grows_its_table(order: str) -> None:
    queue = conduit.HostQueue(order="arrival") if order == "arrival" else None
    plane = make_plane(placement="device", schedule="overlap" if order != "sequential" else order, host_queue=queue)
    plane.register_ingestion(
        lambda rollout: Step(np.repeat(rollout.observation, 2, axis=-1), rollout.reward), host=True
    )
    sizes = {}
    for number, size in enumerate((3, 3, 5, 4, 150)):
        sizes[number] = 2 * size
        plane.push(unit(number, size))
    plane.flush()
    stats = plane.stats().tables["experience"]
    assert [move.reason for move in stats.moves] == ["growth", "growth"]
    assert (stats.inserted_items, stats.live_items) == (5 * 8, 32)
    assert_padded(plane.pull().data, sizes, 300)
    if order == "sequential":
        with pytest.raises(conduit.SpecError, match="grew beyond"):
            plane.push(unit(5, 151))
    plane.close()


@pytest.mark.slow
def test_saving_waits_for_a_host_hook_that_makes_its_table_grow(tmp_path: Path) -> None:
    plane = make_plane(placement="device", host_queue=conduit.HostQueue(order="arrival", deadline_s=60))
    plane.register_ingestion(lambda rollout: rollout, host=True)
    plane.push(unit(0, 3))
    plane.push(unit(1, 200))
    plane.save(tmp_path / "saved")
    assert plane.stats().tables["experience"].inserted_items == 16
    plane.close()


@pytest.mark.slow
def test_an_optional_leaf_may_come_late_and_be_missing_again() -> None:
    plane = make_plane()
    plane.push(unit(0, 3))
    plane.push(unit(1, 3, mask=True))
    plane.push(unit(2, 3))
    data = jax.tree.map(np.asarray, plane.pull().data)
    unmasked = (data.reward // 8 != 1) & True
    np.testing.assert_array_equal(data.mask, np.where(unmasked, -1, data.reward % 2))


@pytest.mark.parametrize(
    ("old_items", "capacity"),
    [
        ("drop", None),
        pytest.param("pad", None, marks=pytest.mark.slow),
        pytest.param("pad", 64, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_compiled_within_the_pause(
    old_items: str, capacity: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = make_plane(replace(GROWTH, old_items=old_items), placement="device")
    for number in range(2):
        plane.push(unit(number, 3))
        plane.pull()
    within: list[int] = []

    def watched(*arguments: Any) -> None:
        with count_traces() as traces:
            relocate(*arguments)
        within.append(traces.compiled)

    monkeypatch.setattr(relocation, "relocate", watched)
    plane.grow(unit(2, 9), capacity=capacity)
    assert within == [0]


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 64])
def test_growth_compiles_before_the_pause_what_runs_after_it(capacity: int | None) -> None:
    plane = make_plane(placement="device")

    def iteration(rollout: Step) -> None:
        plane.push(rollout)
        sample = plane.pull()
        plane.update_priorities(sample.info, sample.weights)

    units = [jax.device_put(unit(number, 3 + number), jax.devices()[0]) for number in range(2)]
    iteration(units[0])
    iteration(units[0])
    plane.grow(units[1], capacity=capacity)
    with count_traces() as traces:
        iteration(units[1])
    assert traces.compiled == 0


@pytest.mark.slow
def test_priorities_and_updates_in_flight_survive_growth_of_leaves() -> None:
    plane = make_plane()
    plane.push(unit(0, 3))
    plane.push(unit(1, 3))
    sample = plane.pull()
    plane.grow(unit(0, 7))
    weighted = np.where(np.asarray(sample.data.reward) == int(sample.data.reward[0]), 1e6, 0.0).astype(np.float32)
    assert int(plane.update_priorities(sample.info, weighted).sum()) == BATCH
    later = plane.pull()
    share = np.mean(np.asarray(later.data.reward) == int(sample.data.reward[0]))
    assert share == 1.0
    assert later.data.observation.shape == (BATCH, 7)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(32, 64), (32, 16)])
def test_another_capacity_keeps_the_newest_items_and_their_priorities(before: int, after: int) -> None:
    plane = make_plane(capacity=before)
    for number in range(6):
        plane.push(unit(number, 3))
    sample = plane.pull()
    plane.update_priorities(sample.info, np.asarray(sample.data.reward % 3, np.float32))
    plane.grow(capacity=after)
    stats = plane.stats().tables["experience"]
    assert (stats.capacity_items, stats.live_items, stats.inserted_items) == (after, min(after, 32), 48)
    assert int(plane.update_priorities(sample.info, np.ones(BATCH, np.float32)).sum()) == 0
    assert plane.stats().tables["experience"].stale_updates == BATCH
    seen = {int(reward) for _ in range(20) for reward in plane.pull().data.reward}
    assert seen <= set(range(48 - min(after, 32), 48))
    for number in range(6, 16):
        plane.push(unit(number, 3))
        assert_padded(plane.pull().data, dict.fromkeys(range(20), 3), 3)
    stats = plane.stats().tables["experience"]
    assert (stats.live_items, stats.inserted_items) == (after, 128)


@pytest.mark.slow
@settings(max_examples=6)
@given(st.sampled_from([(4, 7), (6, 3)]), st.integers(0, 14), st.booleans(), st.data())
def test_a_resized_ring_holds_the_newest_steps_of_each_lane_in_order(
    lengths: tuple[int, int], pushed: int, ragged: bool, data: st.DataObject
) -> None:
    length, longer = lengths
    old, new = Geometry(3, length), Geometry(3, longer)
    replay = conduit.make_replay(
        conduit.ReplayConfig(capacity=3 * length, sampler=conduit.Prioritized(exponent=1.0), ragged=ragged),
        batch_size=1,
        lanes=3,
    )
    state = replay.init(jnp.zeros((), jnp.float32))
    lanes: list[list[float]] = [[], [], []]
    for step in range(pushed):
        value = np.float32([step + 1, step + 101, step + 201])
        counts = data.draw(st.lists(st.integers(0, 1), min_size=3, max_size=3)) if ragged else [1, 1, 1]
        given_lengths = jnp.int32(counts) if ragged else None
        state, _ = replay.add(state, jnp.asarray(value)[None], given_lengths, jnp.asarray(value)[None])
        for lane in range(3):
            lanes[lane] += [float(value[lane])] * counts[lane]
    control = resized(state.control, old, new, conduit.Prioritized(exponent=1.0), keep=True)
    stacked = jax.tree.map(lambda field: np.asarray(field)[None], state.control.ring)
    rows, stored = np.asarray(state.storage.rows)[:, 1].view(np.float32), np.zeros(new.slots, np.float32)
    for _, start, to, count in kept_runs(stacked, old, new):
        stored[to : to + count] = rows[start : start + count]
    for lane, values in enumerate(lanes):
        want = values[-min(length, longer) :]
        own = ring.at_lane(control.ring, jnp.int32(lane))
        slots = [lane * longer + int(ring.nth_oldest(own, longer, jnp.int32(at))) for at in range(len(want))]
        assert int(own.filled) == len(want)
        np.testing.assert_array_equal(stored[slots], np.float32(want))
        np.testing.assert_array_equal(np.asarray(control.selector.tree.priorities)[slots], np.float32(want))
    assert float(np.sum(control.selector.tree.priorities)) == sum(sum(own[-min(length, longer) :]) for own in lanes)


@pytest.mark.parametrize(
    ("pushed", "message"),
    [
        (unit(1, 301), r"'observation' grew beyond[\s\S]*size 301[\s\S]*at most 300[\s\S]*Growth\(axes="),
        (Step(unit(1, 5).observation.astype(np.float16), unit(1, 5).reward), r"another (shape|dtype)"),
        (Step(unit(1, 5).observation[:1], unit(1, 5).reward[:1]), "another shape"),
        (Step(unit(1, 5).observation[..., None], unit(1, 5).reward), "another shape"),
        (Step(unit(1, 5).observation, unit(1, 5).reward[..., None]), "another shape"),
        ({"observation": unit(1, 5).observation}, "another tree"),
    ],
)
def test_what_was_not_declared_is_refused_and_changes_nothing(pushed: Any, message: str) -> None:
    plane = make_plane()
    plane.push(unit(0, 3))
    with pytest.raises(conduit.SpecError, match=message):
        plane.push(pushed)
    assert plane.stats().tables["experience"].moves == ()
    plane.push(unit(1, 3))
    assert_padded(plane.pull().data, {0: 3, 1: 3}, 3)


def test_a_plane_without_growth_refuses_larger_rollouts_as_ever() -> None:
    plane = make_plane(None)
    plane.push(unit(0, 3))
    with pytest.raises(conduit.SpecError, match="another shape"):
        plane.push(unit(1, 4))
    with pytest.raises(conduit.SpecError, match="another shape"):
        plane.grow(unit(1, 4))
    with pytest.raises(conduit.ConfigError, match="larger than the replay"):
        plane.grow(capacity=4)
    plane.grow(capacity=32)
    assert plane.stats().tables["experience"].moves == ()


@pytest.mark.parametrize(
    ("growth", "message"),
    [
        ({"axes": {"observations": {0: 9}}}, "did you mean 'observation'"),
        ({"axes": {"observation": {1: 9}}}, "cannot grow as declared"),
        ({"axes": {"observation": {0: 2}}}, "cannot grow as declared"),
        ({"axes": {"reward": {0: 9}}}, "cannot grow as declared"),
        ({"axes": {"observation": {0: 9}, "reward": {}}, "optional": ("reward",), "fill": 0.5}, "cannot hold the fill"),
    ],
)
def test_declarations_that_do_not_go_with_the_first_push_are_refused(growth: dict[str, Any], message: str) -> None:
    with pytest.raises(conduit.ConfigError, match=message):
        make_plane(conduit.Growth(**growth)).push(unit(0, 3))


@pytest.mark.parametrize(
    "bad",
    [
        {"axes": {"x": {-1: 3}}},
        {"axes": {"x": {0: 0}}},
        {"axes": 3},
        {"optional": "mask"},
        {"fill": "0"},
        {"old_items": "keep"},
    ],
)
def test_declarations_that_make_no_sense_are_refused_when_made(bad: dict[str, Any]) -> None:
    with pytest.raises(conduit.ConfigError):
        conduit.Growth(**bad)


def test_growth_that_fits_nowhere_is_refused_and_the_table_works_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plane = make_plane(placement="device")
    plane.push(unit(0, 3))
    monkeypatch.setattr("conduit_jax.sharding.placement.available_bytes", lambda device, kind: 2000)
    with pytest.raises(conduit.PlacementError, match="device lacks"):
        plane.push(unit(1, 300))
    monkeypatch.undo()
    plane.push(unit(1, 3))
    assert_padded(plane.pull().data, {0: 3, 1: 3}, 3)


@pytest.mark.slow
def test_growth_moves_the_buffer_where_its_tier_is_full() -> None:
    plane = make_plane(placement=conduit.AutoPlacement(limits={"device": 2000}))
    plane.push(unit(0, 3))
    assert plane.stats().tables["experience"].placement == "device"
    plane.push(unit(1, 300))
    stats = plane.stats().tables["experience"]
    assert (stats.placement, stats.moves[-1].source) == ("pinned_host", "device")
    assert_padded(plane.pull().data, {0: 3, 1: 300}, 300)


@pytest.mark.slow
def test_a_buffer_that_does_not_fit_beside_its_successor_goes_by_way_of_the_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plane = make_plane(placement="device")
    plane.push(unit(0, 3))
    plane.push(unit(1, 3))
    size = plane.stats().tables["experience"].storage_bytes
    monkeypatch.setattr("conduit_jax.sharding.placement.available_bytes", lambda device, kind: size + 100)
    plane.push(unit(2, 5))
    moves = plane.stats().tables["experience"].moves
    assert [(move.source, move.target) for move in moves] == [("device", "disk"), ("disk", "device")]
    assert_padded(plane.pull().data, {0: 3, 1: 3, 2: 5}, 5)
