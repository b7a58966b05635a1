"""The families of policies that PPO chooses from, and what it needs of each: draws, log-probabilities, entropies, modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp


class Distribution(NamedTuple):
    """A family of policies over actions of ``outputs`` numbers; ``said`` is what the network says, ``(batch, outputs)``.

    ``free``: parameters that do not depend on the observation. ``draw(said, free, key)``, ``mode(said)``: actions as the
    environment takes them. ``log_prob(said, free, action)`` and ``entropy(said, free)``: ``(batch,)``.
    """

    outputs: int
    free: jax.Array
    draw: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    log_prob: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    entropy: Callable[[jax.Array, jax.Array], jax.Array]
    mode: Callable[[jax.Array], jax.Array]


def categorical(count: int) -> Distribution:
    """Return the policies that choose among ``count`` actions; ``said`` are logits."""

    def log_prob(said: jax.Array, free: jax.Array, action: jax.Array) -> jax.Array:
        return jnp.take_along_axis(nn.log_softmax(said), action[:, None], axis=1)[:, 0]

    return Distribution(
        outputs=count,
        free=jnp.zeros((0,), jnp.float32),
        draw=lambda said, free, key: jax.random.categorical(key, said),
        log_prob=log_prob,
        entropy=lambda said, free: -jnp.sum(nn.softmax(said) * nn.log_softmax(said), axis=-1),
        mode=lambda said: jnp.argmax(said, axis=-1),
    )


def gaussian(low: jax.Array, high: jax.Array) -> Distribution:
    """Return the policies that draw from a Gaussian in units of half the range; ``free`` are log standard deviations.

    What falls outside the range is left to the environment, which clips.
    """
    middle, half, shape = (high + low) / 2, (high - low) / 2, low.shape

    def draw(said: jax.Array, free: jax.Array, key: jax.Array) -> jax.Array:
        return mode(said + jnp.exp(free) * jax.random.normal(key, said.shape))

    def mode(said: jax.Array) -> jax.Array:
        return middle + half * said.reshape(-1, *shape)

    def log_prob(said: jax.Array, free: jax.Array, action: jax.Array) -> jax.Array:
        z = (((action - middle) / half).reshape(said.shape) - said) / jnp.exp(free)
        return jnp.sum(-0.5 * z**2 - free - 0.5 * jnp.log(2 * jnp.pi), axis=-1)

    def entropy(said: jax.Array, free: jax.Array) -> jax.Array:
        return jnp.broadcast_to(jnp.sum(free + 0.5 + 0.5 * jnp.log(2 * jnp.pi)), said.shape[:1])

    return Distribution(low.size, jnp.full((low.size,), -0.7, jnp.float32), draw, log_prob, entropy, mode)
