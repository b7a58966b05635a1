"""Laws of the border to torch: every bit gets across, memory is shared where that is safe, and each copy has its reason."""

from __future__ import annotations

import gc
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import conduit_jax as conduit
from tests.reference_plane import BATCH, LANES, STEPS, priorities_for, unit

torch = pytest.importorskip("torch", reason="torch is not installed (extra: torch)")

from conduit_jax.adapters.dlpack import Handovers, Lender  # noqa: E402
from conduit_jax.adapters.torch import from_torch, to_torch  # noqa: E402

SHARED = ("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32", "complex64")


def bits_of(tensor: Any) -> bytes:
    tensor = tensor.detach().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def random_array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    draws = np.random.default_rng(len(shape))
    raw = draws.integers(0, 256, (*shape, jnp.dtype(name).itemsize), np.uint8)
    return raw[..., 0] > 127 if name == "bool" else raw.view(jnp.dtype(name))[..., 0]


# ---------------------------------------------------------------- JAX to torch


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (0, 3), (2, 1, 7)])
@pytest.mark.parametrize("name", SHARED)
def test_every_dtype_and_shape_is_shared_with_torch_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    array, count = jnp.asarray(random_array(name, shape)), Handovers()
    tensor = to_torch(array, handovers=count)
    assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{name}", shape)
    assert bits_of(tensor) == np.asarray(array).tobytes()
    assert (count.shared, sum(count.copied.values())) == (1, 0)
    if tensor.numel():
        assert tensor.data_ptr() == array.unsafe_buffer_pointer()


def test_a_tensor_keeps_the_memory_of_its_array() -> None:
    tensor = to_torch(jnp.arange(100_000) * 3)
    gc.collect()
    [jnp.zeros(100_000, jnp.int32) for _ in range(4)]
    assert bits_of(tensor) == (np.arange(100_000, dtype=np.int32) * 3).tobytes()


def test_what_torch_has_no_form_for_is_widened_or_refused() -> None:
    count = Handovers()
    tensor = to_torch(jnp.arange(-4, 4).astype(jnp.int4), handovers=count)
    assert tensor.tolist() == list(range(-4, 4))
    assert count.copied == {"dtype": 1}
    with pytest.raises(conduit.SpecError, match="PRNG key"):
        to_torch(jax.random.key(0))


@pytest.mark.parametrize("name", SHARED)
def test_shards_are_put_side_by_side_in_lent_memory_that_comes_back(name: str) -> None:
    mesh = jax.make_mesh((4,), ("data",))
    value, count = random_array(name, (8, 33)), Handovers()
    array = jax.device_put(value, jax.NamedSharding(mesh, jax.P("data")))
    tensor = to_torch(array, handovers=count)
    assert bits_of(tensor) == value.tobytes()
    assert (count.copied, count.copied_bytes) == ({"device": 1}, {"device": value.nbytes})


def test_lent_memory_returns_only_when_the_tensors_storage_dies() -> None:
    lender = Lender()
    slab = lender.lend((100,), np.dtype(np.float32))
    address = slab.ctypes.data
    tensor = torch.from_numpy(slab)
    view = tensor[10:].reshape(9, 10).T
    storage = view.untyped_storage()
    for last in ("slab", "tensor", "view"):
        assert lender.lent == 1, last
        if last == "slab":
            del slab
        elif last == "tensor":
            del tensor
        else:
            del view
        gc.collect()
        other = lender.lend((100,), np.dtype(np.float32))
        assert other.ctypes.data != address
        del other
        gc.collect()
    assert lender.lent == 1
    del storage
    gc.collect()
    assert lender.lent == 0
    addresses = {lender.lend((25, 4), np.dtype(np.int32)).ctypes.data for _ in range(3)}
    assert address in addresses or len(addresses) == 1
    assert address % 64 == 0


def test_memory_may_come_back_while_its_lender_is_at_work() -> None:
    """As when the garbage collector runs within ``lend``."""
    lender = Lender()
    slab = lender.lend((100,), np.dtype(np.uint8))
    with lender._lock:
        del slab
        gc.collect()
    assert lender.lend((100,), np.dtype(np.uint8)).size == 100
    assert (lender.lent, lender._kept_bytes) == (0, 100)


def test_a_lender_keeps_no_more_than_it_may() -> None:
    lender = Lender(keep_bytes=1000)
    several = [lender.lend((400,), np.dtype(np.uint8)) for _ in range(5)]
    del several
    gc.collect()
    assert lender._kept_bytes == 800
    assert lender.lent == 0


