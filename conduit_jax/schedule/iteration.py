"""Runs a schedule for on-policy experience: one iteration's units, the finalize barrier, then epochs of mini-batches.

A batch never holds anything but this iteration's items. The permutation of an epoch is a function of (seed, iteration,
epoch) alone, so every schedule delivers the same mini-batches bit for bit.

* Ingestion (overlap 0, g 1) takes all units of an iteration in one call when the last one is there; (1, k/M) takes a k/M
  share of them as soon as it is there, behind the rollouts that follow. A hook sees whole units, so a share is at least one.
* Delivery (0, 1) gathers an epoch's M mini-batches in one call; (1, 1/M) one at a time, one ahead of the learner.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from conduit_jax.config import OnPolicy
from conduit_jax.errors import ConfigError, LifecycleError, NotReadyError, nearest_multiples, refuse
from conduit_jax.hooks import Hook
from conduit_jax.schedule.minibatches import (
    Epochs,
    Finalized,
    joined,
    minibatch,
    oldest,
    over_batches,
    permutation,
    units_program,
    version_of,
)
from conduit_jax.schedule.programs import Unit, context_kind
from conduit_jax.schedule.semantics import Schedule, parts_per_call
from conduit_jax.schedule.worker import Pending
from conduit_jax.sharding.lift import in_own_mesh
from conduit_jax.sharding.mesh import in_callers_mesh
from conduit_jax.types import Sample

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
        self._epochs: Callable[[], Epochs | None] = lambda: None
        self._restored: tuple[Finalized, int] | None = None
        self._known_contexts: set[Any] = set()
        self._lock = threading.Lock()
        self._ingest = in_own_mesh(jax.jit(units_program(ingestion), donate_argnums=0), home.mesh)
        self._shapes_of_ingest: Callable[..., Any] = getattr(self._ingest, "shapes")  # noqa: B009
        self._finalize = in_own_mesh(
            jax.jit(lambda units, versions, context: (finalize.function(joined(units), context), oldest(versions))),
            home.mesh,
        )
        self._permute = in_own_mesh(
            jax.jit(lambda key, iteration, epoch: permutation(key, iteration, epoch, items)), home.mesh
        )
        one = minibatch(delivery, self.batch_size, items)
        self._gather = in_own_mesh(jax.jit(over_batches(one), out_shardings=_batch_at(home)), home.mesh)
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
            (self._carry,), self._restored = store, None
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
            self._restored = None

    def _ingest_waiting(self) -> None:
        units, contexts = (tuple(getattr(unit, name) for unit in self._waiting) for name in ("rollout", "context"))
        self._carry, records = self._ingest(self._carry, units, contexts)
        for unit, one in zip(self._waiting, records, strict=True):
            if unit.ticket is not None:
                unit.ticket.reader = jax.tree.leaves(one)[0]
            self._units.append(one)
            self._versions.append(version_of(unit))
        self._waiting = []

    def _check_context(self, unit: Unit) -> None:
        """Raise now what the hook would raise for a context of this shape when the unit's turn comes."""
        kind = context_kind(unit.context)
        if kind not in self._known_contexts:
            self._shapes_of_ingest(self._carry, (unit.rollout,), (unit.context,))
            self._known_contexts.add(kind)

    def ready(self) -> bool:
        """Whether ``epochs`` would return mini-batches."""
        return self._units_are_there() or self._restored is not None

    def _units_are_there(self) -> bool:
        return len(self._units) == self.algorithm.units_per_iteration

    @property
    def delivering(self) -> Epochs | None:
        """Mini-batches of an iteration that are still to come, as long as somebody holds them."""
        epochs = self.epochs_of(*self._restored) if self._restored else self._epochs()
        return epochs if epochs is not None and epochs.left else None

    def go_on_with(self, iteration: Finalized, handed: int) -> None:
        """Let the next ``epochs`` return what an iteration that was saved had left, unless another unit is pushed first."""
        self._restored = iteration, handed

    def epochs(self, context: PyTree) -> Iterator[Sample]:
        """Return ``num_epochs * num_minibatches`` batches of this iteration; ``NotReadyError`` when units are missing.

        The finalize hook is dispatched here, once; where it raises, the iteration stays as it was.
        """
        with self._lock:
            epochs = self.epochs_of(*self._restored) if self._restored else self._finalized(context)
            self._restored, self._epochs = None, weakref.ref(epochs)
            return epochs

    def _finalized(self, context: PyTree) -> Epochs:
        if not self._units_are_there():
            refuse(
                NotReadyError,
                "The iteration is not complete.",
                got=f"{self.pushed_in_iteration} units",
                want=f"{self.algorithm.units_per_iteration}",
            )
        records, version = self._finalize(tuple(self._units), tuple(self._versions), context)
        self._units, self._versions = [], []
        number, self.iteration = self.iteration, self.iteration + 1
        return self.epochs_of(Finalized(records, version, context, number))

    def epochs_of(self, iteration: Finalized, handed: int = 0) -> Epochs:
        """Return the mini-batches of an iteration from number ``handed`` on, by the present schedule."""
        count, per_call = self.algorithm.num_minibatches, parts_per_call(self.schedule, self.algorithm)[1]
        stamp = np.uint32(iteration.number & 0xFFFFFFFF)

        def gather(first: int, order: Array) -> tuple:
            starts = tuple(np.int32((first % count + index) * self.batch_size) for index in range(per_call))
            serials = tuple(np.uint32(first + index) for index in range(per_call))
            stamps = stamp, iteration.version
            samples = self._gather(iteration.records, order, starts, serials, stamps, self._key, iteration.context)
            return self._submit(samples) if self._submit else samples

        def permute(epoch: int) -> Array:
            return self._permute(self._key, stamp, np.uint32(epoch))

        pace = per_call, int(self.schedule.overlap_delivery)
        return Epochs(iteration, (self.algorithm.num_epochs, count), pace, (permute, gather, self._hand_over), handed)

    def _hand_over(self, sample: Any) -> Sample:
        self.delivered_batches += 1
        if isinstance(sample, Pending):
            return sample.result()
        return in_callers_mesh(jax.device_put(sample, self._retyped) if self._retyped else sample)


def _batch_at(home: Home) -> Sharding:
    """Return the learner's batch sharding on the home mesh, whose axes are Auto."""
    if home.mesh.size == 1:
        return SingleDeviceSharding(home.mesh.devices.item())
    return NamedSharding(home.mesh, home.batch.spec)
