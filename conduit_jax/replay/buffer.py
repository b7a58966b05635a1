"""One partition's replay: ring, storage, selector and limiter composed into a ``Replay`` of pure functions.

    replay = make_replay(ReplayConfig(capacity=100_000, min_size=1_000), batch_size=256, lanes=16)
    state = jax.jit(replay.init)(item)                       # item: a tree of one item's arrays or shapes
    state, _ = replay.add(state, chunk)                      # chunk leaves: (T, lanes, ...)
    control, sample = replay.sample(state.control, state.storage, key)

Inside ``jit`` and ``scan`` these are used as they are; **add before you sample**: the other order makes XLA copy the whole
storage. Outside, ``conduit_jax.place`` compiles them with donation and shardings.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.config import ReplayConfig
from conduit_jax.errors import ConfigError, SpecError, refuse
from conduit_jax.replay import interface, random_bits, rate_limiter, ring, storage
from conduit_jax.replay.interface import MAX_SLOTS, Faults, Replay, ReplayState, mutate
from conduit_jax.replay.rate_limiter import LimiterState, RateLimiter, make_limiter
from conduit_jax.replay.records import record_layout
from conduit_jax.replay.ring import RingState
from conduit_jax.replay.selectors import Geometry, Selector, Table, describe, make_selector, usable
from conduit_jax.replay.slots import make_slots
from conduit_jax.replay.storage import Experience, Storage, in_device_memory
from conduit_jax.replay.turns import in_turn, waiting
from conduit_jax.replay.window_writes import Window
from conduit_jax.trees import tree_spec
from conduit_jax.types import AddInfo, Sample, SampleInfo

Array = jax.Array
PyTree = Any


class Control(NamedTuple):
    """Everything that is small and changes with every call: ``ring``, ``selector`` state, ``faults`` and ``limiter`` state."""

    ring: RingState
    selector: PyTree
    faults: Faults
    limiter: LimiterState


def replay_geometry(config: ReplayConfig, lanes: int, partitions: int = 1) -> Geometry:
    """Return one partition's lanes and ring length: ``capacity`` rounded up so that it divides by all lanes."""
    length = -(-config.capacity // lanes)
    geometry = Geometry(lanes // partitions, length)
    interface.check_slots(geometry.slots, partitions)
    return geometry


def make_replay(
    config: ReplayConfig,
    *,
    batch_size: int,
    lanes: int = 1,
    partitions: int = 1,
    storage_access: Storage = in_device_memory,
) -> Replay:
    """Return the replay of **one** of ``partitions`` partitions; ``batch_size`` and ``lanes`` are totals over all of them.

    Raises ``ConfigError`` where lanes or batch do not divide by ``partitions``, or the limiter would never allow a batch.
    """
    if config.items is not None:
        refuse(
            ConfigError, "This makes replays of single steps.", got=f"items={config.items}", fix="conduit.make_replay"
        )
    interface.check_divides(lanes, batch_size, partitions)
    if config.resolved_storage == "slots":
        return make_slots(
            config, batch_size=batch_size, lanes=lanes, partitions=partitions, storage_access=storage_access
        )
    return _make_ring(config, replay_geometry(config, lanes, partitions), batch_size, partitions, storage_access)


def _make_ring(
    config: ReplayConfig, geometry: Geometry, batch_size: int, partitions: int, storage_access: Storage
) -> Replay:
    draws = batch_size // partitions
    selector, limiter = (
        make_selector(config.sampler),
        make_limiter(config.limits, partitions=partitions, batch_size=draws),
    )

    def init(item: PyTree) -> ReplayState:
        layout = record_layout(tree_spec(item))
        control = Control(
            ring=ring.init(geometry.lanes if config.ragged else None),
            selector=selector.init(geometry),
            faults=interface.no_faults(),
            limiter=limiter.init(),
        )
        return ReplayState(storage.allocate(layout, geometry.slots), control)

    def size(control: Control) -> Array:
        return ring.live_items(control.ring, geometry.lanes)

    def can_add(control: Control, n: int) -> Array:
        return limiter.can_insert(control.limiter, size(control), n)

    def can_sample(control: Control, n: int) -> Array:
        return limiter.can_sample(control.limiter, size(control), n)

    def add(
        state: ReplayState,
        chunk: PyTree,
        lengths: Array | None = None,
        priorities: Array | None = None,
        version: Array | None = None,
        key: Array | None = None,  # a ring removes its oldest items, never drawn ones
    ) -> tuple[ReplayState, AddInfo]:
        steps = _check_chunk(state.storage, chunk, geometry, lengths, ragged=config.ragged)
        lengths = _admitted(limiter, state.control, geometry, steps, lengths) if limiter.gates_inserts else lengths
        before = state.control.ring
        slots, present = _slots_to_write(before, geometry, steps, lengths)
        version = jnp.zeros((), jnp.uint32) if version is None else version
        # Rows stay as they come, step by step: large leaves are not transposed for an order that nobody needs.
        flat = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), chunk)
        step_major = slots.reshape(geometry.lanes, steps).T.reshape(-1)
        aligned = lengths is None and before.head.ndim == 0
        window = Window(geometry.lanes, geometry.length, before.head) if aligned else None
        stored = storage.write(storage_access, state.storage, step_major, flat, version, window)
        given = None if priorities is None else _lane_major(priorities)
        kept, replaced = selector.insert(state.control.selector, slots, given, present)
        count = jnp.asarray(steps, jnp.int32) if lengths is None else jnp.clip(lengths.astype(jnp.int32), 0, steps)
        after = ring.advance(before, geometry.length, count)
        added = jnp.sum(present, dtype=jnp.int32)
        evicted = added - (ring.live_items(after, geometry.lanes) - ring.live_items(before, geometry.lanes))
        faults = state.control.faults
        faults = faults._replace(replaced_priorities=faults.replaced_priorities + replaced)
        control = Control(after, kept, faults, limiter.inserted(state.control.limiter, added))
        return ReplayState(stored, control), AddInfo(added, evicted, replaced)

    def sample(control: Control, experience: Experience, key: Array) -> tuple[Control, Sample]:
        key = waiting(key, control)
        selection = selector.select(control.selector, geometry, control.ring, key, draws)
        data, versions = storage.gather(storage_access, experience, selection.slots)
        ready = can_sample(control, draws)
        weights = interface.importance_weights(config.sampler, selection.probability, size(control))
        info = describe(control.ring, geometry, selection, Table(size(control), ready), versions, weights)
        paid = limiter.sampled(control.limiter, jnp.where(ready, draws, 0))
        return in_turn(control._replace(limiter=paid), info, data), Sample.described(data, info, None)

    def update_priorities(control: Control, info: SampleInfo, priorities: Array) -> tuple[Control, Array]:
        return _update_priorities(selector, geometry, control, info, priorities.astype(jnp.float32))

    def reset(control: Control) -> Control:
        return Control(ring.reset(control.ring), selector.init(geometry), control.faults, limiter.init())

    def explain_blocked(control: Control, operation: str, n: int) -> str:
        return rate_limiter.explain_blocked(limiter, control.limiter, int(size(control)), n, operation)

    return Replay(
        init,
        can_add,
        add,
        can_sample,
        sample,
        update_priorities,
        _refuse_delete,
        reset,
        explain_blocked,
        size,
        geometry,
    )


