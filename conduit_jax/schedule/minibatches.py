"""What becomes of an on-policy iteration's records: its mini-batches, one after the other, and the programs that make them."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.hooks import Hook
from conduit_jax.ingestion import over_units
from conduit_jax.replay import random_bits
from conduit_jax.schedule.programs import Unit
from conduit_jax.types import Rollout, Sample, SampleInfo

Array = jax.Array
PyTree = Any


class Finalized(NamedTuple):
    """One iteration's ``records`` behind the barrier, the oldest ``version`` among its units, and its ``number``."""

    records: PyTree
    version: Array
    context: PyTree
    number: int


class Epochs:
    """The mini-batches of an ``iteration``, from number ``handed`` on: an iterator; ``left`` are still to come.

    ``shape``: epochs and mini-batches in each. ``pace``: mini-batches a call, and how many ahead of the learner.
    ``calls``: an epoch's order, the samples of the call that begins with a mini-batch, and what is handed over of one.
    """

    def __init__(
        self,
        iteration: Finalized,
        shape: tuple[int, int],
        pace: tuple[int, int],
        calls: tuple[Callable[[int], Array], Callable[[int, Array], tuple], Callable[[Any], Sample]],
        handed: int = 0,
    ):
        self.iteration: Finalized | None = iteration
        self.handed = handed
        self._total, self._in_epoch = shape[0] * shape[1], shape[1]
        self._per_call, self._ahead = pace
        self._calls: Any = calls
        self._drawn: deque[Any] = deque()
        self._order: tuple[int, Any] = (-1, None)

    @property
    def left(self) -> int:
        """Mini-batches that were not handed over."""
        return self._total - self.handed

    def close(self) -> None:
        """Give up what is left, and let go of the records."""
        self._total, self.iteration, self._calls = self.handed, None, None
        self._drawn.clear()

    def __iter__(self) -> Epochs:
        return self

    def __next__(self) -> Sample:
        if not self.left:
            raise StopIteration
        while len(self._drawn) <= self._ahead and self.handed + len(self._drawn) < self._total:
            self._draw(self.handed + len(self._drawn))
        (*_, hand_over), sample = self._calls, self._drawn.popleft()
        self.handed += 1
        if not self.left:
            self.close()
        return hand_over(sample)

    def _draw(self, number: int) -> None:
        """Make the call that mini-batch ``number`` is of, and keep what was not handed over before."""
        (permute, gather, _), epoch, done = self._calls, number // self._in_epoch, number % self._per_call
        if self._order[0] != epoch:
            self._order = epoch, permute(epoch)
        self._drawn.extend(gather(number - done, self._order[1])[done:])


def units_program(hook: Hook) -> Callable[..., tuple]:
    """Return ``(carry, units, contexts) -> (carry, records of each unit)``: the hook on one unit after the other."""

    def ingest(carry: PyTree, units: tuple, contexts: tuple) -> tuple:
        carry, records = over_units(hook, carry, units, contexts)
        return carry, tuple(one.items for one in records)

    return ingest


def over_batches(minibatch: Callable[..., Sample]) -> Callable[..., tuple]:
    """Return ``minibatch`` over tuples of starts and serial numbers."""

    def gather(
        records: PyTree, order: Array, starts: tuple, serials: tuple, stamps: tuple, key: Array, context: PyTree
    ) -> tuple:
        pairs = zip(starts, serials, strict=True)
        return tuple(minibatch(records, order, start, (serial, *stamps), key, context) for start, serial in pairs)

    return gather


def minibatch(delivery: Hook, size: int, total: int) -> Callable[..., Sample]:
    """Return ``(records, order, start, (serial, iteration, version), key, context) -> Sample`` of ``size`` of ``total`` items."""

    def minibatch(
        records: PyTree, order: Array, start: Array, stamps: tuple[Array, Array, Array], key: Array, context: PyTree
    ) -> Sample:
        serial, iteration, version = stamps
        index = jax.lax.dynamic_slice(order, (start,), (size,))
        data = jax.tree.map(
            lambda leaf: leaf.reshape(-1, *leaf.shape[2:]).at[index].get(mode="promise_in_bounds"), records
        )
        hook_key = random_bits.fold(random_bits.fold(key, iteration), serial)
        data = delivery.function(data, jax.random.wrap_key_data(hook_key, impl="threefry2x32"), context)
        ones = jnp.ones((size,), jnp.float32)
        info = SampleInfo(
            slot=index,
            generation=jnp.broadcast_to(iteration, (size,)),
            probability=ones / total,
            priority=ones,
            table_size=jnp.full((size,), total, jnp.int32),
            age=jnp.zeros((size,), jnp.int32),
            policy_version=jnp.broadcast_to(version, (size,)),
        )
        return Sample.packed(data, info, ones, None, jnp.ones((size,), bool))

    return minibatch


def version_of(unit: Unit) -> Any:
    """Return the policy version of a unit, uint32: the rollout's own where it says so."""
    own = unit.rollout.policy_version if isinstance(unit.rollout, Rollout) else None
    return np.uint32(unit.version & 0xFFFFFFFF) if own is None else own.astype(jnp.uint32)


def oldest(versions: tuple[Array, ...]) -> Array:
    """Return the least of the units' versions."""
    return functools.reduce(jnp.minimum, versions)


def joined(units: tuple[PyTree, ...]) -> PyTree:
    """Return the units' records one after the other in time, ``(units * T, lanes, ...)``."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=0), *units)


def permutation(key: Array, iteration: Array, epoch: Array, count: int) -> Array:
    """Return the epoch's order of items, int32 ``(count,)``."""
    words = random_bits.fold(random_bits.fold(key, iteration), epoch + jnp.uint32(0x65706F63))
    return jax.random.permutation(
        jax.random.wrap_key_data(words, impl="threefry2x32"), jnp.arange(count, dtype=jnp.int32)
    )
