"""The network of PPO and of behaviour cloning: what a policy says of an observation, and what it is worth."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp


class ActorCritic(nn.Module):
    """What the policy says, ``(batch, outputs)``, and the state's value, ``(batch,)``.

    Vectors go through an MLP for each; ``uint8`` images are cut into about 16 x 16 patches, each seen by one layer (a convolution as a
    matrix product, which a CPU is fast at), then go through a strided convolution and an MLP that both share.
    """

    outputs: int
    hidden: tuple[int, ...]

    @nn.compact
    def __call__(self, observation: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = observation.astype(jnp.float32)
        if observation.dtype == jnp.uint8 and observation.ndim == 4:
            x = nn.relu(nn.Dense(16)(patches(x / 255)))
            x = nn.relu(nn.Conv(32, (4, 4), (2, 2))(x))
            shared = _mlp(x.reshape(x.shape[0], -1), self.hidden, nn.relu)
            policy, value = shared, shared
        else:
            x = x.reshape(x.shape[0], -1)
            policy, value = _mlp(x, self.hidden, nn.tanh), _mlp(x, self.hidden, nn.tanh)
        said = nn.Dense(self.outputs, kernel_init=nn.initializers.orthogonal(0.01))(policy)
        return said, nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0))(value)[:, 0]


def patches(images: jax.Array, size: int | None = None) -> jax.Array:
    """Return ``(batch, height, width, channels)`` as ``(batch, height / size, width / size, size * size * channels)``.

    ``size`` is a sixteenth of the height unless given. Sides that it does not divide are padded with zeros, as flax's
    convolution of stride ``size`` does.
    """
    size = max(1, images.shape[1] // 16) if size is None else size
    padded = _padded(images, size, size)
    batch, height, width, channels = padded.shape
    cut = padded.reshape(batch, height // size, size, width // size, size, channels)
    return jnp.swapaxes(cut, 2, 3).reshape(batch, height // size, width // size, -1)


def windows(images: jax.Array, size: int, stride: int) -> jax.Array:
    """Return what a convolution sees at each place: ``(batch, height / stride, width / stride, size * size * channels)``.

    A dense layer on it is flax's convolution (padding ``"SAME"``) as a matrix product; under ``vmap`` over parameters a CPU
    takes many times longer for the convolution itself, which XLA turns into a grouped one (jax 0.10).
    """
    height, width = (-(-side // stride) for side in images.shape[1:3])
    padded = _padded(images, size, stride)
    seen = [
        padded[:, row : row + height * stride : stride, column : column + width * stride : stride]
        for row in range(size)
        for column in range(size)
    ]
    return jnp.concatenate(seen, axis=-1)


def _padded(images: jax.Array, size: int, stride: int) -> jax.Array:
    """Return images with the zeros around them that padding ``"SAME"`` adds."""
    sides = []
    for side in images.shape[1:3]:
        more = max((-(-side // stride) - 1) * stride + size - side, 0)
        sides.append((more // 2, more - more // 2))
    return jnp.pad(images, ((0, 0), *sides, (0, 0))) if any(map(any, sides)) else images


def _mlp(x: jax.Array, hidden: tuple[int, ...], activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
    for width in hidden:
        x = activation(nn.Dense(width, kernel_init=nn.initializers.orthogonal(2**0.5))(x))
    return x
