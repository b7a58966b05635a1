"""Facts of the replay's programs compiled for one H100 and for 1,024 of them; nothing is run, no GPU is needed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from conduit_jax.sharding.memory import storage_access
from tests.aot import h100
from tests.aot.h100 import Setting

KINDS = ["device", "pinned_host"]
# What may touch host memory: transfers and host computations that are started, and waited for only where they are needed.
ASYNCHRONOUS = {"fusion-start", "fusion-done", "custom-call-start", "custom-call-done", "copy-start", "copy-done"}

everywhere = pytest.mark.parametrize(
    "setting",
    [
        Setting(kind, count, prioritized, count)
        for kind in KINDS
        for count in (1, 1024)
        for prioritized in (False, True)
    ],
    ids=lambda setting: f"{setting.kind}-{setting.devices}-{'prioritized' if setting.prioritized else 'uniform'}",
)


def smallest_storage_leaf(setting: Setting) -> int:
    return min(setting.bytes_per_device([leaf]) for leaf in jax.tree.leaves(setting.storage))


def assert_storage_is_in_place(setting: Setting, program: h100.Program, aliased: Any) -> None:
    """All of ``aliased``, storage among it, shares its buffers with the results; nothing of storage's size is copied or made."""
    storage, everything = setting.bytes_per_device(setting.storage), setting.bytes_per_device(aliased)
    assert program.device_alias + program.host_alias == everything
    assert program.host_alias == (storage if setting.kind == "pinned_host" else 0)
    assert program.aliased_parameters == len(jax.tree.leaves(aliased))
    assert program.output < storage / 64
    assert_no_storage_is_copied(setting, program)


def assert_no_storage_is_copied(setting: Setting, program: h100.Program) -> None:
    storage = setting.bytes_per_device(setting.storage)
    assert program.host_temp < storage / 1024
    assert program.device_temp < storage / 64
    assert program.largest_copy < smallest_storage_leaf(setting) / 16


@everywhere
def test_insert_is_in_place_without_collectives(setting: Setting) -> None:
    program = h100.insert(setting)
    assert_storage_is_in_place(setting, program, (setting.storage, setting.control))
    assert not program.collectives


@everywhere
def test_sample_reads_storage_where_it_is_without_collectives(setting: Setting) -> None:
    program = h100.sample(setting)
    assert program.device_alias == setting.bytes_per_device(setting.control)
    assert program.host_alias == 0
    assert program.output < setting.bytes_per_device(setting.storage) / 64, "storage must not be among the results"
    assert_no_storage_is_copied(setting, program)
    assert not program.collectives


@everywhere
def test_a_fused_step_is_in_place_and_has_no_collectives_but_the_learners(setting: Setting) -> None:
    program = h100.fused(setting)
    storage_and_control = setting.bytes_per_device((setting.storage, setting.control))
    assert program.device_alias + program.host_alias == storage_and_control + h100.total_bytes(setting.params)
    assert_no_storage_is_copied(setting, program)
    assert program.collectives == h100.train_alone(setting).collectives
    assert bool(program.collectives) == (setting.devices > 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prioritized", [False, True])
def test_nothing_grows_with_the_device_count(kind: str, prioritized: bool) -> None:
    """A device of 1,024 has the collectives, arguments, results and temporaries of a device of eight."""
    few, many = (h100.fused(Setting(kind, count, prioritized, count)) for count in (8, 1024))
    assert few.collectives == many.collectives
    assert {**few.bytes, "temp_size_in_bytes": 0} == {**many.bytes, "temp_size_in_bytes": 0}
    assert abs(few.device_temp - many.device_temp) < 4096
    assert len(many.text) < 1.2 * len(few.text)


@pytest.mark.parametrize("devices", [1, 1024])
@pytest.mark.parametrize("prioritized", [False, True])
def test_host_memory_is_touched_asynchronously_only(devices: int, prioritized: bool) -> None:
    setting = Setting("pinned_host", devices, prioritized, devices)
    leaves = len(jax.tree.leaves(setting.storage))
    written, read, both = h100.insert(setting), h100.sample(setting), h100.fused(setting)
    for program in (written, read, both):
        assert set(program.host_opcodes()) <= ASYNCHRONOUS, program.host_opcodes()
    assert written.host_opcodes()["fusion-start"] == 3 * leaves, "six steps are three pieces: 3, 2 and 1"
    assert read.host_opcodes()["custom-call-start"] == 1, "all leaves are gathered by one host computation"
    assert 'custom_call_target="HostExecute"' in read.text


def test_windows_of_host_memory_are_read_asynchronously() -> None:
    """Trajectory windows: consecutive slots from many starts at once."""
    setting, access = Setting("pinned_host", 1, False, 1), storage_access("pinned_host")
    result = NamedSharding(setting.abstract, PartitionSpec())

    def windows(storage: Any, starts: jax.Array) -> Any:
        slots = (starts[:, None] + jnp.arange(16)).reshape(-1)
        return [access.gather(leaf.reshape(leaf.shape[1:]), slots) for leaf in jax.tree.leaves(storage)]

    jitted = jax.jit(windows, out_shardings=result)
    program = h100.Program(jitted.trace(setting.storage, setting.on_device((32,), jnp.int32)).lower().compile())
    assert set(program.host_opcodes()) <= ASYNCHRONOUS
    assert program.host_opcodes()["custom-call-start"] >= 1
    assert_no_storage_is_copied(setting, program)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("partitions", "ragged"), [(8, False), (1, True), (8, True)], ids=["several partitions", "ragged", "several ragged"]
)
def test_scattered_inserts_are_in_place_too(kind: str, partitions: int, ragged: bool) -> None:
    """Lanes that fill unequally far, or several partitions on one device, cannot be written as whole windows."""
    setting = Setting(kind, 1, True, partitions, ragged)
    program = h100.insert(setting)
    assert_storage_is_in_place(setting, program, (setting.storage, setting.control))


def test_the_checks_see_a_storage_that_is_copied() -> None:
    """Sampling the storage of before the insert makes XLA keep it: these tests would fail."""
    setting = Setting("pinned_host", 1, False, 1)
    replay = setting.placed

    def read_then_write(storage: Any, control: Any, chunk: Any, key: Any) -> Any:
        _, batch = replay.sample(control, storage, key)
        state, _ = replay.add(h100.ReplayState(storage, control), chunk)
        return state, batch

    jitted = jax.jit(read_then_write, donate_argnums=(0, 1))
    program = h100.Program(jitted.trace(setting.storage, setting.control, setting.chunk, setting.key).lower().compile())
    assert program.host_temp > setting.bytes_per_device(setting.storage) / 2
    with pytest.raises(AssertionError):
        assert_no_storage_is_copied(setting, program)