def test_numpy_leaves_come_along_and_none_stays() -> None:
    count, frozen = Handovers(), np.arange(3)
    frozen.flags.writeable = False
    tree = to_torch({"a": np.arange(4.0), "b": frozen, "c": np.arange(4)[::-1], "d": None}, handovers=count)
    assert [tree[name].tolist() for name in "abc"] == [[0, 1, 2, 3], [0, 1, 2], [3, 2, 1, 0]]
    assert tree["d"] is None
    assert (count.shared, count.copied) == (1, {"read-only": 1, "stride": 1})


# ---------------------------------------------------------------- torch to JAX


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (0, 3), (2, 1, 7)])
@pytest.mark.parametrize("name", SHARED)
def test_every_dtype_and_shape_is_shared_with_jax_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    value = random_array(name, shape)
    tensor = torch.empty(shape, dtype=getattr(torch, name))
    if tensor.numel():
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(value.tobytes(), np.uint8)
    count = Handovers()
    array = from_torch(tensor, handovers=count)
    assert (array.dtype.name, array.shape) == (name, shape)
    assert np.asarray(array).tobytes() == value.tobytes()
    assert (count.shared, count.copied) == (1, {})
    if tensor.numel():
        assert array.unsafe_buffer_pointer() == tensor.data_ptr()


CASES = {
    "alignment": lambda: torch.arange(65, dtype=torch.float32)[1:],
    "dtype": lambda: torch.arange(64),
    "stride": lambda: torch.arange(64, dtype=torch.int32).reshape(8, 8)[:, ::2],
}


@pytest.mark.parametrize("reason", [*CASES, "float64", "conjugate", "negative", "sparse"])
def test_what_cannot_be_shared_is_copied_for_a_reason_and_is_right(reason: str) -> None:
    more = {
        "float64": ("dtype", lambda: torch.linspace(0, 1, 64, dtype=torch.float64)),
        "conjugate": ("stride", lambda: torch.complex(torch.ones(16), torch.arange(16.0)).conj()),
        "negative": ("stride", lambda: torch.complex(torch.ones(16), torch.arange(16.0)).conj().imag),
        "sparse": ("stride", lambda: torch.eye(4).to_sparse()),
    }
    why, make = more.get(reason, (reason, CASES.get(reason)))
    tensor, count = make(), Handovers()
    array = from_torch(tensor, handovers=count)
    np.testing.assert_allclose(np.asarray(array), tensor.to_dense().resolve_conj().resolve_neg().numpy(), rtol=1e-6)
    assert dict(count.copied) == {why: 1}
    assert count.copied_bytes[why] == array.nbytes


def test_transposed_tensors_and_those_with_a_gradient_are_shared() -> None:
    count = Handovers()
    transposed = torch.arange(64, dtype=torch.float32).reshape(4, 16).T
    learned = torch.ones(16, requires_grad=True)
    arrays = from_torch([transposed, learned], handovers=count)
    np.testing.assert_array_equal(np.asarray(arrays[0]), transposed.numpy())
    assert (count.shared, count.copied) == (2, {})


@given(hnp.arrays(np.int64, hnp.array_shapes(max_dims=2, min_side=0), elements=st.integers(-(2**40), 2**40)))
def test_integers_are_exact_or_refused(values: np.ndarray) -> None:
    fits = not values.size or (values.min() >= -(2**31) and values.max() < 2**31)
    if not fits:
        with pytest.raises(conduit.SpecError, match="int64 from"):
            from_torch(torch.from_numpy(values))
        return
    np.testing.assert_array_equal(np.asarray(from_torch(torch.from_numpy(values))), values)


def test_with_64_bits_switched_on_they_are_shared() -> None:
    count = Handovers()
    with jax.enable_x64(True):
        arrays = from_torch([torch.tensor([2**40] * 8), torch.ones(8, dtype=torch.float64)], handovers=count)
        assert [array.dtype.name for array in arrays] == ["int64", "float64"]
        assert int(arrays[0][0]) == 2**40
    assert (count.shared, count.copied) == (2, {})


