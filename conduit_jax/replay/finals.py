"""Final observations beside the ring: a bounded ring of their own, each named by the slot and generation of its step.

Episodes' ends are few, so they need little room; where it runs out the oldest go first, and whose they were is told, so
that those steps can be kept from being drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.replay import ring
from conduit_jax.replay.ring import RingState
from conduit_jax.replay.selectors import Geometry
from conduit_jax.replay.starts import BEYOND

Array = jax.Array


class Finals(NamedTuple):
    """``slot`` int32 and ``generation`` uint32 ``(room,)``: whose step an entry belongs to.

    ``head`` int32: the next entry to be written; ``overwritten`` uint32: how many went while their step was live.
    """

    slot: Array
    generation: Array
    head: Array
    overwritten: Array


class Ends(NamedTuple):
    """Where the steps ``(lanes, T)`` of a chunk that end an episode put their final observation.

    ``entry`` int32, 0 where ``kept`` is False: no end, or more ends in this chunk than there is room for. ``total`` int32
    counts all ends.
    """

    entry: Array
    kept: Array
    total: Array


def init(room: int) -> Finals:
    """Return an empty side ring of ``room`` entries."""
    zero = jnp.zeros((), jnp.uint32)
    return Finals(jnp.full((room,), BEYOND, jnp.int32), jnp.zeros((room,), jnp.uint32), jnp.zeros((), jnp.int32), zero)


def assign(finals: Finals, ended: Array) -> Ends:
    """Return which entries the ends ``ended`` bool ``(lanes, T)`` get, in the order of their slots."""
    room, flat = finals.slot.shape[0], ended.reshape(-1).astype(jnp.int32)
    rank = (jnp.cumsum(flat, dtype=jnp.int32) - flat).reshape(ended.shape)
    total = jnp.sum(flat, dtype=jnp.int32)
    kept = ended & (rank >= total - room)
    return Ends(jnp.where(kept, jnp.mod(finals.head + rank, room), 0), kept, total)


def entries_to_write(ends: Ends) -> Array:
    """Return the entries lane-major int32 ``(lanes * T,)``, those of other steps out of range and all distinct."""
    beyond = BEYOND - jnp.arange(ends.kept.size, dtype=jnp.int32)
    return jnp.where(ends.kept.reshape(-1), ends.entry.reshape(-1), beyond)


def advance(geometry: Geometry, steps: RingState, finals: Finals, ends: Ends, slots: Array) -> tuple[Finals, Array]:
    """Return the side ring after an add that wrote ``slots`` ``(lanes, T)`` and left the ring at ``steps``.

    Also returns the slots of live steps whose final observation was overwritten, int32 ``(k,)`` (``BEYOND``: none). An
    end of this chunk for which there was no room is counted here, but is not among them.
    """
    room = finals.slot.shape[0]
    number = jnp.arange(min(room, slots.size), dtype=jnp.int32)
    gone = jnp.mod(finals.head + number, room)
    slot, generation = finals.slot[gone], finals.generation[gone]
    live = (number < ends.total) & (slot < geometry.slots)
    live = live & (_generation(geometry, steps, slot) == generation) & _is_live(geometry, steps, slot)
    lost = jnp.sum(live, dtype=jnp.int32) + ends.total - jnp.sum(ends.kept, dtype=jnp.int32)
    # Never true, but XLA does not know: so it reads before it writes, instead of copying what it reads (jax 0.10.2).
    impossible = jnp.any((slot < 0) & (generation == 1))
    entries = jnp.where(impossible, BEYOND, entries_to_write(ends))
    owned = Finals(
        finals.slot.at[entries].set(slots.reshape(-1), mode="drop"),
        finals.generation.at[entries].set(_generation(geometry, steps, slots.reshape(-1)), mode="drop"),
        jnp.mod(finals.head + ends.total, room),
        finals.overwritten + lost.astype(jnp.uint32),
    )
    return owned, jnp.where(live, slot, BEYOND)


def _generation(geometry: Geometry, steps: RingState, slots: Array) -> Array:
    lane = jnp.minimum(slots // geometry.length, geometry.lanes - 1)
    return ring.generation(ring.at_lane(steps, lane), slots % geometry.length)


def _is_live(geometry: Geometry, steps: RingState, slots: Array) -> Array:
    lane = jnp.minimum(slots // geometry.length, geometry.lanes - 1)
    return ring.is_live(ring.at_lane(steps, lane), geometry.length, slots % geometry.length)
