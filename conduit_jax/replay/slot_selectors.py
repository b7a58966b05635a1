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
from conduit_jax.replay.reads import read_rows
from conduit_jax.replay.sum_tree import SumTree

Array = jax.Array
PyTree = Any


class SlotSelector(NamedTuple):
    """Pure functions over the selector's own state; slots out of range are left out everywhere.

    ``init(slots) -> state``
    ``insert(state, slots, priorities) -> state``: int32 and float32 ``(n,)``, oldest first, no two slots alike
    ``remove(state, slots) -> state``; a chained selector removes the first of ``slots`` only, which it must hold
    ``exchange(state, gone, slots, priorities) -> state``: ``remove`` and ``insert`` as one, for a selector not chained; ``gone``
    may hold a slot several times, and slots that are inserted
    ``update(state, slots, priorities) -> state``: live slots, no two alike, touched in this order
    ``select(state, live, high, low) -> (slots, probability)``: as many draws as there are pairs of uint32 words
    ``draws``: whether it uses the words. ``chained``: see ``remove``.
    """

    init: Callable[[int], PyTree]
    insert: Callable[[PyTree, Array, Array], PyTree]
    remove: Callable[[PyTree, Array], PyTree]
    exchange: Callable[[PyTree, Array, Array, Array], PyTree]
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
    exchange=lambda state, gone, slots, priorities: state,
    update=lambda state, slots, priorities: state,
    select=_select_uniform,
    draws=True,
)


def _chained(end: Callable[[InsertionList], Array]) -> SlotSelector:
    """The oldest or the newest insertion, by a linked list."""

    def select(state: InsertionList, live: LiveList, high: Array, low: Array) -> tuple[Array, Array]:
        return _certain(jnp.minimum(end(state), state.sentinel - 1), high)

    return SlotSelector(
        init=insertion_list.init,
        insert=lambda state, slots, priorities: insertion_list.insert(state, slots),
        remove=lambda state, slots: insertion_list.remove(state, slots[0], slots[0] < state.sentinel),
        exchange=lambda state, gone, slots, priorities: state,
        update=lambda state, slots, priorities: state,
        select=select,
        chained=True,
    )


def _heap(sign: float) -> SlotSelector:
    """The lowest of ``sign * priority``, ties by the least recent touch."""

    def in_line(state: OrderedTree, slots: Array) -> Array:
        return live_list.after(slots, ordered_tree.first(state))  # a change waits for the one before, up to its root

    def touch(state: OrderedTree, slots: Array, priorities: Array) -> OrderedTree:
        return ordered_tree.touch(state, in_line(state, slots), sign * priorities)

    def exchange(state: OrderedTree, gone: Array, slots: Array, priorities: Array) -> OrderedTree:
        return ordered_tree.exchange(state, in_line(state, gone), in_line(state, slots), sign * priorities)

    return SlotSelector(
        init=ordered_tree.init,
        insert=touch,
        remove=lambda state, slots: ordered_tree.remove(state, in_line(state, slots)),
        exchange=exchange,
        update=touch,
        select=lambda state, live, high, low: _certain(ordered_tree.first(state), high),
    )


def _prioritized(exponent: float, *, stratified: bool) -> SlotSelector:
    """Weights in a sum tree; uniform over all live items where no weight is positive."""

    def select(state: SumTree, live: LiveList, high: Array, low: Array) -> tuple[Array, Array]:
        drawn, everything = sum_tree.draw(state, high, low, stratified=stratified)
        weightless = everything <= 0
        uniform, evenly = _select_uniform((), live, high, low)
        slots = jnp.where(weightless, uniform, drawn)
        share = read_rows(state.levels, slots) / jnp.where(weightless, 1.0, everything)
        return slots, jnp.where(weightless, evenly, share)

    def put(state: SumTree, slots: Array, priorities: Array) -> SumTree:
        positive = (sum_tree.total(state) > 0).astype(jnp.int32)  # see `_heap`
        return sum_tree.update_unique(state, live_list.after(slots, positive), priorities, exponent)

    def exchange(state: SumTree, gone: Array, slots: Array, priorities: Array) -> SumTree:
        priorities = jnp.concatenate([jnp.zeros(gone.shape, jnp.float32), priorities])
        return sum_tree.update(state, jnp.concatenate([gone, slots]), priorities, exponent)

    return SlotSelector(
        init=sum_tree.init,
        insert=put,
        remove=lambda state, slots: put(state, slots, jnp.zeros(slots.shape, jnp.float32)),
        exchange=exchange,
        update=put,
        select=select,
        draws=True,
    )


__all__ = ["BEYOND", "SlotSelector", "make_slot_selector"]