@settings(max_examples=15)
@given(
    shape=st.lists(st.integers(0, 4), min_size=0, max_size=3),
    order=st.randoms(use_true_random=False),
    steps=st.lists(st.integers(1, 2), min_size=3, max_size=3),
    start=st.integers(0, 3),
)
def test_any_view_of_a_tensor_arrives_as_it_looks(shape: list[int], order: Any, steps: list[int], start: int) -> None:
    axes = list(range(len(shape)))
    order.shuffle(axes)
    size = int(np.prod([length * step for length, step in zip(shape, steps, strict=False)], dtype=int))
    base = torch.arange(size + start, dtype=torch.int32)[start:]
    view = base.reshape([length * step for length, step in zip(shape, steps, strict=False)])
    view = view[tuple(slice(None, None, step) for step, _ in zip(steps, shape, strict=False))].permute(axes)
    array = from_torch(view)
    np.testing.assert_array_equal(np.asarray(array), view.numpy())


# ---------------------------------------------------------------- batches


def make_plane(**options: Any) -> conduit.ExperiencePlane:
    return conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=BATCH),
        replay=conduit.ReplayConfig(capacity=96, sampler=conduit.Prioritized()),
        **options,
    )


@pytest.mark.parametrize("schedule", ["sequential", "overlap"])
def test_torch_batches_are_the_planes_batches_and_priorities_come_back(schedule: str) -> None:
    plain, tensors = make_plane(schedule=schedule), make_plane(schedule=schedule)
    batches = tensors.torch_batches()
    for number in range(6):
        plain.push(unit(number))
        tensors.push(from_torch(jax.tree.map(_as_tensor, unit(number))))
        want, got = plain.pull(), next(batches)
        for name, leaf in want.data.items():
            assert bits_of(got.data[name]) == np.asarray(leaf).tobytes(), name
        assert bits_of(got.weights) == np.asarray(want.weights).tobytes()
        assert got.mask is None
        priorities = priorities_for(want)
        plain.update_priorities(want.info, priorities)
        applied = got.update_priorities(torch.from_numpy(priorities).requires_grad_())
        assert int(applied[0]) > 0
    assert batches.handovers.shared == 6 * 6
    assert not batches.handovers.copied


def _as_tensor(leaf: np.ndarray) -> Any:
    return (
        torch.from_numpy(leaf.view(np.int16)).view(torch.bfloat16)
        if leaf.dtype.name == "bfloat16"
        else torch.from_numpy(leaf.copy())
    )


def test_holding_batches_does_not_make_inserts_copy_the_storage() -> None:
    plane = make_plane(schedule="sequential")
    plane.push(unit(0))
    batches = plane.torch_batches()
    pipeline = plane._tables["experience"].pipeline
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pipeline.state.storage)]
    held = []
    for number in range(1, 5):
        held.append(next(batches))
        plane.push(unit(number))
    plane.flush()
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pipeline.state.storage)] == before
    assert all((batch.data["id"] >= 0).all() for batch in held)


def test_on_policy_epochs_end() -> None:
    plane = conduit.ExperiencePlane(algorithm=conduit.OnPolicy(num_minibatches=4, num_epochs=2))
    for number in range(2):
        plane.push({"x": torch.full((STEPS, LANES), float(number)).numpy()})
        seen = [batch.data["x"] for batch in plane.torch_batches()]
        assert len(seen) == 8
        assert all((x == number).all() for x in seen)


def test_batches_of_a_mesh_are_gathered_and_counted() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    plane, one = make_plane(mesh=mesh), make_plane(placement="device")
    plane.push(unit(0))
    batches = plane.torch_batches()
    batch = next(batches)
    ids = batch.data["id"].tolist()
    assert len(ids) == BATCH
    assert set(batches.handovers.copied) == {"device"}
    batch.update_priorities(torch.ones(BATCH))
    one.push(unit(0))
    assert next(one.torch_batches()).data["id"].shape == (BATCH,)


def test_a_batch_that_is_not_ready_is_said_as_pull_says_it() -> None:
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=8), replay=conduit.ReplayConfig(capacity=64, min_size=64)
    )
    plane.push({"x": np.zeros((4, 8), np.float32)})
    with pytest.raises(conduit.NotReadyError):
        next(plane.torch_batches())


def test_handovers_count_right_from_several_threads() -> None:
    count, array = Handovers(), jnp.ones(3)
    threads = [
        threading.Thread(target=lambda: [to_torch(array, handovers=count) for _ in range(200)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count.shared == 800


@pytest.mark.gpu
def test_device_memory_is_handed_over_on_the_device_in_stream_order() -> None:
    step = jax.jit(lambda x: (x @ x) / 4096)
    array = step(jnp.ones((4096, 4096)))  # still running when it is handed over
    tensor = to_torch(array)
    assert tensor.device.type == "cuda"
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    assert float(tensor.sum()) == 4096 * 4096
    doubled = from_torch(tensor * 2)
    assert float(step(doubled)[0, 0]) == 4
