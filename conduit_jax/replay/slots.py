"""One partition's replay over independent slots: any sampler, any remover, draws that remove, deletes.

The rules are those of one item after another: an item is inserted and then, where the table is over its capacity, what
the remover names goes, which may be the newcomer itself. Only small state walks through that loop; the storage is written
once, when it is decided which items of the chunk stay.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.config import Epochs, ReplayConfig
from conduit_jax.errors import ConfigError, refuse
from conduit_jax.replay import interface, live_list, random_bits, rate_limiter, slot_draws, slot_table, storage
from conduit_jax.replay.duplicates import BEYOND, keep_last
from conduit_jax.replay.interface import Faults, Replay, ReplayState
from conduit_jax.replay.rate_limiter import LimiterState, make_limiter
from conduit_jax.replay.records import record_layout
from conduit_jax.replay.selectors import Geometry, usable
from conduit_jax.replay.slot_draws import Draws
from conduit_jax.replay.slot_selectors import make_slot_selector
from conduit_jax.replay.slot_table import Items, Rules, Table
from conduit_jax.replay.storage import Experience, Storage, in_device_memory
from conduit_jax.trees import tree_spec
from conduit_jax.types import AddInfo, Sample, SampleInfo

Array = jax.Array
PyTree = Any


class SlotsControl(NamedTuple):
    """Everything that is small and changes with every call.

    ``max_priority`` float32: the highest ever given, at first 1. ``draws_left`` uint32: how many draws the live items
    have left, modulo 2**32. ``inserts`` and ``adds`` uint32: items and chunks inserted, modulo 2**32.
    """

    table: Table
    items: Items
    max_priority: Array
    draws_left: Array
    inserts: Array
    adds: Array
    faults: Faults
    limiter: LimiterState


_OWN_STREAM = np.array([0x510_7EED, 0x0E51C7ED], np.uint32)  # any two words: the key of a remover that was given none


def make_slots(
    config: ReplayConfig,
    *,
    batch_size: int,
    lanes: int = 1,
    partitions: int = 1,
    storage_access: Storage = in_device_memory,
) -> Replay:
    """Return the replay of **one** of ``partitions`` partitions over slots; ``batch_size`` and ``lanes`` are totals over all.

    An insert's order is that of time, then of lanes. ``SampleInfo.age`` is how many items came in after it, whether or not
    they live. A prioritized sampler with ``max_times_sampled`` draws independently, whatever its ``stratified``.
    """
    rules = slot_rules(config, partitions)
    draws = batch_size // partitions
    by_turns = rules.epochs or rules.max_times_sampled > 0
    whole = 1 if rules.max_times_sampled else draws  # draws that remove may be fewer than asked for
    limiter = make_limiter(config.limits, partitions=partitions, batch_size=whole)
    if draws * rules.max_times_sampled >= 2**32:
        refuse(
            ConfigError,
            "batch * max_times_sampled is out of range.",
            got=draws * rules.max_times_sampled,
            want="< 2**32",
        )

    def init(item: PyTree) -> ReplayState:
        layout = record_layout(tree_spec(item))
        zero = jnp.zeros((), jnp.uint32)
        control = SlotsControl(
            table=slot_table.init_table(rules),
            items=slot_table.init_items(rules.slots),
            max_priority=jnp.ones((), jnp.float32),
            draws_left=zero,
            inserts=zero,
            adds=zero,
            faults=interface.no_faults(),
            limiter=limiter.init(),
        )
        return ReplayState(storage.allocate(layout, rules.slots), control)

    def can_add(control: SlotsControl, n: Array | int) -> Array:
        return limiter.can_insert(control.limiter, control.table.live.size, n)

    def can_sample(control: SlotsControl, n: int) -> Array:
        ready = limiter.can_sample(control.limiter, control.table.live.size, n)
        if not rules.max_times_sampled:
            return ready
        # With fewer than n live items the draws left are below n * max_times_sampled, where the modulus does not matter.
        return ready & ((control.table.live.size >= n) | (control.draws_left >= n))

    def add(
        state: ReplayState,
        chunk: PyTree,
        lengths: Array | None = None,
        priorities: Array | None = None,
        version: Array | None = None,
        key: Array | None = None,
    ) -> tuple[ReplayState, AddInfo]:
        steps = interface.check_chunk(state.storage, chunk, lanes // partitions)
        control, flat = state.control, jax.tree.map(_flat, chunk)
        present = _present(steps, lanes // partitions, lengths)
        if limiter.gates_inserts:
            present = present & can_add(control, jnp.sum(present, dtype=jnp.int32))
        given = None if priorities is None else _flat(priorities)
        control, slots, info = _insert(rules, control, given, present, key)
        control = control._replace(limiter=limiter.inserted(control.limiter, info.added))
        version = jnp.zeros((), jnp.uint32) if version is None else version
        stored = storage.write(storage_access, state.storage, _apart(slots), flat, version)
        return ReplayState(stored, control), info

    def sample(control: SlotsControl, experience: Experience, key: Array) -> tuple[SlotsControl, Sample]:
        words = random_bits.bits(key, 2 * draws)
        high, low = words[:draws], words[draws:]
        table, items = control.table, control.items
        if by_turns:
            allowed = jnp.broadcast_to(can_sample(control, draws), (draws,))
            if rules.max_times_sampled:
                numbers = jnp.arange(1, draws + 1, dtype=jnp.int32)
                allowed = limiter.can_sample(control.limiter, table.live.size, numbers)
            table, items, drawn = slot_draws.draw_in_turn(
                rules, table, items, (high, low), jnp.broadcast_to(allowed, (draws,))
            )
        else:
            table, items, drawn = slot_draws.draw_at_once(rules, table, items, (high, low), can_sample(control, draws))
        data, versions = storage.gather(storage_access, experience, drawn.slots)
        count = jnp.sum(drawn.valid, dtype=jnp.int32)
        info = _describe(control, drawn, versions)
        weights = interface.importance_weights(config.sampler, drawn.probability, drawn.table_size, drawn.valid)
        control = control._replace(
            table=table,
            items=items,
            draws_left=control.draws_left - (count.astype(jnp.uint32) if rules.max_times_sampled else jnp.uint32(0)),
            limiter=limiter.sampled(control.limiter, count),
        )
        return control, Sample.packed(data, info, weights, None, drawn.valid)

    def update_priorities(control: SlotsControl, info: SampleInfo, priorities: Array) -> tuple[SlotsControl, Array]:
        return _update_priorities(rules, control, info, priorities.astype(jnp.float32))

    def delete(control: SlotsControl, info: SampleInfo) -> tuple[SlotsControl, Array]:
        return _delete(rules, control, info)

    def reset(control: SlotsControl) -> SlotsControl:
        return control._replace(
            table=slot_table.reset_table(rules, control.table),
            max_priority=jnp.ones((), jnp.float32),
            draws_left=jnp.zeros((), jnp.uint32),
            limiter=limiter.init(),
        )

    def explain_blocked(control: SlotsControl, operation: str, n: int) -> str:
        size = int(control.table.live.size)
        reason = rate_limiter.explain_blocked(limiter, control.limiter, size, n, operation)
        if reason or operation == "insert" or bool(can_sample(control, n)):
            return reason
        bound = f"max_times_sampled={rules.max_times_sampled}"
        return f"sampling {n}: {size} live items have {int(control.draws_left)} draws left in all ({bound})"

    return Replay(
        init,
        can_add,
        add,
        can_sample,
        sample,
        update_priorities,
        delete,
        reset,
        explain_blocked,
        lambda control: control.table.live.size,
        Geometry(1, rules.slots),
    )


def slot_rules(config: ReplayConfig, partitions: int = 1) -> Rules:
    """Return one partition's rules: ``capacity`` rounded up so that it divides by ``partitions``."""
    capacity = -(-config.capacity // partitions)
    interface.check_slots(capacity + 1, partitions)
    return Rules(
        capacity=capacity,
        sampler=make_slot_selector(config.sampler, stratified=config.max_times_sampled == 0),
        remover=make_slot_selector(config.remover, stratified=False),
        max_times_sampled=config.max_times_sampled,
        epochs=isinstance(config.sampler, Epochs),
    )


def _flat(leaf: Array) -> Array:
    """Turn ``(T, lanes, ...)`` into ``(T * lanes, ...)``: all lanes' first steps come before any second."""
    return leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])


