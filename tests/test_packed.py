"""Laws of packed structures: bits, trees and the face of a NamedTuple."""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from conduit_jax.types import AddInfo, SampleInfo

DTYPES = {
    "slot": np.int32,
    "generation": np.uint32,
    "probability": np.float32,
    "priority": np.float32,
    "table_size": np.int32,
    "age": np.int32,
    "policy_version": np.uint32,
    "times_sampled": np.int32,
    "weight": np.float32,
    "valid": np.bool_,
    "table": np.int32,
}
OPTIONAL = ("times_sampled", "weight", "valid", "table")


@st.composite
def columns(draw: st.DrawFn) -> dict[str, np.ndarray | None]:
    """Any bits in every column, NaNs with payloads among them; optional ones may be absent."""
    count = draw(st.integers(0, 4))
    words = st.lists(st.integers(0, 2**32 - 1), min_size=count, max_size=count)
    bits = {name: np.array(draw(words), np.uint32) for name in DTYPES}
    made = {
        name: bits[name] % 2 == 1 if dtype == np.bool_ else bits[name].view(dtype) for name, dtype in DTYPES.items()
    }
    return made | dict.fromkeys(draw(st.sets(st.sampled_from(OPTIONAL))), None)


def same(left: object, right: object) -> bool:
    if left is None or right is None:
        return left is right
    left, right = np.asarray(left), np.asarray(right)
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


@given(columns())
def test_every_column_comes_back_bit_for_bit_on_host_and_device_and_through_trees(given: dict) -> None:
    on_host = SampleInfo(**given)
    on_device = SampleInfo(**{name: None if one is None else jnp.asarray(one) for name, one in given.items()})
    for info in (on_host, on_device, jax.tree.map(lambda leaf: leaf, on_host), jax.jit(lambda own: own)(on_host)):
        assert all(same(getattr(info, name), given[name]) for name in DTYPES)
        assert info.shape == given["slot"].shape
        assert len(jax.tree.leaves(info)) == 1
        assert all(same(one, given[name]) for name, one in info._asdict().items())


@given(columns(), st.sampled_from(list(DTYPES)))
def test_a_replaced_column_changes_and_no_other(given: dict, name: str) -> None:
    info = SampleInfo(**given)
    changed = info._replace(**{name: np.full(info.shape, 7, DTYPES[name])})
    for other in DTYPES:
        wanted = np.full(info.shape, 7, DTYPES[name]) if other == name else given[other]
        assert same(getattr(changed, other), wanted)


def test_it_is_mapped_sliced_and_copied_as_one_array() -> None:
    info = SampleInfo(*(np.arange(6, dtype=dtype).reshape(2, 3) for dtype in list(DTYPES.values())[:7]))
    assert jax.vmap(lambda own: own.slot * 2)(info).tolist() == [[0, 2, 4], [6, 8, 10]]
    assert jax.tree.map(lambda words: words[1], info).age.tolist() == [3, 4, 5]
    for twin in (copy.deepcopy(info), pickle.loads(pickle.dumps(info))):
        assert same(twin.words, info.words)
        assert twin.times_sampled is None
    assert "times_sampled=None" in repr(info)
    assert repr(jax.tree.map(lambda _: "x", info)) == "SampleInfo('x')"


def test_columns_that_are_missing_unknown_or_written_to_are_refused() -> None:
    with pytest.raises(TypeError, match="SampleInfo takes slot, generation"):
        SampleInfo(np.zeros(3))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="colour"):
        SampleInfo(*[np.zeros(3)] * 7, colour=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="SampleInfo takes"):
        SampleInfo(*[np.zeros(3)] * 7, slot=np.zeros(3))  # type: ignore[call-arg]
    info = SampleInfo(*[np.zeros(3)] * 7)
    with pytest.raises(TypeError, match="SampleInfo takes"):
        info._replace(priority=None)
    with pytest.raises(AttributeError):
        info.colour  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError):
        info.slot = np.ones(3)  # type: ignore[misc]


