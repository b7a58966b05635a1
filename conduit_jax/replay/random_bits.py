"""Counter-based random bits for draws: ``jax.random.bits`` of threefry keys, bit for bit, in one fused loop.

The rounds are unrolled: XLA on CPU otherwise keeps them as a loop whose overhead is several times the work of a batch.
Threefry2x32 with 20 rounds is from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.errors import SpecError, refuse
from conduit_jax.replay.piecewise import DRAWN, piecewise

Array = jax.Array

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def threefry2x32(key: Array, high: Array, low: Array) -> tuple[Array, Array]:
    """Return the cipher's two output words (uint32) for the counter ``(high, low)`` under ``key`` uint32 ``(2,)``."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    high, low = high + schedule[0], low + schedule[1]
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            high = high + low
            low = ((low << np.uint32(rotation)) | (low >> np.uint32(32 - rotation))) ^ high
        high = high + schedule[(block + 1) % 3]
        low = low + schedule[(block + 2) % 3] + np.uint32(block + 1)
    return high, low


def key_words(key: Array) -> Array:
    """Return the two words uint32 ``(2,)`` of a threefry key, typed or raw; ``SpecError`` for another generator's key."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    if key.shape != (2,):
        refuse(
            SpecError,
            "Draws need one threefry2x32 key.",
            got=f"key data of shape {key.shape}",
            want="two uint32 words",
            fix="jax.random.key(seed, impl='threefry2x32')",
        )
    return key


def fold(key: Array, number: Array | np.uint32) -> Array:
    """Return raw key data ``uint32 (2,)`` of ``jax.random.fold_in(key, number)``."""
    number = jnp.asarray(number).astype(jnp.uint32)
    return jnp.stack(threefry2x32(key_words(key), jnp.uint32(0), number))


def bits(key: Array, count: int) -> Array:
    """Return ``count`` uniform uint32 words: equal to ``jax.random.bits(key, (count,), uint32)``."""
    return bits_at(key, jax.lax.iota(jnp.uint32, count))


@partial(jax.jit, static_argnums=1, inline=True)
def shared_bits(key: Array, count: int) -> Array:
    """Return ``bits(key, count)``, computed once however many kernels use them."""
    words = key_words(key)
    return piecewise(lambda numbers: bits_at(words, numbers), words, count=count, piece=DRAWN)


def bits_at(key: Array, numbers: Array) -> Array:
    """Return those of ``bits(key, ...)`` that ``numbers`` uint32 or int32 count, uint32 of their shape."""
    numbers = numbers.astype(jnp.uint32)
    first, second = threefry2x32(key_words(key), jnp.zeros(numbers.shape, jnp.uint32), numbers)
    return first ^ second


def below(words: Array, bound: Array) -> Array:
    """Map uniform uint32 ``words`` to int32 in ``[0, bound)`` by ``floor(word * bound / 2**32)``, exactly, in 32-bit integers.

    Every value has probability 1/bound up to 2**-32; ``bound`` 0 gives 0.
    """
    bound = bound.astype(jnp.uint32)
    word_high, word_low = words >> 16, words & 0xFFFF
    bound_high, bound_low = bound >> 16, bound & 0xFFFF
    carry = ((word_low * bound_low) >> 16) + ((word_high * bound_low) & 0xFFFF) + ((word_low * bound_high) & 0xFFFF)
    high = word_high * bound_high + ((word_high * bound_low) >> 16) + ((word_low * bound_high) >> 16) + (carry >> 16)
    return high.astype(jnp.int32)


def unit_interval(words: Array) -> Array:
    """Map uint32 ``words`` to float32 in ``[0, 1)`` with 24 bits."""
    return (words >> 8).astype(jnp.float32) * np.float32(2.0**-24)
