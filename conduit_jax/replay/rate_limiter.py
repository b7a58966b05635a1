"""May we insert or sample now: pure predicates over the number of live items."""

from __future__ import annotations

from typing import NamedTuple

import jax

Array = jax.Array


class MinSize(NamedTuple):
    """Samples wait until ``min_size`` items are live; inserts never wait (the reference's MinSize: ratio 1, no bound on the difference)."""

    min_size: int

    def can_insert(self, size: Array, count: int) -> Array:
        """Return True: a full ring replaces its oldest items."""
        return (size >= 0) & (count >= 0)

    def can_sample(self, size: Array, count: int) -> Array:
        """Return whether ``count`` items may be drawn, with replacement, from ``size`` live ones."""
        return (size >= self.min_size) & (count >= 0)
