"""Running statistics that an ingestion hook carries from one rollout to the next."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.errors import check_at_least, check_fraction
from conduit_jax.types import Array, PyTree, Rollout


class RewardScale(NamedTuple):
    """Each lane's running discounted return ``(lanes,)``; of all of them so far how many, their mean and squares about it.

    All are float32.
    """

    running: Array
    seen: Array
    mean: Array
    squares: Array


def reward_scale_carry(rollout: Rollout) -> RewardScale:
    """Return the carry before the first rollout (arrays or ``ShapeDtypeStruct``); an ``init_carry``."""
    zero = jnp.zeros((), jnp.float32)
    return RewardScale(jnp.zeros(rollout.reward.shape[1], jnp.float32), zero, zero, zero)


def scale_rewards(carry: RewardScale, rollout: Rollout, *, discount: float) -> tuple[RewardScale, Array]:
    """Return the carry after ``rollout`` and its rewards over the standard deviation of discounted returns, ``(T, lanes)``.

    G_t = r_t + discount * G_{t-1}, begun anew after an episode's end. The rollout's moments are merged into those before it
    (Chan et al. 1983) and all of it is scaled alike, by moments that include it. The mean is left in: a reward keeps its
    sign. ``ConfigError`` where ``discount`` is outside [0, 1].

    Source: the reward scaling of Engstrom et al. 2020, section 2.
    """
    check_fraction("discount", discount)

    def step(running: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        reward, ended = now
        running = discount * running + reward
        return jnp.where(ended, 0, running), running

    rewards = rollout.reward.astype(jnp.float32)
    running, returns = jax.lax.scan(step, carry.running, (rewards, rollout.terminated | rollout.truncated))
    size, mean = jnp.asarray(returns.size, jnp.float32), jnp.mean(returns)
    seen, difference = carry.seen + size, mean - carry.mean
    squares = carry.squares + jnp.sum((returns - mean) ** 2) + difference**2 * carry.seen * size / seen
    carry = RewardScale(running, seen, carry.mean + difference * size / seen, squares)
    return carry, rewards / jnp.sqrt(squares / seen + 1e-8)


class ObservationStatistics(NamedTuple):
    """How many observations were seen, ``()``; of each of their elements the mean and the sum of squares about it.

    ``mean`` and ``squares`` are shaped like one observation; all are float32.
    """

    seen: Array
    mean: PyTree
    squares: PyTree


def observation_statistics(observation: PyTree) -> ObservationStatistics:
    """Return the statistics of no observation yet, for ones like ``observation`` (arrays or ``ShapeDtypeStruct``)."""
    zeros = lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), observation)  # noqa: E731
    return ObservationStatistics(jnp.zeros((), jnp.float32), zeros(), zeros())


def observation_statistics_carry(rollout: Rollout) -> ObservationStatistics:
    """Return the carry before the first rollout (arrays or ``ShapeDtypeStruct``); an ``init_carry``."""
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), rollout.observation)
    return observation_statistics(one)


def update_observation_statistics(carry: ObservationStatistics, rollout: Rollout) -> ObservationStatistics:
    """Return the statistics of all before and of ``rollout``'s observations, each one that was acted on once.

    However a stream is cut into rollouts, they are those of the whole (to float32 rounding). Steps beyond ``lengths`` do not
    count. On a mesh whose lanes are sharded XLA reduces over them.

    Source: Chan et al. 1983, equation 2.1.
    """
    steps, lanes = rollout.reward.shape[:2]
    lengths = jnp.full(lanes, steps) if rollout.lengths is None else rollout.lengths
    real = jnp.arange(steps)[:, None] < lengths
    seen = jnp.sum(real).astype(jnp.float32)

    def mean_of(leaf: Array) -> Array:
        mask = real.reshape(steps, lanes, *[1] * (leaf.ndim - 2))
        return jnp.sum(jnp.where(mask, leaf.astype(jnp.float32), 0), (0, 1)) / jnp.maximum(seen, 1)

    mean = jax.tree.map(mean_of, rollout.observation)
    centred = jax.tree.map(lambda leaf, middle: (leaf.astype(jnp.float32) - middle) ** 2, rollout.observation, mean)
    squares = jax.tree.map(lambda leaf: mean_of(leaf) * seen, centred)
    return _merged(carry, ObservationStatistics(seen, mean, squares))


def merge_observation_statistics(
    statistics: ObservationStatistics, axis_name: str | None = None
) -> ObservationStatistics:
    """Return the statistics of all shards together, on each of them the same bits.

    With ``axis_name`` each shard gives its own (inside ``shard_map`` or ``vmap``), at the price of one gather of
    1 + 2 * elements float32; without it, leaves have a leading axis of shards (carries of a plane's partitions).
    """
    if axis_name is not None:
        leaves, tree = jax.tree.flatten(statistics)
        packed = jax.lax.all_gather(jnp.concatenate([leaf.reshape(-1) for leaf in leaves]), axis_name)
        ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
        rows = zip(jnp.split(packed, ends, axis=1), leaves, strict=True)
        statistics = tree.unflatten([row.reshape(-1, *leaf.shape) for row, leaf in rows])
    shard = lambda at: jax.tree.map(lambda leaf: leaf[at], statistics)  # noqa: E731
    together = shard(0)
    for number in range(1, statistics.seen.shape[0]):
        together = _merged(together, shard(number))
    return together


def normalize_observations(statistics: ObservationStatistics, observation: PyTree, *, clip: float = 10.0) -> PyTree:
    """Return ``(..., *shape)`` observations less the mean, over the standard deviation, within ``clip`` of 0; float32.

    An element that never differed is only centred; before anything was seen they are as they are, but for the clip.
    ``ConfigError`` where ``clip`` is negative.
    """
    check_at_least("clip", clip, 0)

    def normal(leaf: Array, mean: Array, squares: Array) -> Array:
        variance = jnp.where(squares > 0, squares / jnp.maximum(statistics.seen, 1), 1)
        return jnp.clip((leaf.astype(jnp.float32) - mean) / jnp.sqrt(variance + 1e-8), -clip, clip)

    return jax.tree.map(normal, observation, statistics.mean, statistics.squares)


def _merged(one: ObservationStatistics, other: ObservationStatistics) -> ObservationStatistics:
    seen = one.seen + other.seen
    share = other.seen / jnp.maximum(seen, 1)
    apart = jax.tree.map(jnp.subtract, other.mean, one.mean)
    mean = jax.tree.map(lambda old, far: old + far * share, one.mean, apart)
    add = lambda old, new, far: old + new + far**2 * one.seen * share  # noqa: E731
    return ObservationStatistics(seen, mean, jax.tree.map(add, one.squares, other.squares, apart))
