"""Few rows are read on one thread, and are the rows asked for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conduit_jax import Prioritized, ReplayConfig, Uniform
from conduit_jax.replay.buffer import make_replay
from conduit_jax.replay.reads import read_rows

SPLIT = "outer_dimension_partitions"  # how XLA on CPU marks a kernel that it splits over threads
MANY = 2**16


@pytest.mark.parametrize("count", [1, 2, 3, 11, 49, 256])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.bool_, jnp.uint8])
def test_rows_are_those_asked_for(count: int, dtype: jnp.dtype) -> None:
    array = jnp.asarray(np.random.default_rng(0).integers(0, 2, (MANY, 3, 2))).astype(dtype)
    index = jnp.asarray(np.random.default_rng(1).integers(0, MANY, count), jnp.int32)
    read = jax.jit(read_rows)(array, index)
    np.testing.assert_array_equal(np.asarray(read), np.asarray(array)[np.asarray(index)])


def test_reads_are_batched_over_seeds() -> None:
    array = jnp.arange(3 * MANY, dtype=jnp.float32).reshape(3, MANY)
    index = jnp.asarray(np.random.default_rng(2).integers(0, MANY, (3, 8)), jnp.int32)
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
