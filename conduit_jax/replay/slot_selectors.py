"""Which of independent slots are drawn or removed: values of one interface, each usable as sampler and as remover.

A selector keeps what it needs about the items and turns random words into slots. Two tables, or the sampler and the
remover of one, never share a state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.config import Epochs, Fifo, Lifo, MaxHeap, MinHeap, Prioritized, Sampler, Uniform
from conduit_jax.replay import insertion_list, live_list, ordered_tree, random_bits, sum_tree
from conduit_jax.replay.duplicates import BEYOND
from conduit_jax.replay.insertion_list import InsertionList
from conduit_jax.replay.live_list import LiveList
from conduit_jax.replay.ordered_tree import OrderedTree
from conduit_jax.replay.sum_tree import SumTree

Array = jax.Array
PyTree = Any


class SlotSelector(NamedTuple):
    """Pure functions over the selector's own state; slots out of range are left out everywhere.

    ``init(slots) -> state``
    ``insert(state, slots, priorities) -> state``: int32 and float32 ``(n,)``, oldest first, no two slots alike
    ``remove(state, slots) -> state``; a chained selector removes one slot at a time: ``(1,)``, and only what it holds
    ``update(state, slots, priorities) -> state``: live slots, no two alike, touched in this order
    ``select(state, live, high, low) -> (slots, probability)``: as many draws as there are pairs of uint32 words
    ``draws``: whether it uses the words. ``chained``: see ``remove``.
    """

    init: Callable[[int], PyTree]
    insert: Callable[[PyTree, Array, Array], PyTree]
    remove: Callable[[PyTree, Array], PyTree]
    update: Callable[[PyTree, Array, Array], PyTree]
    select: Callable[[PyTree, LiveList, Array, Array], tuple[Array, Array]]
    draws: bool = False
    chained: bool = False


def make_slot_selector(sampler: Sampler, *, stratified: bool) -> SlotSelector:
    """Return the selector that a configuration names; ``stratified`` False makes a prioritized one's draws independent."""
    match sampler:
        case Uniform():
            return _UNIFORM
        case Epochs():
            return _UNIFORM._replace(select=_select_undrawn)
        case Fifo():
            return _chained(insertion_list.oldest)
        case Lifo():
            return _chained(insertion_list.newest)
        case MinHeap():
            return _heap(1.0)
        case MaxHeap():
            return _heap(-1.0)
        case Prioritized():
            return _prioritized(float(sampler.exponent), stratified=stratified and sampler.stratified)


def _certain(slot: Array, words: Array) -> tuple[Array, Array]:
    """Return the one slot for every draw, with probability 1."""
    return jnp.broadcast_to(slot, words.shape), jnp.ones(words.shape, jnp.float32)


def _select_uniform(state: PyTree, live: LiveList, high: Array, low: Array) -> tuple[Array, Array]:
    slots = live_list.nth(live, random_bits.below(high, live.size))
    return slots, jnp.broadcast_to(1.0 / jnp.maximum(live.size, 1).astype(jnp.float32), high.shape)


def _select_undrawn(state: PyTree, live: LiveList, high: Array, low: Array) -> tuple[Array, Array]:
    """Draw among what this epoch has left; the probability is that of this draw, given the epoch so far."""
    left = live.size - live.drawn
    slots = live_list.nth(live, live.drawn + random_bits.below(high, left))
    return slots, jnp.broadcast_to(1.0 / jnp.maximum(left, 1).astype(jnp.float32), high.shape)


_UNIFORM = SlotSelector(
    init=lambda slots: (),
    insert=lambda state, slots, priorities: state,
    remove=lambda state, slots: state,
    update=lambda state, slots, priorities: state,
    select=_select_uniform,
    draws=True,
)


def _chained(end: Callable[[InsertionList], Array]) -> SlotSelector:
    """The oldest or the newest insertion, by a linked list."""

    def insert(state: InsertionList, slots: Array, priorities: Array) -> InsertionList:
        if slots.shape[0] > 1:
            return insertion_list.insert(state, slots)
        return insertion_list.append(state, slots[0], slots[0] < state.newer.shape[0] - 1)

    def select(state: InsertionList, live: LiveList, high: Array, low: Array) -> tuple[Array, Array]:
        return _certain(jnp.minimum(end(state), state.newer.shape[0] - 2), high)

    return SlotSelector(
        init=insertion_list.init,
        insert=insert,
        remove=lambda state, slots: insertion_list.remove(state, slots[0], slots[0] < state.newer.shape[0] - 1),
        update=lambda state, slots, priorities: state,
        select=select,
        chained=True,
    )


def _heap(sign: float) -> SlotSelector:
    """The lowest of ``sign * priority``, ties by the least recent touch."""

    def touch(state: OrderedTree, slots: Array, priorities: Array) -> OrderedTree:
        return ordered_tree.touch(state, slots, sign * priorities)

    return SlotSelector(
        init=ordered_tree.init,
        insert=touch,
        remove=ordered_tree.remove,
        update=touch,
        select=lambda state, live, high, low: _certain(ordered_tree.first(state), high),
    )


def _prioritized(exponent: float, *, stratified: bool) -> SlotSelector:
    """Weights in a sum tree; uniform over all live items where no weight is positive."""

    def select(state: SumTree, live: LiveList, high: Array, low: Array) -> tuple[Array, Array]:
        everything = sum_tree.total(state)
        weightless = everything <= 0
        drawn = sum_tree.draw(state, high, low, stratified=stratified)
        uniform, evenly = _select_uniform((), live, high, low)
        weight = state.levels[0].at[drawn].get(mode="promise_in_bounds")
        share = weight / jnp.where(weightless, 1.0, everything)
        return jnp.where(weightless, uniform, drawn), jnp.where(weightless, evenly, share)

    return SlotSelector(
        init=sum_tree.init,
        insert=lambda state, slots, priorities: sum_tree.update_unique(state, slots, priorities, exponent),
        remove=lambda state, slots: sum_tree.update_unique(state, slots, jnp.zeros(slots.shape, jnp.float32), exponent),
        update=lambda state, slots, priorities: sum_tree.update_unique(state, slots, priorities, exponent),
        select=select,
        draws=True,
    )


__all__ = ["BEYOND", "SlotSelector", "make_slot_selector"]
