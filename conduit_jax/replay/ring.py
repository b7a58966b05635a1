"""Index arithmetic of the time axis, alone: a ring of ``length`` time steps, shared by all lanes or one a lane.

With *aligned* lanes (every insert writes all lanes equally far) the state's fields are scalars; with *ragged* lanes they
are ``(lanes,)`` and every function broadcasts. Nothing here counts without bound: ``head`` and ``filled`` stay within the
ring and ``laps`` is a uint32 that may wrap, so the arithmetic is the same before and after 2**31 items.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.packed import Packed, packed

Array = jax.Array


@packed(head=np.int32, laps=np.uint32, filled=np.int32)
class RingState(Packed):
    """``head`` int32: the next time index to be written; ``laps`` uint32: times it has passed the end; ``filled`` int32: live steps."""

    __slots__ = ()
    head: Array
    laps: Array
    filled: Array


def init(lanes: int | None = None) -> RingState:
    """Return an empty ring; ``lanes=None`` for aligned lanes, a number for one ring a lane."""
    shape = () if lanes is None else (lanes,)
    return RingState(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.int32))


def reset(state: RingState) -> RingState:
    """Forget all items; what is written from here on has generations that were never handed out before."""
    return RingState(jnp.zeros_like(state.head), state.laps + jnp.uint32(1), jnp.zeros_like(state.filled))


def write_times(state: RingState, length: int, count: int) -> Array:
    """Return the time indices of the next ``count`` writes, int32 ``(..., count)``; ``count <= length``."""
    return wrap(state.head[..., None], length, jnp.arange(count, dtype=jnp.int32))


def wrap(head: Array, length: int, offset: Array) -> Array:
    """Return the time index ``offset`` steps on from ``head``, int32; ``0 <= offset <= length``."""
    time = head - length + offset  # head + offset may pass 2**31
    return jnp.where(time < 0, time + length, time)


def advance(state: RingState, length: int, count: Array) -> RingState:
    """Return the ring after ``count`` more steps (``0 <= count <= length``, scalar or ``(lanes,)``)."""
    head = state.head - length + count  # head + count may pass 2**31
    wrapped = head >= 0
    return RingState(
        head=jnp.where(wrapped, head, head + length),
        laps=state.laps + wrapped.astype(jnp.uint32),
        filled=length - jnp.maximum(length - state.filled - count, 0),
    )


def age(state: RingState, length: int, time: Array) -> Array:
    """Return how many newer steps the lane holds than the one at index ``time``; 0 for the newest."""
    back = state.head - 1 - time
    return jnp.where(back < 0, back + length, back)


def is_live(state: RingState, length: int, time: Array) -> Array:
    """Return whether index ``time`` holds an item."""
    return age(state, length, time) < state.filled


def generation(state: RingState, time: Array) -> Array:
    """Return how many times index ``time`` had been passed when its present content was written, uint32."""
    return state.laps - (time >= state.head).astype(jnp.uint32)


def nth_oldest(state: RingState, length: int, offset: Array) -> Array:
    """Return the time index of the item that is ``offset`` steps younger than the oldest live one."""
    time = state.head - state.filled + offset
    time = jnp.where(time < 0, time + length, time)
    return jnp.where(time >= length, time - length, time)


def at_lane(state: RingState, lane: Array) -> RingState:
    """Return the ring seen by each of ``lane``'s items: itself if aligned, gathered a lane if ragged."""
    return state if state.head.ndim == 0 else jax.tree.map(lambda field: field[lane], state)


def live_items(state: RingState, lanes: int) -> Array:
    """Return the number of live items over all ``lanes``, int32."""
    return state.filled * lanes if state.filled.ndim == 0 else jnp.sum(state.filled, dtype=jnp.int32)


def nth_live(state: RingState, length: int, lanes: int, rank: Array) -> tuple[Array, Array]:
    """Return ``(lane, time)`` of the ``rank``-th live item, counted lane by lane and oldest first.

    ``rank`` is int32 in ``[0, live_items)``; anything else (an empty ring) gives some legal index.
    """
    if lanes == 1 and state.filled.ndim == 0:
        lane, offset = jnp.zeros_like(rank), rank
    elif state.filled.ndim == 0:
        lane = rank // jnp.maximum(state.filled, 1)
        offset = rank - lane * state.filled
    else:
        ends = jnp.cumsum(state.filled, dtype=jnp.int32)
        lane = jnp.searchsorted(ends, rank, side="right", method="compare_all").astype(jnp.int32)
        offset = rank - (ends - state.filled)[jnp.minimum(lane, lanes - 1)]
    lane = jnp.clip(lane, 0, lanes - 1)
    time = nth_oldest(at_lane(state, lane), length, offset)
    return lane, jnp.clip(time, 0, length - 1)
