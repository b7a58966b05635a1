"""Laws of what is plain data: a structure comes back as it was, and settings differ where they differ."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conduit_jax as conduit
from conduit_jax.checkpoint.arrays import Reader, Writer
from conduit_jax.checkpoint.structure import (
    differences,
    settings_as_data,
    structure_as_data,
    structure_from_data,
    told,
)

LEAVES = st.just(0.0)
TREES = st.recursive(
    LEAVES | st.none(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.tuples(inner, inner, inner, inner, inner).map(lambda five: conduit.Transition(*five)),
        st.sampled_from([conduit.AddInfo(1, 2, 3), conduit.SampleInfo(*[0] * 7), conduit.SampleInfo(*[0] * 8)]),
    ),
    max_leaves=8,
)


@given(TREES)
def test_a_structure_comes_back_from_json(tree: Any) -> None:
    data = json.loads(json.dumps(structure_as_data(tree)))
    assert structure_from_data(data) == jax.tree.structure(tree)


class Own(NamedTuple):
    x: Any


def test_a_users_own_node_has_no_form_and_an_unknown_one_is_not_made() -> None:
    assert structure_as_data({"a": [Own(1.0)]}) is None
    for data in (["Popen", ["*"]], ["Own", ["*"]], 7, ["dict", [["a"]]]):
        with pytest.raises((ValueError, TypeError)):
            structure_from_data(data)


def test_settings_differ_by_field() -> None:
    here = settings_as_data({"a": conduit.ReplayConfig(capacity=3, sampler=conduit.Prioritized()), "b": 1})
    there = settings_as_data({"a": conduit.ReplayConfig(capacity=4), "b": 1})
    assert differences(json.loads(json.dumps(here)), here) == []
    lines = differences(here, there)
    assert "a.capacity: saved 3, here 4" in lines
    assert any(line.startswith("a.sampler: saved 'Prioritized', here 'Uniform'") for line in lines)


def test_differing_leaves_are_named_as_python_would_and_the_many_are_counted() -> None:
    lines = differences({".params['w']": "float32[4]", "[0]": 1}, {".params['w']": "float32[2]", "[0]": 1}, "learner")
    assert lines == ["learner.params['w']: saved 'float32[4]', here 'float32[2]'"]
    few, many = [f"{number}" for number in range(7)], [f"{number}" for number in range(9)]
    assert told(few).split() == few
    assert told(many).split("\n")[-1].strip() == "and 3 more"


DTYPES = ("bool", "uint8", "int16", "bfloat16", "float16", "float8_e4m3fn", "uint32", "float32", "complex64")


@pytest.mark.parametrize("size", [0, 3, 70_001])
def test_every_dtype_and_size_comes_back_bit_for_bit(tmp_path: Any, size: int) -> None:
    draws, writer = np.random.default_rng(size), Writer(tmp_path)
    values: list[Any] = [jnp.float32(1.5), 3, True, np.float64(0.1), np.arange(20_000)[::2]]
    for name in DTYPES:
        raw = draws.integers(0, 256, (size, 2, jnp.dtype(name).itemsize), np.uint8)
        values.append(raw[..., 0] > 127 if name == "bool" else raw.view(jnp.dtype(name))[..., 0])
    values += [jnp.asarray(value) for value in values[5:]] + [jax.random.key(3), jax.random.split(jax.random.key(1), 5)]
    references = json.loads(json.dumps([writer.put(value) for value in values]))
    writer.close()
    for value, reference in zip(values, references, strict=True):
        back = Reader(tmp_path).get(reference)
        if "key" in reference:
            assert back.dtype == value.dtype
            back, value = jax.random.key_data(back), jax.random.key_data(value)
        assert (back.dtype, back.shape) == (np.asarray(value).dtype, np.shape(value))
        assert np.asarray(back).tobytes() == np.asarray(value).tobytes()


@pytest.mark.parametrize("axes", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto], ids=str)
@pytest.mark.parametrize("spec", [jax.P("data"), jax.P(None, "data")], ids=str)
def test_a_large_sharded_array_crosses_in_pieces(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, spec: Any, axes: Any
) -> None:
    from conduit_jax.checkpoint import arrays

    monkeypatch.setattr(arrays, "CHUNK_BYTES", 64 << 10)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axes,))
    value = np.arange(8 * 30_000, dtype=np.float32).reshape(8, 30_000)
    leaf = jax.device_put(value, jax.NamedSharding(mesh, spec))
    writer = Writer(tmp_path)
    reference = writer.put(leaf)
    writer.close()
    reader = Reader(tmp_path)
    reader.check(reference)
    np.testing.assert_array_equal(reader.get(reference), value)
