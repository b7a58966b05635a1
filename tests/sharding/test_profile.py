"""Laws of profiles: every pair of endpoints is measured, files are kept by machine, memory is what is free now."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from conduit_jax.errors import ConfigError, PlacementError
from conduit_jax.sharding import memory, probe, profile_cache
from conduit_jax.sharding.choice import AutoPlacement, choose_placement
from conduit_jax.sharding.links import Link
from conduit_jax.sharding.moves import RowsOnDisk, System, link_names, message, transfer, within
from conduit_jax.sharding.placement import LearnerSite
from conduit_jax.sharding.planner import plan
from conduit_jax.sharding.profile import profile
from conduit_jax.sharding.topology import Topology, load_topology
from conduit_jax.sharding.workload import Traffic, Workload

SIZES = (1 << 12, 1 << 15)


@pytest.fixture(scope="module")
def measured() -> Topology:
    return profile(jax.devices()[:2], sizes=SIZES, repeats=2, rows=8)


def test_every_link_is_measured_at_every_size_with_its_spread(measured: Topology) -> None:
    assert set(measured.links) >= {"device->device", "pageable->device", "pinned_host->device", "pageable->pinned_host"}
    assert set(measured.links) >= {"disk->device", "device->disk", "pageable->disk"}
    for name, link in measured.links.items():
        assert link.bytes == SIZES, name
        assert all(math.isfinite(seconds) and seconds > 0 for seconds in (*link.seconds, *link.fresh_seconds))
        assert len(link.spread) == len(SIZES)
    assert set(measured.contention) == {"device->device", "pageable->device", "pinned_host->device"}
    for kind, together in measured.contention.items():
        assert isinstance(together, Link)
        assert together.bytes == SIZES  # contention is measured at the sizes that are moved, as links alone are
        assert all(slow >= alone for slow, alone in zip(together.seconds, measured.links[kind].seconds, strict=True))
    assert len(measured.launch_s) == 2


def test_what_was_measured_can_be_planned_with_and_comes_back_from_json(measured: Topology, tmp_path) -> None:
    measured.save(tmp_path / "here.json")
    assert load_topology(tmp_path / "here.json") == measured
    got = plan(measured, Workload(item_bytes=400, capacity_items=1000, sampled_items=64, inserted_items=8))
    assert got.layout.name == "single_device"  # nothing is nearer than the learner's own memory
    pageable = next(one for one in got.rejected if one.layout.name == "pageable")
    assert "own memory is pageable" in pageable.reason


def test_all_tiers_of_the_cpu_backend_are_one_memory(measured: Topology) -> None:
    room = measured.node_memory_bytes
    assert room is not None
    half = Workload(item_bytes=1, capacity_items=room // 2, leaves={}, partitions=2)
    assert plan(measured, half, only=["shared:2"])
    with pytest.raises(PlacementError, match="bytes more of device memory"):
        plan(measured, Workload(item_bytes=1, capacity_items=room + room // 2, partitions=2), only=["shared:2"])


def test_every_pair_of_endpoints_has_a_link() -> None:
    system = System(tuple(jax.devices()[:3]), ("device", "pinned_host", "pageable"))
    names = set(link_names(system))
    assert {f"device:{i}->device:{j}" for i in range(3) for j in range(3) if i != j} <= names
    assert {"pinned_host->device", "device->pinned_host", "pageable->device", "device->pageable"} <= names


@pytest.mark.parametrize(
    "name", ["device:0->device:1", "pageable->device", "device->pinned_host", "pinned_host->device"]
)
def test_a_move_brings_the_bytes_to_where_its_name_says(name: str) -> None:
    system = System(tuple(jax.devices()[:2]), ("device", "pinned_host"))
    block = message(1 << 12, 8)
    arrived = transfer(name, system, block)()
    assert np.array_equal(np.asarray(arrived), block)
    destination = name.split("->")[1]
    assert arrived.sharding.memory_kind == ("pinned_host" if destination == "pinned_host" else "device")
    assert arrived.devices() == {jax.devices()[1 if destination == "device:1" else 0]}


def test_rows_on_disk_are_what_was_written_last_and_leave_no_file(tmp_path: Path) -> None:
    block = message(1 << 14, 8)
    file = RowsOnDisk(block, tmp_path)
    assert list(tmp_path.iterdir()) == []
    np.testing.assert_array_equal(file.read(), block)
    file.write(block + 1)
    np.testing.assert_array_equal(file.read(), block + 1)


@pytest.mark.parametrize("name", ["disk->device", "device->disk", "pageable->disk"])
def test_what_goes_over_the_disk_link_ends_or_begins_on_the_device(name: str) -> None:
    block = message(1 << 12, 8)
    arrived = transfer(name, System(tuple(jax.devices()[:1]), ("device", "disk")), block)()
    np.testing.assert_array_equal(np.asarray(arrived), block)
    assert arrived.devices() == {jax.devices()[0]}


def test_the_disk_is_planned_with_where_memory_is_too_small(measured: Topology) -> None:
    limited = measured.limited({"device": 1000, "pinned_host": 1000})
    got = plan(limited, Workload(item_bytes=400, capacity_items=1000, sampled_items=64, inserted_items=8))
    assert got.layout.name == "disk"
    assert got.seconds["sample_s"] > 0
    assert measured.host_memory_bytes["disk"] > 0


def test_a_machine_without_a_folder_for_the_disk_has_no_such_link(monkeypatch) -> None:
    monkeypatch.setattr("conduit_jax.sharding.profile.disk_memory", dict)
    assert "disk->device" not in profile(jax.devices()[:1], sizes=(1 << 12,), repeats=1, rows=8).links


@pytest.mark.parametrize("tier", ["device", "pinned_host"])
def test_a_gather_finds_what_a_write_has_left(tier: str) -> None:
    system = System(tuple(jax.devices()[:1]), ("device", "pinned_host"))
    block = message(1 << 10, 8)
    write = within(tier, "write", system, block)
    for _ in range(3):  # storage is handed on from write to write
        storage = write()
    assert storage.sharding.memory_kind == tier
    assert sorted(np.asarray(storage).sum(axis=1))[-8:] == [block[0].sum()] * 8


def test_links_come_from_the_cache_until_they_are_refreshed(measured: Topology, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CONDUIT_JAX_CACHE_DIR", str(tmp_path / "profiles"))
    calls = []

    def measure(devices, *, unavailable, alone):
        assert alone
        calls.append(unavailable)
        return measured

    chosen = {"measure": measure, "try_tiers": lambda: {"disk": "not tried"}}
    first = profile_cache.cached_profile(jax.devices()[:2], **chosen)
    again = profile_cache.cached_profile(jax.devices()[:2], **chosen)
    assert calls == [{"disk": "not tried"}]
    assert again.links == first.links == measured.links
    profile_cache.cached_profile(jax.devices()[:2], refresh=True, **chosen)
    assert len(calls) == 2
    (kept,) = (tmp_path / "profiles").iterdir()
    kept.write_text("torn")
    profile_cache.cached_profile(jax.devices()[:2], **chosen)
    assert len(calls) == 3
    assert json.loads(kept.read_text())["name"] == measured.name
    profile_cache.cached_profile(jax.devices()[:1], **chosen)
    assert len(calls) == 4  # other devices are another machine


def test_a_process_that_measures_alone_waits_for_no_other(measured: Topology, tmp_path, monkeypatch) -> None:
    def everyone(*_arguments, **_named):
        raise AssertionError("others were asked, who may never come")

    monkeypatch.setenv("CONDUIT_JAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", everyone)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", everyone)
    assert profile(jax.devices()[:1], sizes=(1 << 12,), repeats=1, rows=8, alone=True).nodes == 1
    profile_cache.cached_profile(jax.devices(), alone=True, measure=lambda *_, **__: measured, try_tiers=dict)
    traffic = Traffic(item_bytes=100, capacity_items=80, inserted_items=8, sampled_items=16)
    _, decided = choose_placement(AutoPlacement(limits={"device": 2000}), LearnerSite(jax.devices()[0]), 8, traffic)
    assert decided is not None
    assert decided.topology.links == measured.links
    with pytest.raises(AssertionError, match="may never come"):
        profile_cache.cached_profile(jax.devices()[:2], measure=lambda *_, **__: measured, try_tiers=dict)


def test_a_folder_that_cannot_be_written_is_done_without(measured: Topology, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CONDUIT_JAX_CACHE_DIR", str(tmp_path / "file" / "below"))
    got = profile_cache.cached_profile(jax.devices()[:2], measure=lambda *_, **__: measured, try_tiers=dict)
    assert got.links == measured.links


def test_limits_of_a_control_group_bound_host_memory(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 64 kB\nMemAvailable:      32 kB\n")
    assert memory.host_available(tmp_path) == 32 * 1024
    group = tmp_path / "sys/fs/cgroup"
    (group / "memory").mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1\n")
    assert memory.host_available(tmp_path) == 32 * 1024
    (group / "memory.max").write_text("8192\n")
    assert memory.host_available(tmp_path) == 8191
    (group / "memory/memory.limit_in_bytes").write_text("5000\n")
    (group / "memory/memory.usage_in_bytes").write_text("6000\n")
    assert memory.host_available(tmp_path) == 0


@pytest.mark.parametrize(
    ("limit", "used", "stat", "name"),
    [
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ],
)
def test_files_that_a_control_group_has_read_do_not_fill_its_memory(tmp_path, limit, used, stat, name) -> None:
    """The kernel counts its cache of files as used, and gives it up when memory is asked for."""
    group = tmp_path / "sys/fs/cgroup"
    (group / "memory").mkdir(parents=True)
    (group / limit).write_text("8192\n")
    (group / used).write_text("8000\n")
    (group / stat).write_text(f"cache 7500\n{name} 7000\nactive_file 500\n")
    assert memory.host_available(tmp_path) == 8192 - 1000


def test_the_pinned_pool_is_as_large_as_the_process_says(monkeypatch) -> None:
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "3")
    assert memory.pinned_pool_bytes() == 3 << 30
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")
    assert memory.pinned_pool_bytes() == 64 << 30


@pytest.mark.parametrize("tier", ["device", "pinned_host"])
def test_storage_is_written_and_gathered_in_every_tier_of_this_backend(tier: str) -> None:
    assert probe.try_storage(tier) == ""


def test_a_tier_that_ends_its_trial_is_named_with_the_last_words() -> None:
    begun = (
        '{"tier": "device", "begun": true}\n{"tier": "device", "reason": ""}\n{"tier": "pinned_host", "begun": true}\n'
    )
    assert probe._outcome(begun, "...\nFatal: no such layout\n", -6) == {
        "pinned_host": "the trial ended with -6: Fatal: no such layout"
    }
    refused = begun + '{"tier": "pinned_host", "reason": "XlaRuntimeError: INTERNAL"}\n'
    assert probe._outcome(refused, "", 0) == {"pinned_host": "XlaRuntimeError: INTERNAL"}
    assert "could not run" in probe._outcome("", "ModuleNotFoundError", 1)["pinned_host"]


def test_the_trial_runs_in_a_process_of_its_own() -> None:
    assert probe.probe() == {}


@pytest.mark.parametrize("chosen", [{"sizes": ()}, {"sizes": (0,)}, {"rows": 0}, {"repeats": 0}])
def test_a_profile_of_nothing_is_refused(chosen) -> None:
    with pytest.raises(ConfigError):
        profile(jax.devices()[:1], **chosen)
