"""Which steps of a ring may be drawn, where an item needs its neighbours: windows, n-step jumps, frame stacks.

A *start* is a step that an item may begin at. Whether it may be drawn now depends on the steps around it and changes with
adds alone, so every add marks the few starts it touched in a tree of ones and zeros; uniform draws descend that tree, and
are uniform over exactly the drawable starts. Prioritized draws descend a second tree, in which a start that may not be
drawn has weight zero whatever its priority: an update changes priorities, never what may be drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.config import Prioritized, ReplayConfig, Sampler, Uniform
from conduit_jax.errors import ConfigError, refuse
from conduit_jax.replay import interface, random_bits, rate_limiter, ring, sum_tree
from conduit_jax.replay.buffer import Control
from conduit_jax.replay.rate_limiter import RateLimiter
from conduit_jax.replay.reads import read_rows
from conduit_jax.replay.selectors import Geometry, usable
from conduit_jax.replay.sum_tree import SumTree
from conduit_jax.types import SampleInfo

Array = jax.Array

BEYOND = np.int32(2**31 - 1)  # out of range of every tree: left out
_FEW_NODES = 1024


class Starts(NamedTuple):
    """``drawable`` float32: the levels of a sum tree over all starts, ones and zeros in its leaves.

    ``priority``: a sum tree that keeps every live start's priority and gives weight to the drawable ones;
    ``max_priority`` float32, the highest ever given, at first 1. Both are ``None`` where draws are uniform.
    """

    drawable: Array
    priority: SumTree | None
    max_priority: Array | None


class StartSelection(NamedTuple):
    """Drawn starts int32 ``(n,)`` with their ``probability`` and raw ``priority``, float32."""

    drawn: Array
    probability: Array
    priority: Array


def ring_below(config: ReplayConfig) -> ReplayConfig:
    """Return the configuration of the ring that keeps the steps; which of them are drawn is decided here."""
    if config.resolved_storage != "ring":
        refuse(
            ConfigError,
            "Items that read their neighbours need steps in time order, which only the ring storage keeps.",
            got=config,
            want="a ring: Fifo() removal, Uniform() or Prioritized() draws and max_times_sampled=0",
        )
    return replace(config, sampler=Uniform(), min_size=1, items=None)


def make_limiter(config: ReplayConfig, geometry: Geometry, partitions: int, draws: int, steps: int) -> RateLimiter:
    """Return a partition's limiter, which counts steps inserted and items drawn.

    Refuses one that stops inserts before every lane has the ``steps`` that its share of ``min_size`` items needs.
    """
    limiter = rate_limiter.make_limiter(ring_below(config).limits, partitions=partitions, batch_size=draws)
    if limiter.max_debt is not None:
        most, least = max(limiter.max_debt // limiter.p, limiter.min_size), steps * geometry.lanes
        if most < least:
            refuse(
                ConfigError,
                "The rate limiter would deadlock: it stops inserts before enough items may be drawn.",
                got=f"at most {most} steps inserted in one of {partitions} partitions before the first sample",
                want=f"at least {least}",
                fix="raise SampleToInsertRatio(min_size=), which counts steps here, or its error_buffer",
            )
    return limiter


def refuse_delete(control: Control, info: SampleInfo) -> tuple[Control, Array]:
    """Refuse: a step belongs to the items of its neighbours too."""
    return refuse(
        ConfigError,
        "Items that read their neighbours cannot be deleted: their steps belong to other items too.",
        want="update_priorities to 0 where draws are prioritized",
        fix="ReplayConfig(sampler=Prioritized())",
    )


def explain_too_few(size: int, least: int, n: int) -> str:
    """Return why ``n`` items cannot be sampled where only ``size`` starts may be drawn; empty where they can."""
    return "" if size >= least else f"sampling {n}: drawable starts >= min_size does not hold ({size} < {least})"


def init(sampler: Sampler, count: int) -> Starts:
    """Return ``count`` starts of which none may be drawn."""
    levels = sum_tree.init(count).levels
    if not isinstance(sampler, Prioritized):
        return Starts(levels, None, None)
    return Starts(levels, sum_tree.init(count), jnp.ones((), jnp.float32))


def drawable_count(starts: Starts, count: int) -> Array:
    """Return how many of ``count`` starts may be drawn, int32: summed where nodes are small enough to be exact in float32."""
    begin, end = next(pair for pair in pairwise(sum_tree.level_starts(count)) if pair[1] - pair[0] <= _FEW_NODES)
    return jnp.sum(starts.drawable[begin:end].astype(jnp.int32), dtype=jnp.int32)


def may_be_drawn(starts: Starts, index: Array) -> Array:
    """Return which starts, int32 and in range, may be drawn."""
    return read_rows(starts.drawable, index) > 0


def record(starts: Starts, index: Array, priorities: Array | None) -> tuple[Starts, Array]:
    """Keep the priorities of newly written starts ``(n,)``; return how many bad ones the maximum replaced, uint32.

    No two in range are equal; ``index`` out of range is left out. Who may be drawn is for ``mark`` to say.
    """
    if starts.priority is None or starts.max_priority is None:
        return starts, jnp.zeros((), jnp.uint32)
    highest, tree = starts.max_priority, starts.priority
    present = index < tree.priorities.shape[0]
    given = jnp.broadcast_to(highest, index.shape) if priorities is None else priorities.astype(jnp.float32)
    good = usable(given)
    values = jnp.where(good, given, highest)
    kept = tree.priorities.at[index].set(values, mode="drop")
    highest = jnp.maximum(highest, jnp.max(jnp.where(present, values, 0), initial=0.0))
    replaced = jnp.sum(present & ~good, dtype=jnp.uint32)
    return starts._replace(priority=tree._replace(priorities=kept), max_priority=highest), replaced


def mark(sampler: Sampler, starts: Starts, count: int, index: Array, drawable: Array) -> Starts:
    """Say of the starts ``index`` ``(n,)``, of ``count``, whether they may be drawn; one out of range is left out.

    Equal entries must say the same. Cost O(n log count).
    """
    levels = sum_tree.set_weights(starts.drawable, count, index, drawable.astype(jnp.float32))
    tree = starts.priority
    if tree is None or not isinstance(sampler, Prioritized):
        return starts._replace(drawable=levels)
    own = read_rows(tree.priorities, jnp.minimum(index, count - 1))
    weights = jnp.where(drawable, sum_tree.weigh(own, float(sampler.exponent)), 0)
    tree = tree._replace(levels=sum_tree.set_weights(tree.levels, count, index, weights))
    return starts._replace(drawable=levels, priority=tree)


def select(sampler: Sampler, starts: Starts, count: int, key: Array, n: int) -> StartSelection:
    """Draw ``n`` starts; where no drawable one has weight, uniformly over the drawable ones."""
    words = random_bits.shared_bits(key, 2 * n)
    high, low = words[:n], words[n:]
    size = jnp.maximum(drawable_count(starts, count), 1).astype(jnp.float32)
    even = jnp.broadcast_to(1.0 / size, (n,))
    ones = SumTree(starts.drawable, starts.drawable[:count])
    if starts.priority is None or not isinstance(sampler, Prioritized):
        return StartSelection(sum_tree.draw(ones, high, low, stratified=False)[0], even, jnp.ones((n,), jnp.float32))
    tree = starts.priority
    drawn, everything = sum_tree.draw(tree, high, low, stratified=sampler.stratified)
    weightless = everything <= 0
    index = jnp.where(weightless, sum_tree.draw(ones, high, low, stratified=sampler.stratified)[0], drawn)
    priority = read_rows(tree.priorities, index)
    share = sum_tree.weigh(priority, float(sampler.exponent)) / jnp.where(weightless, 1.0, everything)
    return StartSelection(index, jnp.where(weightless, even, share), priority)


def update(sampler: Sampler, starts: Starts, index: Array, priorities: Array) -> Starts:
    """Give drawable starts new priorities; ``index`` out of range is left out, the last of equal ones wins."""
    if starts.priority is None or starts.max_priority is None or not isinstance(sampler, Prioritized):
        return starts
    present = index < starts.priority.priorities.shape[0]
    highest = jnp.maximum(starts.max_priority, jnp.max(jnp.where(present, priorities, 0), initial=0.0))
    tree = sum_tree.update(starts.priority, index, priorities, float(sampler.exponent))
    return starts._replace(priority=tree, max_priority=highest)


def accepted_update(
    control: Control,
    geometry: Geometry,
    may_be_drawn: Callable[[Array], Array],
    info: SampleInfo,
    priorities: Array,
    stride: int = 1,
) -> tuple[Control, Array, Array]:
    """Return ``control`` with its faults counted, the starts an update reaches (others out of range) and how many.

    It reaches what still is what it was when drawn and ``may_be_drawn(starts)`` still. Starts are every ``stride``-th step of a lane.
    A bad priority anywhere refuses all of the update.
    """
    lane, time = info.slot // geometry.length, info.slot % geometry.length
    own = ring.at_lane(control.ring, jnp.clip(lane, 0, geometry.lanes - 1))
    named = (info.slot >= 0) & (info.slot < geometry.slots) & (time % stride == 0)
    index = jnp.where(named, info.slot // stride, 0)
    current = named & ring.is_live(own, geometry.length, time) & (ring.generation(own, time) == info.generation)
    current = current & may_be_drawn(index) & interface.was_drawn(info)
    accepted = jnp.all(usable(priorities))
    applied = current & accepted
    faults = control.faults
    faults = faults._replace(
        refused_updates=faults.refused_updates + (~accepted).astype(jnp.uint32),
        stale_updates=faults.stale_updates + jnp.sum(accepted & ~current, dtype=jnp.uint32),
    )
    return control._replace(faults=faults), jnp.where(applied, index, BEYOND), jnp.sum(applied, dtype=jnp.int32)
