"""How a batch is divided among tables: whole shares next to exact ones, the same in every batch or rounded by the key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp

from conduit_jax.replay import random_bits

Array = jax.Array


def fixed_shares(proportions: Sequence[float], batch_size: int) -> tuple[int, ...]:
    """Return whole shares of ``batch_size`` by largest remainder; of equal remainders the first table's is the larger."""
    exact = exact_shares(proportions, batch_size)
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda table: shares[table] - exact[table])
    for table in by_remainder[: batch_size - sum(shares)]:
        shares[table] += 1
    return tuple(shares)


def exact_shares(proportions: Sequence[float], batch_size: int) -> list[Fraction]:
    """Return ``batch_size * proportion / sum(proportions)``, exactly."""
    parts = [Fraction(proportion).limit_denominator(10**6) for proportion in proportions]  # 0.1 is a tenth
    return [part * batch_size / sum(parts) for part in parts]


def asked_for(proportions: Sequence[float], batch_size: int, shares: str) -> tuple[int, ...]:
    """Return how many items each table is asked for: its share, or the larger of the two that it may have."""
    if shares == "fixed":
        return fixed_shares(proportions, batch_size)
    return tuple(math.ceil(share) for share in exact_shares(proportions, batch_size))


def random_rows(exact: Sequence[Fraction], key: Array) -> Array:
    """Return which of the drawn items, table after table, are delivered: int32 ``(sum(exact),)``.

    Table k gets the rows from floor(c_k + u) to floor(c_k+1 + u), where c are cumulated exact shares and u is uniform:
    a number of rows next to its exact share, which it has in the mean. What is left out is not always the last item
    drawn, for that may be a stratum of its own.
    """
    words = random_bits.bits(key, 1 + len(exact))
    drawn = [math.ceil(share) for share in exact]
    row = jnp.arange(int(sum(exact)), dtype=jnp.int32)
    where, block, cumulated = row, 0, Fraction(0)
    for number, (share, count) in enumerate(zip(exact, drawn, strict=True)):
        begin = jnp.int32(int(cumulated)) + _rounds_up(words[0], cumulated % 1)
        turned = row - begin + random_bits.below(words[1 + number], jnp.int32(count))
        where = jnp.where(row >= begin, block + jnp.where(turned < count, turned, turned - count), where)
        block, cumulated = block + count, cumulated + share
    return where


def _rounds_up(word: Array, fraction: Fraction) -> Array:
    """Return 1 with probability ``fraction`` (to 2**-32), else 0, int32, for a uniform uint32 ``word``."""
    bound = math.ceil((1 - fraction) * 2**32)
    return jnp.zeros((), jnp.int32) if bound >= 2**32 else (word >= jnp.uint32(bound)).astype(jnp.int32)
