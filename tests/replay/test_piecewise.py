"""What is computed piece by piece is what it is at once, and a draw or an insert by itself runs where it is called."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conduit_jax import Prioritized, ReplayConfig, Uniform
from conduit_jax.replay.buffer import Replay, make_replay
from conduit_jax.replay.piecewise import COUNTED, piecewise, renewed, zero_of
from conduit_jax.replay.windows import Windows, make_window_replay

ONE_KERNEL = "xla_cpu_small_call"  # how XLA on CPU marks a loop that it compiles as a whole


@pytest.mark.parametrize("piece", [1, 3, 4, 64])
@pytest.mark.parametrize("count", [1, 2, 4, 5, 63, 64, 256])
def test_pieces_are_the_whole(count: int, piece: int) -> None:
    rows = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (count, 3), np.uint32))

    def function(numbers: jax.Array, rows: jax.Array) -> dict[str, jax.Array]:
        return {"sums": rows.sum(1, dtype=jnp.uint32) + numbers.astype(jnp.uint32), "odd": rows[:, :2] % 2 == 1}

    made = jax.jit(lambda rows: piecewise(function, rows, rows, count=count, piece=piece))(rows)
    wanted = function(jnp.arange(count, dtype=jnp.int32), rows)
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(np.asarray(made[name]), np.asarray(leaf))
        assert made[name].dtype == leaf.dtype


def test_pieces_are_batched_and_know_64_bits() -> None:
    rows = jnp.arange(3 * 50, dtype=jnp.int32).reshape(3, 50)

    def squares(rows: jax.Array) -> jax.Array:
        return piecewise(lambda numbers, few: few * few - numbers, rows, rows, count=50, piece=4)

    with jax.enable_x64(True):
        batched = jax.jit(jax.vmap(squares))(rows)
    np.testing.assert_array_equal(np.asarray(batched), np.asarray(rows) ** 2 - np.arange(50))


@pytest.mark.parametrize("value", [0, 1, -1, 2**31 - 1, -(2**31)])
def test_the_zero_that_waits_is_zero(value: int) -> None:
    word = jnp.asarray([value, 7], jnp.int32)
    assert int(zero_of(word)) == int(zero_of(word.astype(jnp.uint32))) == 0
    assert int(renewed(jnp.int32(5), word)) == 5


def make(kind: str, lanes: int = 1) -> Replay:
    config = ReplayConfig(capacity=64_000, sampler=Prioritized() if kind == "prioritized" else Uniform())
    if kind in ("pairs", "windows"):
        length, batch = (2, 256) if kind == "pairs" else (16, 16)
        return make_window_replay(config, Windows(length=length, boundary="cross"), batch_size=batch, lanes=lanes)
    return make_replay(config, batch_size=256, lanes=lanes)


def wide_item() -> dict[str, Any]:
    scalar, image = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((32, 32, 3), jnp.uint8)
    action, vector = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((128,), jnp.float32)
    return {"image": image, "vector": vector, "action": action, "reward": scalar, "discount": scalar}


def operations(compiled: Any) -> float:
    return compiled.cost_analysis()["flops"]


@pytest.mark.parametrize("lanes", [1, 16])
@pytest.mark.parametrize("kind", ["items", "pairs", "windows"])
def test_a_draw_is_not_handed_to_another_thread(kind: str, lanes: int) -> None:
    replay = make(kind, lanes)
    state = jax.eval_shape(lambda: replay.init(wide_item()))
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    compiled = jax.jit(replay.sample, donate_argnums=0).lower(state.control, state.storage, key).compile()
    assert operations(compiled) < COUNTED
    assert (compiled.as_text() or "").count(ONE_KERNEL) >= 3, "items are drawn, described and unpacked by a kernel each"


@pytest.mark.parametrize("steps", [32, 256])
@pytest.mark.parametrize(("kind", "lanes"), [("items", 1), ("windows", 16), ("prioritized", 1)])
def test_an_insert_is_not_handed_to_another_thread(kind: str, lanes: int, steps: int) -> None:
    replay = make(kind, lanes)
    state = jax.eval_shape(lambda: replay.init(wide_item()))
    lead = (steps // lanes, lanes)
    chunk = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*lead, *leaf.shape), leaf.dtype), wide_item())
    compiled = jax.jit(replay.add, donate_argnums=0).lower(state, chunk).compile()
    assert operations(compiled) < COUNTED or (kind, steps) == ("prioritized", 256), "so many powers are counted"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("level", [0, 3])
def test_every_bit_of_small_floats_comes_through(dtype: str, level: int) -> None:
    """NaNs too: XLA on CPU updates slices of such arrays through float32."""
    kind = jnp.dtype(dtype)
    bits = (np.arange(4096) * 16 + 15).astype(f"uint{8 * kind.itemsize}")
    through = jax.jit(
        lambda values: piecewise(lambda _, few: few, jnp.zeros((1,), jnp.int32), values, count=4096),
        compiler_options={"xla_backend_optimization_level": level},
    )
    assert np.asarray(through(bits.view(kind))).tobytes() == bits.tobytes()
