"""Laws of the disk tier: the same bytes as from any memory, a bounded share of RAM, a file nobody else sees or inherits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conduit_jax as conduit
from conduit_jax.sharding.disk import MIN_CACHE_BYTES, Disk, DiskStorage, on_disk
from tests.reference_plane import BATCH, CAPACITY, ReferencePlane, assert_same_batch, run_program, unit

PRIORITIZED = conduit.ReplayConfig(capacity=CAPACITY, sampler=conduit.Prioritized())


def shapes(*rest: tuple[int, ...], partitions: int = 2, slots: int = 40) -> list[jax.ShapeDtypeStruct]:
    kinds = (np.uint32, np.uint8, np.float32)
    return [jax.ShapeDtypeStruct((partitions, slots, *one), kinds[at % 3]) for at, one in enumerate(rest)]


def plane_on(where: Any, partitions: int = 1, schedule: Any = "sequential") -> conduit.ExperiencePlane:
    return conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=BATCH),
        replay=conduit.ReplayConfig(capacity=CAPACITY, sampler=conduit.Prioritized(), partitions=partitions),
        placement=where,
        schedule=schedule,
        seed=3,
    )


@pytest.mark.parametrize("partitions", [1, 4])
def test_a_plane_on_disk_delivers_the_bytes_of_any_other(partitions: int, tmp_path: Path) -> None:
    plane = plane_on(Disk(directory=str(tmp_path), cache_bytes=MIN_CACHE_BYTES), partitions)
    want = run_program(ReferencePlane(PRIORITIZED, partitions, seed=3))
    for batch, other in zip(run_program(plane), want, strict=True):
        assert_same_batch(batch, other)
    stats = plane.stats().tables["experience"]
    assert stats.placement == "disk"
    assert (stats.inserted_items, stats.stale_updates) == (7 * 32, 0)
    assert "disk: " in plane.explain()


def test_groups_and_batches_drawn_ahead_come_from_disk_too() -> None:
    schedule = conduit.Schedule(overlap_ingestion=True, overlap_delivery=True)
    got = run_program(plane_on("disk", schedule=schedule))
    want = run_program(ReferencePlane(PRIORITIZED, 1, seed=3, ahead=1, late_inserts=True))
    for batch, other in zip(got, want, strict=True):
        assert_same_batch(batch, other)


def test_a_buffer_moves_to_disk_and_back() -> None:
    plane, reference = plane_on("device"), ReferencePlane(PRIORITIZED, 1, seed=3)
    for number, where in enumerate(("disk", "pinned_host", "disk", "device")):
        for one in (plane, reference):
            one.push(unit(number), version=number)
        plane.migrate(where)
        for _ in range(2):
            assert_same_batch(plane.pull(), reference.pull())
    assert [move.target for move in plane.stats().tables["experience"].moves] == [
        "disk",
        "pinned_host",
        "disk",
        "device",
    ]


@settings(max_examples=10)
@given(st.data())
def test_rows_come_back_as_they_were_written_whatever_the_cache(data: st.DataObject) -> None:
    storage = DiskStorage(shapes((3,), (700, 100), ()), Disk(cache_bytes=MIN_CACHE_BYTES))
    model = [np.zeros(one.shape, one.dtype) for one in storage.shapes]
    for step in range(6):
        slots = np.stack([data.draw(st.permutations(range(40))) for _ in range(2)])[:, :7].astype(np.int64)
        slots[0, 0] = data.draw(st.sampled_from([-1, 40, 2**31 - 1, int(slots[0, 0])]))
        values = [
            np.random.default_rng(step).integers(0, 200, (2, 7, *one.shape[2:])).astype(one.dtype) for one in model
        ]
        storage.scatter(slots, values)
        for partition, index in np.ndindex(2, 7):
            if 0 <= slots[partition, index] < 40:
                for own, given_values in zip(model, values, strict=True):
                    own[partition, slots[partition, index]] = given_values[partition, index]
        for own, got in zip(model, storage.gather(np.tile(np.arange(40), (2, 1))), strict=True):
            np.testing.assert_array_equal(got, own)
    storage.write(1, 5, [own[0, :30] for own in model])
    for own, got in zip(model, storage.read(1, 5, 30), strict=True):
        np.testing.assert_array_equal(got, own[0, :30])
    storage.close()


def resident_bytes(of: str) -> int:
    """Bytes of the mapping whose name holds ``of`` that are in this process' memory."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            ours = of in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="resident pages are read from /proc")
def test_what_is_resident_stays_within_the_cache_however_large_the_buffer(tmp_path: Path) -> None:
    cache = 4 << 20
    storage = DiskStorage(
        [jax.ShapeDtypeStruct((1, 1024, 64 << 10), np.uint8)], Disk(directory=str(tmp_path), cache_bytes=cache)
    )
    assert storage.bytes == 64 << 20
    rows, most = np.ones((1, 64, 64 << 10), np.uint8), 0
    draws = np.random.default_rng(0)
    for start in range(0, 1024, 64):
        storage.write(0, start, [rows[0]])
        storage.gather(draws.integers(0, 1024, (1, 64)))
        most = max(most, resident_bytes(str(tmp_path)))
    assert 0 < most <= cache
    storage.close()


def test_the_file_has_no_name_and_is_gone_when_the_plane_is_closed(tmp_path: Path) -> None:
    plane = plane_on(Disk(directory=str(tmp_path)))
    plane.push(unit(0))
    assert list(tmp_path.iterdir()) == []
    storage = on_disk(plane._tables["experience"].pipeline.state.storage)
    assert storage.bytes >= CAPACITY * 1040
    storage._map.flush()
    plane.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="closed"):
        storage._map.size()


@pytest.mark.skipif(not Path("/proc/self/map_files").exists(), reason="the mode of a nameless file is read from /proc")
def test_the_file_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    storage = DiskStorage(shapes((3,)), Disk(directory=str(tmp_path)))
    mapped = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    bounds = [part.lstrip("0") or "0" for part in mapped[0].split("-")]
    assert os.stat(f"/proc/self/map_files/{bounds[0]}-{bounds[1]}").st_mode & 0o777 == 0o600
    storage.close()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_disk_without_room_or_folder_is_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = plane_on(Disk(directory=str(tmp_path / "missing")))
    with pytest.raises(conduit.PlacementError, match=r"no folder to write to[\s\S]*missing"):
        missing.push(unit(0))
    monkeypatch.setattr(Disk, "available_bytes", lambda self: 1000)
    full = plane_on(Disk(directory=str(tmp_path)))
    with pytest.raises(conduit.PlacementError, match=r"does not fit[\s\S]*disk lacks [\d,]+ bytes"):
        full.push(unit(0))
    monkeypatch.undo()
    full.push(unit(0))

    def no_room(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(conduit.PlacementError, match="No space left"):
        DiskStorage(shapes((3,)), Disk(directory=str(tmp_path)))


@pytest.mark.parametrize(
    ("settings_given", "message"),
    [({"cache_bytes": 1000}, "cache_bytes"), ({"cache_bytes": True}, "cache_bytes"), ({"directory": 3}, "not a path")],
)
def test_settings_that_can_never_work_are_refused(settings_given: dict[str, Any], message: str) -> None:
    with pytest.raises(conduit.ConfigError, match=message):
        Disk(**settings_given)


def test_an_item_larger_than_the_cache_is_refused() -> None:
    with pytest.raises(conduit.ConfigError, match="less than one item"):
        DiskStorage(shapes((2 << 20,), slots=4), Disk(cache_bytes=MIN_CACHE_BYTES))
