"""Laws of plane.save and plane.restore: the next batches are the uninterrupted run's, whatever happened in between."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conduit_jax as conduit
from conduit_jax.checkpoint import arrays, rows
from conduit_jax.testing import assert_in_place, compiled_facts
from tests.reference_plane import BATCH, CAPACITY, assert_same_batch, priorities_for, unit

ROOT = Path(__file__).resolve().parents[2]
SAMPLERS = {"uniform": conduit.Uniform(), "prioritized": conduit.Prioritized()}


def make_plane(
    sampler: str = "prioritized",
    *,
    placement: str = "device",
    devices: int = 1,
    partitions: int | None = None,
    schedule: Any = "auto",
    **config: Any,
) -> conduit.ExperiencePlane:
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)) if devices > 1 else None
    replay = {"capacity": CAPACITY, "sampler": SAMPLERS[sampler], "partitions": partitions} | config
    return conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=BATCH),
        replay=conduit.ReplayConfig(**replay),
        placement=placement,
        schedule=schedule,
        mesh=mesh,
    )


def step(plane: conduit.ExperiencePlane, number: int) -> conduit.Sample:
    """One iteration: push, pull, update."""
    plane.push(unit(number), version=number)
    sample = plane.pull()
    plane.update_priorities(sample.info, priorities_for(sample))
    return jax.tree.map(np.array, sample)


def assert_equal_bits(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for have, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(have).tobytes() == np.asarray(wanted).tobytes()


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


# ---------------------------------------------------------------- the law


PROGRAMS = st.lists(st.sampled_from(["push", "pull", "update", "save"]), min_size=5, max_size=12)
PLACEMENTS = st.sampled_from([("device", 1), ("device", 4), ("device", 2), ("pinned_host", 1), ("pageable", 1)])


SCHEDULES = [
    "sequential",
    "overlap",
    conduit.Schedule(g_ingestion=3, g_delivery=2),
    conduit.Schedule(overlap_ingestion=True, overlap_delivery=True, g_ingestion=2, g_delivery=2),
]

by_programs = given(
    program=PROGRAMS,
    sampler=st.sampled_from(sorted(SAMPLERS)),
    schedule=st.sampled_from(SCHEDULES),
    partitions=st.sampled_from([1, 4]),
    places=st.lists(PLACEMENTS, min_size=2, max_size=3),
)


@pytest.mark.slow
@settings(max_examples=3)
@by_programs
def test_any_program_goes_on_after_a_restore_as_if_nothing_had_happened(tmp_path_factory: Any, **program: Any) -> None:
    goes_on(tmp_path_factory, **program)


@pytest.mark.slow
@by_programs
def test_many_programs_go_on_after_a_restore_as_if_nothing_had_happened(tmp_path_factory: Any, **program: Any) -> None:
    goes_on(tmp_path_factory, **program)


def goes_on(
    tmp_path_factory: Any,
    program: list[str],
    sampler: str,
    schedule: Any,
    partitions: int,
    places: list[tuple[str, int]],
) -> None:
    def plane_at(number: int, schedule: Any) -> conduit.ExperiencePlane:
        placement, devices = places[number % len(places)]
        devices = devices if partitions % devices == 0 else 1
        return make_plane(sampler, placement=placement, devices=devices, partitions=partitions, schedule=schedule)

    folder = tmp_path_factory.mktemp("checkpoint")
    whole, broken, restores = plane_at(0, schedule), plane_at(0, schedule), 0
    for plane in (whole, broken):
        plane.push(unit(0)), plane.flush()
    last: Any = None
    for number, call in enumerate([*program, "save", "pull", "push", "update", "pull"], start=1):
        if call == "push":
            whole.push(unit(number), version=number), broken.push(unit(number), version=number)
        elif call == "pull":
            last = whole.pull(), broken.pull()
            assert_same_batch(last[1], jax.tree.map(np.asarray, last[0]))
        elif call == "update" and last is not None:
            for plane, sample in zip((whole, broken), last, strict=True):
                plane.update_priorities(sample.info, priorities_for(sample))
        elif call == "save":
            restores += 1
            broken.save(folder)
            broken = plane_at(restores, "auto")
            broken.restore(folder)
            last = last and (last[0], jax.tree.map(np.asarray, last[1]))
    counts = [{**plane.stats().tables["experience"].__dict__, "storage_bytes": 0} for plane in (whole, broken)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("schedule", ["sequential", "overlap"])
@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_on_the_same_placement_every_bit_is_the_same_weights_and_probabilities_too(
    tmp_path: Path, sampler: str, schedule: str
) -> None:
    whole, saved = (make_plane(sampler, schedule=schedule) for _ in range(2))
    for number in range(5):
        assert_equal_bits(step(saved, number), step(whole, number))
    saved.save(tmp_path)
    restored = make_plane(sampler)
    restored.restore(tmp_path)
    for number in range(5, 10):
        want = step(whole, number)
        assert_equal_bits(step(saved, number), want)  # saving changes nothing
        assert_equal_bits(step(restored, number), want)
    assert restored.policy_version == whole.policy_version
    assert str(restored._tables["experience"].schedule) == str(whole._tables["experience"].schedule)


def test_a_plane_that_has_gone_on_goes_back_to_what_was_saved(tmp_path: Path) -> None:
    plane = make_plane()
    for number in range(3):
        step(plane, number)
    plane.save(tmp_path)
    first = [step(plane, number) for number in range(3, 9)]
    plane.restore(tmp_path)
    assert_equal_bits([step(plane, number) for number in range(3, 9)], first)


@settings(max_examples=3)
@given(
    pushed=st.integers(0, 2),
    carried=st.booleans(),
    iterations=st.integers(0, 2),
    schedule=st.sampled_from(
        ["sequential", "overlap", conduit.Schedule(overlap_ingestion=True, g_ingestion=Fraction(1, 2))]
    ),
)
def test_on_policy_units_and_carries_come_back(
    tmp_path_factory: Any, pushed: int, carried: bool, iterations: int, schedule: Any
) -> None:
    def plane_of(schedule: Any = "auto") -> conduit.ExperiencePlane:
        plane = conduit.ExperiencePlane(
            algorithm=conduit.OnPolicy(num_minibatches=4, num_epochs=2, units_per_iteration=3), schedule=schedule
        )
        if carried:
            plane.register_ingestion(
                lambda carry, rollout: (carry + rollout["id"].sum(), {**rollout, "seen": rollout["id"] + carry}),
                init_carry=lambda rollout: jnp.int32(0),
            )
        return plane

    def finish(plane: conduit.ExperiencePlane, start: int, count: int) -> list[Any]:
        for number in range(start, start + count):
            plane.push(unit(number))
        return [jax.tree.map(np.array, sample) for sample in plane.epochs()]

    folder, whole, saved = tmp_path_factory.mktemp("on_policy"), plane_of(schedule), plane_of(schedule)
    for plane in (whole, saved):
        for iteration in range(iterations):
            finish(plane, 3 * iteration, 3)
        for number in range(max(pushed, 1 - iterations)):
            plane.push(unit(100 + number))
    pushed = max(pushed, 1 - iterations)
    saved.save(folder)
    restored = plane_of()
    restored.restore(folder)
    for start in (200, 300):
        want = finish(whole, start, 3 - pushed)
        assert_equal_bits(finish(restored, start, 3 - pushed), want)
        pushed = 0
    assert restored.stats().tables == whole.stats().tables


@settings(max_examples=3)
@given(
    calls=st.lists(st.sampled_from(["push", "old", "pull", "update"]), min_size=4, max_size=10),
    schedule=st.sampled_from(["sequential", conduit.Schedule(overlap_delivery=True)]),
    partitions=st.sampled_from([1, 2]),
)
def test_a_queue_of_bounded_lag_comes_back_with_its_counts(
    tmp_path_factory: Any, calls: list[str], schedule: Any, partitions: int
) -> None:
    def plane_of(schedule: Any = "auto") -> conduit.ExperiencePlane:
        algorithm = conduit.BoundedLag(batch_size=BATCH, max_policy_lag=3)
        config = conduit.ReplayConfig(capacity=CAPACITY, partitions=partitions)
        return conduit.ExperiencePlane(algorithm=algorithm, replay=config, schedule=schedule)

    folder, whole, broken = tmp_path_factory.mktemp("lag"), plane_of(schedule), plane_of(schedule)
    whole.push(unit(0)), broken.push(unit(0))
    for number, call in enumerate([*calls, "save", "pull", "push", "pull", "pull"], start=1):
        if call == "save":
            broken.save(folder)
            broken = plane_of()
            broken.restore(folder)
        for plane in (whole, broken):
            if call in ("push", "old"):
                plane.push(unit(number), version=plane.policy_version - (2 if call == "old" else 0))
            elif call == "update":
                plane.policy_version += 1
        if call == "pull":
            assert whole.ready() == broken.ready()
            if whole.ready():
                assert_equal_bits(broken.pull(), whole.pull())
    assert broken.stats().tables == whole.stats().tables


@pytest.mark.parametrize("consumed", [1, 3, 4, 7])
@pytest.mark.parametrize("schedule", ["sequential", "overlap", "auto"])
def test_a_plane_saved_in_the_middle_of_an_on_policy_iterations_batches_yields_those_that_were_left(
    tmp_path: Path, consumed: int, schedule: str
) -> None:
    def plane_of() -> conduit.ExperiencePlane:
        plane = conduit.ExperiencePlane(
            algorithm=conduit.OnPolicy(num_minibatches=4, num_epochs=2, units_per_iteration=2), schedule=schedule
        )
        plane.register_finalize(lambda records, context: {**records, "added": records["id"] + context})
        plane.register_delivery(
            lambda data, key, context: {**data, "noise": jax.random.normal(key, data["id"].shape) + context}
        )
        return plane

    def iteration(plane: conduit.ExperiencePlane, first: int) -> Any:
        for number in (first, first + 1):
            plane.push(unit(number), context=jnp.int32(5))
        return plane.epochs(context=jnp.int32(5))

    saved, restored = plane_of(), plane_of()
    list(iteration(saved, 0))
    batches = iteration(saved, 2)
    for _ in range(consumed):
        next(batches)
    saved.save(tmp_path)
    restored.restore(tmp_path, context=jnp.int32(5))
    assert restored.ready()
    again = tmp_path / "again"
    restored.save(again)  # what was restored is saved, whether or not anybody asked for it yet
    third = plane_of()
    third.restore(again, context=jnp.int32(5))
    want = [jax.tree.map(np.array, sample) for sample in batches]
    assert len(want) == 8 - consumed
    for plane in (restored, third):
        assert_equal_bits([jax.tree.map(np.array, sample) for sample in plane.epochs(context=jnp.int32(5))], want)
        assert not plane.ready()
        assert plane.stats().tables["experience"].delivered_batches == 16
    want = [jax.tree.map(np.array, sample) for sample in iteration(saved, 4)]
    assert_equal_bits([jax.tree.map(np.array, sample) for sample in iteration(restored, 4)], want)


def test_batches_that_were_left_are_given_up_by_the_next_push_and_dropped_ones_are_not_saved(tmp_path: Path) -> None:
    plane, restored = (conduit.ExperiencePlane(algorithm=conduit.OnPolicy(num_minibatches=4)) for _ in range(2))
    plane.push(unit(0))
    batches = plane.epochs()
    next(batches)
    plane.save(tmp_path)
    restored.restore(tmp_path)
    restored.push(unit(1))
    assert len(list(restored.epochs())) == 4
    del batches
    plane.save(tmp_path)
    restored.restore(tmp_path)
    assert not restored.ready()


def test_a_plane_without_items_is_saved_and_restored(tmp_path: Path) -> None:
    plane, restored = make_plane(), make_plane()
    plane.save(tmp_path)
    restored.restore(tmp_path)
    plane.build(unit(0))
    plane.save(tmp_path)
    restored.restore(tmp_path)
    assert not restored.ready()
    assert_equal_bits(step(restored, 0), step(plane, 0))


@pytest.mark.parametrize("axes", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto], ids=str)
def test_inside_a_callers_mesh_context_saving_and_restoring_change_no_bit(tmp_path: Path, axes: Any) -> None:
    whole, saved = make_plane(schedule="overlap"), make_plane(schedule="overlap")
    for number in range(2):
        step(whole, number), step(saved, number)
    with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(axes,))):
        saved.save(tmp_path)
        restored = make_plane()
        restored.restore(tmp_path)
        got = [step(restored, number) for number in range(2, 5)]
    assert_equal_bits(got, [step(whole, number) for number in range(2, 5)])


def test_tables_come_back_by_name_and_one_never_pushed_to_stays_unbuilt(tmp_path: Path) -> None:
    def plane_of() -> conduit.ExperiencePlane:
        tables = {name: conduit.ReplayConfig(capacity=64) for name in ("one", "two", "three")}
        return conduit.ExperiencePlane(algorithm=conduit.OffPolicy(batch_size=8), replay=tables)

    plane, restored = plane_of(), plane_of()
    for name, number in (("one", 1), ("two", 2)):
        plane.push(unit(number), table=name)
    plane.save(tmp_path)
    restored.restore(tmp_path)
    for name in ("one", "two"):
        assert_equal_bits(restored.pull(table=name), plane.pull(table=name))
    assert not restored.ready(table="three")


# ---------------------------------------------------------------- what a checkpoint cannot know


class Mine(NamedTuple):
    """A rollout of the user's own kind."""

    x: Any
    y: Any


