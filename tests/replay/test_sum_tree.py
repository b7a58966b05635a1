"""The tree's sums, its weights and what it draws, against exact arithmetic."""

from __future__ import annotations

import itertools
import math
from functools import cache, partial
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit_jax.replay import random_bits, sum_tree
from conduit_jax.replay.sum_tree import FANOUT, SumTree
from tests.replay.reference import chi_square_tail, priority_probabilities

UPDATES = 6
exact_priorities = st.sampled_from([0.0, -0.0, 0.25, 1.0, 3.0, 1e-6, 7e5]) | st.floats(
    0, 1e6, width=32, allow_subnormal=False
)

update = jax.jit(sum_tree.update, static_argnums=3)
weigh = jax.jit(sum_tree.weigh, static_argnums=1)
set_weights = jax.jit(sum_tree.set_weights, static_argnums=1)
keep_last = jax.jit(sum_tree._keep_last)
one_draw = jax.jit(
    lambda *tree_and_words, stratified: sum_tree.draw(*tree_and_words, stratified=stratified)[0],
    static_argnames="stratified",
)


def parents(children: np.ndarray) -> np.ndarray:
    """What the nodes above ``children`` must be, bit for bit: the float32 sum of eight, left to right."""
    total = children[0::FANOUT].copy()
    for child in range(1, FANOUT):
        total = total + children[child::FANOUT]
    return total


def levels_of(tree: SumTree) -> list[np.ndarray]:
    starts = sum_tree.level_starts(len(tree.priorities))
    assert starts[-1] == len(tree.levels)
    return np.split(np.asarray(tree.levels), starts[1:-1])


def assert_consistent(tree: SumTree, exponent: float) -> None:
    """Every level is the sum of the one below, and the lowest the weights of the priorities."""
    levels, slots = levels_of(tree), len(tree.priorities)
    assert levels[0][:slots].tobytes() == np.asarray(weigh(tree.priorities, exponent)).tobytes()
    assert not levels[0][slots:].any()
    for below, above in itertools.pairwise(levels):
        expected = parents(below)
        assert (above[: len(expected)] == expected).all()
        assert not above[len(expected) :].any()


def grow(priorities: np.ndarray, exponent: float) -> SumTree:
    tree = sum_tree.init(len(priorities))
    return update(tree, jnp.arange(len(priorities), dtype=jnp.int32), jnp.asarray(priorities, jnp.float32), exponent)


