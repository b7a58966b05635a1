"""Laws of migration: a plane that moved delivers what one that never moved does, and a move that fails changes nothing."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

import conduit_jax as conduit
from conduit_jax import relocation
from conduit_jax.relocation import migrate_table
from conduit_jax.sharding.migration import cuts
from conduit_jax.sharding.surroundings import memory_only
from conduit_jax.testing import count_traces, live_buffer_bytes
from tests.reference_plane import (
    BATCH,
    CAPACITY,
    ReferencePlane,
    assert_intact,
    assert_same_batch,
    priorities_for,
    unit,
)
from tests.sharding.places import fragile

CONFIG = conduit.ReplayConfig(capacity=CAPACITY, sampler=conduit.Prioritized())
TIERS = ("device", "pinned_host", "pageable", "single_device")


def make_plane(partitions: int, schedule: str = "sequential", where: str = "device") -> conduit.ExperiencePlane:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)) if partitions == 8 else None
    return conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=BATCH),
        replay=replace(CONFIG, partitions=partitions),
        placement=where,
        schedule=schedule,
        seed=3,
        mesh=mesh,
    )


def run(program: list[str], plane: conduit.ExperiencePlane, reference: ReferencePlane) -> None:
    """Drive both through ``program``; only the plane understands the names of tiers."""
    sample: Any = None
    for number, step in enumerate(["push", "push", *program]):
        if step == "push":
            for one in (plane, reference):
                one.push(unit(number), version=number)
        elif step == "pull":
            sample = plane.pull()
            assert_same_batch(sample, reference.pull())
            assert_intact(sample.data)
        elif step == "update":
            if sample is not None:
                applied = plane.update_priorities(sample.info, priorities_for(sample))
                assert int(applied.sum()) == reference.update_priorities(
                    jax.tree.map(np.asarray, sample.info), priorities_for(sample)
                )
        else:
            plane.migrate(step)
            assert plane.stats().tables["experience"].placement == step


STEPS = st.lists(st.sampled_from(["push", "pull", "update", *TIERS]), min_size=12, max_size=30)


@pytest.mark.slow
@settings(max_examples=2)
@given(STEPS)
def test_a_plane_that_moves_at_any_point_delivers_what_one_that_never_moved_does(program: list[str]) -> None:
    run([*program, "pull"], make_plane(1), ReferencePlane(CONFIG, 1, seed=3))


@pytest.mark.slow
@settings(max_examples=1)
@given(STEPS)
def test_batches_and_units_that_wait_move_along_with_a_schedule_that_overlaps(program: list[str]) -> None:
    run([*program, "pull"], make_plane(1, "overlap"), ReferencePlane(CONFIG, 1, seed=3, ahead=1, late_inserts=True))


@pytest.mark.slow
def test_a_buffer_spreads_over_eight_devices_and_comes_back_without_a_trace() -> None:
    plane, reference = make_plane(8, where="single_device"), ReferencePlane(CONFIG, 8, seed=3)
    for where in ("device", "pinned_host", "single_device"):
        run(["pull", "update", where, "push", "pull", "update"], plane, reference)
    stats = plane.stats().tables["experience"]
    assert [move.target for move in stats.moves] == ["device", "pinned_host", "single_device"]
    assert [move.edges for move in stats.moves] == [8] * 3
    for move in stats.moves:
        assert move.bytes == stats.storage_bytes
        assert move.seconds <= move.pause_s
        assert move.link_fraction > 0
    state = plane._tables["experience"].pipeline.state
    assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(state))
    assert "single_device: 8 partition(s)" in plane.explain()
    assert "moved pinned_host -> single_device (asked for)" in plane.explain()


def made_on(device: int | None, number: int) -> dict[str, Any]:
    """A unit of host arrays, or of arrays on a device."""
    rollout = unit(number)
    return rollout if device is None else jax.block_until_ready(jax.device_put(rollout, jax.devices()[device]))


@pytest.mark.parametrize(
    ("partitions", "start", "where", "device", "updates"),
    [
        (1, "device", "pinned_host", None, "host"),
        pytest.param(1, "device", "pageable", 0, "device", marks=pytest.mark.slow),
        pytest.param(1, "device", "disk", 0, "host", marks=pytest.mark.slow),
        pytest.param(8, "single_device", "device", 0, "device", marks=pytest.mark.slow),
        pytest.param(8, "device", "single_device", 0, "host", marks=pytest.mark.slow),
    ],
)
def test_programs_are_compiled_before_the_pause_not_after(
    partitions: int, start: str, where: str, device: int | None, updates: str
) -> None:
    plane = make_plane(partitions, where=start)

    def iteration(rollout: dict[str, Any]) -> None:
        plane.push(rollout)
        sample = plane.pull()
        priorities = sample.weights if updates == "device" else np.ones(BATCH, np.float32)
        plane.update_priorities(sample.info, priorities)

    units = [made_on(device, number) for number in range(4)]
    iteration(units[0])
    iteration(units[1])
    plane.migrate(where)
    with count_traces() as traces:
        iteration(units[2])
    assert traces.compiled == 0
    iteration(units[3])


@pytest.mark.parametrize("partitions", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_a_move_that_fails_half_way_leaves_the_old_placement_working(partitions: int) -> None:
    plane, reference = make_plane(partitions), ReferencePlane(CONFIG, partitions, seed=3)
    run(["pull", "update"], plane, reference)
    table = plane._tables["experience"]
    for leaf in jax.tree.leaves(table.pipeline.state.storage):
        assert leaf.addressable_shards  # views that an array keeps once it was asked for them are counted as arrays
    gc.collect()
    before, size = live_buffer_bytes(), plane.stats().tables["experience"].storage_bytes
    with pytest.raises(conduit.PlacementError, match="half way: RuntimeError: the link is down"):
        migrate_table(table, "pinned_host", put=fragile(10 * partitions), piece_bytes=4096)
    assert live_buffer_bytes() <= before + size / 2
    assert plane.stats().tables["experience"].placement == "device"
    run(["pull", "update", "push", "pull", "pinned_host", "pull", "update", "pull"], plane, reference)


def bytes_in_use() -> int:
    """Bytes of all buffers on one device each, views of one buffer counted once."""
    alone = [array for array in jax.live_arrays() if len(array.sharding.device_set) == 1]
    return sum({array.unsafe_buffer_pointer(): array.nbytes for array in alone}.values())


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), [("device", "pinned_host"), ("disk", "device")])
def test_a_move_takes_no_more_memory_than_both_placements_and_a_few_pieces(source: str, target: str) -> None:
    gc.collect()  # what other tests left may go while this one counts
    plane, piece = make_plane(1, where=source), 4096
    plane.push(unit(0))
    table, peaks = plane._tables["experience"], []
    before, size = bytes_in_use(), plane.stats().tables["experience"].storage_bytes

    def watching(pieces: Any, sharding: Any) -> Any:
        arrived = jax.device_put(pieces, sharding)
        peaks.append(bytes_in_use())
        return arrived

    moved = migrate_table(table, target, put=watching, piece_bytes=piece)
    assert moved.placement.name == target
    assert len(peaks) > 30
    assert max(peaks) <= before + size + 12 * piece
    assert max(peaks) >= before + size


@pytest.mark.slow
def test_threads_that_push_during_moves_lose_nothing() -> None:
    plane = make_plane(1)
    plane.push(unit(0))
    failed: list[BaseException] = []

    def produce(first: int) -> None:
        try:
            for number in range(first, first + 12):
                plane.push(unit(number))
                assert_intact(plane.pull().data)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=produce, args=(100 * number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for where in ("pinned_host", "pageable", "device"):
        plane.migrate(where)
    for thread in threads:
        thread.join()
    assert not failed, failed
    assert plane.stats().tables["experience"].pushed_units == 25
    assert plane.stats().tables["experience"].inserted_items == 25 * 32


@pytest.mark.slow
def test_hooks_on_the_host_move_along() -> None:
    plane = make_plane(1)
    plane.register_delivery(lambda data: {"twice": np.asarray(data["id"]) * 2, **data}, host=True)
    plane.push(unit(0))
    for where in ("pinned_host", "device"):
        assert "twice" in plane.pull().data
        plane.migrate(where)
    data = plane.pull().data
    np.testing.assert_array_equal(data["twice"], 2 * np.asarray(data["id"]))
    plane.close()


def test_a_move_to_where_the_buffer_is_does_nothing() -> None:
    plane = make_plane(1)
    plane.push(unit(0))
    plane.migrate("device")
    assert plane.stats().tables["experience"].moves == ()


def test_moves_that_cannot_be_are_refused_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plane = make_plane(1)
    with pytest.raises(conduit.LifecycleError, match="migrate needs a built table"):
        plane.migrate("device")
    plane.push(unit(0))
    with pytest.raises(conduit.ConfigError, match="did you mean 'pinned_host'"):
        plane.migrate("pinedhost")
    with pytest.raises(conduit.ConfigError, match="Unknown table"):
        plane.migrate("device", table="experiences")
    other = make_plane(8)
    other.push(unit(0))
    with pytest.raises(conduit.PlacementError, match=r"8 partitions[\s\S]*1, as it was built with"):
        plane.migrate(other._tables["experience"].placement)
    monkeypatch.setattr("conduit_jax.sharding.placement.available_bytes", lambda device, kind: 1000)
    with pytest.raises(conduit.PlacementError, match="pinned_host lacks"):
        plane.migrate("pinned_host")
    assert plane.stats().tables["experience"].placement == "device"
    plane.close()
    with pytest.raises(conduit.LifecycleError, match="closed plane"):
        plane.migrate("device")


def test_a_link_that_is_down_from_the_start_fails_before_anything_pauses() -> None:
    plane, reference = make_plane(1), ReferencePlane(CONFIG, 1, seed=3)
    run(["pull"], plane, reference)
    with pytest.raises(conduit.PlacementError, match="could not be prepared: RuntimeError: the link is down"):
        migrate_table(plane._tables["experience"], "pinned_host", put=fragile(0))
    run(["pull", "push", "pull"], plane, reference)


@given(st.integers(1, 5000), st.integers(0, 10).map(lambda power: 1 << power))
def test_pieces_cover_every_slot_once_in_few_sizes(count: int, most: int) -> None:
    pieces = cuts(count, most)
    assert [start for start, _ in pieces] == [0, *np.cumsum([size for _, size in pieces])[:-1]]
    assert sum(size for _, size in pieces) == count
    assert all(size == most or (size < most and size & (size - 1) == 0) for _, size in pieces)


def test_new_limits_count_what_the_buffer_itself_holds_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of one and a half times the buffer: it fits, though not beside itself."""
    plane = make_plane(1, where="auto")
    plane.push(unit(0))
    size = plane.stats().tables["experience"].storage_bytes

    def room(devices: Any) -> conduit.Topology:
        free = size // 2
        return replace(memory_only(devices), device_memory_bytes=(free,) * len(devices), node_memory_bytes=None)

    monkeypatch.setattr("conduit_jax.sharding.choice.memory_only", room)
    plane.migrate(conduit.AutoPlacement(limits={"device": size + size // 4}))
    assert plane.stats().tables["experience"].moves == ()
    plane.migrate(conduit.AutoPlacement(limits={"device": size - 1}))
    assert [move.target for move in plane.stats().tables["experience"].moves] == ["pinned_host"]


@pytest.mark.slow
@pytest.mark.parametrize("fails", [None, conduit.PlacementError, RuntimeError])  # the last as JAX does without memory
def test_what_fits_only_once_the_buffer_has_gone_goes_by_way_of_the_disk(
    fails: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane, reference = make_plane(1, where="pinned_host"), ReferencePlane(CONFIG, 1, seed=3)
    run(["pull"], plane, reference)
    beside = [1]  # how often the new placement does not fit beside the old one
    monkeypatch.setattr("conduit_jax.relocation.shortfall", lambda *_: beside.pop() if beside else 0)
    if fails:
        rehouse, calls = relocation.rehouse, []

        def failing(*arguments: Any, **named: Any) -> Any:
            calls.append(1)
            if len(calls) > 1:  # to the disk it goes, on and back it does not
                raise fails("no room")
            return rehouse(*arguments, **named)

        monkeypatch.setattr(relocation, "rehouse", failing)
        with pytest.raises(conduit.PlacementError, match=r"no room[\s\S]*stays on disk"):
            plane.migrate("auto")
    else:
        plane.migrate("auto")
    stats = plane.stats().tables["experience"]
    assert [move.target for move in stats.moves] == ["disk"] + ["device"] * (fails is None)
    assert stats.placement == ("disk" if fails else "device")
    run(["pull", "push", "pull"], plane, reference)
