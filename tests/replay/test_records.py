"""Packing is reinterpretation: every dtype, shape and bit comes back, small leaves in one row, large ones apart."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit_jax.errors import SpecError
from conduit_jax.replay import records
from conduit_jax.replay.records import record_layout
from conduit_jax.trees import tree_spec

DTYPES = [jnp.bool_, jnp.uint8, jnp.int8, jnp.uint16, jnp.int16, jnp.int32, jnp.uint32]
DTYPES += [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32]
WIDE = [np.int64, np.uint64, np.float64]
SHAPES = [(), (1,), (3,), (5, 1, 7), (0,), (2, 0)]


def random_bits_of(dtype: Any, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Values with every bit pattern alike likely: NaN payloads, subnormals, negative zeros."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    raw = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return np.ascontiguousarray(raw).reshape(-1).view(dtype).reshape(shape)


def there_and_back(layout: records.RecordLayout, tree: Any, version: Any) -> tuple[Any, Any, Any, Any]:
    rows, apart = records.pack(layout, tree, version)
    return records.unpack(layout, rows, apart), records.row_versions(rows), rows, apart


def assert_same_bits(got: Any, wanted: Any) -> None:
    got_leaves, got_tree = jax.tree.flatten(got)
    wanted_leaves, wanted_tree = jax.tree.flatten(wanted)
    assert got_tree == wanted_tree
    for one, other in zip(got_leaves, wanted_leaves, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def check_layout(tree: dict[str, np.ndarray], lead: tuple[int, ...]) -> None:
    layout = record_layout(tree_spec(tree, drop=len(lead)))
    version = np.uint32(2**32 - 3)
    back, versions, rows, apart = jax.jit(partial(there_and_back, layout))(tree, version)
    assert_same_bits(back, tree)
    assert rows.shape == (*lead, layout.words)
    assert (np.asarray(versions) == version).all()
    assert versions.shape == lead
    assert len(apart) == len(layout.apart)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_dtype_comes_back_bit_for_bit_in_every_shape(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    lead = (2, 3)
    check_layout({str(shape): random_bits_of(dtype, (*lead, *shape), rng) for shape in SHAPES}, lead)


@pytest.mark.parametrize("dtype", WIDE, ids=lambda dtype: np.dtype(dtype).name)
def test_64_bit_leaves_come_back_bit_for_bit_where_x64_is_on(dtype: Any) -> None:
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        check_layout({str(shape): random_bits_of(dtype, (4, *shape), rng) for shape in SHAPES}, (4,))


@pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 3, 2)], ids=str)
def test_any_leading_axes_are_kept(lead: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    kinds = {
        "scalar": (np.float32, ()),
        "odd": (np.uint8, (3,)),
        "half": (np.float16, (2, 3)),
        "large": (np.uint8, (2000,)),
    }
    check_layout({name: random_bits_of(dtype, (*lead, *shape), rng) for name, (dtype, shape) in kinds.items()}, lead)


leaf_kinds = st.tuples(st.sampled_from(DTYPES), st.sampled_from([*SHAPES, (1024,), (1025,), (257, 3)]))


@given(kinds=st.lists(leaf_kinds, min_size=1, max_size=5))
def test_segments_tile_the_row_and_leaves_above_the_limit_stand_apart(kinds: list[tuple[Any, tuple[int, ...]]]) -> None:
    spec = tree_spec([jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in kinds])
    layout = record_layout(spec)
    end = records.VERSION_WORDS
    for leaf, segment in zip(spec.leaves, layout.segments, strict=True):
        assert (segment is None) == (leaf.bytes > records.SMALL_LEAF_BYTES)
        if segment is not None:
            assert segment.start == end
            assert 0 <= 4 * segment.words - leaf.bytes < 4
            end += segment.words
    assert layout.words == end
    assert layout.bytes_per_item == 4 * end + sum(leaf.bytes for leaf in layout.apart)
    assert hash(layout) == hash(record_layout(spec))


def test_a_row_is_one_gather_however_many_small_leaves_there_are() -> None:
    tree = {f"leaf{number}": np.zeros((3,), np.uint8) for number in range(10)}
    layout = record_layout(tree_spec(tree))
    assert layout.words == records.VERSION_WORDS + 10
    assert layout.apart == ()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16], ids=lambda dtype: np.dtype(dtype).name)
def test_the_payload_of_a_signalling_nan_survives(dtype: Any) -> None:
    quiet_bit_off = {4: np.array([0x7F812345, 0xFF800001], np.uint32), 2: np.array([0x7C01, 0xFF81], np.uint16)}
    values = quiet_bit_off[np.dtype(dtype).itemsize].view(dtype)
    check_layout({"value": values}, (2,))


@pytest.mark.parametrize("dtype", ["complex64", "int4", "uint4"])
def test_a_dtype_that_cannot_be_stored_is_refused_by_path(dtype: str) -> None:
    spec = tree_spec({"fine": jnp.zeros(2), "odd": jax.ShapeDtypeStruct((3,), jnp.dtype(dtype))})
    with pytest.raises(SpecError, match=r"\['odd'\]"):
        record_layout(spec)
