"""A window is written as numpy would, wherever it starts, in one loop, in place."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conduit_jax.replay.window_writes import STEP_BYTES, Window, scatter_steps, write_in_turns, write_steps
from conduit_jax.testing import assert_in_place

SHAPES = [(1, 1, 1), (1, 9, 6), (1, 7, 7), (2, 7, 1), (3, 8, 8), (2, 5, 4)]
ROWS = [((3,), np.uint32), ((2, 3, 5), np.uint8), ((STEP_BYTES // 4 + 1,), np.float32)]


def scattered(arrays: Any, window: Window, values: Any) -> Any:
    return tuple(scatter_steps(array, window, new) for array, new in zip(arrays, values, strict=True))


def some(seed: int, *lead: int) -> tuple[np.ndarray, ...]:
    draws = np.random.default_rng(seed)
    return tuple(draws.integers(0, 200, (*lead, *row)).astype(dtype) for row, dtype in ROWS)


def expected(arrays: Any, values: Any, lanes: int, length: int, head: int) -> list[np.ndarray]:
    wanted = []
    for array, new in zip(arrays, values, strict=True):
        kept, steps = array.copy().reshape(lanes, length, *array.shape[1:]), new.reshape(-1, lanes, *new.shape[1:])
        kept[:, (head + np.arange(steps.shape[0])) % length] = steps.swapaxes(0, 1)
        wanted.append(kept.reshape(array.shape))
    return wanted


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("way", [write_steps, write_in_turns, scattered])
@pytest.mark.parametrize(("lanes", "length", "steps"), SHAPES)
def test_a_window_is_written_as_numpy_would(way: Any, lanes: int, length: int, steps: int, x64: bool) -> None:
    with jax.enable_x64(x64):
        write = jax.jit(lambda arrays, head, values: way(arrays, Window(lanes, length, head), values))
        for head in range(length):
            arrays, values = some(head, lanes * length), some(head + 100, steps * lanes)
            written = write(arrays, jnp.int32(head), values)
            for got, want in zip(written, expected(arrays, values, lanes, length, head), strict=True):
                np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize(("lanes", "length", "steps"), SHAPES)
def test_windows_that_start_apart_are_written_under_vmap(lanes: int, length: int, steps: int) -> None:
    heads = np.arange(3, dtype=np.int32) % length
    arrays, values = some(0, 3, lanes * length), some(1, 3, steps * lanes)
    write = jax.jit(jax.vmap(lambda arrays, head, values: write_steps(arrays, Window(lanes, length, head), values)))
    written = write(arrays, heads, values)
    for number, head in enumerate(heads):
        own, new = ([leaf[number] for leaf in part] for part in (arrays, values))
        for got, want in zip(written, expected(own, new, lanes, length, int(head)), strict=True):
            np.testing.assert_array_equal(np.asarray(got)[number], want)


@pytest.mark.parametrize("partitions", [0, 2])
@pytest.mark.parametrize("lanes", [1, 4])
def test_a_window_is_written_in_place_and_in_a_loop_too(lanes: int, partitions: int) -> None:
    length, steps = 4096, 32

    def one(arrays: Any, head: jax.Array, values: Any) -> Any:
        return write_steps(arrays, Window(lanes, length, head), values)

    lead = (partitions,) if partitions else ()
    shapes = partial(jax.tree.map, lambda row: jax.ShapeDtypeStruct((*lead, *row.shape), row.dtype))
    arrays = shapes(tuple(jax.ShapeDtypeStruct((lanes * length, *row), dtype) for row, dtype in ROWS))
    values = shapes(tuple(jax.ShapeDtypeStruct((lanes * steps, *row), dtype) for row, dtype in ROWS))
    head, write = jax.ShapeDtypeStruct(lead, jnp.int32), jax.vmap(one) if partitions else one

    def several(arrays: Any, head: jax.Array, values: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda turn, kept: write(kept, (head + turn * steps) % length, values), arrays)

    assert_in_place(write, arrays, head, values, max_temp_fraction=0.1)
    assert_in_place(several, arrays, head, values, max_temp_fraction=0.1)