def _present(steps: int, lanes: int, lengths: Array | None) -> Array:
    """Return which items of a flat chunk are real, bool ``(T * lanes,)``."""
    if lengths is None:
        return jnp.ones((steps * lanes,), bool)
    real = jnp.arange(steps, dtype=jnp.int32)[:, None] < lengths.reshape(1, -1)
    return jnp.broadcast_to(real, (steps, lanes)).reshape(-1)


def _apart(slots: Array) -> Array:
    """Return ``slots`` with those out of range all different, as a scatter of unique indices wants them."""
    return jnp.where(slots == BEYOND, BEYOND - jnp.arange(slots.shape[0], dtype=jnp.int32), slots)


def _insert(
    rules: Rules, control: SlotsControl, given: Array | None, present: Array, key: Array | None
) -> tuple[SlotsControl, Array, AddInfo]:
    """Insert ``present`` items with ``given`` priorities; return also where each stands, ``BEYOND`` for those that do not."""
    count = present.shape[0]
    highest = control.max_priority
    wanted = jnp.broadcast_to(highest, (count,)) if given is None else given.astype(jnp.float32)
    good = usable(wanted)
    values = jnp.where(good, wanted, highest)
    zeros = jnp.zeros((count,), jnp.uint32)
    words = (zeros, zeros)
    if rules.remover.draws:
        stream = random_bits.fold(jnp.asarray(_OWN_STREAM) if key is None else key, control.adds)
        drawn = random_bits.bits(stream, 2 * count)
        words = (drawn[:count], drawn[count:])
    table, inserted = slot_table.insert_chunk(rules, control.table, values, present, words)
    added = jnp.sum(present, dtype=jnp.int32)
    left, never = control.draws_left, jnp.zeros((), jnp.int32)
    if rules.max_times_sampled:
        lost = slot_table.draws_lost(rules, control.items, inserted)
        left = left + added.astype(jnp.uint32) * jnp.uint32(rules.max_times_sampled) - lost
        never = live_list.after(never, (lost >> 1).astype(jnp.int32))  # `lost` is read from what is about to be written
    numbers = control.inserts + jnp.cumsum(present, dtype=jnp.uint32)
    items = slot_table.write_items(control.items, inserted.slots, values, numbers, never)
    replaced = jnp.sum(present & ~good, dtype=jnp.uint32)
    faults = control.faults._replace(replaced_priorities=control.faults.replaced_priorities + replaced)
    control = control._replace(
        table=table,
        items=items,
        max_priority=jnp.maximum(highest, jnp.max(jnp.where(present, values, 0), initial=0.0)),
        draws_left=left,
        inserts=control.inserts + added.astype(jnp.uint32),
        adds=control.adds + jnp.uint32(1),
        faults=faults,
    )
    return control, inserted.slots, AddInfo(added, jnp.sum(inserted.victims != BEYOND, dtype=jnp.int32), replaced)


