"""Runs a schedule for on-policy experience: one iteration's units, the finalize barrier, then epochs of mini-batches.

A batch never holds anything but this iteration's items. The permutation of an epoch is a function of (seed, iteration,
epoch) alone, so every schedule delivers the same mini-batches bit for bit.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from conduit_jax.config import OnPolicy
from conduit_jax.errors import ConfigError, LifecycleError, NotReadyError, nearest_multiples, refuse
from conduit_jax.hooks import Hook
from conduit_jax.replay import random_bits
from conduit_jax.schedule.pipeline import Unit
from conduit_jax.schedule.semantics import Schedule
from conduit_jax.sharding.lift import in_own_mesh
from conduit_jax.sharding.mesh import in_callers_mesh
from conduit_jax.types import Rollout, Sample, SampleInfo

Array = jax.Array
PyTree = Any


class Home(NamedTuple):
    """Where iterations are kept, a ``mesh`` with Auto axes, and the ``batch`` sharding the learner takes mini-batches with."""

    mesh: Mesh
    batch: NamedSharding


class IterationPipeline:
    """The units of one iteration at run time: ``push`` them, then iterate ``epochs`` once; the next push starts the next iteration."""

    def __init__(
        self,
        algorithm: OnPolicy,
        ingestion: Hook,
        finalize: Hook,
        delivery: Hook,
        carry: PyTree,
        schedule: Schedule,
        key: Array,
        unit_items: int,
        home: Home,
    ):
        items = unit_items * algorithm.units_per_iteration
        if items % algorithm.num_minibatches:
            refuse(
                ConfigError,
                "An iteration's items do not divide into mini-batches.",
                got=f"{items} items, num_minibatches={algorithm.num_minibatches}",
                want=f"{nearest_multiples(items, algorithm.num_minibatches)} items (T * lanes * units_per_iteration)",
            )
        self.algorithm, self.schedule, self.items = algorithm, schedule, items
        self.batch_size = items // algorithm.num_minibatches
        self.iteration, self.pushed_units, self.delivered_batches = 0, 0, 0
        self._carry, self._key = carry, key
        self._units: list[PyTree] = []
        self._versions: list[Any] = []
        self._batches_of_now: Callable[[], Generator[Sample] | None] = lambda: None
        self._lock = threading.Lock()
        self._ingest = in_own_mesh(jax.jit(ingestion.function, donate_argnums=0), home.mesh)
        self._finalize = in_own_mesh(
            jax.jit(lambda units, versions, context: (finalize.function(_joined(units), context), _oldest(versions))),
            home.mesh,
        )
        self._permute = in_own_mesh(
            jax.jit(lambda key, iteration, epoch: _permutation(key, iteration, epoch, items)), home.mesh
        )
        self._gather = in_own_mesh(jax.jit(self._minibatch(delivery), out_shardings=_batch_at(home)), home.mesh)
        self._retyped = home.batch if home.mesh != home.batch.mesh else None

    def push(self, unit: Unit) -> None:
        """Ingest one unit of the present iteration; ``LifecycleError`` when it already has all of its units."""
        with self._lock:
            if len(self._units) == self.algorithm.units_per_iteration:
                refuse(
                    LifecycleError,
                    "This iteration has all of its units; on-policy data is not carried into the next one.",
                    got=f"{len(self._units) + 1} units",
                    want=f"units_per_iteration={self.algorithm.units_per_iteration}",
                    fix="consume plane.epochs() before pushing the next iteration",
                )
            self._carry, records = self._ingest(self._carry, unit.rollout, unit.context)
            if unit.ticket is not None:
                unit.ticket.reader = jax.tree.leaves(records.items)[0]
            self._units.append(records.items)
            self._versions.append(_version_of(unit))
            self.pushed_units += 1

    def ready(self) -> bool:
        """Whether the iteration is complete."""
        return len(self._units) == self.algorithm.units_per_iteration

    @property
    def delivering(self) -> bool:
        """Whether somebody holds mini-batches of an iteration that are still to come."""
        batches = self._batches_of_now()
        return batches is not None and inspect.getgeneratorstate(batches) != inspect.GEN_CLOSED

    def epochs(self, context: PyTree) -> Iterator[Sample]:
        """Yield ``num_epochs * num_minibatches`` batches of this iteration; ``NotReadyError`` when units are missing.

        The finalize hook is dispatched here, once; where it raises, the iteration stays as it was.
        """
        with self._lock:
            if not self.ready():
                refuse(
                    NotReadyError,
                    "The iteration is not complete.",
                    got=f"{len(self._units)} units",
                    want=f"{self.algorithm.units_per_iteration}",
                )
            records, version = self._finalize(tuple(self._units), tuple(self._versions), context)
            self._units, self._versions = [], []
            number, self.iteration = self.iteration, self.iteration + 1
        batches = self._batches(records, version, context, number)
        self._batches_of_now = weakref.ref(batches)
        return batches

    def _batches(self, records: PyTree, version: Array, context: PyTree, number: int) -> Generator[Sample]:
        for epoch in range(self.algorithm.num_epochs):
            order = self._permute(self._key, np.uint32(number & 0xFFFFFFFF), np.uint32(epoch))
            for batch in range(self.algorithm.num_minibatches):
                serial = np.uint32(epoch * self.algorithm.num_minibatches + batch)
                stamps = (np.uint32(number & 0xFFFFFFFF), serial, version)
                self.delivered_batches += 1
                start = np.int32(batch * self.batch_size)
                sample = self._gather(records, order, start, stamps, self._key, context)
                yield in_callers_mesh(jax.device_put(sample, self._retyped) if self._retyped else sample)

    def _minibatch(self, delivery: Hook) -> Any:
        size, total = self.batch_size, self.items

        def minibatch(
            records: PyTree, order: Array, start: Array, stamps: tuple[Array, Array, Array], key: Array, context: PyTree
        ) -> Sample:
            iteration, serial, version = stamps
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
            return Sample(data, info, ones, None, jnp.ones((size,), bool))

        return minibatch


def _batch_at(home: Home) -> Sharding:
    """Return the learner's batch sharding on the home mesh, whose axes are Auto."""
    if home.mesh.size == 1:
        return SingleDeviceSharding(home.mesh.devices.item())
    return NamedSharding(home.mesh, home.batch.spec)


def _version_of(unit: Unit) -> Any:
    """Return the policy version of a unit, uint32: the rollout's own where it says so."""
    own = unit.rollout.policy_version if isinstance(unit.rollout, Rollout) else None
    return np.uint32(unit.version & 0xFFFFFFFF) if own is None else own.astype(jnp.uint32)


def _oldest(versions: tuple[Array, ...]) -> Array:
    return functools.reduce(jnp.minimum, versions)


def _joined(units: tuple[PyTree, ...]) -> PyTree:
    """Return the units' records one after the other in time, ``(units * T, lanes, ...)``."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=0), *units)


def _permutation(key: Array, iteration: Array, epoch: Array, count: int) -> Array:
    """Return the epoch's order of items, int32 ``(count,)``."""
    words = random_bits.fold(random_bits.fold(key, iteration), epoch + jnp.uint32(0x65706F63))
    return jax.random.permutation(
        jax.random.wrap_key_data(words, impl="threefry2x32"), jnp.arange(count, dtype=jnp.int32)
    )
