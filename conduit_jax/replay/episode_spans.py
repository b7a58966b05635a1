"""Which episodes are completed by a chunk that may cut them anywhere, and where in their lane they lie."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
PyTree = Any

BROKEN = 2**30  # steps of a running episode whose first ones are lost: longer than any that may be kept


class Span(NamedTuple):
    """One episode of a lane: ``start`` uint32, the clock of its first step, and its ``length`` int32.

    A lane's clock counts its steps modulo 2**32; only differences of at most a ring are used.
    """

    start: Array
    length: Array


class Closed(NamedTuple):
    """What a chunk completes, ``(lanes, T)``: ``kept`` bool where the last step of an episode to be kept is, and its ``length``.

    ``running`` int32 ``(lanes,)``: steps of the episode that goes on. ``dropped`` uint32: episodes completed but not kept.
    """

    kept: Array
    length: Array
    running: Array
    dropped: Array


def close(running: Array, ended: Array, count: Array, max_length: int, *, split: bool) -> Closed:
    """Return what ``ended`` bool ``(T, lanes)`` completes, of which each lane takes the first ``count`` int32 ``(lanes,)`` steps.

    An episode of more than ``max_length`` steps is dropped, or ``split`` into pieces of that length and a shorter last one.
    """
    step = jnp.arange(ended.shape[0], dtype=jnp.int32)
    present = step < count[:, None]
    ends = ended.T & present
    ended_at = jax.lax.cummax(jnp.where(ends, step, -1), axis=1)
    previous = jnp.pad(ended_at[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    total = jnp.where(previous >= 0, step - previous, step + 1 + running[:, None])
    whole = total <= (BROKEN if split else max_length)
    length = (total - 1) % max_length + 1 if split else total
    completed = ends | (present & whole & (length == max_length)) if split else ends
    goes_on = jnp.where(whole & jnp.asarray(split), length % max_length, jnp.minimum(total, BROKEN))
    at_last = jnp.take_along_axis(jnp.where(ends, 0, goes_on), jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    return Closed(
        kept=completed & whole,
        length=length,
        running=jnp.where(count > 0, at_last, running),
        dropped=jnp.sum(completed & ~whole, dtype=jnp.uint32),
    )


class Compact(NamedTuple):
    """The chosen entries of every lane pushed to its front: ``values``, a tree of ``(room, lanes)``, ``filled`` int32 ``(lanes,)`` of them.

    ``crowded`` int32: the oldest of them that had no room.
    """

    values: PyTree
    filled: Array
    crowded: Array


def compact(chosen: Array, values: PyTree, room: int) -> Compact:
    """Return the newest ``room`` entries of ``values`` ``(lanes, T)`` where ``chosen``, in their order."""
    lanes, steps = chosen.shape
    total = jnp.sum(chosen, axis=1, dtype=jnp.int32)
    crowded = jnp.maximum(total - room, 0)
    place = jnp.cumsum(chosen, axis=1, dtype=jnp.int32) - 1 - crowded[:, None]
    apart = 2**31 - 1 - jnp.arange(steps, dtype=jnp.int32)  # unique and out of range
    place = jnp.where(chosen & (place >= 0), place, apart)
    lane = jnp.arange(lanes, dtype=jnp.int32)[:, None]

    def push(entries: Array) -> Array:
        front = jnp.zeros((lanes, room), entries.dtype)
        return front.at[lane, place].set(entries, mode="drop", unique_indices=True).T

    return Compact(jax.tree.map(push, values), total - crowded, jnp.sum(crowded, dtype=jnp.int32))
