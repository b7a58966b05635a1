"""Laws of ``Sample``: five fields like a NamedTuple's, of which two travel inside ``info`` where they fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conduit_jax.types import Sample, SampleInfo

COUNT = 3
WEIGHTS, VALID = np.array([1, 0.5, 0.25], np.float32), np.array([True, False, True])


def new_info() -> SampleInfo:
    return SampleInfo(*(np.arange(COUNT) for _ in range(7)))


def new_sample() -> Sample:
    return Sample.packed({"x": np.zeros((COUNT, 2))}, new_info(), WEIGHTS, None, VALID)


def test_it_is_read_and_unpacked_as_five_fields() -> None:
    sample = new_sample()
    data, info, weights, mask, valid = sample
    assert (len(sample), sample[0] is data, sample[1:2][0] is info) == (5, True, True)
    assert data["x"].shape == (COUNT, 2)
    assert mask is None
    assert info.slot.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(weights, WEIGHTS)
    np.testing.assert_array_equal(valid, VALID)
    assert weights.dtype == np.float32
    assert valid.dtype == np.bool_


def test_weights_and_valid_leave_a_program_inside_info() -> None:
    def program(weights: jax.Array, valid: jax.Array) -> Sample:
        return Sample.packed(jnp.zeros(COUNT), jax.tree.map(jnp.asarray, new_info()), weights, None, valid)

    sample = jax.jit(program)(WEIGHTS, VALID)
    assert len(jax.tree.leaves(sample)) == 2
    np.testing.assert_array_equal(sample.weights, WEIGHTS)
    np.testing.assert_array_equal(jax.jit(lambda own: own.valid)(sample), VALID)


@pytest.mark.parametrize("changes", [{"weights": np.ones(2 * COUNT)}, {"valid": np.ones(1, bool)}, {"info": None}])
def test_other_shapes_stand_apart_and_nothing_else_changes(changes: dict) -> None:
    changed = new_sample()._replace(**changes)
    for name, value in {"weights": WEIGHTS, "valid": VALID, **changes}.items():
        np.testing.assert_array_equal(getattr(changed, name), value)
    if changed.info is not None:
        assert changed.info.slot.tolist() == [0, 1, 2]


def test_a_users_own_weights_have_gradients_and_keep_their_dtype() -> None:
    def total(weights: jax.Array) -> jax.Array:
        made = Sample(0, jax.tree.map(jnp.asarray, new_info()), weights, None, VALID)
        return jnp.sum(new_sample()._replace(weights=weights).weights * 2 + made.weights)

    assert jax.grad(total)(jnp.ones(COUNT)).tolist() == [3.0] * COUNT
    assert new_sample()._replace(weights=jnp.ones(COUNT, jnp.bfloat16)).weights.dtype == jnp.bfloat16


def test_filling_what_is_none_fills_the_mask_alone() -> None:
    filled = jax.tree.map(lambda leaf: VALID if leaf is None else leaf, new_sample(), is_leaf=lambda leaf: leaf is None)
    np.testing.assert_array_equal(filled.mask, VALID)
    np.testing.assert_array_equal(filled.weights, WEIGHTS)


def test_another_info_keeps_weights_and_valid() -> None:
    changed = new_sample()._replace(info=new_info()._replace(slot=np.full(COUNT, 9)))
    assert changed.info.slot.tolist() == [9] * COUNT
    np.testing.assert_array_equal(changed.weights, WEIGHTS)
    np.testing.assert_array_equal(changed.valid, VALID)


def test_replaced_data_and_mask_touch_no_column() -> None:
    sample = new_sample()
    changed = sample._replace(data=1, mask=VALID)
    assert changed.info is sample.info
    assert (changed.data, changed.mask is VALID) == (1, True)


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="colour"):
        new_sample()._replace(colour=1)
    with pytest.raises(TypeError):
        Sample(1, new_info())  # type: ignore[call-arg]


def test_trees_keep_their_names() -> None:
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(new_sample())]
    assert paths == [".data['x']", ".info.words"]
    assert "info" in repr(new_sample())
