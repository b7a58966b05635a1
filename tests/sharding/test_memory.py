"""Laws of storage in host memory: it holds what storage in device memory would hold, however it is written."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from conduit_jax.replay.storage import in_device_memory
from conduit_jax.replay.window_writes import STEP_BYTES, Window, write_steps
from conduit_jax.sharding.memory import in_host_memory, pieces, storage_access, write_slices
from conduit_jax.sharding.mesh import single_device_mesh
from conduit_jax.testing import assert_in_place, compiled_facts

WORDS = 3


def host_sharding() -> NamedSharding:
    return NamedSharding(single_device_mesh(jax.devices()[0]), PartitionSpec(), memory_kind="pinned_host")


def in_host(value: Any) -> jax.Array:
    return jax.device_put(value, host_sharding())


def test_each_kind_of_memory_has_its_own_access() -> None:
    assert storage_access("device") is in_device_memory
    assert storage_access("pinned_host") is in_host_memory


@given(st.integers(1, 10_000), st.data())
def test_pieces_taken_while_they_fit_fill_any_number_of_steps(steps: int, data: st.DataObject) -> None:
    sizes, wanted, filled = pieces(steps), data.draw(st.integers(0, steps)), 0
    assert sum(sizes) == steps
    assert len(sizes) <= steps.bit_length() + 1
    for size in sizes:
        filled += size if filled + size <= wanted else 0
    assert filled == wanted


def write_window(lanes: int, length: int, array: Any, head: Any, values: Any) -> Any:
    assert in_host_memory.write_window is not None
    (written,) = in_host_memory.write_window((array,), Window(lanes, length, head), (values,))
    return written


def write_by_slices(lanes: int, length: int, array: Any, head: Any, values: Any) -> Any:
    """What accelerators do, on any platform."""
    by_lanes = values.reshape(-1, lanes, WORDS).swapaxes(0, 1).reshape(values.shape)
    return write_slices(array, Window(lanes, length, head), by_lanes)


@pytest.mark.parametrize(
    ("lanes", "length", "steps"), [(1, 1, 1), (2, 7, 1), (2, 7, 3), (3, 8, 8), (1, 9, 6), (2, 5, 4)]
)
@pytest.mark.parametrize(("way", "partitions"), [(write_window, 1), (write_window, 2), (write_by_slices, 1)])
def test_a_window_in_host_memory_is_written_as_numpy_would_wherever_it_starts(
    way: Any, partitions: int, lanes: int, length: int, steps: int
) -> None:
    """Around the end of the ring as well; several partitions at once (``vmap``) have heads of their own."""
    check_every_start(way, partitions, lanes, length, steps)


@pytest.mark.parametrize("way", [write_window, write_by_slices])
def test_windows_are_written_alike_with_64_bits_enabled(way: Any) -> None:
    with jax.enable_x64(True):
        check_every_start(way, partitions=1, lanes=2, length=7, steps=3)


@pytest.mark.parametrize("words", [3, STEP_BYTES // 4 + 1], ids=["small rows", "large rows"])
def test_a_window_in_device_memory_is_written_as_numpy_would(words: int) -> None:
    lanes, length, steps, draws = 3, 7, 4, np.random.default_rng(1)
    write = jax.jit(lambda array, head, values: write_steps((array,), Window(lanes, length, head), (values,))[0])
    for head in range(length):
        want = draws.integers(0, 2**32, (lanes, length, words), np.uint32)
        values = draws.integers(0, 2**32, (steps, lanes, words), np.uint32)
        got = write(want.reshape(-1, words), jnp.int32(head), values.reshape(-1, words))
        want[:, (head + np.arange(steps)) % length] = values.swapaxes(0, 1)
        np.testing.assert_array_equal(np.asarray(got).reshape(want.shape), want)


def check_every_start(way: Any, partitions: int, lanes: int, length: int, steps: int) -> None:
    draws = np.random.default_rng(0)
    one = partial(way, lanes, length)
    write = jax.jit(jax.vmap(one) if partitions > 1 else one, donate_argnums=0, out_shardings=host_sharding())
    lead = (partitions,) if partitions > 1 else ()
    for head in range(length):
        heads = ((head + np.arange(partitions)) % length).astype(np.int32)
        before = draws.integers(0, 2**32, (partitions, lanes, length, WORDS), np.uint32)
        values = draws.integers(0, 2**32, (partitions, lanes, steps, WORDS), np.uint32)
        want = before.copy()
        for number, start in enumerate(heads):
            want[number][:, (start + np.arange(steps)) % length] = values[number]
        got = write(
            in_host(before.reshape(*lead, lanes * length, WORDS)),
            jnp.asarray(heads.reshape(lead)),
            jnp.asarray(values.swapaxes(1, 2).reshape(*lead, lanes * steps, WORDS)),
        )
        assert got.sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(np.asarray(got).reshape(want.shape), want)


@pytest.mark.parametrize("way", ["window", "scatter"])
def test_writes_to_host_memory_are_in_place(way: str) -> None:
    lanes, length, steps = 2, 4096, 8
    array = jax.ShapeDtypeStruct((lanes * length, 64), jnp.uint32, sharding=host_sharding())
    values = jax.ShapeDtypeStruct((lanes * steps, 64), jnp.uint32)
    if way == "window":
        write, where = lambda *operands: write_window(lanes, length, *operands), jax.ShapeDtypeStruct((), jnp.int32)
    else:
        write, where = in_host_memory.scatter, jax.ShapeDtypeStruct((lanes * steps,), jnp.int32)
    jitted = jax.jit(write, donate_argnums=0, out_shardings=host_sharding())
    assert_in_place(jitted, array, where, values, max_temp_fraction=0.02)
    assert not compiled_facts(jitted, array, where, values).collectives


def test_slots_out_of_range_are_dropped_and_rows_come_back_to_the_device() -> None:
    slots = np.array([4, 2**31 - 1, 0, 2**31 - 2], np.int32)
    values = np.arange(12, dtype=np.uint32).reshape(4, WORDS) + 1
    write = jax.jit(in_host_memory.scatter, donate_argnums=0, out_shardings=host_sharding())
    kept = write(in_host(np.zeros((6, WORDS), np.uint32)), jnp.asarray(slots), jnp.asarray(values))
    rows = jax.jit(in_host_memory.gather)(kept, jnp.asarray([0, 1, 4], jnp.int32))
    np.testing.assert_array_equal(np.asarray(rows), [values[2], np.zeros(WORDS), values[0]])
    assert rows.sharding.memory_kind == "device"