def mine(number: int) -> Mine:
    return Mine(np.full((4, 8), number, np.float32), np.arange(32, dtype=np.int32).reshape(4, 8) + 32 * number)


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("schedule", ["sequential", "overlap"])
def test_rollouts_of_the_users_own_kind_are_filled_in_once_they_are_known(
    tmp_path: Path, schedule: str, *, built: bool
) -> None:
    whole = make_plane(schedule=schedule)
    for number in range(3):
        whole.push(mine(number))
        whole.pull()
    whole.save(tmp_path)
    restored = make_plane()
    if built:
        restored.build(mine(0))
    restored.restore(tmp_path)
    for number in range(3, 6):
        whole.push(mine(number)), restored.push(mine(number))
        assert_equal_bits(restored.pull(), whole.pull())


def test_hooks_with_a_context_are_restored_with_one(tmp_path: Path) -> None:
    def plane_of() -> conduit.ExperiencePlane:
        plane = make_plane(schedule="sequential")
        plane.register_ingestion(lambda rollout, context: {"id": rollout["id"] * context["scale"]})
        return plane

    whole, context = plane_of(), {"scale": jnp.int32(3)}
    whole.push(unit(0), context=context)
    whole.save(tmp_path)
    restored = plane_of()
    with pytest.raises(conduit.HookError, match=r"plane\.restore\(path, context="):
        restored.restore(tmp_path)
    restored.restore(tmp_path, context=context)
    assert_equal_bits(restored.pull(), whole.pull())


