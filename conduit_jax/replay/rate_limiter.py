"""May we insert or sample now: exact predicates over the number of live items and a debt of samples.

    debt = inserts * samples_per_insert - samples
    can_sample(n):  inserts - deletes >= min_size      and  debt - n >= min_diff
    can_insert(n):  inserts + n - deletes <= min_size  or   debt + n * samples_per_insert <= max_diff

``inserts - deletes`` is the number of live items, which the replay knows. With ``samples_per_insert = p / q`` the debt is
kept as the integer ``inserts * p - samples * q`` in 64 bits, two words, so it is as exact after 2**31 items as before.
A limiter that bounds neither difference keeps nothing at all.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.config import RateLimits
from conduit_jax.errors import ConfigError, refuse

Array = jax.Array
PyTree = Any

_WORD = 2**32


class Wide(NamedTuple):
    """A signed 64-bit integer in two words, ``high`` int32 and ``low`` uint32: JAX has none unless x64 is on."""

    high: Array
    low: Array


def wide(value: int) -> Wide:
    """Return the constant ``value``, an int of at most 64 bits."""
    return Wide(jnp.asarray(value >> 32, jnp.int32), jnp.asarray(value % _WORD, jnp.uint32))


def add(one: Wide, other: Wide) -> Wide:
    """Return the sum, modulo 2**64."""
    low = one.low + other.low
    return Wide(one.high + other.high + (low < one.low).astype(jnp.int32), low)


def subtract(one: Wide, other: Wide) -> Wide:
    """Return the difference, modulo 2**64."""
    return Wide(one.high - other.high - (one.low < other.low).astype(jnp.int32), one.low - other.low)


def multiply(count: Array, factor: int) -> Wide:
    """Return ``count * factor`` for an int32 ``count >= 0`` and a constant ``0 <= factor < 2**31``, exactly."""
    count = count.astype(jnp.uint32)
    high, low = count >> 16, count & 0xFFFF
    factor_high, factor_low = np.uint32(factor >> 16), np.uint32(factor & 0xFFFF)
    middle, other = high * factor_low, low * factor_high
    carry = ((low * factor_low) >> 16) + (middle & 0xFFFF) + (other & 0xFFFF)
    top = high * factor_high + (middle >> 16) + (other >> 16) + (carry >> 16)
    return Wide(top.astype(jnp.int32), count * np.uint32(factor))


def at_least(value: Wide, bound: int) -> Array:
    """Return ``value >= bound``."""
    other = wide(bound)
    return (value.high > other.high) | ((value.high == other.high) & (value.low >= other.low))


def to_int(value: Wide) -> int:
    """Return a concrete ``value`` as an int."""
    return int(value.high) * _WORD + int(value.low)


class LimiterState(NamedTuple):
    """``debt``: ``inserts * p - samples * q``, or ``None`` where the limiter bounds no difference."""

    debt: Wide | None


class RateLimiter(NamedTuple):
    """The limits of one partition, static and hashable: ``p / q`` samples an insert, differences times ``q``, rounded inwards."""

    p: int
    q: int
    min_size: int
    min_debt: int | None
    max_debt: int | None

    @property
    def gates_inserts(self) -> bool:
        """Whether an insert may ever have to wait."""
        return self.max_debt is not None

    def init(self) -> LimiterState:
        """Return the state before the first insert, which is also that after a reset."""
        return LimiterState(None if self.min_debt is None and self.max_debt is None else wide(0))

    def can_insert(self, state: LimiterState, size: Array, count: Array | int) -> Array:
        """Return whether ``count`` more items may go to the ``size`` live ones."""
        if state.debt is None or self.max_debt is None:
            return jnp.ones((), bool)
        count = jnp.asarray(count, jnp.int32)
        small = (size <= self.min_size) & (count <= self.min_size - size)  # size + count may pass 2**31
        return small | ~at_least(add(state.debt, multiply(count, self.p)), self.max_debt + 1)

    def can_sample(self, state: LimiterState, size: Array, count: Array | int) -> Array:
        """Return whether ``count`` items may be drawn from ``size`` live ones."""
        return (size >= self.min_size) & self.affords(state, count)

    def affords(self, state: LimiterState, count: Array | int) -> Array:
        """Return whether the debt allows ``count`` samples, whatever the number of live items."""
        if state.debt is None or self.min_debt is None:
            return jnp.ones((), bool)
        cost = multiply(jnp.asarray(count, jnp.int32), self.q)
        return at_least(subtract(state.debt, cost), self.min_debt)

    def admits(self, size: int, debt: int, count: int) -> bool:
        """Return ``can_insert`` of plain ints."""
        return self.max_debt is None or size + count <= self.min_size or debt + count * self.p <= self.max_debt

    def allows(self, size: int, debt: int, count: int) -> bool:
        """Return ``can_sample`` of plain ints."""
        return size >= self.min_size and (self.min_debt is None or debt - count * self.q >= self.min_debt)

    def inserted(self, state: LimiterState, count: Array) -> LimiterState:
        """Return the state after ``count`` inserts, int32."""
        return state if state.debt is None else LimiterState(add(state.debt, multiply(count, self.p)))

    def sampled(self, state: LimiterState, count: Array) -> LimiterState:
        """Return the state after ``count`` samples, int32."""
        return state if state.debt is None else LimiterState(subtract(state.debt, multiply(count, self.q)))


def make_limiter(limits: RateLimits, *, partitions: int = 1, batch_size: int = 1) -> RateLimiter:
    """Return the limiter of one of ``partitions`` partitions, which hold, insert and sample equal shares.

    Raises ``ConfigError`` where the share of a partition, or a batch of ``batch_size`` items (a partition's), would deadlock.
    """
    p, q = limits.samples_per_insert.numerator, limits.samples_per_insert.denominator
    least = None if limits.min_diff is None else math.ceil(limits.min_diff * q / partitions)
    most = None if limits.max_diff is None else math.floor(limits.max_diff * q / partitions)
    limiter = RateLimiter(p, q, -(-limits.min_size // partitions), least, most)
    if max(p, q, *(abs(bound) for bound in limiter[3:] if bound is not None)) >= 2**31:
        refuse(
            ConfigError, "A rate limiter's numbers are too large.", got=limits, want="below 2**31 as fractions over q"
        )
    _check_room(limiter, partitions, batch_size)
    return limiter


def _check_room(limiter: RateLimiter, partitions: int, batch_size: int) -> None:
    """Refuse a share in which one insert and one sample can block each other, and a batch for which inserts stop too early."""
    if limiter.min_debt is None or limiter.max_debt is None:
        return
    p, q, min_size, least, most = limiter.p, limiter.q, limiter.min_size, limiter.min_debt, limiter.max_debt
    where = "" if partitions == 1 else f" in one of {partitions} partitions"
    got = f"batch {batch_size}, min_diff={_number(Fraction(least, q))}, max_diff={_number(Fraction(most, q))}{where}"
    if most - least < p + q - 1:  # some debt lies above max_debt - p and below min_debt + q
        want = f"max_diff - min_diff >= {_number(Fraction(p + q - 1, q))}{where}"
        refuse(ConfigError, "The rate limiter would deadlock.", got=got, want=want, fix="use fewer partitions")
    highest = max(most, min_size * p)
    if highest - batch_size * q < least:
        refuse(
            ConfigError,
            "The rate limiter would never allow a whole batch: it stops inserts before enough samples are due.",
            got=got,
            want=f"a batch of at most {(highest - least) // q}",
            fix="raise SampleToInsertRatio(error_buffer=), or sample smaller batches",
        )


def explain_blocked(limiter: RateLimiter, state: LimiterState, size: int, count: int, operation: str) -> str:
    """Return which inequality keeps ``count`` items from being inserted or sampled, with its numbers; empty if none does.

    ``operation`` is ``"insert"`` or ``"sample"``. For the host: ``state`` and ``size`` are read.
    """
    return explain_account(limiter, int(size), None if state.debt is None else to_int(state.debt), count, operation)


def explain_account(limiter: RateLimiter, size: int, owed: int | None, count: int, operation: str) -> str:
    """Return ``explain_blocked`` of plain ints; ``owed`` is the debt times ``q``."""
    ratio = Fraction(limiter.p, limiter.q)
    debt = None if owed is None else Fraction(owed, limiter.q)
    if operation == "insert":
        if limiter.max_debt is None or debt is None or size + count <= limiter.min_size:
            return ""
        after, most = debt + count * ratio, Fraction(limiter.max_debt, limiter.q)
        if after <= most:
            return ""
        return (
            f"inserting {count}: inserts + n - deletes <= min_size does not hold ({size} + {count} > {limiter.min_size}), "
            f"nor does (inserts + n) * samples_per_insert - samples <= max_diff "
            f"({_number(debt)} + {count} * {_number(ratio)} = {_number(after)} > {_number(most)})"
        )
    blocks = []
    if size < limiter.min_size:
        blocks.append(f"inserts - deletes >= min_size does not hold ({size} < {limiter.min_size})")
    if limiter.min_debt is not None and debt is not None and debt - count < Fraction(limiter.min_debt, limiter.q):
        least = _number(Fraction(limiter.min_debt, limiter.q))
        blocks.append(
            "inserts * samples_per_insert - samples - n >= min_diff does not hold "
            f"({_number(debt)} - {count} = {_number(debt - count)} < {least})"
        )
    return f"sampling {count}: {' and '.join(blocks)}" if blocks else ""


def _number(value: Fraction) -> str:
    return f"{float(value):g}"
