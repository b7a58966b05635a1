"""The tournament over slots: first by key, then by touch, whatever the history and however long it is."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conduit_jax.replay import insertion_list, ordered_tree
from conduit_jax.replay.duplicates import BEYOND, in_order, keep_last, occurrences

WIDTH = 4
SIZES = [1, 8, 9, 70]
keys = st.sampled_from([0.0, 0.5, 1.0, 1.0, -2.0, 3.4e38])


@cache
def functions() -> Any:
    return tuple(jax.jit(one) for one in (ordered_tree.touch, ordered_tree.remove, ordered_tree.exchange))


@cache
def list_functions() -> Any:
    return jax.jit(insertion_list.insert), jax.jit(insertion_list.remove)


def slots_up_to(size: int) -> Any:
    return st.lists(st.integers(0, size - 1) | st.just(int(BEYOND)), min_size=WIDTH, max_size=WIDTH)


@pytest.mark.parametrize("size", SIZES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_first_is_the_lowest_key_touched_least_recently(size: int, data: st.DataObject) -> None:
    touch, remove, exchange = functions()
    tree, model, clock = ordered_tree.init(size), {}, 0
    # The counter starts anywhere, also where its low word is about to wrap.
    start = data.draw(st.sampled_from([0, 2**31 - 3, 2**32 - 5, 2**40 - 1]))
    tree = tree._replace(clock=jnp.array([start >> 32, start % 2**32], jnp.uint32))
    for step in data.draw(st.lists(st.sampled_from(["touch", "touch", "remove", "exchange"]), max_size=12)):
        slots, gone = data.draw(slots_up_to(size)), data.draw(slots_up_to(size))
        values = data.draw(st.lists(keys, min_size=WIDTH, max_size=WIDTH))
        given_slots, given_gone = jnp.array(slots, jnp.int32), jnp.array(gone, jnp.int32)
        if step == "remove":
            tree = remove(tree, given_gone)
        elif step == "touch":
            tree = touch(tree, given_slots, jnp.array(values, jnp.float32))
        else:
            tree = exchange(tree, given_gone, given_slots, jnp.array(values, jnp.float32))
        for slot in gone if step != "touch" else []:
            model.pop(slot, None)
        for slot, value in zip(slots, values, strict=True) if step != "remove" else []:
            clock += 1
            if slot < size:
                model[slot] = (np.float32(value), clock)
        if model:
            assert int(ordered_tree.first(tree)) == min(model, key=model.__getitem__)


def test_popping_sorts_stably() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 40, 500).astype(np.float32)
    tree = ordered_tree.touch(ordered_tree.init(500), jnp.arange(500, dtype=jnp.int32), jnp.asarray(values))

    def pop(tree: ordered_tree.OrderedTree, _: None) -> Any:
        slot = ordered_tree.first(tree)
        return ordered_tree.remove(tree, slot[None]), slot

    _, order = jax.jit(lambda tree: jax.lax.scan(pop, tree, None, length=500))(tree)
    np.testing.assert_array_equal(order, np.argsort(values, kind="stable"))


def test_touches_pass_2_to_the_32() -> None:
    """The order of equal keys is that of their touches on both sides of the wrap of the low word."""
    tree = ordered_tree.init(20)._replace(clock=jnp.array([0, 2**32 - 7], jnp.uint32))
    for slot in range(19, -1, -1):
        tree = functions()[0](tree, jnp.array([slot] * WIDTH), jnp.ones(WIDTH))
    for slot in range(19, -1, -1):
        assert int(ordered_tree.first(tree)) == slot
        tree = functions()[1](tree, jnp.array([slot] * WIDTH))
    assert tree.clock.tolist() == [1, 20 * WIDTH - 7]


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_the_insertion_list_keeps_the_order_of_insertion(data: st.DataObject) -> None:
    size, (insert, remove) = 6, list_functions()
    items, model, yes = insertion_list.init(size), [], jnp.asarray(True)
    for _ in range(data.draw(st.integers(1, 12))):
        free = [slot for slot in range(size) if slot not in model]
        if data.draw(st.booleans()) and free:
            new = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=3))
            new = data.draw(st.permutations([*new, *[int(BEYOND)] * (3 - len(new))]))
            items = insert(items, jnp.array(new, jnp.int32))
            model += [slot for slot in new if slot != BEYOND]
        elif model:
            gone = data.draw(st.sampled_from(model))
            items = remove(items, jnp.int32(gone), yes)
            model.remove(gone)
        newer, older = np.asarray(items.neighbours)
        for links, wanted in ((newer, model), (older, model[::-1])):
            walked, node = [], links[size]
            while node != size:
                walked.append(int(node))
                node = links[node]
            assert walked == wanted
        assert int(insertion_list.oldest(items)) == (model[0] if model else size)
        assert int(insertion_list.newest(items)) == (model[-1] if model else size)
        np.testing.assert_array_equal(remove(items, jnp.int32(0), ~yes).neighbours, items.neighbours)


@settings(max_examples=50, deadline=None)
@given(slots=st.lists(st.integers(0, 4), min_size=5, max_size=5))
def test_of_equal_slots_the_last_counts(slots: list[int]) -> None:
    given_slots = jnp.array(slots, jnp.int32)
    wanted = [slot if slot not in slots[index + 1 :] else int(BEYOND) for index, slot in enumerate(slots)]
    assert keep_last(given_slots).tolist() == wanted
    written = jnp.zeros(5, jnp.int32).at[in_order(given_slots)].set(jnp.arange(5), mode="drop")
    assert all(int(written[slot]) == index for index, slot in enumerate(wanted) if slot != BEYOND)
    assert occurrences(given_slots).tolist() == [slots[: index + 1].count(slot) for index, slot in enumerate(slots)]
