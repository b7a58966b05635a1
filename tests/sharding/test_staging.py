"""Laws of staging: host arrays may be written to as soon as the call returns, and slabs are reused only behind their fence."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import conduit_jax as conduit
from conduit_jax.sharding.intake import Intake
from conduit_jax.sharding.mesh import single_device_mesh
from conduit_jax.sharding.staging import Stager, aligned_empty, bring
from conduit_jax.testing import count_traces, delayed

FLOAT = np.dtype(np.float32)


@jax.jit
def slow_copy(value: jax.Array, rounds: int) -> jax.Array:
    """Read ``value`` only after some work on the same device."""
    busy = jax.lax.fori_loop(0, rounds, lambda _, x: jnp.tanh(x @ x), jnp.full((128, 128), 0.1))
    return value + 0 * busy[0, 0]


def stage_one(stager: Stager, value: np.ndarray) -> tuple[jax.Array, object]:
    (array,), ticket = stager.stage([value], [value.dtype], [jax.sharding.SingleDeviceSharding(jax.devices()[0])])
    return array, ticket


@pytest.mark.parametrize("rows", [3, 50_000])
@pytest.mark.parametrize("in_a_mesh", [False, True])
def test_what_is_brought_is_laid_out_as_asked_few_bytes_or_many_in_a_callers_mesh_or_not(rows, in_a_mesh) -> None:
    home = NamedSharding(single_device_mesh(jax.devices()[-1]), PartitionSpec())
    leaves = [aligned_empty((rows,), np.dtype(dtype)) for dtype in (np.uint8, np.bool_, np.int16, np.float32)]
    for leaf in leaves:
        leaf[:] = np.arange(rows) % 2
    with jax.set_mesh(single_device_mesh(jax.devices()[0])) if in_a_mesh else nullcontext():
        arrived = bring(leaves, [home] * len(leaves))
    for leaf, array in zip(leaves, arrived, strict=True):
        assert (array.sharding, array.dtype, array.committed) == (home, leaf.dtype, True)
        np.testing.assert_array_equal(np.asarray(array), leaf)


def test_few_bytes_are_brought_by_one_program_whatever_the_values(monkeypatch) -> None:
    home = [NamedSharding(single_device_mesh(jax.devices()[0]), PartitionSpec())] * 2
    bring([np.zeros(3, FLOAT), np.zeros(2, np.uint8)], home)
    monkeypatch.setattr(jax, "device_put", None)
    with count_traces() as traced:
        (first, second) = bring([np.ones(3, FLOAT), np.full(2, 7, np.uint8)], home)
    assert (float(first.sum()), int(second.sum()), traced.count) == (3.0, 14, 0)


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_, np.int16, np.float32])
@pytest.mark.parametrize("shape", [(), (3,), (5, 7)])
def test_slabs_start_on_a_64_byte_boundary(shape: tuple[int, ...], dtype: type) -> None:
    slab = aligned_empty(shape, np.dtype(dtype))
    assert slab.ctypes.data % 64 == 0
    assert (slab.shape, slab.dtype) == (shape, dtype)
    slab[...] = 1
    assert (slab == 1).all()


def test_an_array_overwritten_right_after_staging_arrives_as_it_was_although_its_reader_is_slow() -> None:
    stager, source, read = Stager(), np.zeros((64, 64), FLOAT), []
    for number in range(24):
        source[:] = number
        array, ticket = stage_one(stager, source)
        ticket.reader = slow_copy(array, 20)
        read.append(ticket.reader)
        source[:] = -1
    for number, value in enumerate(read):
        np.testing.assert_array_equal(np.asarray(value), number)


def test_without_a_fence_the_same_arrays_would_be_corrupted() -> None:
    """The hazard is real: the guard above is not guarding against nothing."""
    source, read = aligned_empty((64, 64), FLOAT), []
    for number in range(24):
        source[:] = number
        read.append(slow_copy(jax.device_put(source, jax.devices()[0]), 20))
    assert any((np.asarray(value) != number).any() for number, value in enumerate(read))


def test_slabs_are_recycled_once_their_reader_has_finished() -> None:
    stager, seen = Stager(depth=3), set()
    for number in range(12):
        array, ticket = stage_one(stager, np.full((8,), number, FLOAT))
        ticket.reader = array + 1
        seen |= {slab[0].ctypes.data for slab in stager._slabs if slab is not None}
    assert len(seen) == 3


def test_a_tree_nobody_read_keeps_its_slab_to_itself() -> None:
    stager = Stager(depth=2)
    kept = [stage_one(stager, np.full((8,), number, FLOAT))[0] for number in range(7)]
    for number, array in enumerate(kept):
        np.testing.assert_array_equal(np.asarray(array), number)


def test_the_transfer_is_a_value_that_can_be_replaced() -> None:
    moved = []

    def put(leaves: list, shardings: list) -> list:
        moved.append(sum(leaf.nbytes for leaf in leaves))
        return jax.device_put(leaves, shardings)

    array, _ = stage_one(Stager(put=put), np.arange(6, dtype=FLOAT))
    assert moved == [24]
    np.testing.assert_array_equal(np.asarray(array), np.arange(6))


def test_threads_that_stage_at_once_do_not_write_into_each_others_slabs() -> None:
    stager, wrong, ready = Stager(depth=2), [], threading.Barrier(3)

    def produce(mark: int) -> None:
        ready.wait()
        for number in range(60):
            want = mark * 1000 + number
            array, ticket = stage_one(stager, np.full((256,), want, FLOAT))
            ticket.reader = array + 0
            if not (np.asarray(ticket.reader) == want).all():
                wrong.append(want)

    threads = [threading.Thread(target=produce, args=(mark,)) for mark in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_arrays_already_at_home_pass_through_untouched_and_others_are_brought() -> None:
    device, other = jax.devices()[0], jax.devices()[1]
    intake = Intake({"x": jnp.zeros((2, 4))}, single_device_mesh(device), "partition")
    home = {"x": jax.device_put(jnp.ones((2, 4)), device)}
    same, ticket = intake(home)
    assert same["x"] is home["x"]
    assert ticket is None
    brought, ticket = intake({"x": jax.device_put(jnp.ones((2, 4)), other)})
    assert brought["x"].devices() == {device}
    assert ticket is None
    staged, ticket = intake({"x": np.ones((2, 4), FLOAT)})
    assert staged["x"].devices() == {device}
    assert ticket is not None


def test_whatever_came_before_each_tree_is_checked_and_brought_by_itself() -> None:
    """A tree that looks like one that was let in passes without being looked at leaf by leaf; nothing else does."""
    device, other = jax.devices()[0], jax.devices()[1]
    mesh = single_device_mesh(device)
    intake = Intake({"x": jnp.zeros((2, 4)), "y": [jnp.zeros((2, 4), jnp.int32)]}, mesh, "partition")

    def tree(**leaves: Any) -> Any:
        return {"x": jnp.ones((2, 4)), "y": [jnp.ones((2, 4), jnp.int32)]} | leaves

    refused: list[tuple[Any, str]] = [
        (tree(x=jnp.ones((3, 4))), "another shape"),
        (tree(x=jnp.ones((2, 4), jnp.int32)), "another dtype"),
        (tree(z=jnp.ones((2, 4))), "another tree"),
        (tree(y=(jnp.ones((2, 4), jnp.int32),)), "another tree"),
        (tree(y=jnp.ones((2, 4), jnp.int32)), "another tree"),
        (tree(x={"x": jnp.ones((2, 4))}), "another tree"),
        ({"x": jnp.ones((2, 4))}, "another tree"),
        (None, "another tree"),
    ]
    moved = [
        tree(x=jax.device_put(jnp.ones((2, 4)), other)),
        tree(x=np.ones((2, 4), FLOAT)),
        tree(y=[np.ones((2, 4), np.int64)]),
    ]
    for _ in range(2):
        home = tree()
        assert intake(home) == (home, None)
        retyped = tree(x=jax.device_put(jnp.ones((2, 4)), NamedSharding(mesh, PartitionSpec())))
        assert intake(retyped) == (retyped, None)
        for wrong, why in refused:
            with pytest.raises(conduit.SpecError, match=why):
                intake(wrong)
        for away in moved:
            brought, _ = intake(away)
            assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(brought))
            assert all(np.asarray(leaf).all() for leaf in jax.tree.leaves(brought))


def test_sixty_four_bit_host_arrays_are_stored_as_jax_stores_them() -> None:
    intake = Intake(
        {"x": np.zeros((2, 4), np.float64), "n": np.zeros((2, 4), np.int64)}, single_device_mesh(jax.devices()[0]), None
    )
    staged, _ = intake({"x": np.full((2, 4), 0.5), "n": np.full((2, 4), 9)})
    assert (staged["x"].dtype, staged["n"].dtype) == (np.float32, np.int32)
    np.testing.assert_array_equal(np.asarray(staged["n"]), 9)


def test_context_arrays_of_the_host_are_copied_and_device_ones_brought() -> None:
    intake = Intake({"x": jnp.zeros((2, 4))}, single_device_mesh(jax.devices()[0]), None)
    array = np.zeros((4,), FLOAT)
    context = intake.context({"host": array, "device": jax.device_put(jnp.ones(3), jax.devices()[2]), "plain": 3})
    array[:] = 1
    np.testing.assert_array_equal(context["host"], 0)
    assert context["device"].devices() == {jax.devices()[0]}
    assert context["plain"] == 3


@pytest.mark.parametrize(
    ("algorithm", "schedule"), [("off_policy", "sequential"), ("off_policy", "overlap"), ("on_policy", "sequential")]
)
def test_numpy_pushes_overwritten_at_once_are_delivered_as_they_were_pushed(algorithm: str, schedule: str) -> None:
    units, width = 9, 64
    if algorithm == "off_policy":
        plane = conduit.ExperiencePlane(
            algorithm=conduit.OffPolicy(batch_size=256),
            replay=conduit.ReplayConfig(capacity=units * 32),
            schedule=schedule,
        )
    else:
        plane = conduit.ExperiencePlane(
            algorithm=conduit.OnPolicy(num_minibatches=2, units_per_iteration=units), schedule=schedule
        )
    rollout = {"id": aligned_empty((4, 8), np.dtype(np.int32)), "row": aligned_empty((4, 8, width), FLOAT)}
    rollout["id"][:], rollout["row"][:] = 0, 0
    plane.build(rollout)
    seen = set()
    with delayed(plane, pause=lambda seconds: None, seed=1):  # busy devices: the plane runs ahead of them
        for number in range(units):
            rollout["id"][:] = number
            rollout["row"][:] = number
            plane.push(rollout)
            rollout["id"][:] = -5
            rollout["row"][:] = -7
        samples = plane.epochs() if algorithm == "on_policy" else [plane.pull(), plane.pull()]
        for sample in samples:
            ids = np.asarray(sample.data["id"])
            np.testing.assert_array_equal(np.asarray(sample.data["row"]), np.repeat(ids[:, None], width, axis=1))
            seen |= set(ids.tolist())
    assert seen <= set(range(units))
    assert len(seen) >= units - 1, "rows that were never delivered cannot be intact"


def test_without_compilation_host_arrays_are_brought_all_the_same() -> None:
    block = aligned_empty((16,), np.dtype(np.float32))
    block[:] = 1
    with jax.disable_jit():
        (brought,) = bring([block], [jax.sharding.SingleDeviceSharding(jax.devices()[0])])
    assert isinstance(brought, jax.Array)
