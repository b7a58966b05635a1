"""The draws' random bits are those of ``jax.random``, and mapping them below a bound is exact."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit_jax.errors import SpecError
from conduit_jax.replay import random_bits
from tests.replay.reference import chi_square_tail

words = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 0xFFFF, 0x10000, 0x10001, 2**31, 2**32 - 1])
bounds = st.integers(0, 2**31 - 1) | st.sampled_from([0, 1, 2, 0xFFFF, 0x10000, 0x10001, 2**30, 2**31 - 1])


@cache
def jitted_bits(count: int):
    ours = jax.jit(partial(random_bits.bits, count=count))
    theirs = jax.jit(lambda key: jax.random.bits(key, (count,), jnp.uint32))
    return ours, theirs


@pytest.mark.parametrize("count", [1, 2, 5, 1000])
@given(seed=st.integers(0, 2**31 - 1))
def test_bits_are_those_of_jax_random(count: int, seed: int) -> None:
    ours, theirs = jitted_bits(count)
    key = jax.random.key(seed, impl="threefry2x32")
    expected = np.asarray(theirs(key))
    assert expected.dtype == np.uint32
    np.testing.assert_array_equal(ours(key), expected)
    np.testing.assert_array_equal(ours(jax.random.key_data(key)), expected)


fold = jax.jit(random_bits.fold)
fold_in = jax.jit(lambda key, number: jax.random.key_data(jax.random.fold_in(key, number)))
below = jax.jit(random_bits.below)


@given(seed=st.integers(0, 2**31 - 1), number=words)
def test_folding_is_that_of_jax_random(seed: int, number: int) -> None:
    key = jax.random.key(seed, impl="threefry2x32")
    expected = fold_in(key, np.uint32(number))
    folded = fold(key, np.uint32(number))
    assert folded.dtype == jnp.uint32
    np.testing.assert_array_equal(folded, expected)


def test_raw_and_typed_keys_have_the_same_words() -> None:
    key = jax.random.key(7, impl="threefry2x32")
    assert [int(word) for word in random_bits.key_words(key)] == np.asarray(jax.random.key_data(key)).tolist()


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_another_generators_key_is_refused_with_the_way_out(impl: str) -> None:
    with pytest.raises(SpecError, match="threefry2x32") as caught:
        random_bits.bits(jax.random.key(0, impl=impl), 4)
    assert "(4,)" in str(caught.value)


def test_a_batch_of_keys_is_refused() -> None:
    with pytest.raises(SpecError, match="one threefry2x32 key"):
        random_bits.bits(jax.random.split(jax.random.key(0), 3), 4)


@given(pairs=st.lists(st.tuples(words, bounds), min_size=1, max_size=64))
def test_below_is_the_exact_product_of_big_integers(pairs: list[tuple[int, int]]) -> None:
    padded = pairs + [(0, 1)] * (64 - len(pairs))
    word, bound = (np.array(column) for column in zip(*padded, strict=True))
    got = below(word.astype(np.uint32), bound.astype(np.int32))
    assert got.dtype == jnp.int32
    assert got.tolist() == [w * b >> 32 for w, b in padded]


def test_below_reaches_every_value_alike() -> None:
    bound, count = 37, 50_000
    drawn = random_bits.below(random_bits.bits(jax.random.key(3), count), jnp.int32(bound))
    counts = np.bincount(drawn, minlength=bound)
    assert counts.shape == (bound,)
    assert chi_square_tail(counts, np.full(bound, count / bound)) > 1e-3


@given(word=words)
def test_the_unit_interval_is_24_exact_bits_and_excludes_one(word: int) -> None:
    got = random_bits.unit_interval(np.array([word], np.uint32))
    assert got.dtype == jnp.float32
    assert float(got[0]) == (word >> 8) / 2**24 < 1


def test_bits_do_not_depend_on_x64() -> None:
    raw = np.array([1, 2], np.uint32)
    expected = np.asarray(random_bits.bits(jnp.asarray(raw), 9))
    with jax.enable_x64(True):
        wide = random_bits.bits(jnp.asarray(raw), 9)
        assert wide.dtype == jnp.uint32
        folded = random_bits.fold(jnp.asarray(raw), 5)
        assert folded.dtype == jnp.uint32
    np.testing.assert_array_equal(wide, expected)
