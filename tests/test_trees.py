"""Specs are hashable values, and a tree that differs from one is refused with the leaf's path, what was got and wanted."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conduit_jax import trees
from conduit_jax.errors import SpecError, nearest_multiples
from conduit_jax.trees import LeafSpec, check_matches, leaf_dtype, tree_spec


class Step(NamedTuple):
    observation: dict[str, Any]
    reward: Any


def example(steps: int = 3, lanes: int = 2) -> Step:
    pixels = np.zeros((steps, lanes, 4, 4), np.uint8)
    return Step({"pixels": pixels, "speed": np.zeros((steps, lanes), np.float32)}, np.zeros((steps, lanes), np.float32))


def test_a_spec_drops_leading_axes_and_names_leaves_by_path() -> None:
    spec = tree_spec(example(), drop=2)
    assert spec.paths == (".observation['pixels']", ".observation['speed']", ".reward")
    assert spec.leaves == (
        LeafSpec((4, 4), np.dtype(np.uint8)),
        LeafSpec((), np.dtype(np.float32)),
        LeafSpec((), np.dtype(np.float32)),
    )
    assert spec.bytes == 16 + 4 + 4


def test_equal_trees_have_equal_specs_of_one_hash() -> None:
    assert tree_spec(example(3), drop=2) == tree_spec(example(7), drop=2)
    assert hash(tree_spec(example(3), drop=2)) == hash(tree_spec(example(7), drop=2))
    assert tree_spec(example(3)) != tree_spec(example(7))


def test_a_spec_of_shapes_is_the_spec_of_arrays_and_gives_the_shapes_back() -> None:
    spec = tree_spec(example(), drop=2)
    assert tree_spec(spec.shapes(5, 6), drop=2) == spec
    assert spec.shapes(5).observation["pixels"].shape == (5, 4, 4)


def test_a_bare_array_is_a_tree_of_its_own() -> None:
    assert tree_spec(np.zeros(3, np.int32)).paths == ("<root>",)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(1.0, np.float32), (3, np.int32), (True, np.bool_), (np.zeros(2), np.float32), (np.int64(3), np.int32)],
)
def test_leaves_have_the_dtype_jax_will_give_them(value: Any, dtype: Any) -> None:
    assert leaf_dtype(value) == dtype
    assert leaf_dtype(value) == jnp.asarray(value).dtype


def test_with_x64_on_64_bits_stay() -> None:
    with jax.enable_x64(True):
        assert leaf_dtype(np.zeros(2)) == np.float64


def message(tree: Any, wanted: Any = None, drop: int = 0) -> str:
    with pytest.raises(SpecError) as caught:
        tree_spec(tree, drop=drop) if wanted is None else check_matches(tree, wanted, "The rollout")
    return str(caught.value)


def test_too_few_axes_are_refused_by_path_got_and_want() -> None:
    text = message(example()._replace(reward=np.zeros(3)), drop=2)
    assert "Leaf .reward" in text
    assert "got:  shape (3,)" in text
    assert "want: at least 2 leading axes" in text


@pytest.mark.parametrize("junk", ["text", object(), b"bytes", 1j])
def test_what_is_no_array_is_refused_by_path(junk: Any) -> None:
    assert "Leaf .reward is not an array" in message(example()._replace(reward=junk))
    assert "Leaf .reward is not an array" in message(example()._replace(reward=junk), tree_spec(example()))


def test_typed_keys_are_refused_with_the_way_to_store_them() -> None:
    text = message({"key": jax.random.key(0)})
    assert "['key']" in text
    assert "jax.random.key_data" in text


@pytest.mark.parametrize("junk", [np.array(["a"]), np.array([object()]), np.zeros(2, "timedelta64[D]")])
def test_arrays_of_what_jax_has_not_are_refused_by_path(junk: np.ndarray) -> None:
    assert "Leaf ['x'] is not an array JAX can hold" in message({"x": junk})


def test_what_matches_is_returned_leaf_by_leaf() -> None:
    tree = example()
    leaves = check_matches(tree, tree_spec(tree), "The rollout")
    assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in jax.tree.leaves(tree)]
    assert len(leaves) == 3


@pytest.mark.parametrize("value", [np.zeros((3, 2)), np.zeros((3, 2), np.float32), jnp.zeros((3, 2))])
def test_64_bit_numpy_matches_what_jax_will_make_of_it(value: Any) -> None:
    assert check_matches(example()._replace(reward=value), tree_spec(example()), "The rollout")[2] is value


def test_64_bit_numpy_is_compared_as_fast_as_32_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(trees, "_explain_mismatch")
    tree = {"a": np.zeros(3), "b": np.zeros(3, np.int64), "c": np.zeros(3, np.uint64)}
    assert len(check_matches(tree, tree_spec(tree), "The rollout")) == 3


def test_python_scalars_match_scalar_leaves() -> None:
    wanted = tree_spec({"a": jnp.float32(0), "b": jnp.int32(0), "c": jnp.bool_(0)})
    assert check_matches({"a": 1.0, "b": 2, "c": True}, wanted, "The context") == [1.0, 2, True]


def test_a_missing_and_an_unexpected_leaf_are_both_named() -> None:
    wanted = tree_spec(example())
    missing = message(example()._replace(observation={"pixels": example().observation["pixels"]}), wanted)
    assert "missing leaves [\".observation['speed']\"]" in missing
    extra = message(example()._replace(observation={**example().observation, "sound": np.zeros(3)}), wanted)
    assert "unexpected leaves [\".observation['sound']\"]" in extra
    assert "The rollout" in extra


def test_another_shape_or_dtype_is_named_by_path_with_got_and_want() -> None:
    wanted = tree_spec(example())
    shape = message(example()._replace(reward=np.zeros((3, 5), np.float32)), wanted)
    assert "leaf .reward has another shape" in shape
    assert "got:  (3, 5)" in shape
    assert "want: (3, 2)" in shape
    dtype = message(example()._replace(reward=np.zeros((3, 2), np.float16)), wanted)
    assert "leaf .reward has another dtype" in dtype
    assert "got:  float16" in dtype
    assert "want: float32" in dtype
    assert ".astype(float32)" in dtype


def test_the_same_leaves_in_another_container_are_refused() -> None:
    wanted = tree_spec((np.zeros(1), np.zeros(1)))
    assert "another tree" in message([np.zeros(1), np.zeros(1)], wanted)


@pytest.mark.parametrize(
    ("value", "divisor", "words"), [(100, 8, "96 or 104"), (3, 8, "8"), (16, 8, "16"), (9, 8, "8 or 16")]
)
def test_nearest_multiples_are_those_around_the_value(value: int, divisor: int, words: str) -> None:
    assert nearest_multiples(value, divisor) == words
