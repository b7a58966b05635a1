"""A ring of steps and the index of the complete episodes in it: what a chunk adds and evicts, and what a draw finds."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.errors import SpecError, refuse
from conduit_jax.replay import interface, ring, storage
from conduit_jax.replay.episode_batches import Assemble, Drawn
from conduit_jax.replay.episode_config import ByLength, EpisodesConfig
from conduit_jax.replay.episode_spans import Closed, Span, close, compact
from conduit_jax.replay.interface import Faults, Replay, ReplayState
from conduit_jax.replay.paths import any_of
from conduit_jax.replay.ring import RingState
from conduit_jax.replay.selectors import Geometry, Selector
from conduit_jax.replay.storage import Experience, Storage
from conduit_jax.replay.tables import TablesControl, TablesGeometry
from conduit_jax.types import AddInfo, Sample

Array = jax.Array
PyTree = Any


class EpisodesStorage(NamedTuple):
    """``steps``, the gigabytes, and ``spans``, where the episodes of each bucket lie in them."""

    steps: Experience
    spans: tuple[Experience, ...]


class EpisodesControl(NamedTuple):
    """``episodes``: the controls of the spans, one a bucket. ``steps``: the lanes' rings, and each one's ``clock`` uint32 ``(lanes,)``.

    ``running`` int32 ``(lanes,)``: steps so far of the episode that goes on. ``dropped`` uint32: episodes left out whole,
    too long or begun before a reset.
    """

    episodes: TablesControl
    steps: RingState
    clock: Array
    running: Array
    dropped: Array

    @property
    def faults(self) -> Faults:
        return self.episodes.faults

    @property
    def ring(self) -> RingState:
        return self.steps


class Table(NamedTuple):
    """The static parts: a replay of spans and a way to batches for each bucket, which holds ``lengths[i - 1] < length <= lengths[i]``."""

    config: EpisodesConfig
    steps: Geometry
    replays: tuple[Replay, ...]
    selector: Selector
    assemble: tuple[Assemble, ...]
    lengths: tuple[int, ...]
    access: Storage

    @property
    def geometry(self) -> TablesGeometry:
        return TablesGeometry(tuple(replay.geometry for replay in self.replays))


def insert(
    table: Table, state: ReplayState, chunk: PyTree, lengths: Array | None, priorities: Array | None, version: Array
) -> tuple[ReplayState, AddInfo]:
    """Write a chunk's steps, index the episodes that it completes, and evict those whose first step it has overwritten."""
    kept, control = state.storage, state.control
    steps = _check_chunk(table, kept.steps, chunk)
    given = jnp.asarray(steps, jnp.int32) if lengths is None else jnp.clip(lengths.astype(jnp.int32), 0, steps)
    count = jnp.broadcast_to(given, (table.steps.lanes,))
    written = storage.write(
        table.access, kept.steps, _slots(table, control.steps, count, steps), _lane_major(chunk), version
    )
    ended = any_of(chunk, table.config.ended)
    closed = close(control.running, ended, count, table.config.max_length, split=table.config.overlong == "split")
    after = control._replace(
        steps=ring.advance(control.steps, table.steps.length, count),
        clock=control.clock + count.astype(jnp.uint32),
        running=closed.running,
        dropped=control.dropped + closed.dropped,
    )
    first = control.clock[:, None] + jnp.arange(1, steps + 1, dtype=jnp.uint32) - closed.length.astype(jnp.uint32)
    spans, controls, infos = [], [], []
    for bucket in range(len(table.replays)):
        own = ReplayState(kept.spans[bucket], control.episodes.tables[bucket])
        own, info = _index(table, bucket, own, closed, first, priorities, version)
        own, evicted = _evict(table, bucket, own, after.clock, steps)
        spans.append(own.storage)
        controls.append(own.control)
        infos.append(info._replace(evicted=info.evicted + evicted))
    control = after._replace(episodes=control.episodes._replace(tables=tuple(controls)))
    info = jax.tree.map(lambda *counts: sum(counts[1:], counts[0]), *infos)
    return ReplayState(EpisodesStorage(written, tuple(spans)), control), info


