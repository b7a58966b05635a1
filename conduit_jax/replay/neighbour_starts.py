"""Which steps a transition may begin at: its successors, its final observation and its frames must all be there."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.replay import ring
from conduit_jax.replay.finals import Ends
from conduit_jax.replay.ring import RingState
from conduit_jax.replay.selectors import Geometry
from conduit_jax.replay.starts import BEYOND
from conduit_jax.replay.transition_view import TransitionView

Array = jax.Array

GOES_ON, ENDED, ENDED_LOST = 0, 1, 2


class Marks(NamedTuple):
    """What is kept of every step, small, to judge its neighbours by.

    ``end`` uint8 ``(slots,)``: whether an episode ended there, and whether its final observation is lost. ``depth`` uint16
    ``(slots,)``: how many frames of the same episode precede the step, at most stack - 1; ``next_depth`` int32 ``(lanes,)``
    that of the step to come. Both are ``None`` without a stack.
    """

    end: Array
    depth: Array | None
    next_depth: Array | None


def init(geometry: Geometry, stack: int) -> Marks:
    """Return the marks of an empty ring."""
    end = jnp.zeros((geometry.slots,), jnp.uint8)
    if stack == 1:
        return Marks(end, None, None)
    return Marks(end, jnp.zeros((geometry.slots,), jnp.uint16), jnp.zeros((geometry.lanes,), jnp.int32))


def restart(marks: Marks) -> Marks:
    """Return the marks of a ring that was reset: the next step begins an episode."""
    return marks if marks.next_depth is None else marks._replace(next_depth=jnp.zeros_like(marks.next_depth))


def write(marks: Marks, slots: Array, ended: Array, ends: Ends, lost: Array, stack: int) -> Marks:
    """Return the marks after writing the steps ``slots`` ``(lanes, T)``, those ``BEYOND`` left out.

    ``ended`` bool ``(lanes, T)``; ``lost`` int32 ``(k,)`` are older steps whose final observation has gone.
    """
    code = jnp.where(ended, jnp.where(ends.kept, ENDED, ENDED_LOST), GOES_ON).astype(jnp.uint8)
    end = marks.end.at[slots].set(code, mode="drop").at[lost].set(ENDED_LOST, mode="drop")
    if marks.depth is None or marks.next_depth is None:
        return marks._replace(end=end)
    depths = episode_depths(marks.next_depth, ended, stack)
    depth = marks.depth.at[slots].set(depths[:, :-1].astype(jnp.uint16), mode="drop")
    count = jnp.sum(slots < BEYOND, axis=1, dtype=jnp.int32)
    return Marks(end, depth, jnp.take_along_axis(depths, count[:, None], axis=1)[:, 0])


def episode_depths(first: Array, ended: Array, stack: int) -> Array:
    """Return int32 ``(lanes, T + 1)``: the depth of each step and of the one after, ``first`` ``(lanes,)`` given."""
    position = jnp.arange(ended.shape[1] + 1, dtype=jnp.int32)
    begins = jnp.where(ended, position[1:], -BEYOND)
    begins = jax.lax.cummax(jnp.concatenate([-first[:, None], begins], axis=1), axis=1)
    return jnp.minimum(position - begins, stack - 1)


def touched_by_add(view: TransitionView, geometry: Geometry, steps: RingState, added: int, lost: Array) -> Array:
    """Return the slots ``(k,)`` whose transition an add of ``added`` steps a lane may have changed, some of them twice.

    Those written and the n before them, whose successors have come; the oldest of each lane, whose frames may have gone;
    those whose n steps end where a final observation was lost. ``BEYOND`` stands for none.
    """
    lanes = jnp.arange(geometry.lanes, dtype=jnp.int32)[:, None]
    own = RingState(*(jnp.broadcast_to(field, (geometry.lanes,))[:, None] for field in steps))
    newest = own.head - 1 - jnp.arange(min(added + view.largest_n, geometry.length), dtype=jnp.int32)
    oldest = ring.nth_oldest(own, geometry.length, jnp.arange(view.stack - 1, dtype=jnp.int32))
    time = jnp.concatenate([jnp.where(newest < 0, newest + geometry.length, newest), oldest], axis=1)
    near = (lanes * geometry.length + time).reshape(-1)
    before = slots_after(geometry, lost[:, None], -jnp.arange(view.largest_n, dtype=jnp.int32))
    return jnp.concatenate([near, jnp.where(lost[:, None] < geometry.slots, before, BEYOND).reshape(-1)])


def slots_after(geometry: Geometry, slots: Array, steps: Array) -> Array:
    """Return the slots that are ``steps`` (more than minus, less than plus the ring's length) later in their lanes."""
    time = slots % geometry.length
    moved = time - geometry.length + steps
    moved = jnp.where(moved < 0, moved + geometry.length, moved)
    return slots - time + jnp.where(moved < 0, moved + geometry.length, moved)


def drawable_starts(view: TransitionView, geometry: Geometry, steps: RingState, marks: Marks, slots: Array) -> Array:
    """Return whether a transition may begin at ``slots`` int32 ``(k,)``; what it says of slots out of range means nothing."""
    slots = jnp.minimum(slots, geometry.slots - 1)
    own, n = ring.at_lane(steps, slots // geometry.length), view.largest_n
    age = ring.age(own, geometry.length, slots % geometry.length)
    ahead = jnp.arange(n, dtype=jnp.int32)
    code = marks.end[slots_after(geometry, slots[:, None], ahead)]
    known = (code != GOES_ON) & (ahead <= age[:, None])
    first = jnp.take_along_axis(code, jnp.argmax(known, axis=1)[:, None], axis=1)[:, 0]
    complete = jnp.where(jnp.any(known, axis=1), first == ENDED, age >= n)
    older = own.filled - 1 - age  # live steps before this one; negative where it is not live itself
    depth = 0 if marks.depth is None else marks.depth[slots].astype(jnp.int32)
    return complete & (older >= depth)
