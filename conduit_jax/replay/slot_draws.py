"""Draws from independent slots: all at once where one cannot change the next, otherwise in turn."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.replay import live_list
from conduit_jax.replay.duplicates import occurrences
from conduit_jax.replay.slot_table import Items, Rules, Table, remove_one, twice

Array = jax.Array


class Draws(NamedTuple):
    """A batch as of each draw, ``(n,)``: ``table_size`` before any removal, ``times_sampled`` with this draw."""

    slots: Array
    probability: Array
    times_sampled: Array
    table_size: Array
    valid: Array


def draw_at_once(
    rules: Rules, table: Table, items: Items, words: tuple[Array, Array], ready: Array
) -> tuple[Table, Items, Draws]:
    """Draw ``n`` items that stay; ``ready`` bool scalar: all of them count, or none does."""
    slots, probability = rules.sampler.select(table.sampler, table.live, *words)
    counted = jnp.where(ready, occurrences(slots), 0)
    times = items.times_sampled.at[slots].get(mode="promise_in_bounds") + counted
    # The largest count of equal slots is the one to keep, in whatever order the backend writes.
    after = items.times_sampled.at[slots].max(times, mode="promise_in_bounds")
    size, valid = (jnp.broadcast_to(value, slots.shape) for value in (table.live.size, ready))
    return table, items._replace(times_sampled=after), Draws(slots, probability, times, size, valid)


def draw_in_turn(
    rules: Rules, table: Table, items: Items, words: tuple[Array, Array], allowed: Array
) -> tuple[Table, Items, Draws]:
    """Draw items one by one, for epochs and ``max_times_sampled``; ``allowed`` bool ``(n,)``: by the limiter.

    A draw is valid while it is allowed and an item is left; the draw that reaches ``max_times_sampled`` removes its item.
    """

    def one(carry: tuple[Table, Array], given: tuple[Array, ...]) -> tuple[tuple[Table, Array], Draws]:
        (table, times), (high, low, permitted) = carry, given
        size = table.live.size
        valid = permitted & (size > 0)
        if rules.epochs:
            table = table._replace(live=live_list.begin_epoch(table.live, valid))
        chosen, probability = rules.sampler.select(table.sampler, table.live, twice(high), twice(low))
        slot = live_list.after(chosen[0], (probability[0] > 0).astype(jnp.int32))  # what is removed is read before
        sampled = live_list.read_once(times, slot) + valid.astype(jnp.int32)
        times = times.at[twice(slot)].set(twice(sampled), mode="promise_in_bounds")
        if rules.epochs:
            table = table._replace(live=live_list.mark_drawn(table.live, slot, valid))
        if rules.max_times_sampled:
            table = remove_one(rules, table, slot, valid & (sampled >= rules.max_times_sampled))
        return (table, times), Draws(slot, probability[0], sampled, size, valid)

    (table, times), draws = jax.lax.scan(one, (table, items.times_sampled), (*words, allowed))
    return table, items._replace(times_sampled=times), draws
