"""When a table may be inserted into and sampled from: rate limiters, and the exact numbers they come to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from conduit_jax.errors import ConfigError, check_integer, refuse


class RateLimits(NamedTuple):
    """A limiter's parameters in exact numbers; ``None`` where a difference is unbounded.

    Samples want ``inserts - deletes >= min_size`` and ``inserts * samples_per_insert - samples >= min_diff`` after them;
    inserts want ``inserts - deletes <= min_size`` or ``inserts * samples_per_insert - samples <= max_diff`` after them.
    """

    samples_per_insert: Fraction
    min_size: int
    min_diff: Fraction | None
    max_diff: Fraction | None


@dataclass(frozen=True, kw_only=True)
class MinSize:
    """Samples wait until ``min_size`` items are live; inserts never wait."""

    min_size: int

    def __post_init__(self) -> None:
        check_integer("MinSize(min_size=)", self.min_size, 1)

    @property
    def limits(self) -> RateLimits:
        return RateLimits(Fraction(1), self.min_size, None, None)


@dataclass(frozen=True, kw_only=True)
class SampleToInsertRatio:
    """Keep ``inserts * samples_per_insert - samples`` near ``min_size * samples_per_insert``: nobody runs far ahead.

    ``error_buffer`` is how far it may stray on either side, or the pair ``(min_diff, max_diff)`` itself. Numbers are taken
    as the nearest fractions with a denominator of at most 10**6 (``1/3`` is a third) and counted exactly from there on.
    """

    samples_per_insert: float | Fraction
    min_size: int
    error_buffer: float | tuple[float, float]

    def __post_init__(self) -> None:
        name = "SampleToInsertRatio"
        check_integer(f"{name}(min_size=)", self.min_size, 1)
        pair = self.error_buffer if isinstance(self.error_buffer, tuple) else (self.error_buffer,)
        if isinstance(self.error_buffer, tuple) and len(pair) != 2:
            refuse(ConfigError, f"{name}(error_buffer=) is no pair.", got=pair, want="(min_diff, max_diff)")
        _check_finite(f"{name}(samples_per_insert=)", self.samples_per_insert)
        for value in pair:
            _check_finite(f"{name}(error_buffer=)", value)
        if self.limits.samples_per_insert <= 0:
            got = repr(self.samples_per_insert)
            refuse(ConfigError, f"{name}(samples_per_insert=) is out of range.", got=got, want="at least 10**-6")
        _check_limits(self.limits)

    @property
    def limits(self) -> RateLimits:
        ratio = _nearest_fraction(self.samples_per_insert)
        if isinstance(self.error_buffer, tuple):
            least, most = self.error_buffer
            return RateLimits(ratio, self.min_size, _nearest_fraction(least), _nearest_fraction(most))
        middle, buffer = ratio * self.min_size, _nearest_fraction(self.error_buffer)
        return RateLimits(ratio, self.min_size, middle - buffer, middle + buffer)


@dataclass(frozen=True, kw_only=True)
class Queue:
    """At most ``size`` inserts ahead of the samples; with ``Fifo()`` twice and ``max_times_sampled=1`` a queue."""

    size: int

    def __post_init__(self) -> None:
        check_integer(f"{type(self).__name__}(size=)", self.size, 1)

    @property
    def limits(self) -> RateLimits:
        return RateLimits(Fraction(1), 1, Fraction(0), Fraction(self.size))


@dataclass(frozen=True, kw_only=True)
class Stack(Queue):
    """At most ``size`` inserts ahead of the samples; with ``Lifo()`` twice and ``max_times_sampled=1`` a stack."""


Limiter = MinSize | SampleToInsertRatio | Queue | Stack


def _check_limits(limits: RateLimits) -> None:
    """Refuse limits under which samples and inserts come to wait for each other."""
    ratio, min_size, least, most = limits
    if least is None or most is None:
        return
    numbers = f"samples_per_insert={float(ratio)}, min_size={min_size}, min_diff={float(least)}, max_diff={float(most)}"
    if most - least < 2 * max(Fraction(1), ratio):
        refuse(
            ConfigError,
            "A rate limiter this tight would deadlock: one insert or sample could leave neither allowed.",
            got=numbers,
            want=f"max_diff - min_diff >= {float(2 * max(Fraction(1), ratio))}",
            fix="raise SampleToInsertRatio(error_buffer=)",
        )
    if least > min_size * ratio:
        refuse(
            ConfigError,
            "A rate limiter would deadlock at once: min_size items do not reach min_diff.",
            got=numbers,
            want=f"min_diff <= min_size * samples_per_insert = {float(min_size * ratio)}",
        )


def _nearest_fraction(value: float | Fraction) -> Fraction:
    return Fraction(value).limit_denominator(10**6)  # 0.1 is a tenth


def _check_finite(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | Fraction) or not math.isfinite(value):
        refuse(ConfigError, f"{name} is not a finite number.", got=repr(value), want="a finite number")
