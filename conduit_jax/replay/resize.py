"""A ring's control for another length: the newest items keep their order, their age and their priority.

Items move to the beginning of their lane, oldest first, and all of them get generations that were never handed out: what
was drawn before and comes back with priorities is then recognised as stale, counted and ignored, never applied to the
item that stands in its old slot now.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.config import Prioritized, Sampler
from conduit_jax.errors import ConfigError, refuse
from conduit_jax.replay import ring, sum_tree
from conduit_jax.replay.buffer import Control
from conduit_jax.replay.ring import RingState
from conduit_jax.replay.selectors import Geometry, PrioritizedState

Array = jax.Array


def resized(control: Any, old: Geometry, new: Geometry, sampler: Sampler, *, keep: bool) -> Control:
    """Return one partition's ``control`` for lanes of ``new.length`` steps; without ``keep`` it is empty.

    Raises ``ConfigError`` for a replay that is no plain ring.
    """
    if not isinstance(control, Control):
        refuse(ConfigError, "Only a ring changes its capacity.", got=type(control).__name__, want='storage="ring"')
    steps = control.ring
    kept = jnp.minimum(steps.filled, new.length) if keep else jnp.zeros_like(steps.filled)
    head = jnp.where(kept == new.length, 0, kept)
    selector = control.selector
    if isinstance(selector, PrioritizedState):
        assert isinstance(sampler, Prioritized)
        priorities = _moved(selector.tree.priorities, steps, kept, old, new)
        slots = jnp.arange(new.slots, dtype=jnp.int32)
        tree = sum_tree.update_unique(sum_tree.init(new.slots), slots, priorities, float(sampler.exponent))
        selector = selector._replace(tree=tree)
    return control._replace(ring=RingState(head, steps.laps + jnp.uint32(2), kept), selector=selector)


def _moved(priorities: Array, steps: RingState, kept: Array, old: Geometry, new: Geometry) -> Array:
    """Return the priorities float32 ``(new.slots,)`` of the newest ``kept`` steps a lane, zero elsewhere."""
    fields = [jnp.broadcast_to(field, (new.lanes,))[:, None] for field in (*steps, kept)]
    lanes, remaining = RingState(*fields[:3]), fields[3]
    times = jnp.arange(new.length, dtype=jnp.int32)[None]
    source = ring.nth_oldest(lanes, old.length, jnp.minimum(lanes.filled - remaining + times, old.length - 1))
    values = jnp.take_along_axis(priorities.reshape(old.lanes, old.length), source, axis=1)
    return jnp.where(times < remaining, values, 0).reshape(-1)


def kept_runs(steps: RingState, old: Geometry, new: Geometry) -> list[tuple[int, int, int, int]]:
    """Return (partition, slot, new slot, number of slots) of all that a longer or shorter ring keeps; ``steps`` of all partitions."""
    head, filled = (np.asarray(field, np.int64) for field in (steps.head, steps.filled))
    runs = []
    for partition in range(head.shape[0]):
        heads, sizes = (np.broadcast_to(field[partition], (old.lanes,)) for field in (head, filled))
        for lane in range(old.lanes):
            kept = int(min(sizes[lane], new.length))
            start = int(heads[lane] - kept) % old.length
            first = min(kept, old.length - start)
            base, to = lane * old.length, lane * new.length
            runs += [(partition, base + start, to, first), (partition, base, to + first, kept - first)]
    return [run for run in runs if run[3]]
