"""Running statistics that an ingestion hook carries from one rollout to the next."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.errors import check_fraction
from conduit_jax.types import Array, Rollout


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
