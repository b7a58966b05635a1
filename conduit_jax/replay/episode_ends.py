"""Where the episode of every step of a ring begins and ends, in O(1) a step written or asked for.

Every lane numbers its episodes round a ring of ``length + 1``: more than can have live steps at once, the running one
included, so no two of them share a number. A slot keeps its episode's number and an episode the clock of its last step; it
begins after the last step of the episode before. Nothing is ever written backwards when an episode ends. Clocks count
the steps of a lane, modulo 2**32; only differences of less than a ring, or of one episode, are used.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.replay import ring
from conduit_jax.replay.ring import RingState
from conduit_jax.replay.selectors import Geometry

Array = jax.Array

_BEYOND = 2**31 - 1


class EpisodeEnds(NamedTuple):
    """``episode`` int32 ``(slots,)``; ``ends`` uint32 ``(lanes, length + 1)``, the clock of each episode's last step.

    ``running`` int32 ``(lanes,)``: the number of the episode that the next step belongs to; ``clock`` uint32 ``(lanes,)``:
    the clock of that step.
    """

    episode: Array
    ends: Array
    running: Array
    clock: Array


class Span(NamedTuple):
    """What lives of a step's episode: int32 steps ``before`` and ``after`` the step, and whether its end is ``known``."""

    before: Array
    after: Array
    known: Array


def init(geometry: Geometry) -> EpisodeEnds:
    """Return the state of empty lanes, whose first episode begins at clock 0."""
    lanes, length = geometry
    return EpisodeEnds(
        episode=jnp.zeros((geometry.slots,), jnp.int32),
        ends=jnp.full((lanes, length + 1), 2**32 - 1, jnp.uint32),
        running=jnp.zeros((lanes,), jnp.int32),
        clock=jnp.zeros((lanes,), jnp.uint32),
    )


def advance(state: EpisodeEnds, geometry: Geometry, before: RingState, ended: Array, count: Array) -> EpisodeEnds:
    """Return the state after a chunk: ``ended`` bool ``(T, lanes)``, of which each lane takes the first ``count`` steps.

    ``before`` is the ring that the chunk was added to; ``count`` int32, a scalar or ``(lanes,)``.
    """
    (steps, lanes), (_, length) = ended.shape, geometry
    count = jnp.broadcast_to(count, (lanes,))
    present = jnp.arange(steps, dtype=jnp.int32) < count[:, None]  # from here on (lanes, T), the order of the slots
    closes = ended.T & present
    passed = jnp.cumsum(closes, axis=1, dtype=jnp.int32)
    number = _wrap(state.running[:, None] + passed - closes, length)
    lane = jnp.arange(lanes, dtype=jnp.int32)[:, None]
    times = jnp.broadcast_to(ring.write_times(before, length, steps), (lanes, steps))
    apart = _BEYOND - jnp.arange(lanes * steps, dtype=jnp.int32).reshape(lanes, steps)  # unique and out of range
    slots = jnp.where(present, lane * length + times, apart)
    clocks = state.clock[:, None] + jnp.arange(steps, dtype=jnp.uint32)
    ends = state.ends.at[lane, jnp.where(closes, number, apart)].set(clocks, mode="drop", unique_indices=True)
    return EpisodeEnds(
        episode=state.episode.at[slots].set(number, mode="drop", unique_indices=True),
        ends=ends,
        running=_wrap(state.running + jnp.sum(closes, axis=1, dtype=jnp.int32), length),
        clock=state.clock + count.astype(jnp.uint32),
    )


def reset(state: EpisodeEnds, geometry: Geometry) -> EpisodeEnds:
    """Return the state of a ring that has been reset: the running episode ended there, what follows is another."""
    lanes = jnp.arange(geometry.lanes, dtype=jnp.int32)
    ends = state.ends.at[lanes, state.running].set(state.clock - jnp.uint32(1))
    return state._replace(ends=ends, running=_wrap(state.running + 1, geometry.length))


def span(state: EpisodeEnds, geometry: Geometry, steps: RingState, slots: Array) -> Span:
    """Return how far the episodes of live ``slots`` int32 ``(n,)`` reach; one that is still running, to its newest step."""
    lane, time = slots // geometry.length, slots % geometry.length
    own = ring.at_lane(steps, lane)
    age = ring.age(own, geometry.length, time)
    number = state.episode.at[slots].get(mode="promise_in_bounds")
    previous = jnp.where(number == 0, geometry.length, number - 1)
    clock = state.clock[lane] - jnp.uint32(1) - age.astype(jnp.uint32)
    known = number != state.running[lane]
    after = jnp.where(known, (state.ends[lane, number] - clock).astype(jnp.int32), age)
    before = clock - state.ends[lane, previous] - jnp.uint32(1)
    older = jnp.maximum(own.filled - 1 - age, 0)
    before = jnp.minimum(before, older.astype(jnp.uint32)).astype(jnp.int32)
    return Span(before, jnp.clip(after, 0, age), known)


def shift(geometry: Geometry, slots: Array, by: Array) -> Array:
    """Return the slots ``by`` steps later (int32, negative: earlier; less than a ring) in the lanes of ``slots``."""
    lane, time = slots // geometry.length, slots % geometry.length
    return lane * geometry.length + (time + by) % geometry.length


def _wrap(number: Array, length: int) -> Array:
    return number % (length + 1)
