"""Runs a schedule for on-policy experience: one iteration's units, the finalize barrier, then epochs of mini-batches.

A batch never holds anything but this iteration's items. The permutation of an epoch is a function of (seed, iteration,
epoch) alone, so every schedule delivers the same mini-batches bit for bit.

* Ingestion (overlap 0, g 1) takes all units of an iteration in one call when the last one is there; (1, k/M) takes a k/M
  share of them as soon as it is there, behind the rollouts that follow. A hook sees whole units, so a share is at least one.
* Delivery (0, 1) gathers an epoch's M mini-batches in one call; (1, 1/M) one at a time, one ahead of the learner.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from conduit_jax.config import OnPolicy
from conduit_jax.errors import ConfigError, LifecycleError, NotReadyError, nearest_multiples, refuse
from conduit_jax.hooks import Hook
from conduit_jax.ingestion import over_units
from conduit_jax.replay import random_bits
from conduit_jax.schedule.programs import Unit, context_kind
from conduit_jax.schedule.semantics import Schedule, parts_per_call
from conduit_jax.schedule.worker import Pending
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
        self.mesh, self.apart = home.mesh, False
        self._submit: Callable[[tuple], tuple] | None = None
        self._waiting: list[Unit] = []
        self._units: list[PyTree] = []
        self._versions: list[Any] = []
        self._batches_of_now: Callable[[], Generator[Sample] | None] = lambda: None
        self._known_contexts: set[Any] = set()
        self._lock = threading.Lock()
        self._ingest = in_own_mesh(jax.jit(_over_units(ingestion), donate_argnums=0), home.mesh)
        self._shapes_of_ingest: Callable[..., Any] = getattr(self._ingest, "shapes")  # noqa: B009
        self._finalize = in_own_mesh(
            jax.jit(lambda units, versions, context: (finalize.function(_joined(units), context), _oldest(versions))),
            home.mesh,
        )
        self._permute = in_own_mesh(
            jax.jit(lambda key, iteration, epoch: _permutation(key, iteration, epoch, items)), home.mesh
        )
        minibatch = _minibatch(delivery, self.batch_size, items)
        self._gather = in_own_mesh(jax.jit(_over_batches(minibatch), out_shardings=_batch_at(home)), home.mesh)
        self._retyped = home.batch if home.mesh != home.batch.mesh else None

    @property
    def programs(self) -> tuple[Any, Any, Any, Any]:
        """The compiled functions: ingest, finalize, permute, gather."""
        return self._ingest, self._finalize, self._permute, self._gather

    @property
    def one_site(self) -> bool:
        """Whether mini-batches are where the learner computes, and all hooks are traced."""
        return self._retyped is None and not self.apart

    @property
    def key(self) -> Array:
        """The raw key all permutations derive from, uint32 ``(2,)``."""
        return self._key

    @property
    def store(self) -> tuple[PyTree]:
        """The hook's carry: what a fused program takes over, and gives back by ``resume``."""
        return (self._carry,)

    def resume(self, store: tuple[PyTree], iterations: int) -> None:
        """Go on with ``store`` after whole ``iterations`` were run by others."""
        with self._lock:
            (self._carry,) = store
            self.iteration += iterations
            self.pushed_units += iterations * self.algorithm.units_per_iteration
            self.delivered_batches += iterations * self.algorithm.num_epochs * self.algorithm.num_minibatches

    @property
    def units_per_call(self) -> int:
        """Units an ingestion call takes: all, or the scheduled share of an iteration, at least one."""
        return parts_per_call(self.schedule, self.algorithm)[0]

    @property
    def pushed_in_iteration(self) -> int:
        """Units of the present iteration."""
        return len(self._units) + len(self._waiting)

    @property
    def waiting_units(self) -> int:
        """Units pushed and not yet ingested."""
        return len(self._waiting)

    def deliver_by(self, submit: Callable[[tuple], tuple]) -> None:
        """Hand every mini-batch that is gathered to ``submit``, and the result of what that returns to the learner."""
        self._submit, self.apart = submit, True

    def reschedule(self, schedule: Schedule) -> None:
        """Run ``schedule`` from the next iteration's first push on; no mini-batch changes by it."""
        with self._lock:
            self.schedule = schedule

    def admit(self, deadline_s: float = 0.0) -> None:
        """Let a unit in: only replayed tables have limiters."""

    def push(self, unit: Unit) -> None:
        """Take one unit of the present iteration; ``LifecycleError`` when it already has all of its units."""
        with self._lock:
            pushed = self.pushed_in_iteration
            if pushed == self.algorithm.units_per_iteration:
                refuse(
                    LifecycleError,
                    "This iteration has all of its units; on-policy data is not carried into the next one.",
                    got=f"{pushed + 1} units",
                    want=f"units_per_iteration={self.algorithm.units_per_iteration}",
                    fix="consume plane.epochs() before pushing the next iteration",
                )
            due = pushed + 1 == self.algorithm.units_per_iteration or len(self._waiting) + 1 >= self.units_per_call
            if not due:
                self._check_context(unit)
            self._waiting.append(unit)
            try:
                if due:
                    self._ingest_waiting()
            except BaseException:
                self._waiting.pop()  # a push that raises has pushed nothing
                raise
            self.pushed_units += 1

    def _ingest_waiting(self) -> None:
        units, contexts = (tuple(getattr(unit, name) for unit in self._waiting) for name in ("rollout", "context"))
        self._carry, records = self._ingest(self._carry, units, contexts)
        for unit, one in zip(self._waiting, records, strict=True):
            if unit.ticket is not None:
                unit.ticket.reader = jax.tree.leaves(one)[0]
            self._units.append(one)
            self._versions.append(_version_of(unit))
        self._waiting = []

    def _check_context(self, unit: Unit) -> None:
        """Raise now what the hook would raise for a context of this shape when the unit's turn comes."""
        kind = context_kind(unit.context)
        if kind not in self._known_contexts:
            self._shapes_of_ingest(self._carry, (unit.rollout,), (unit.context,))
            self._known_contexts.add(kind)

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
                    got=f"{self.pushed_in_iteration} units",
                    want=f"{self.algorithm.units_per_iteration}",
                )
            records, version = self._finalize(tuple(self._units), tuple(self._versions), context)
            self._units, self._versions = [], []
            number, self.iteration = self.iteration, self.iteration + 1
        batches = self._batches(records, version, context, number)
        self._batches_of_now = weakref.ref(batches)
        return batches

    def _batches(self, records: PyTree, version: Array, context: PyTree, number: int) -> Generator[Sample]:
        count, stamp = self.algorithm.num_minibatches, np.uint32(number & 0xFFFFFFFF)
        ahead, per_call = self.schedule.overlap_delivery, parts_per_call(self.schedule, self.algorithm)[1]
        drawn: deque[Sample] = deque()
        order = None
        for serial in range(0, self.algorithm.num_epochs * count, per_call):
            epoch, batch = divmod(serial, count)
            order = self._permute(self._key, stamp, np.uint32(epoch)) if batch == 0 else order
            starts = tuple(np.int32((batch + index) * self.batch_size) for index in range(per_call))
            serials = tuple(np.uint32(serial + index) for index in range(per_call))
            samples = self._gather(records, order, starts, serials, (stamp, version), self._key, context)
            drawn.extend(self._submit(samples) if self._submit else samples)
            while len(drawn) > ahead:
                yield self._hand_over(drawn.popleft())
        if drawn:
            yield self._hand_over(drawn.popleft())

    def _hand_over(self, sample: Any) -> Sample:
        self.delivered_batches += 1
        if isinstance(sample, Pending):
            return sample.result()
        return in_callers_mesh(jax.device_put(sample, self._retyped) if self._retyped else sample)


def _over_units(hook: Hook) -> Callable[..., tuple]:
    """Return ``(carry, units, contexts) -> (carry, records of each unit)``: the hook on one unit after the other."""

    def ingest(carry: PyTree, units: tuple, contexts: tuple) -> tuple:
        carry, records = over_units(hook, carry, units, contexts)
        return carry, tuple(one.items for one in records)

    return ingest


def _over_batches(minibatch: Callable[..., Sample]) -> Callable[..., tuple]:
    """Return ``minibatch`` over tuples of starts and serial numbers."""

    def gather(
        records: PyTree, order: Array, starts: tuple, serials: tuple, stamps: tuple, key: Array, context: PyTree
    ) -> tuple:
        pairs = zip(starts, serials, strict=True)
        return tuple(minibatch(records, order, start, (serial, *stamps), key, context) for start, serial in pairs)

    return gather


def _minibatch(delivery: Hook, size: int, total: int) -> Callable[..., Sample]:
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