def tree_over(weights: np.ndarray) -> SumTree:
    """The tree of ``weights`` at exponent 1, built on the host."""
    levels, slots = [], len(weights)
    for size in sum_tree.level_sizes(slots):
        padded = np.zeros(-(-size // FANOUT) * FANOUT, np.float32)
        padded[:size] = weights if not levels else parents(levels[-1])[:size]
        levels.append(padded)
    return SumTree(jnp.asarray(np.concatenate(levels)), jnp.asarray(weights))


@pytest.mark.parametrize(("slots", "exponent"), [(1, 0.6), (2, 1.0), (5, 0.0), (16, 0.6), (37, 1.0)])
@given(data=st.data())
def test_every_parent_is_the_sum_of_its_children_and_the_last_of_equal_slots_wins(
    slots: int, exponent: float, data: st.DataObject
) -> None:
    tree = sum_tree.init(slots)
    expected = np.zeros(slots, np.float32)
    beyond = st.integers(slots, 2**31 - 1) | st.integers(-(2**31), -1)
    entry = st.tuples(st.integers(0, slots - 1) | beyond, exact_priorities)
    for batch in data.draw(st.lists(st.lists(entry, min_size=UPDATES, max_size=UPDATES), max_size=4)):
        for slot, priority in batch:
            if 0 <= slot < slots:
                expected[slot] = priority
        where, what = zip(*batch, strict=True)
        tree = update(tree, jnp.array(where, jnp.int32), jnp.array(what, jnp.float32), exponent)
        np.testing.assert_array_equal(np.asarray(tree.priorities).view(np.uint32), expected.view(np.uint32))
        assert_consistent(tree, exponent)
    assert (tree.levels.dtype, tree.priorities.dtype) == (jnp.float32, jnp.float32)
    exact = math.fsum(float(p) ** exponent for p in expected if p > 0)
    assert float(sum_tree.total(tree)) == pytest.approx(exact, rel=1e-6)


@given(slots=st.lists(st.integers(0, 9) | st.integers(16, 2**31 - 1), min_size=UPDATES, max_size=UPDATES))
def test_of_equal_slots_only_the_last_is_written_whatever_the_backends_scatter_does(slots: list[int]) -> None:
    kept = keep_last(jnp.array([slot if slot < 16 else 2**31 - 1 for slot in slots], jnp.int32)).tolist()
    for index, (before, after) in enumerate(zip(slots, kept, strict=True)):
        overruled = before < 16 and before in slots[index + 1 :]
        assert after >= 16 if overruled or before >= 16 else after == before


def test_a_long_history_leaves_no_rounding_behind() -> None:
    slots, rng = 64, np.random.default_rng(0)
    tree = sum_tree.init(slots)
    for _ in range(200):
        where = rng.integers(0, slots, 32).astype(np.int32)
        tree = update(tree, where, (10.0 ** rng.uniform(-6, 6, 32)).astype(np.float32), 0.6)
    assert_consistent(tree, 0.6)
    tree = update(tree, np.arange(slots, dtype=np.int32), np.zeros(slots, np.float32), 0.6)
    assert not np.asarray(tree.levels).any()


@given(slots=st.integers(1, 2**30))
def test_every_level_holds_one_node_for_eight_below_up_to_a_single_root(slots: int) -> None:
    sizes = sum_tree.level_sizes(slots)
    assert sizes[0] == slots
    assert sizes[-1] == 1
    assert len(sizes) >= 2
    assert all(FANOUT * (above - 1) < below <= FANOUT * above for below, above in itertools.pairwise(sizes))


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 2.0])
def test_a_weight_has_the_same_bits_in_every_batch_and_shape(exponent: float) -> None:
    rng = np.random.default_rng(1)
    values = (10.0 ** rng.uniform(-8, 8, 1000)).astype(np.float32)
    values[::7] = 0
    together = np.asarray(weigh(values, exponent))
    expected = np.where(values > 0, values.astype(np.float64) ** exponent, 0)
    np.testing.assert_allclose(together, expected, rtol=3e-6)
    for count in (*range(1, 41), 127, 128, 129) if exponent == 0.6 else (1, 3, 17, 40):
        for start in (0, 333, 600):
            alone = np.asarray(weigh(values[start : start + count], exponent))
            assert alone.tobytes() == together[start : start + count].tobytes(), (start, count)
    for shape in ((25, 40), (500, 2), (2, 4, 125)):
        assert np.asarray(weigh(values.reshape(shape), exponent)).tobytes() == together.tobytes()
    mapped = jax.jit(jax.vmap(partial(sum_tree.weigh, exponent=exponent)))(values.reshape(200, 5))
    assert np.asarray(mapped).tobytes() == together.tobytes()


@cache
def draws_of(count: int, batches: int, stratified: bool):
    """``(tree, key) -> slots (batches, count)``."""

    @jax.jit
    def draw(tree: SumTree, key: jax.Array) -> jax.Array:
        words = random_bits.bits(key, 2 * count * batches).reshape(batches, 2, count)
        one = partial(sum_tree.draw, stratified=stratified)
        return jax.vmap(lambda high_low: one(tree, high_low[0], high_low[1])[0])(words)

    return draw


