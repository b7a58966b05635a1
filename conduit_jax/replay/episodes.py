"""Whole episodes as items: steps in a ring without padding, an index of (start, length), batches of one shape.

    config = EpisodesConfig(capacity_steps=1_000_000, max_length=500)
    replay = make_episodes(config, batch_size=32, lanes=16)                            # or delivery=Packed(...), Buckets(...)
    state, added = replay.add(state, chunk)                      # (T, lanes, ...): chunks may cut episodes anywhere
    control, sample = replay.sample(state.control, state.storage, key)                 # data (32, 500, ...), sample.mask

The index is itself a replay, of spans: its draws, priorities, generations and counts are those of any other replay. Only
complete episodes are in it. What this file adds is the ring of steps below, and that an episode leaves when its first
step is overwritten.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from conduit_jax.config import Prioritized, ReplayConfig
from conduit_jax.errors import ConfigError, refuse
from conduit_jax.replay import episode_table, interface, paths, random_bits, ring, storage, sum_tree
from conduit_jax.replay.buffer import make_replay
from conduit_jax.replay.episode_batches import Buckets, Delivery, Packed, Padded, packed_into, padded_to
from conduit_jax.replay.episode_config import ByLength, EpisodesConfig
from conduit_jax.replay.episode_spans import BROKEN, Span
from conduit_jax.replay.episode_table import EpisodesControl, EpisodesStorage, Table
from conduit_jax.replay.interface import Replay, ReplayState
from conduit_jax.replay.records import record_layout
from conduit_jax.replay.selectors import Geometry, make_selector
from conduit_jax.replay.storage import Storage, in_device_memory
from conduit_jax.replay.tables import TablesControl, delete_from_tables, update_tables
from conduit_jax.trees import tree_spec
from conduit_jax.types import AddInfo, Sample, SampleInfo

Array = jax.Array
PyTree = Any


def make_episodes(
    config: EpisodesConfig,
    *,
    batch_size: int,
    lanes: int = 1,
    partitions: int = 1,
    delivery: Delivery | None = None,
    storage_access: Storage = in_device_memory,
) -> Replay:
    """Return the replay of complete episodes of **one** of ``partitions`` partitions; sizes are totals over all of them.

    ``delivery`` is ``Padded()`` unless given. ``Sample.info``, ``weights`` and ``valid`` are of the ``batch_size`` drawn
    episodes, ``mask`` of the delivered steps. ``add``'s ``priorities[t]`` counts where an episode ends at ``t``. With
    ``Buckets``, ``sample``, ``can_sample`` and ``explain_blocked`` take a static ``bucket=0``, and probabilities are within it.
    Chunks longer than ``max_length`` and lanes filled unequally far (``lengths``) need no setting.

    Raises:
      ConfigError: for episodes longer than a lane's ring or a packed row, and where lanes or batch do not divide.
    """
    table = _table(config, batch_size, lanes, partitions, delivery or Padded(), storage_access)

    def init(item: PyTree) -> ReplayState:
        span = jax.eval_shape(lambda: Span(jnp.uint32(0), jnp.int32(0)))
        jax.eval_shape(lambda one: paths.any_of(one, config.ended), item)
        steps = storage.allocate(record_layout(tree_spec(item)), table.steps.slots)
        spans = [replay.init(span) for replay in table.replays]
        count = jnp.zeros((table.steps.lanes,), jnp.int32)
        index = TablesControl(tuple(one.control for one in spans), jnp.zeros((), jnp.uint32))
        control = EpisodesControl(
            index, ring.init(table.steps.lanes), count.astype(jnp.uint32), count, jnp.zeros((), jnp.uint32)
        )
        return ReplayState(EpisodesStorage(steps, tuple(one.storage for one in spans)), control)

    def add(
        state: ReplayState,
        chunk: PyTree,
        lengths: Array | None = None,
        priorities: Array | None = None,
        version: Array | None = None,
        key: Array | None = None,  # a ring removes its oldest episodes, never drawn ones
    ) -> tuple[ReplayState, AddInfo]:
        return episode_table.insert(
            table, state, chunk, lengths, priorities, jnp.uint32(0) if version is None else version
        )

    def can_sample(control: EpisodesControl, n: int, bucket: int = 0) -> Array:
        return table.replays[bucket].can_sample(control.episodes.tables[bucket], n)

    def sample(
        control: EpisodesControl, kept: EpisodesStorage, key: Array, bucket: int = 0
    ) -> tuple[EpisodesControl, Sample]:
        return episode_table.draw(table, control, kept, key, bucket)

    def update_priorities(control: EpisodesControl, info: SampleInfo, priorities: Array) -> tuple:
        if isinstance(config.sampler, ByLength):
            refuse(ConfigError, "Episodes drawn by their length have no priorities.", fix="sampler=Prioritized()")
        index, applied = update_tables(table.replays, table.geometry, control.episodes, info, priorities)
        return control._replace(episodes=index), applied

    def delete(control: EpisodesControl, info: SampleInfo) -> tuple:
        index, deleted = delete_from_tables(table.replays, table.geometry, control.episodes, info)
        return control._replace(episodes=index), deleted

    def reset(control: EpisodesControl) -> EpisodesControl:
        pairs = zip(table.replays, control.episodes.tables, strict=True)
        index = control.episodes._replace(tables=tuple(replay.reset(own) for replay, own in pairs))
        return control._replace(episodes=index, running=jnp.where(control.running > 0, BROKEN, 0))

    def explain_blocked(control: EpisodesControl, operation: str, n: int, bucket: int = 0) -> str:
        return table.replays[bucket].explain_blocked(control.episodes.tables[bucket], operation, n)

    def size(control: EpisodesControl) -> Array:
        pairs = zip(table.replays, control.episodes.tables, strict=True)
        return sum((replay.size(own) for replay, own in pairs), jnp.int32(0))

    return Replay(
        init=init,
        can_add=lambda control, n: jnp.ones((), bool),
        add=add,
        can_sample=can_sample,
        sample=sample,
        update_priorities=update_priorities,
        delete=delete,
        reset=reset,
        explain_blocked=explain_blocked,
        size=size,
        geometry=table.geometry,
    )


def for_bucket(episodes: Replay, bucket: int) -> Replay:
    """Return ``episodes`` with everything that takes a bucket fixed to one: what wrappers and placements take as it is."""
    buckets = len(episodes.geometry.tables)
    if not 0 <= bucket < buckets:
        refuse(ConfigError, "There is no such bucket.", got=bucket, want=f"0 to {buckets - 1}")
    functions = {name: getattr(episodes, name) for name in ("can_sample", "sample", "explain_blocked")}
    return episodes._replace(**{name: partial(function, bucket=bucket) for name, function in functions.items()})


def draw_bucket(episodes: Replay, buckets: Buckets, control: EpisodesControl, key: Array) -> Array:
    """Return the number, int32, of a bucket, so that over many batches draws follow the sampler's law over all episodes.

    Its probability is its part of all weight (episodes, lengths or priorities) over its batch size, and 0 where it cannot
    be sampled yet; 0 is returned where none can. For the host to read: a bucket is static.
    """
    tables = list(zip(control.episodes.tables, episodes.geometry.tables, strict=True))
    sizes = [ring.live_items(own.ring, geometry.lanes).astype(jnp.float32) for own, geometry in tables]
    totals = [sum_tree.total(own.selector.tree) if own.selector else jnp.float32(0) for own, _ in tables]
    weights = jnp.where(jnp.sum(jnp.stack(totals)) > 0, jnp.stack(totals), jnp.stack(sizes))
    ready = jnp.stack([episodes.can_sample(control, 1, bucket=number) for number in range(len(tables))])
    batch_sizes = jnp.array(buckets.batch_sizes or (1,) * len(tables), jnp.float32)
    weights = jnp.where(ready, weights / batch_sizes, 0)
    begins = jnp.cumsum(weights, dtype=jnp.float32) - weights
    target = random_bits.unit_interval(random_bits.bits(key, 1)) * jnp.sum(weights)
    entered = (begins <= target) & (weights > 0)  # the last of these: never one without weight, whatever the rounding
    return jnp.max(jnp.where(entered, jnp.arange(len(tables), dtype=jnp.int32), 0))


def _table(
    config: EpisodesConfig, batch_size: int, lanes: int, partitions: int, delivery: Delivery, access: Storage
) -> Table:
    """Check what can never work and return the static parts."""
    rows = delivery.rows if isinstance(delivery, Packed) else batch_size
    for size in (batch_size, rows):
        interface.check_divides(lanes, size, partitions)
    length = -(-config.capacity_steps // lanes)
    interface.check_slots(length * (lanes // partitions), partitions)
    _check_fits(config, length, delivery)
    bounds = delivery.lengths if isinstance(delivery, Buckets) else (config.max_length,)
    batches = (isinstance(delivery, Buckets) and delivery.batch_sizes) or (batch_size,) * len(bounds)
    sampler = (
        Prioritized(exponent=1.0, importance_exponent=0.0) if isinstance(config.sampler, ByLength) else config.sampler
    )
    index = ReplayConfig(
        capacity=min(config.max_episodes or length * lanes, length * lanes),
        min_size=config.min_episodes,
        sampler=sampler,
        storage="ring",
        ragged=True,
    )
    shape = {"lanes": lanes, "partitions": partitions, "storage_access": access}
    if isinstance(delivery, Packed):
        assemble = (packed_into(rows // partitions, delivery.row_length),)
    else:
        assemble = tuple(padded_to(bound) for bound in bounds)
    return Table(
        config=config,
        steps=Geometry(lanes // partitions, length),
        replays=tuple(make_replay(index, batch_size=size, **shape) for size in batches),
        selector=make_selector(sampler),
        assemble=assemble,
        lengths=bounds,
        access=access,
    )


def _check_fits(config: EpisodesConfig, length: int, delivery: Delivery) -> None:
    """Refuse episodes that could never be kept or delivered whole."""
    if config.max_length > length:
        refuse(
            ConfigError,
            "The longest episode does not fit a lane's ring.",
            got=f"max_length={config.max_length}",
            want=f"at most {length} = capacity_steps / lanes",
            fix="raise capacity_steps, or use fewer lanes",
        )
    if isinstance(delivery, Packed) and delivery.row_length < config.max_length:
        refuse(
            ConfigError,
            "The longest episode does not fit a packed row.",
            got=f"Packed(row_length={delivery.row_length})",
            want=f"at least max_length = {config.max_length}",
        )
    if isinstance(delivery, Buckets) and delivery.lengths[-1] != config.max_length:
        refuse(
            ConfigError,
            "The last bucket has to hold the longest episode, and no longer one.",
            got=f"Buckets(lengths={delivery.lengths})",
            want=f"a last length of {config.max_length}",
        )
