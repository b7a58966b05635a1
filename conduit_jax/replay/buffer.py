"""One partition's replay: ring, storage, selector and limiter composed into a ``Replay`` of pure functions.

    replay = make_replay(ReplayConfig(capacity=100_000, min_size=1_000), batch_size=256, lanes=16)
    state = jax.jit(replay.init)(item)                       # item: a tree of one item's arrays or shapes
    state, _ = replay.add(state, chunk)                      # chunk leaves: (T, lanes, ...)
    control, sample = replay.sample(state.control, state.storage, key)

Inside ``jit`` and ``scan`` these are used as they are; **add before you sample**: the other order makes XLA copy the whole
storage. Outside, ``conduit_jax.place`` compiles them with donation and shardings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.config import Prioritized, ReplayConfig
from conduit_jax.errors import ConfigError, SpecError, nearest_multiples, refuse
from conduit_jax.replay import random_bits, ring, storage
from conduit_jax.replay.rate_limiter import MinSize
from conduit_jax.replay.records import record_layout
from conduit_jax.replay.ring import RingState
from conduit_jax.replay.selectors import Geometry, Selection, Selector, make_selector, usable
from conduit_jax.replay.storage import Experience, Storage, Window, in_device_memory
from conduit_jax.trees import tree_spec
from conduit_jax.types import AddInfo, Sample, SampleInfo

Array = jax.Array
PyTree = Any


MAX_SLOTS = 2**30  # int32 slots, the tree's node numbers up to twice as many, and room beyond for writes to be left out


class Faults(NamedTuple):
    """What device-side values did wrong, counted (uint32) and raised by the shell at its next sync point.

    ``refused_updates``: calls with a NaN, infinite or negative priority, refused whole. ``replaced_priorities``: such
    values given at insertion, replaced by the maximum. ``stale_updates``: items overwritten before their update came.
    """

    refused_updates: Array
    replaced_priorities: Array
    stale_updates: Array


class Control(NamedTuple):
    """Everything that is small and changes with every call: ``ring``, ``selector`` state and ``faults``."""

    ring: RingState
    selector: PyTree
    faults: Faults


class ReplayState(NamedTuple):
    """``storage``, the gigabytes, written by ``add`` alone, and ``control``."""

    storage: Experience
    control: Control


class Replay(NamedTuple):
    """Pure functions over one static config; wrappers and placements turn a ``Replay`` into a ``Replay``.

    ``init(item) -> state``: ``item`` is one item's tree of arrays or ``ShapeDtypeStruct``.
    ``can_add(control, n) -> bool`` and ``can_sample(control, n) -> bool``: n items, static.
    ``add(state, chunk, lengths=None, priorities=None, version=None) -> (state, AddInfo)``: ``chunk`` leaves
    ``(T, lanes, ...)``, ``lengths`` int32, leading steps that are real (``()`` for all lanes alike, ``(lanes,)`` in a
    ragged replay), ``priorities`` float32 ``(T, lanes)``, ``version`` uint32 scalar of the policy that acted. Donate
    ``state``.
    ``sample(control, storage, key) -> (control, Sample)``. Donate ``control``; ``storage`` is only read and, on purpose,
    not returned: an output that is an undonated input is a copy of it.
    ``update_priorities(control, info, priorities) -> (control, applied)``. Donate ``control``.
    ``reset(control) -> control``: empty, with generations that were never handed out. ``geometry`` is one partition's shape.
    """

    init: Callable[..., ReplayState]
    can_add: Callable[[Control, int], Array]
    add: Callable[..., tuple[ReplayState, AddInfo]]
    can_sample: Callable[[Control, int], Array]
    sample: Callable[[Control, Experience, Array], tuple[Control, Sample]]
    update_priorities: Callable[[Control, SampleInfo, Array], tuple[Control, Array]]
    reset: Callable[[Control], Control]
    geometry: Geometry


def replay_geometry(config: ReplayConfig, lanes: int, partitions: int = 1) -> Geometry:
    """Return one partition's lanes and ring length: ``capacity`` rounded up so that it divides by all lanes."""
    length = -(-config.capacity // lanes)
    geometry = Geometry(lanes // partitions, length)
    if geometry.slots > MAX_SLOTS:
        refuse(
            ConfigError,
            "A partition can hold at most 2**30 items.",
            got=f"{geometry.slots} items in one partition",
            want=f"capacity <= {MAX_SLOTS * partitions}",
            fix="use more partitions",
        )
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

    Raises ``ConfigError`` where lanes or batch do not divide by ``partitions``.
    """
    for what, total in (("lanes", lanes), ("batch", batch_size)):
        if total % partitions:
            nearest = nearest_multiples(total, partitions)
            refuse(
                ConfigError,
                f"The {what} does not divide by the partitions.",
                got=f"{total} over {partitions}",
                want=nearest,
            )
    geometry = replay_geometry(config, lanes, partitions)
    selector, limiter = make_selector(config.sampler), MinSize(-(-config.min_size // partitions))
    draws = batch_size // partitions

    def init(item: PyTree) -> ReplayState:
        layout = record_layout(tree_spec(item))
        zero = jnp.zeros((), jnp.uint32)
        control = Control(
            ring=ring.init(geometry.lanes if config.ragged else None),
            selector=selector.init(geometry),
            faults=Faults(zero, zero, zero),
        )
        return ReplayState(storage.allocate(layout, geometry.slots), control)

    def size(control: Control) -> Array:
        return ring.live_items(control.ring, geometry.lanes)

    def can_add(control: Control, n: int) -> Array:
        return limiter.can_insert(size(control), n)

    def can_sample(control: Control, n: int) -> Array:
        return limiter.can_sample(size(control), n)

    def add(
        state: ReplayState,
        chunk: PyTree,
        lengths: Array | None = None,
        priorities: Array | None = None,
        version: Array | None = None,
    ) -> tuple[ReplayState, AddInfo]:
        steps = _check_chunk(state.storage, chunk, geometry, lengths, ragged=config.ragged)
        before = state.control.ring
        slots, present = _slots_to_write(before, geometry, steps, lengths)
        flat = jax.tree.map(lambda leaf: _lane_major(leaf), chunk)
        version = jnp.zeros((), jnp.uint32) if version is None else version
        aligned = lengths is None and before.head.ndim == 0
        window = Window(geometry.lanes, geometry.length, before.head) if aligned else None
        stored = storage.write(storage_access, state.storage, slots, flat, version, window)
        given = None if priorities is None else _lane_major(priorities)
        kept, replaced = selector.insert(state.control.selector, slots, given, present)
        count = jnp.asarray(steps, jnp.int32) if lengths is None else jnp.clip(lengths.astype(jnp.int32), 0, steps)
        after = ring.advance(before, geometry.length, count)
        added = jnp.sum(present, dtype=jnp.int32)
        evicted = added - (ring.live_items(after, geometry.lanes) - ring.live_items(before, geometry.lanes))
        faults = state.control.faults
        faults = faults._replace(replaced_priorities=faults.replaced_priorities + replaced)
        return ReplayState(stored, Control(after, kept, faults)), AddInfo(added, evicted, replaced)

    def sample(control: Control, experience: Experience, key: Array) -> tuple[Control, Sample]:
        selection = selector.select(control.selector, geometry, control.ring, key, draws)
        data, versions = storage.gather(storage_access, experience, selection.slots)
        ready = can_sample(control, draws)
        info = _describe(control.ring, geometry, selection, versions)
        weights = _importance_weights(config, selection.probability, size(control))
        return control, Sample(data, info, weights, None, jnp.broadcast_to(ready, (draws,)))

    def update_priorities(control: Control, info: SampleInfo, priorities: Array) -> tuple[Control, Array]:
        return _update_priorities(selector, geometry, control, info, priorities.astype(jnp.float32))

    def reset(control: Control) -> Control:
        return Control(ring.reset(control.ring), selector.init(geometry), control.faults)

    return Replay(init, can_add, add, can_sample, sample, update_priorities, reset, geometry)


def _check_chunk(
    experience: Experience, chunk: PyTree, geometry: Geometry, lengths: Array | None, *, ragged: bool
) -> int:
    """Return the chunk's number of steps; raise at trace time for what can never be stored."""
    wanted, found = experience.layout.spec, tree_spec(chunk, drop=2)
    if found != wanted:
        refuse(
            SpecError,
            "The chunk's items differ from the item the replay was made for.",
            got=found.shapes(),
            want=wanted.shapes(),
        )
    lead = {leaf.shape[:2] for leaf in jax.tree.leaves(chunk)}
    if len(lead) != 1:
        refuse(SpecError, "The chunk's leaves disagree on (T, lanes).", got=sorted(lead), want="one leading shape")
    steps, lanes = lead.pop()
    if lanes != geometry.lanes:
        refuse(SpecError, "The chunk has another number of lanes than the replay.", got=lanes, want=geometry.lanes)
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


def _describe(steps: RingState, geometry: Geometry, selection: Selection, versions: Array) -> SampleInfo:
    lane, time = selection.slots // geometry.length, selection.slots % geometry.length
    own = ring.at_lane(steps, lane)
    size = ring.live_items(steps, geometry.lanes)
    return SampleInfo(
        slot=selection.slots,
        generation=ring.generation(own, time),
        probability=selection.probability,
        priority=selection.priority,
        table_size=jnp.broadcast_to(size, selection.slots.shape),
        age=ring.age(own, geometry.length, time),
        policy_version=versions,
    )


def _importance_weights(config: ReplayConfig, probability: Array, size: Array) -> Array:
    """Return (N * P)**-beta, divided by the batch's largest where the sampler says so; ones for uniform draws."""
    sampler = config.sampler
    if not isinstance(sampler, Prioritized) or sampler.importance_exponent == 0:
        return jnp.ones_like(probability)
    scaled = jnp.maximum(probability * size.astype(jnp.float32), jnp.finfo(jnp.float32).tiny)
    scaled = (
        scaled / jnp.min(scaled) if sampler.importance_normalization == "batch" else scaled
    )  # before the power: no inf
    return jnp.power(scaled, -jnp.float32(sampler.importance_exponent))


def _update_priorities(
    selector: Selector, geometry: Geometry, control: Control, info: SampleInfo, priorities: Array
) -> tuple[Control, Array]:
    """Apply an update to the items that still are what they were when drawn; a bad value anywhere refuses all of it."""
    lane, time = info.slot // geometry.length, info.slot % geometry.length
    own = ring.at_lane(control.ring, jnp.clip(lane, 0, geometry.lanes - 1))
    named = (info.slot >= 0) & (info.slot < geometry.slots)
    current = named & ring.is_live(own, geometry.length, time) & (ring.generation(own, time) == info.generation)
    accepted = jnp.all(usable(priorities))
    applied = current & accepted
    beyond = jnp.int32(2**31 - 1) - jnp.arange(info.slot.shape[0], dtype=jnp.int32)
    state = selector.update(control.selector, jnp.where(applied, info.slot, beyond), priorities)
    faults = control.faults
    faults = faults._replace(
        refused_updates=faults.refused_updates + (~accepted).astype(jnp.uint32),
        stale_updates=faults.stale_updates + jnp.sum(accepted & ~current, dtype=jnp.uint32),
    )
    return Control(control.ring, state, faults), jnp.sum(applied, dtype=jnp.int32)


__all__ = ["Control", "Faults", "Replay", "ReplayState", "make_replay", "random_bits", "replay_geometry"]