def _refuse_delete(control: Control, info: SampleInfo) -> tuple[Control, Array]:
    """Refuse: uniform draws, sizes and eviction of a ring are arithmetic on its head and have no room for holes."""
    return refuse(
        ConfigError,
        "The ring storage cannot delete single items.",
        want="a replay of slots",
        fix='ReplayConfig(storage="slots"), or update_priorities to 0 where draws are prioritized',
    )


def _admitted(limiter: RateLimiter, control: Control, geometry: Geometry, steps: int, lengths: Array | None) -> Array:
    """Return the chunk's ``lengths``, all 0 where the limiter blocks it."""
    count = jnp.full((), steps, jnp.int32) if lengths is None else jnp.clip(lengths.astype(jnp.int32), 0, steps)
    items = jnp.sum(jnp.broadcast_to(count, (geometry.lanes,)), dtype=jnp.int32)
    allowed = limiter.can_insert(control.limiter, ring.live_items(control.ring, geometry.lanes), items)
    return jnp.where(allowed, count, 0)


def _check_chunk(
    experience: Experience, chunk: PyTree, geometry: Geometry, lengths: Array | None, *, ragged: bool
) -> int:
    """Return the chunk's number of steps; raise at trace time for what can never be stored."""
    steps = interface.check_chunk(experience, chunk, geometry.lanes)
    if steps > geometry.length:
        refuse(
            SpecError,
            "The chunk is longer than a lane's ring: its oldest steps would be overwritten by its newest.",
            got=f"{steps} steps a lane",
            want=f"at most {geometry.length}",
            fix=f"raise capacity to at least {steps * geometry.lanes} a partition, or add shorter chunks",
        )
    if lengths is not None and lengths.ndim == 1 and not ragged:
        refuse(
            ConfigError,
            "This replay keeps its lanes aligned.",
            got="lengths a lane",
            want="None, or one length for all lanes",
            fix="ReplayConfig(ragged=True)",
        )
    return steps


