"""Windows that may cross the ends of episodes, drawn uniformly: which starts there are is arithmetic on the ring's head."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.replay import random_bits, ring
from conduit_jax.replay import starts as startable
from conduit_jax.replay.buffer import Control, Replay, ReplayState
from conduit_jax.replay.piecewise import DRAWN, piecewise, renewed
from conduit_jax.replay.rate_limiter import RateLimiter
from conduit_jax.replay.ring import RingState
from conduit_jax.replay.selectors import Selection, Table, describe, settled
from conduit_jax.replay.storage import Experience, Storage
from conduit_jax.replay.turns import in_turn, waiting
from conduit_jax.replay.window_reads import check_item, read_windows
from conduit_jax.replay.window_starts import Windows
from conduit_jax.types import Sample, SampleInfo

Array = jax.Array
PyTree = Any


class _Starts(NamedTuple):
    """``number`` int32 windows a lane; the first begins ``offset`` int32 steps after the lane's oldest step."""

    number: Array
    offset: Array


def make_crossing(
    base: Replay, windows: Windows, limiter: RateLimiter, draws: int, least: int, access: Storage
) -> Replay:
    """Return ``base``, a replay of aligned steps in whole periods, with samples of ``draws`` windows.

    An insert costs what one of steps costs. ``least`` windows must be there before a draw.
    """
    geometry = base.geometry

    def starts(steps: RingState) -> _Starts:
        oldest, period = ring.nth_oldest(steps, geometry.length, jnp.int32(0)), np.int32(windows.period)
        offset = jax.lax.rem(period - jax.lax.rem(oldest, period), period)
        room = jnp.maximum(steps.filled - windows.length - offset + period, 0)
        return _Starts(jax.lax.div(room, period), offset)

    def init(item: PyTree) -> ReplayState:
        state = base.init(item)
        check_item(windows, state.storage, geometry)
        return state

    def size(control: Control) -> Array:
        return starts(control.ring).number * geometry.lanes

    def can_sample(control: Control, n: int) -> Array:
        return base.can_sample(control, n) & (size(control) >= least)

    @partial(jax.jit, inline=True)
    def draw(steps: RingState, key: Array) -> Array:
        """Return the slots int32 ``(draws,)`` that windows begin in."""
        key = random_bits.key_words(key)

        def few(draw: Array) -> Array:
            own = renewed(steps, draw)
            number, offset = starts(own)
            total = number * geometry.lanes
            rank = random_bits.below(random_bits.bits_at(renewed(key, draw), draw), total)
            lane = jax.lax.div(rank, jnp.maximum(number, 1))
            nth = offset + (rank - lane * number) * windows.period
            time = jnp.clip(ring.nth_oldest(own, geometry.length, nth), 0, geometry.length - 1)
            return settled(lane * geometry.length + time, geometry, total)

        return piecewise(few, key, count=draws, piece=DRAWN // 2)

    def sample(control: Control, experience: Experience, key: Array) -> tuple[Control, Sample]:
        key = waiting(key, control)
        total, slots = size(control), draw(control.ring, key)
        data, mask, versions = read_windows(windows, geometry, access, experience, slots)
        one, ready = jnp.ones((), jnp.float32), can_sample(control, draws)
        selection = Selection(slots, 1.0 / jnp.maximum(total, 1).astype(jnp.float32), one)
        info = describe(control.ring, geometry, selection, Table(total, ready), versions, one)
        paid = limiter.sampled(control.limiter, jnp.where(ready, draws, 0))
        return in_turn(control._replace(limiter=paid), info, data), Sample.described(data, info, mask)

    def may_be_drawn(index: Array, steps: RingState) -> Array:
        time = index * windows.period % geometry.length
        return ring.age(steps, geometry.length, time) >= windows.length - 1

    def update_priorities(control: Control, info: SampleInfo, priorities: Array) -> tuple[Control, Array]:
        priorities, may = priorities.astype(jnp.float32), partial(may_be_drawn, steps=control.ring)
        control, _, applied = startable.accepted_update(control, geometry, may, info, priorities, windows.period)
        return control, applied

    def explain_blocked(control: Control, operation: str, n: int) -> str:
        reason = base.explain_blocked(control, operation, n)
        return reason if reason or operation != "sample" else startable.explain_too_few(int(size(control)), least, n)

    return base._replace(
        init=init,
        can_sample=can_sample,
        sample=sample,
        update_priorities=update_priorities,
        delete=startable.refuse_delete,
        explain_blocked=explain_blocked,
        size=size,
    )