# ---------------------------------------------------------------- what is refused


def test_a_plane_made_otherwise_is_told_every_difference_and_stays_as_it_was(tmp_path: Path) -> None:
    make_plane().build(unit(0))
    saved = make_plane()
    saved.push(unit(0))
    saved.save(tmp_path)
    other = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=BATCH, max_staleness=2),
        replay=conduit.ReplayConfig(capacity=2 * CAPACITY, sampler=conduit.Prioritized(exponent=0.5)),
        seed=3,
    )
    other.push(unit(5))
    with pytest.raises(conduit.ConfigError) as refused:
        other.restore(tmp_path)
    for line in (
        "algorithm.max_staleness: saved 4, here 2",
        "seed: saved 0, here 3",
        "replay.experience.capacity: saved 96, here 192",
        "replay.experience.sampler.exponent: saved 0.6, here 0.5",
    ):
        assert line in str(refused.value)
    np.testing.assert_array_equal(np.asarray(other.pull().data["id"]) // 32, 5)


def test_another_rollout_schedule_or_number_of_partitions_is_told(tmp_path: Path) -> None:
    saved = make_plane(schedule="sequential")
    saved.push(unit(0))
    saved.save(tmp_path)
    other = make_plane(schedule="overlap", partitions=2)
    other.push({**unit(0), "extra": np.zeros((4, 8), np.float32)})
    with pytest.raises(conduit.ConfigError) as refused:
        other.restore(tmp_path)
    for words in ("partitions: saved 1, here 2", "rollout['extra']: saved 'nothing'", "schedule: saved"):
        assert words in str(refused.value)


def test_saved_partitions_are_taken_over_where_the_config_leaves_them_open(tmp_path: Path) -> None:
    saved = make_plane(devices=4)
    saved.push(unit(0))
    saved.save(tmp_path)
    restored = make_plane()
    restored.restore(tmp_path)
    assert "4 partition(s)" in restored.explain()
    assert_same_batch(restored.pull(), jax.tree.map(np.asarray, saved.pull()))


@pytest.mark.parametrize("what", ["nothing", "empty", "file"])
def test_where_there_is_no_checkpoint_that_is_said(tmp_path: Path, what: str) -> None:
    path = tmp_path / "here"
    if what == "empty":
        path.mkdir()
    if what == "file":
        path.write_text("mine")
        with pytest.raises(conduit.CheckpointError, match="a file"):
            make_plane().save(path)
    with pytest.raises(conduit.CheckpointError, match="no checkpoint here"):
        make_plane().restore(path)


# ---------------------------------------------------------------- files


def test_other_files_survive_and_a_folder_holds_one_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "conduit-mine").mkdir()
    (tmp_path / "conduit-0123456789abcdef").mkdir()  # what a killed save left
    (tmp_path / "conduit.json.0123456789abcdef").write_text("half")
    plane = make_plane()
    plane.push(unit(0))
    for _ in range(3):
        plane.save(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert [name for name in names if "0123456789abcdef" in name] == []
    assert len(names) == 4
    kinds = {path.name for path in files_of(tmp_path) if not path.name.isdigit()}
    assert kinds == {"conduit.json", "zarr.json", "notes.txt"}  # plain data only


def test_a_save_that_fails_at_any_step_leaves_the_checkpoint_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = make_plane()
    plane.push(unit(0))
    plane.save(tmp_path)
    before = files_of(tmp_path)
    plane.push(unit(1))
    for owner, name in (
        (arrays.Writer, "put"),
        (arrays.Writer, "fill"),
        (arrays.Writer, "close"),
        (os, "fsync"),
        (Path, "replace"),
    ):

        def fail(*_: Any, **__: Any) -> Any:
            raise OSError("disk full")

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(OSError, match="disk full"):
                plane.save(tmp_path)
        assert files_of(tmp_path) == before
    restored = make_plane()
    restored.restore(tmp_path)
    assert restored.stats().tables["experience"].pushed_units == 1


def test_every_damaged_file_is_found_and_the_plane_is_as_before(tmp_path: Path) -> None:
    saved, plane = make_plane(), make_plane()
    saved.push(unit(0)), saved.pull()
    saved.save(tmp_path)
    plane.push(unit(7))
    for path in files_of(tmp_path):
        whole = path.read_bytes()
        for damage in (whole[: len(whole) // 2], b"", whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:], None):
            if damage is None:
                path.unlink()
            else:
                path.write_bytes(damage)
            if path.name == "zarr.json" and damage == whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:]:
                path.write_bytes(whole)  # white space of a zarr's own description
                continue
            with pytest.raises(conduit.CheckpointError):
                plane.restore(tmp_path)
            path.write_bytes(whole)
    np.testing.assert_array_equal(np.asarray(plane.pull().data["id"]) // 32, 7)
    plane.restore(tmp_path)
    assert_equal_bits(plane.pull(), saved.pull())


KILLED = """
import sys
import conduit_jax as conduit
from tests.checkpoint.test_plane_checkpoint import make_plane, unit
plane = make_plane(capacity=4096)
for number in range(128):
    plane.push(unit(number))
for number in range(128, 100_000):
    plane.push(unit(number))
    plane.save(sys.argv[1])
    print(number + 1, flush=True)
"""


@pytest.mark.parametrize("delays_s", [(0.013,), pytest.param((0.0, 0.005, 0.021, 0.034), marks=pytest.mark.slow)])
def test_a_process_killed_while_it_saves_leaves_a_whole_checkpoint(tmp_path: Path, delays_s: tuple[float, ...]) -> None:
    for number, delay_s in enumerate(delays_s):
        folder = tmp_path / str(number)
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as child:
            assert child.stdout is not None
            told = int(child.stdout.readline())
            time.sleep(delay_s)
            child.kill()
            told = max([told, *map(int, child.stdout.read().split())])
        plane = make_plane(capacity=4096)
        plane.restore(folder)
        pushed = plane.stats().tables["experience"].pushed_units
        assert pushed in (told, told + 1)
        newest = np.asarray(plane.pull().data["id"]) // 32
        assert ((newest < pushed) & (newest >= pushed - 128)).all()


def test_two_processes_do_not_save_to_one_folder(tmp_path: Path) -> None:
    from conduit_jax.checkpoint import folder

    plane = make_plane()
    plane.push(unit(0))
    with folder.replacing(tmp_path), pytest.raises(conduit.CheckpointError, match="Somebody else"):
        plane.save(tmp_path)
    plane.save(tmp_path)


# ---------------------------------------------------------------- rows


@given(st.data())
def test_spans_are_the_live_slots_of_a_ring_and_count_them_in_order(data: st.DataObject) -> None:
    length, lanes = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4))
    ragged = data.draw(st.booleans())
    rings = data.draw(
        st.lists(
            st.tuples(st.integers(0, length - 1), st.integers(0, length)),
            min_size=lanes if ragged else 1,
            max_size=lanes if ragged else 1,
        )
    )
    head, filled = (np.array(values, np.int32) for values in zip(*rings, strict=True))
    one = (head[None], filled[None]) if ragged else (head, filled)
    (spans,) = rows.ring_spans(*one, length, lanes)
    pairs = rings if ragged else rings * lanes
    want = sorted(
        lane * length + (start - 1 - back) % length for lane, (start, live) in enumerate(pairs) for back in range(live)
    )
    assert rows.slots_of(spans, 0, 10**6).tolist() == want
    cut = data.draw(st.integers(0, len(want)))
    assert [*rows.slots_of(spans, 0, cut), *rows.slots_of(spans, cut, len(want) + 3)] == want


@pytest.mark.parametrize("placement", ["device", "pinned_host"])
def test_only_live_rows_are_written_in_chunks_and_a_chunk_is_all_the_memory_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 40_000)
    whole, plane = (make_plane(placement=placement, capacity=4096, partitions=2) for _ in range(2))
    for number in range(5):
        whole.push(unit(number)), plane.push(unit(number))
    sizes: list[int] = []
    fill = arrays.Writer.fill

    def noted(writer: Any, reference: Any, where: Any, block: np.ndarray) -> None:
        sizes.append(block.nbytes)
        fill(writer, reference, where, block)

    monkeypatch.setattr(arrays.Writer, "fill", noted)
    plane.save(tmp_path)
    live = 5 * 32 * plane._tables["experience"].layout.bytes_per_item
    assert live <= sum(sizes) < live + 80_000  # and the control's larger leaves
    assert max(sizes) <= 40_000
    restored = make_plane(placement=placement, capacity=4096, partitions=2)
    restored.restore(tmp_path)
    assert_equal_bits(restored.pull(), whole.pull())


