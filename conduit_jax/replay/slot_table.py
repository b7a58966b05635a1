"""The small state of independent slots: who lives, in which order, and how items come and go one after another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.replay import live_list
from conduit_jax.replay.duplicates import BEYOND, keep_last, occurrences
from conduit_jax.replay.live_list import LiveList
from conduit_jax.replay.slot_selectors import SlotSelector

Array = jax.Array
PyTree = Any


class Rules(NamedTuple):
    """The static part of a table. ``max_times_sampled`` 0: no bound. ``epochs``: an epoch draws every item once."""

    capacity: int
    sampler: SlotSelector
    remover: SlotSelector
    max_times_sampled: int = 0
    epochs: bool = False

    @property
    def slots(self) -> int:
        """One more than ``capacity``: a newcomer needs a slot before something, perhaps itself, is evicted."""
        return self.capacity + 1


class Table(NamedTuple):
    """``live`` slots and the states of the ``sampler`` and the ``remover`` over them."""

    live: LiveList
    sampler: PyTree
    remover: PyTree


class Items(NamedTuple):
    """What is known of the item in each slot, ``(slots,)``.

    ``generation`` uint32: how often the slot has been written; ``priority`` float32, before any exponent;
    ``times_sampled`` int32; ``inserted`` uint32: the number of its insertion, modulo 2**32.
    """

    generation: Array
    priority: Array
    times_sampled: Array
    inserted: Array


def init_table(rules: Rules) -> Table:
    """Return the empty table."""
    return Table(live_list.init(rules.slots), rules.sampler.init(rules.slots), rules.remover.init(rules.slots))


def reset_table(rules: Rules, table: Table) -> Table:
    """Return the table with all slots free."""
    return Table(live_list.reset(table.live), rules.sampler.init(rules.slots), rules.remover.init(rules.slots))


def init_items(slots: int) -> Items:
    """Return items never written."""
    return Items(
        generation=jnp.zeros((slots,), jnp.uint32),
        priority=jnp.zeros((slots,), jnp.float32),
        times_sampled=jnp.zeros((slots,), jnp.int32),
        inserted=jnp.zeros((slots,), jnp.uint32),
    )


class Inserted(NamedTuple):
    """Slots by item of a chunk, int32 ``(n,)``, ``BEYOND`` where there is none.

    ``taken``: where it was put; ``victims``: what was evicted for it, perhaps itself; ``slots``: where it is in the end.
    """

    taken: Array
    victims: Array
    slots: Array


@partial(jax.jit, static_argnums=0, inline=True)
def insert_chunk(
    rules: Rules, table: Table, priorities: Array, present: Array, words: tuple[Array, Array]
) -> tuple[Table, Inserted]:
    """Insert items in their order, each followed by an eviction where the table is over its capacity.

    Jitted, inlined where it is traced: called by hand, the choice of a backend would be compiled in every call.

    Args:
        priorities: float32 ``(n,)``.
        present: bool ``(n,)``, which items are real.
        words: two uint32 ``(n,)`` for a remover that draws.
    """
    count = priorities.shape[0]

    def in_turn(table: Table) -> tuple[Table, Inserted]:
        return _insert_in_turn(rules, table, priorities, present, words)

    def by_room(table: Table) -> tuple[Table, Inserted]:
        fits = table.live.size <= rules.capacity - jnp.sum(present, dtype=jnp.int32)
        return jax.lax.cond(fits, lambda own: _insert_at_once(rules, own, priorities, present), in_turn, table)

    if count == 1 or count > rules.capacity:
        return in_turn(table)
    # A branch makes XLA (jax 0.10.2) copy the table, which costs more than the loop on a CPU and next to nothing on a GPU.
    return jax.lax.platform_dependent(table, cpu=in_turn, default=by_room)


def _insert_at_once(rules: Rules, table: Table, priorities: Array, present: Array) -> tuple[Table, Inserted]:
    """``insert_chunk`` where nothing has to go."""
    rank = jnp.cumsum(present, dtype=jnp.int32) - 1
    slots = jnp.where(present, live_list.nth(table.live, table.live.size + rank), BEYOND)
    live = live_list.insert(table.live, jnp.sum(present, dtype=jnp.int32))
    sampler = rules.sampler.insert(table.sampler, slots, priorities)
    remover = rules.remover.insert(table.remover, slots, priorities)
    return Table(live, sampler, remover), Inserted(slots, jnp.full_like(slots, BEYOND), slots)


def _insert_in_turn(
    rules: Rules, table: Table, priorities: Array, present: Array, words: tuple[Array, Array]
) -> tuple[Table, Inserted]:
    """``insert_chunk`` one by one. Only the remover, and a chained sampler, must follow each step; a tree catches up after."""
    follows = rules.sampler.chained

    def one(table: Table, given: tuple[Array, ...]) -> tuple[Table, tuple[Array, Array]]:
        priority, real, high, low = given
        slot = jnp.where(real, live_list.nth(table.live, table.live.size), BEYOND)
        live = live_list.insert(table.live, real.astype(jnp.int32))
        remover = rules.remover.insert(table.remover, alone(slot), twice(priority))
        sampler = rules.sampler.insert(table.sampler, alone(slot), twice(priority)) if follows else table.sampler
        over = live.size > rules.capacity
        chosen = live_list.after(rules.remover.select(remover, live, twice(high), twice(low))[0][0], slot)
        victim = jnp.where(over, chosen, BEYOND)
        live = live_list.remove(live, chosen, over)
        remover = rules.remover.remove(remover, alone(victim))
        sampler = rules.sampler.remove(sampler, alone(victim)) if follows else sampler
        return Table(live, sampler, remover), (slot, victim)

    table, (taken, victims) = jax.lax.scan(one, table, (priorities, present, *words))
    last = keep_last(taken)  # a slot may have been given up and taken again within the chunk
    slots = jnp.where(live_list.is_live(table.live, last), last, BEYOND)
    if not follows:
        table = table._replace(sampler=rules.sampler.exchange(table.sampler, victims, slots, priorities))
    return table, Inserted(taken, victims, slots)


def remove_named(
    rules: Rules, table: Table, slots: Array, current: Callable[[Table, Array], Array]
) -> tuple[Table, Array]:
    """Remove ``slots`` int32 ``(n,)`` one by one where ``current(table, index)`` holds; return which were, bool ``(n,)``."""
    chained = (rules.sampler.chained, rules.remover.chained)

    def one(table: Table, index: Array) -> tuple[Table, Array]:
        hit = current(table, index)
        slot = alone(jnp.where(hit, slots[index], BEYOND))
        live = live_list.remove(table.live, jnp.clip(slots[index], 0, rules.slots - 1), hit)
        sampler = rules.sampler.remove(table.sampler, slot) if chained[0] else table.sampler
        remover = rules.remover.remove(table.remover, slot) if chained[1] else table.remover
        return Table(live, sampler, remover), hit

    table, hits = jax.lax.scan(one, table, jnp.arange(slots.shape[0], dtype=jnp.int32))
    gone = jnp.where(hits, slots, BEYOND)
    sampler = table.sampler if chained[0] else rules.sampler.remove(table.sampler, gone)
    remover = table.remover if chained[1] else rules.remover.remove(table.remover, gone)
    return Table(table.live, sampler, remover), hits


def remove_one(rules: Rules, table: Table, slot: Array, present: Array) -> Table:
    """Remove the live ``slot`` int32 scalar from everything, where ``present``."""
    gone = alone(jnp.where(present, slot, BEYOND))
    return Table(
        live_list.remove(table.live, slot, present),
        rules.sampler.remove(table.sampler, gone),
        rules.remover.remove(table.remover, gone),
    )


def alone(slot: Array) -> Array:
    """Return ``slot`` as the only real one of two: single elements become slices, see ``live_list``."""
    return jnp.stack([slot, jnp.asarray(BEYOND)])


def twice(value: Array) -> Array:
    """Return ``value`` two times."""
    return jnp.stack([value, value])


def write_items(items: Items, slots: Array, priorities: Array, numbers: Array, never: Array) -> Items:
    """Return ``items`` with fresh ones in ``slots`` int32 ``(n,)``, no two alike; those out of range are left out.

    ``never`` int32: the 0 of ``times_sampled``.
    """
    return Items(
        generation=items.generation.at[slots].add(jnp.uint32(1), mode="drop"),
        priority=items.priority.at[slots].set(priorities, mode="drop"),
        times_sampled=items.times_sampled.at[slots].set(never, mode="drop"),
        inserted=items.inserted.at[slots].set(numbers, mode="drop"),
    )


def draws_lost(rules: Rules, items: Items, inserted: Inserted) -> Array:
    """Return how often the evicted items could still have been drawn, uint32 modulo 2**32.

    ``items`` as of before. A victim is an item of the same chunk where its slot was taken before.
    """
    victims = inserted.victims
    steps = jnp.stack([inserted.taken, victims], axis=1).reshape(-1)
    old = (occurrences(steps).reshape(-1, 2)[:, 1] == 1) & (victims != BEYOND)
    times = items.times_sampled.at[jnp.minimum(victims, rules.slots - 1)].get(mode="promise_in_bounds")
    left = jnp.where(victims == BEYOND, 0, rules.max_times_sampled - jnp.where(old, times, 0))
    return jnp.sum(left.astype(jnp.uint32), dtype=jnp.uint32)