@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize(("slots", "exponent"), [(37, 0.0), (37, 0.6), (3, 1.0)])
def test_draws_follow_the_exact_probabilities_and_never_reach_a_zero(
    slots: int, exponent: float, stratified: bool
) -> None:
    rng = np.random.default_rng(slots)
    priorities = rng.uniform(0.1, 4, slots).astype(np.float32)
    priorities[::3] = 0
    drawn = draws_of(100, 400, stratified)(grow(priorities, exponent), jax.random.key(11))
    counts = np.bincount(np.asarray(drawn).reshape(-1), minlength=slots)
    exact = priority_probabilities(dict(enumerate(priorities.tolist())), exponent)
    probabilities = np.array([exact[slot] for slot in range(slots)])
    assert counts[::3].sum() == 0
    assert len(counts) == slots
    alive = priorities > 0
    if alive.sum() > 1:
        assert chi_square_tail(counts[alive], drawn.size * probabilities[alive]) > 1e-3


def test_a_stratified_batch_takes_its_share_from_every_upper_subtree() -> None:
    count, slots = 64, FANOUT**2
    priorities = np.random.default_rng(5).uniform(0.1, 4, slots)
    drawn = np.asarray(draws_of(count, 50, True)(grow(priorities, 1.0), jax.random.key(2)))
    expected = count * priorities.reshape(-1, FANOUT).sum(1) / priorities.sum()
    for batch in drawn:
        counts = np.bincount(batch // FANOUT, minlength=slots // FANOUT)
        assert (np.abs(counts - expected) < 2).all()


@given(data=st.data())
def test_no_word_whatever_reaches_a_slot_of_weight_zero(data: st.DataObject) -> None:
    edges = st.sampled_from([0, 1, 255, 256, 2**31, 2**32 - 257, 2**32 - 256, 2**32 - 1]) | st.integers(0, 2**32 - 1)
    alive = data.draw(st.sets(st.integers(0, 36), min_size=1, max_size=4))
    priorities = np.zeros(37, np.float32)
    for slot in alive:
        priorities[slot] = data.draw(st.sampled_from([2.0**-20, 0.3, 1.0, 1.7, 2.0**20]))
    words = np.array(data.draw(st.lists(st.tuples(edges, edges), min_size=4, max_size=4)), np.uint32)
    for stratified in (True, False):
        drawn = one_draw(grow(priorities, 0.6), words[:, 0], words[:, 1], stratified=stratified)
        assert set(drawn.tolist()) <= alive


def test_four_million_equal_items_are_drawn_independently() -> None:
    leaves, count = 2**22, 2**19
    tree = tree_over(np.ones(leaves, np.float32))
    words = random_bits.bits(jax.random.key(0), 2 * count)
    reached = np.zeros(leaves, bool)
    reached[np.asarray(one_draw(tree, words[:count], words[count:], stratified=False))] = True
    share = count / leaves
    expected = leaves * -math.expm1(-share)
    deviation = math.sqrt(leaves * math.exp(-share) * (1 - (1 + share) * math.exp(-share)))
    assert abs(reached.sum() - expected) < 5 * deviation


def test_a_draw_has_more_choices_than_one_float32() -> None:
    """Next to one item of 1023/1024 of all weight, 24 bits would reach but every 256th of four million others."""
    depth, count = 22, 2**12
    weights = np.ones(2**depth, np.float32)
    weights[0] = 1023.0 * 2**depth
    tree = tree_over(weights)
    words = random_bits.bits(jax.random.key(1), 2 * count)
    high, low = words[:count] | np.uint32(1023 << 22), words[count:]  # the last 1/1024 of the unit interval
    drawn = np.asarray(one_draw(tree, high, low, stratified=False))
    light = drawn[drawn > 0]
    assert len(light) > count - 10
    counts = np.bincount(light % 256 // 16, minlength=16)
    assert chi_square_tail(counts, np.full(16, len(light) / 16)) > 1e-3


def test_weights_too_large_to_add_up_are_capped_and_still_never_reach_a_zero() -> None:
    priorities = np.array([0, 3e38, 0, 3e38, 2e38, 0, 3e38, 0], np.float32)
    for exponent in (0.6, 1.0, 2.0):
        tree = grow(priorities, exponent)
        assert np.isfinite(tree.levels).all()
        drawn = np.asarray(draws_of(64, 4, False)(tree, jax.random.key(3)))
        assert set(drawn.reshape(-1).tolist()) == {1, 3, 4, 6}


def test_slots_below_and_beyond_the_range_are_left_out() -> None:
    """A negative index would count from the end and give another item the priority."""
    tree = grow(np.arange(1.0, 21.0).astype(np.float32), 1.0)
    slots = np.array([-1, -20, -21, 20, 2**31 - 1, -(2**31), 3], np.int32)
    given = np.full(7, 9.0, np.float32)
    for change in (sum_tree.update, sum_tree.update_unique):
        after = jax.jit(change, static_argnums=3)(tree, slots, given, 1.0)
        want = np.arange(1.0, 21.0)
        want[3] = 9.0
        np.testing.assert_array_equal(after.priorities, want)
        assert_consistent(after, 1.0)


def test_x64_changes_no_bit_of_a_tree_and_its_draws() -> None:
    priorities = np.linspace(0, 5, 300).astype(np.float32)
    slots, words = np.arange(0, 300, 3, dtype=np.int32), np.asarray(random_bits.bits(jax.random.key(0), 128))

    def everything() -> list[np.ndarray]:
        tree = grow(priorities, 0.6)
        tree = jax.jit(sum_tree.update, static_argnums=3)(tree, slots, priorities[slots][::-1], 0.6)
        drawn = jax.jit(sum_tree.draw, static_argnames="stratified")(tree, words[:64], words[64:], stratified=True)
        return [np.asarray(leaf) for leaf in (*tree, *drawn, sum_tree.total(tree))]

    narrow = everything()
    assert narrow[-1] == narrow[-2] > 0, "a draw's total is the tree's"
    with jax.enable_x64(True):
        wide = everything()
    for one, other in zip(wide, narrow, strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()


def test_an_update_of_no_slots_changes_nothing() -> None:
    tree = grow(np.asarray([1.0, 2.0, 0.5], np.float32), 0.6)
    same = update(tree, jnp.zeros((0,), jnp.int32), jnp.zeros((0,), jnp.float32), 0.6)
    assert jax.tree.all(jax.tree.map(np.array_equal, same, tree))


@pytest.mark.parametrize("slots", [5, 64, 700, 5000])
def test_slot_by_slot_and_level_by_level_make_the_same_tree(slots: int) -> None:
    """The first is what happens on CPU, the second elsewhere and where updates are batched."""
    draws, levels = np.random.default_rng(slots), sum_tree.init(slots).levels
    by_levels = jax.jit(partial(sum_tree._set_by_levels, slots))
    for _ in range(UPDATES):
        where = draws.permutation(np.arange(-3, slots + 3))[:37].astype(np.int32)
        weights = draws.lognormal(size=len(where)).astype(np.float32)
        by_slots = set_weights(levels, slots, where, weights)
        assert np.asarray(by_slots).tobytes() == np.asarray(by_levels(levels, where, weights)).tobytes()
        levels = by_slots


def test_batched_updates_make_the_trees_that_single_ones_do() -> None:
    draws = np.random.default_rng(8)
    trees = [grow(draws.uniform(size=300).astype(np.float32), 0.6) for _ in range(3)]
    where = draws.permuted(np.tile(np.arange(300, dtype=np.int32), (3, 1)), axis=1)[:, :40]
    given_now = draws.uniform(size=(3, 40)).astype(np.float32)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    batched = jax.jit(jax.vmap(lambda tree, slots, new: sum_tree.update(tree, slots, new, 0.6)))(
        stacked, where, given_now
    )
    for number, tree in enumerate(trees):
        single, own = (
            update(tree, where[number], given_now[number], 0.6),
            jax.tree.map(itemgetter(number), batched),
        )
        assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(single, own, strict=True))