def _index(
    table: Table,
    bucket: int,
    own: ReplayState,
    closed: Closed,
    first: Array,
    priorities: Array | None,
    version: Array,
) -> tuple[ReplayState, AddInfo]:
    """Add the spans of the episodes that belong to ``bucket``; ``first`` uint32 ``(lanes, T)`` are their first clocks."""
    shortest = table.lengths[bucket - 1] + 1 if bucket else 1
    chosen = closed.kept & (closed.length >= shortest) & (closed.length <= table.lengths[bucket])
    room = min(closed.kept.shape[1], table.replays[bucket].geometry.length)
    if isinstance(table.config.sampler, ByLength):
        weights = closed.length.astype(jnp.float32)
    else:
        weights = None if priorities is None else priorities.astype(jnp.float32).T
    new = compact(chosen, (Span(first, closed.length), weights), room)
    span, weights = new.values
    own, info = table.replays[bucket].add(own, span, new.filled, weights, version)
    return own, info._replace(added=info.added + new.crowded, evicted=info.evicted + new.crowded)


def _evict(table: Table, bucket: int, own: ReplayState, clock: Array, steps: int) -> tuple[ReplayState, Array]:
    """Remove the episodes whose first step a chunk of at most ``steps`` has overwritten: each lane's oldest.

    They are at most ``steps`` a lane: all their first steps lie in what has been overwritten.
    """
    control, geometry = own.control, table.replays[bucket].geometry
    oldest = jnp.arange(min(steps, geometry.length), dtype=jnp.int32)
    per_lane = jax.tree.map(lambda field: field[:, None], control.ring)
    lane = jnp.arange(geometry.lanes, dtype=jnp.int32)[:, None]
    slots = lane * geometry.length + ring.nth_oldest(per_lane, geometry.length, oldest)
    spans, _ = storage.gather(table.access, own.storage, slots.reshape(-1))
    reach = clock[:, None] - spans.start.reshape(slots.shape)
    dead = (oldest < per_lane.filled) & (reach > jnp.uint32(table.steps.length))
    apart = 2**31 - 1 - jnp.arange(slots.size, dtype=jnp.int32).reshape(slots.shape)
    gone = jnp.where(dead, slots, apart).reshape(-1)
    selector = table.selector.update(control.selector, gone, jnp.zeros(gone.shape, jnp.float32))
    count = jnp.sum(dead, axis=1, dtype=jnp.int32)
    left = control.ring._replace(filled=control.ring.filled - count)
    control = control._replace(ring=left, selector=selector)
    return ReplayState(own.storage, control), jnp.sum(count, dtype=jnp.int32)


def draw(
    table: Table, control: EpisodesControl, kept: EpisodesStorage, key: Array, bucket: int
) -> tuple[EpisodesControl, Sample]:
    """Draw spans of ``bucket`` and assemble their steps."""
    geometry = table.replays[bucket].geometry
    own, sample = table.replays[bucket].sample(control.episodes.tables[bucket], kept.spans[bucket], key)
    lane = sample.info.slot // geometry.length
    back = (control.clock[lane] - sample.data.start).astype(jnp.int32)
    begin = jnp.where(sample.valid, control.steps.head[lane] - back, 0)
    begin = jnp.where(begin < 0, begin + table.steps.length, begin)
    drawn = Drawn(lane, begin, sample.data.length, table.steps.length)
    sample = table.assemble[bucket](table.access, kept.steps, drawn, sample)
    sample = sample._replace(info=sample.info._replace(slot=sample.info.slot + table.geometry.offsets[bucket]))
    tables = control.episodes.tables
    index = control.episodes._replace(tables=(*tables[:bucket], own, *tables[bucket + 1 :]))
    return control._replace(episodes=index), sample


def _check_chunk(table: Table, experience: Experience, chunk: PyTree) -> int:
    steps = interface.check_chunk(experience, chunk, table.steps.lanes)
    if steps > table.steps.length:
        refuse(
            SpecError,
            "The chunk is longer than a lane's ring: its oldest steps would be overwritten by its newest.",
            got=f"{steps} steps a lane",
            want=f"at most {table.steps.length}",
            fix=f"raise capacity_steps to at least {steps * table.steps.lanes} a partition, or add shorter chunks",
        )
    return steps


def _slots(table: Table, steps: RingState, count: Array, width: int) -> Array:
    """Return the slots of a chunk's steps, lane-major int32; those that are not real lie out of range."""
    lanes, length = table.steps
    lane, step = jnp.arange(lanes, dtype=jnp.int32)[:, None], jnp.arange(width, dtype=jnp.int32)
    apart = 2**31 - 1 - jnp.arange(lanes * width, dtype=jnp.int32).reshape(lanes, width)
    return jnp.where(step < count[:, None], lane * length + ring.write_times(steps, length, width), apart).reshape(-1)


def _lane_major(chunk: PyTree) -> PyTree:
    """Turn leaves ``(T, lanes, ...)`` into ``(lanes * T, ...)``, the order of the slots."""
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1).reshape(-1, *leaf.shape[2:]), chunk)