def _lane_major(leaf: Array) -> Array:
    """Turn ``(T, lanes, ...)`` into ``(lanes * T, ...)``, the order of the slots."""
    return jnp.swapaxes(leaf, 0, 1).reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])


def _slots_to_write(steps: RingState, geometry: Geometry, count: int, lengths: Array | None) -> tuple[Array, Array]:
    """Return the slots of a chunk, lane-major int32 ``(lanes * count,)``, and which of them are real; the others lie out of range."""
    times = jnp.broadcast_to(ring.write_times(steps, geometry.length, count), (geometry.lanes, count))
    slots = jnp.arange(geometry.lanes, dtype=jnp.int32)[:, None] * geometry.length + times
    if lengths is None:
        return slots.reshape(-1), jnp.ones((slots.size,), bool)
    present = jnp.arange(count, dtype=jnp.int32) < lengths.reshape(-1, 1)
    present = jnp.broadcast_to(present, slots.shape).reshape(-1)
    beyond = jnp.int32(2**31 - 1) - jnp.arange(slots.size, dtype=jnp.int32)
    return jnp.where(present, slots.reshape(-1), beyond), present


def _update_priorities(
    selector: Selector, geometry: Geometry, control: Control, info: SampleInfo, priorities: Array
) -> tuple[Control, Array]:
    """Apply an update to the items that still are what they were when drawn; a bad value anywhere refuses all of it."""
    lane, time = info.slot // geometry.length, info.slot % geometry.length
    own = ring.at_lane(control.ring, jnp.clip(lane, 0, geometry.lanes - 1))
    named = (info.slot >= 0) & (info.slot < geometry.slots)
    current = named & ring.is_live(own, geometry.length, time) & (ring.generation(own, time) == info.generation)
    current = current & interface.was_drawn(info)
    accepted = jnp.all(usable(priorities))
    applied = current & accepted
    beyond = jnp.int32(2**31 - 1) - jnp.arange(info.slot.shape[0], dtype=jnp.int32)
    state = selector.update(control.selector, jnp.where(applied, info.slot, beyond), priorities)
    faults = control.faults
    faults = faults._replace(
        refused_updates=faults.refused_updates + (~accepted).astype(jnp.uint32),
        stale_updates=faults.stale_updates + jnp.sum(accepted & ~current, dtype=jnp.uint32),
    )
    return control._replace(selector=state, faults=faults), jnp.sum(applied, dtype=jnp.int32)


__all__ = [
    "MAX_SLOTS",
    "Control",
    "Faults",
    "Replay",
    "ReplayState",
    "make_replay",
    "mutate",
    "random_bits",
    "replay_geometry",
]