def _describe(control: SlotsControl, drawn: Draws, versions: Array) -> SampleInfo:
    def there(field: Array) -> Array:
        return field.at[drawn.slots].get(mode="promise_in_bounds")

    age = control.inserts - there(control.items.inserted)
    return SampleInfo(
        slot=drawn.slots,
        generation=there(control.items.generation),
        probability=drawn.probability,
        priority=there(control.items.priority),
        table_size=drawn.table_size,
        age=jnp.minimum(age, jnp.uint32(2**31 - 1)).astype(jnp.int32),
        policy_version=versions,
        times_sampled=drawn.times_sampled,
    )


def _is_current(control: SlotsControl, table: Table, slots: Array, generation: Array) -> Array:
    """Return whether ``slots`` still hold the items that were drawn from them."""
    there = jnp.clip(slots, 0, control.items.generation.shape[0] - 1)
    return live_list.is_live(table.live, slots) & (control.items.generation[there] == generation)


def _update_priorities(
    rules: Rules, control: SlotsControl, info: SampleInfo, priorities: Array
) -> tuple[SlotsControl, Array]:
    """Apply an update to the items that still are what they were when drawn; a bad value anywhere refuses all of it."""
    current = _is_current(control, control.table, info.slot, info.generation) & interface.was_drawn(info)
    accepted = jnp.all(usable(priorities))
    applied = current & accepted
    slots = keep_last(jnp.where(applied, info.slot, BEYOND))
    table, faults = control.table, control.faults
    control = control._replace(
        table=table._replace(
            sampler=rules.sampler.update(table.sampler, slots, priorities),
            remover=rules.remover.update(table.remover, slots, priorities),
        ),
        items=control.items._replace(priority=control.items.priority.at[slots].set(priorities, mode="drop")),
        max_priority=jnp.maximum(control.max_priority, jnp.max(jnp.where(applied, priorities, 0), initial=0.0)),
        faults=faults._replace(
            refused_updates=faults.refused_updates + (~accepted).astype(jnp.uint32),
            stale_updates=faults.stale_updates + jnp.sum(accepted & ~current, dtype=jnp.uint32),
        ),
    )
    return control, jnp.sum(applied, dtype=jnp.int32)


def _delete(rules: Rules, control: SlotsControl, info: SampleInfo) -> tuple[SlotsControl, Array]:
    """Remove the items that still are what they were when drawn, each once; others are ignored."""

    def current(table: Table, index: Array) -> Array:
        return _is_current(control, table, info.slot[index], info.generation[index])

    table, hits = slot_table.remove_named(rules, control.table, info.slot, current)
    left = control.draws_left
    if rules.max_times_sampled:
        there = jnp.clip(info.slot, 0, rules.slots - 1)
        lost = (rules.max_times_sampled - control.items.times_sampled[there]).astype(jnp.uint32)
        left = left - jnp.sum(jnp.where(hits, lost, 0), dtype=jnp.uint32)
    return control._replace(table=table, draws_left=left), jnp.sum(hits, dtype=jnp.int32)