@pytest.mark.parametrize(("placement", "devices"), [("device", 1), ("device", 4), ("pinned_host", 1)])
def test_rows_are_read_and_written_without_a_copy_of_the_storage(placement: str, devices: int) -> None:
    plane = make_plane(placement=placement, devices=devices, partitions=4, capacity=8192)
    plane.push(unit(0))
    built = plane._tables["experience"]
    programs, storage = rows.row_programs(built.placement), built.pipeline.state.storage
    slots = jax.device_put(np.zeros((4, 8), np.int32), built.placement.sharding(built.placement.axis))
    (some,) = programs.read(storage, slots)
    facts = compiled_facts(programs.read.compiled, storage, slots)
    assert facts.temp_bytes < 0.1 * facts.argument_bytes
    assert not facts.collectives
    assert_in_place(programs.write.compiled, storage, slots, some, max_temp_fraction=0.1)


def test_after_a_restore_inserts_are_in_place_from_the_first_on(tmp_path: Path) -> None:
    saved, plane = make_plane(), make_plane()
    saved.push(unit(0))
    saved.save(tmp_path)
    plane.restore(tmp_path)
    pipeline = plane._tables["experience"].pipeline
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pipeline.state)]
    plane.push(unit(1))
    plane.flush()
    after = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pipeline.state)]
    assert before == after
