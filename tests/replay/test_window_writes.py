"""Windows written in runs equal windows written by numpy, wherever the ring ends, and copy nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conduit_jax.replay.window_writes import RUN, Window, write_window
from conduit_jax.testing import assert_in_place

WORDS = (3, 2)


def write(lanes: int, length: int, arrays: Any, head: Any, values: Any) -> Any:
    return write_window(arrays, Window(lanes, length, head), values)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def jitted(lanes: int, length: int, arrays: Any, head: Any, values: Any) -> Any:
    return write(lanes, length, arrays, head, values)


def numbered(shape: tuple[int, ...], first: int) -> np.ndarray:
    return np.arange(first, first + int(np.prod(shape)), dtype=np.uint32).reshape(shape)


def expected(array: np.ndarray, lanes: int, length: int, head: int, values: np.ndarray) -> np.ndarray:
    kept, steps = array.copy().reshape(lanes, length, -1), values.reshape(lanes, -1, array.shape[-1])
    kept[:, (head + np.arange(steps.shape[1])) % length] = steps
    return kept.reshape(array.shape)


@pytest.mark.parametrize(
    ("lanes", "length", "steps"),
    [(1, 70, 2 * RUN), (2, 200, 2 * RUN + 1), (3, 2 * RUN, 2 * RUN), (2, 170, 5 * RUN - 1), (2, 40, RUN)],
)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_window_is_written_as_numpy_would(lanes: int, length: int, steps: int, data: st.DataObject) -> None:
    head = data.draw(st.integers(0, length - 1))
    arrays = tuple(numbered((lanes * length, words), 0) for words in WORDS)
    values = tuple(numbered((lanes * steps, words), 10**6) for words in WORDS)
    got = jitted(lanes, length, jax.tree.map(jnp.asarray, arrays), jnp.int32(head), values)
    for found, array, new in zip(got, arrays, values, strict=True):
        np.testing.assert_array_equal(found, expected(array, lanes, length, head, new))


def test_windows_of_several_rings_at_once_are_written_alike() -> None:
    """Under ``vmap``, every ring with a head of its own."""
    lanes, length, steps, heads = 2, 85, 80, np.array([0, 3, 84], np.int32)
    arrays = tuple(numbered((3, lanes * length, words), 0) for words in WORDS)
    values = tuple(numbered((3, lanes * steps, words), 10**6) for words in WORDS)
    got = jax.jit(jax.vmap(partial(write, lanes, length)))(arrays, heads, values)
    for found, array, new in zip(got, arrays, values, strict=True):
        for number, head in enumerate(heads):
            want = expected(array[number], lanes, length, int(head), new[number])
            np.testing.assert_array_equal(found[number], want)


def test_runs_are_written_in_place() -> None:
    lanes, length, steps = 2, 40_000, 64
    arrays = tuple(jax.ShapeDtypeStruct((lanes * length, words), jnp.uint32) for words in WORDS)
    values = tuple(jax.ShapeDtypeStruct((lanes * steps, words), jnp.uint32) for words in WORDS)
    step = jax.jit(partial(write, lanes, length), donate_argnums=0)
    assert_in_place(step, arrays, jax.ShapeDtypeStruct((), jnp.int32), values)


def test_64_bits_change_nothing() -> None:
    with jax.enable_x64(True):
        array, values = numbered((90, 3), 0), numbered((70, 3), 10**6)
        (got,) = jax.jit(partial(write, 1, 90))((array,), jnp.int32(50), (values,))
        np.testing.assert_array_equal(got, expected(array, 1, 90, 50, values))
