"""Which items are drawn: values of one interface over the slots of a ring.

A selector keeps what it needs about items (nothing, or a tree of priorities) and turns random bits into slots. It knows
neither storage nor limiter. ``Selection`` reports what the draw was made from, as of the draw.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.config import Prioritized, Sampler
from conduit_jax.replay import random_bits, ring, sum_tree
from conduit_jax.replay.piecewise import DRAWN, piecewise, renewed, zero_of
from conduit_jax.replay.reads import read_rows
from conduit_jax.replay.ring import RingState
from conduit_jax.types import SampleInfo

Array = jax.Array
PyTree = Any


class Geometry(NamedTuple):
    """The static shape of a partition: ``lanes`` rings of ``length`` steps."""

    lanes: int
    length: int

    @property
    def slots(self) -> int:
        return self.lanes * self.length


class Selection(NamedTuple):
    """Drawn ``slots`` int32 ``(n,)`` with their ``probability`` and raw ``priority``, float32, ``()`` where all are alike."""

    slots: Array
    probability: Array
    priority: Array


class Selector(NamedTuple):
    """Pure functions; ``slots`` out of range are left out by ``insert`` and ``update``.

    ``init(geometry) -> state``
    ``insert(state, slots, priorities | None, present) -> (state, replaced)``: new items, ``present`` bool marks the real ones
    ``select(state, geometry, ring, key, n) -> Selection``
    ``update(state, slots, priorities) -> state``
    """

    init: Callable[[Geometry], PyTree]
    insert: Callable[..., tuple[PyTree, Array]]
    select: Callable[[PyTree, Geometry, RingState, Array, int], Selection]
    update: Callable[[PyTree, Array, Array], PyTree]


def make_selector(sampler: Sampler) -> Selector:
    """Return the selector a sampler's configuration names."""
    return _prioritized(sampler) if isinstance(sampler, Prioritized) else _UNIFORM


@partial(jax.jit, static_argnums=(0, 3), inline=True)
def _draw_uniform(geometry: Geometry, steps: RingState, key: Array, n: int) -> Array:
    """Return ``n`` slots int32 of live items."""
    key = random_bits.key_words(key)

    def few(number: Array) -> Array:
        own = renewed(steps, number)
        return _uniform_slots(geometry, own, random_bits.bits_at(renewed(key, number), number))

    return piecewise(few, key, count=n, piece=DRAWN)


def _uniform_slots(geometry: Geometry, steps: RingState, words: Array) -> Array:
    size = ring.live_items(steps, geometry.lanes)
    rank = random_bits.below(words, size)
    lane, time = ring.nth_live(steps, geometry.length, geometry.lanes, rank)
    return settled(lane * geometry.length + time, geometry, size)


def settled(slots: Array, geometry: Geometry, size: Array) -> Array:
    """Return ``slots`` int32 as they are, computed once for all their readers.

    Every gather that reads them would draw the random bits again, in a loop that is not vectorised, and XLA on CPU drops
    an ``optimization_barrier`` before it fuses (jax 0.10.2). It never repeats a division whose divisor it does not know:
    ``size`` int32 is at most ``geometry.slots``, so the remainder changes nothing.
    """
    return jax.lax.rem(slots, jnp.maximum(size, jnp.int32(geometry.slots)))


class Table(NamedTuple):
    """What is the same for all items of a draw: how many there were to draw from, int32, and whether they were enough, bool."""

    size: Array
    ready: Array