def test_counts_are_read_on_the_host_in_any_mesh_context() -> None:
    info = AddInfo(*(jnp.arange(2) + start for start in (1, 3, 5)))
    assert isinstance(info.evicted, np.ndarray)
    assert info.replaced.tolist() == [5, 6]
    assert int(jax.jit(lambda own: own.added.sum())(info)) == 3
    with jax.set_mesh(jax.make_mesh((len(jax.devices()),), ("data",))):
        assert info.added.tolist() == [1, 2]


def test_columns_are_counted_and_numbered_as_those_of_a_named_tuple_and_rows_are_refused() -> None:
    info = SampleInfo(*(np.arange(3, dtype=dtype) + index for index, dtype in enumerate(list(DTYPES.values())[:7])))
    assert len(info) == len(tuple(info)) == len(DTYPES)
    assert all(same(info[index], one) for index, one in enumerate(info))
    assert same(info[-5], info.policy_version)
    with pytest.raises(IndexError):
        info[len(DTYPES)]
    for rows in (slice(2), np.arange(2), np.ones(3, bool), (0, 1), "slot"):
        with pytest.raises(TypeError, match=r"SampleInfo\[i\] is its i-th column[\s\S]*jax\.tree\.map"):
            info[rows]


def test_shapes_have_columns_that_are_shapes() -> None:
    info = SampleInfo(*(np.zeros((2, 3), dtype) for dtype in list(DTYPES.values())[:7]))
    shapes = jax.eval_shape(lambda own: own, info)
    for name, dtype in list(DTYPES.items())[:7]:
        assert (getattr(shapes, name).shape, getattr(shapes, name).dtype) == ((2, 3), dtype)
    assert shapes.times_sampled is None
    wider = shapes._replace(times_sampled=jax.ShapeDtypeStruct((2, 3), jnp.int32))
    assert jax.tree.leaves(wider) == [jax.ShapeDtypeStruct((2, 3, 8), jnp.uint32)]
    assert jax.tree.structure(wider) == jax.tree.structure(info._replace(times_sampled=info.slot))
    counts = jax.eval_shape(lambda: AddInfo(jnp.int32(1), jnp.int32(2), jnp.uint32(3)))
    assert counts.added == jax.ShapeDtypeStruct((), jnp.int32)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("axes", [AxisType.Explicit, AxisType.Auto], ids=str)
@pytest.mark.parametrize("inside", [False, True])
def test_a_column_of_another_layout_takes_its_place_on_any_mesh(devices: int, axes: AxisType, *, inside: bool) -> None:
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(axes,), devices=jax.devices()[:devices])
    split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    info = SampleInfo(*(np.arange(16, dtype=dtype) for dtype in list(DTYPES.values())[:7]))
    new = np.arange(16)[::-1].astype(np.int32)

    def check() -> None:
        for home, other in ((split, whole), (whole, split)):
            placed = jax.device_put(info, home)
            for column in (new, jax.device_put(new, other), jax.device_put(new, home)):
                for replace in (
                    lambda own, one: own._replace(slot=one),
                    jax.jit(lambda own, one: own._replace(slot=one)),
                ):
                    got = replace(placed, column)
                    np.testing.assert_array_equal(np.asarray(got.slot), new)
                    np.testing.assert_array_equal(np.asarray(got.age), info.age)

    if inside:
        with jax.set_mesh(mesh):
            check()
    else:
        check()


def test_counts_that_another_process_holds_a_part_of_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    info = AddInfo(*(jnp.arange(2) + start for start in (1, 3, 5)))
    monkeypatch.setattr(type(info.words), "is_fully_addressable", property(lambda own: False))
    assert isinstance(info.evicted, jax.Array)
    monkeypatch.undo()
    assert isinstance(info.evicted, np.ndarray)
