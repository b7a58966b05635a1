"""Few rows are read on one thread, and are the rows asked for."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conduit_jax import Prioritized, ReplayConfig, Uniform
from conduit_jax.replay.buffer import Replay, ReplayState, make_replay
from conduit_jax.replay.reads import read_rows
from conduit_jax.replay.windows import Windows, make_window_replay
from conduit_jax.testing import assert_in_place, count_traces

SPLIT = "outer_dimension_partitions"  # how XLA on CPU marks a kernel that it splits over threads
MANY = 2**16


@pytest.mark.parametrize("count", [1, 2, 3, 11, 49, 256])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.bool_, jnp.uint8])
def test_rows_are_those_asked_for(count: int, dtype: jnp.dtype) -> None:
    array = jnp.asarray(np.random.default_rng(0).integers(0, 2, (MANY, 3, 2))).astype(dtype)
    index = jnp.asarray(np.random.default_rng(1).integers(0, MANY, count), jnp.int32)
    read = jax.jit(read_rows)(array, index)
    np.testing.assert_array_equal(np.asarray(read), np.asarray(array)[np.asarray(index)])


@pytest.mark.parametrize("rows", [8, 121])
def test_reads_are_batched_over_seeds(rows: int) -> None:
    array = jnp.arange(3 * MANY, dtype=jnp.float32).reshape(3, MANY)
    index = jnp.asarray(np.random.default_rng(2).integers(0, MANY, (3, rows)), jnp.int32)
    for axes, wanted in (((0, 0), np.take_along_axis(np.asarray(array), np.asarray(index), 1)), ((None, 0), index)):
        given = array if axes[0] == 0 else array[0]
        np.testing.assert_array_equal(np.asarray(jax.jit(jax.vmap(read_rows, axes))(given, index)), wanted)


def test_a_short_read_of_a_large_array_stays_on_one_thread() -> None:
    array, index = jnp.zeros((MANY, 12)), jnp.zeros((256,), jnp.int32)
    assert SPLIT not in jax.jit(read_rows).lower(array, index).compile().as_text()


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized()], ids=["uniform", "prioritized"])
def test_no_gather_of_a_draw_of_small_items_is_split(sampler: Uniform | Prioritized) -> None:
    replay = make_replay(ReplayConfig(capacity=2**17, sampler=sampler), batch_size=256)
    state = jax.eval_shape(lambda: replay.init({"x": jnp.zeros((4,), jnp.float32), "done": jnp.zeros((), jnp.bool_)}))
    key = jax.eval_shape(lambda: jax.random.key(0))
    compiled = jax.jit(replay.sample).lower(state.control, state.storage, key).compile().as_text()
    split = [line for line in compiled.splitlines() if SPLIT in line and "gather" in line.split("metadata")[0]]
    assert split == []


def make_of(kind: str, config: ReplayConfig, batch: int, lanes: int) -> Replay:
    if kind == "windows":
        return make_window_replay(config, Windows(length=2, boundary="cross"), batch_size=batch, lanes=lanes)
    if kind == "slots":
        config = replace(config, storage="slots")
    return make_replay(config, batch_size=batch, lanes=lanes)


@pytest.mark.parametrize("batch", [121, 128])
@pytest.mark.parametrize("sampler", [Uniform(), Prioritized()], ids=["uniform", "prioritized"])
@pytest.mark.parametrize("make", ["items", "windows"])
def test_what_is_read_in_a_loop_is_not_copied_for_it(make: str, sampler: Uniform | Prioritized, batch: int) -> None:
    config, item = ReplayConfig(capacity=2**17, sampler=sampler), {"x": jnp.zeros((40,), jnp.float32)}
    replay = make_of(make, config, batch, lanes=4)

    def step(state: ReplayState, key: jax.Array) -> tuple[ReplayState, jax.Array]:
        state, _ = replay.add(state, {"x": jnp.ones((24, 4, 40))})
        control, sample = replay.sample(state.control, state.storage, key)
        control, _ = replay.update_priorities(control, sample.info, jnp.ones((batch,)))
        return ReplayState(state.storage, control), jnp.sum(sample.data["x"])

    state = jax.eval_shape(lambda: replay.init(item))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 5))
    assert_in_place(lambda state, keys: jax.lax.scan(step, state, keys), state, keys)


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized()], ids=["uniform", "prioritized"])
@pytest.mark.parametrize("make", ["items", "windows", "slots"])
def test_calls_by_hand_compile_once(make: str, sampler: Uniform | Prioritized) -> None:
    replay = make_of(make, ReplayConfig(capacity=2**16, sampler=sampler), 128, lanes=2)
    state, chunk = jax.jit(lambda: replay.init({"x": jnp.zeros((4,))}))(), {"x": jnp.ones((64, 2, 4))}

    def turn(state: ReplayState, seed: int) -> ReplayState:
        state, _ = replay.add(state, chunk)
        control, sample = replay.sample(state.control, state.storage, jax.random.key(seed))
        control, _ = replay.update_priorities(control, sample.info, jnp.ones((128,)))
        return ReplayState(state.storage, control)

    state = turn(turn(state, 0), 1)
    with count_traces() as counted:
        turn(state, 2)
    assert counted.compiled == 0