@partial(jax.jit, static_argnums=1, inline=True)
def describe(
    steps: RingState, geometry: Geometry, selection: Selection, table: Table, versions: Array, weights: Array
) -> SampleInfo:
    """Return where the drawn items came from, ``versions`` uint32 ``(n,)`` and importance ``weights`` float32 included."""
    slots, probability, priority = selection
    alike = {"probability": probability, "priority": priority, "weight": weights, "policy_version": versions}
    own_columns = {name: column for name, column in alike.items() if column.ndim}

    def few(_: Array, slot: Array, *columns: Array) -> Array:
        length, given = np.int32(geometry.length), alike | dict(zip(own_columns, columns, strict=True))
        own, time = ring.at_lane(renewed(steps, slot), jax.lax.div(slot, length)), jax.lax.rem(slot, length)
        generation, age = ring.generation(own, time), ring.age(own, geometry.length, time)
        return SampleInfo(
            slot=slot, generation=generation, age=age, table_size=table.size, valid=table.ready, **given
        ).words

    columns = (*SampleInfo._fields[:7], "weight", "valid")

    words = piecewise(few, slots, slots, *own_columns.values(), count=slots.shape[0])
    return SampleInfo.of_words(words, columns)


def _uniform_insert(state: PyTree, slots: Array, priorities: Array | None, present: Array) -> tuple[PyTree, Array]:
    return state, jnp.zeros((), jnp.uint32)


def _uniform_select(state: PyTree, geometry: Geometry, steps: RingState, key: Array, n: int) -> Selection:
    slots = _draw_uniform(geometry, steps, key, n)
    size = jnp.maximum(ring.live_items(steps, geometry.lanes), 1)
    return Selection(slots, 1.0 / size.astype(jnp.float32), jnp.ones((), jnp.float32))


_UNIFORM = Selector(lambda geometry: (), _uniform_insert, _uniform_select, lambda state, slots, priorities: state)


class PrioritizedState(NamedTuple):
    """``tree`` over all slots; ``max_priority`` float32, the highest ever given, at first 1."""

    tree: sum_tree.SumTree
    max_priority: Array


def usable(priorities: Array) -> Array:
    """Return which priorities may be stored: finite and not negative."""
    return jnp.isfinite(priorities) & (priorities >= 0)


def _prioritized(sampler: Prioritized) -> Selector:
    exponent = float(sampler.exponent)

    def init(geometry: Geometry) -> PrioritizedState:
        return PrioritizedState(sum_tree.init(geometry.slots), jnp.ones((), jnp.float32))

    def insert(
        state: PrioritizedState, slots: Array, priorities: Array | None, present: Array
    ) -> tuple[PrioritizedState, Array]:
        highest = state.max_priority + zero_of(slots).astype(jnp.float32)  # little of an insert is ready at once
        given = jnp.broadcast_to(highest, slots.shape) if priorities is None else priorities.astype(jnp.float32)
        good = usable(given)
        values = jnp.where(good, given, highest)
        highest = jnp.maximum(highest, jnp.max(jnp.where(present, values, 0), initial=0.0))
        replaced = jnp.sum(present & ~good, dtype=jnp.uint32)
        return PrioritizedState(sum_tree.update_unique(state.tree, slots, values, exponent), highest), replaced

    def select(state: PrioritizedState, geometry: Geometry, steps: RingState, key: Array, n: int) -> Selection:
        words = random_bits.shared_bits(key, 2 * n)
        high, low = words[:n], words[n:]
        drawn, everything = sum_tree.draw(state.tree, high, low, stratified=sampler.stratified)
        weightless = everything <= 0
        slots = jnp.where(weightless, _uniform_slots(geometry, steps, high), drawn)
        slots = settled(slots, geometry, ring.live_items(steps, geometry.lanes))
        priority = read_rows(state.tree.priorities, slots)
        size = jnp.maximum(ring.live_items(steps, geometry.lanes), 1).astype(jnp.float32)
        share = sum_tree.weigh(priority, exponent) / jnp.where(weightless, 1.0, everything)
        return Selection(slots, jnp.where(weightless, 1.0 / size, share), priority)

    def update(state: PrioritizedState, slots: Array, priorities: Array) -> PrioritizedState:
        in_range = (slots >= 0) & (slots < state.tree.priorities.shape[0])
        highest = jnp.maximum(state.max_priority, jnp.max(jnp.where(in_range, priorities, 0), initial=0.0))
        return PrioritizedState(sum_tree.update(state.tree, slots, priorities, exponent), highest)

    return Selector(init, insert, select, update)
