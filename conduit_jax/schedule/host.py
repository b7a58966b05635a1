"""Host hooks at run time: functions that are not traceable, run beside the plane, their results at their place in program order.

* Ingestion: with ``overlap_ingestion`` the hook of a unit runs on a worker while the loop goes on, and its records are
  inserted when ``g_ingestion`` further units have been pushed; otherwise a push waits for its own.
* Delivery: the hook of a batch starts when the batch is drawn, and is waited for when it is handed over; with
  ``overlap_delivery`` that is a call later.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from conduit_jax.errors import ConduitError, HookError, refuse
from conduit_jax.hooks import (
    Hook,
    Stage,
    delivered_as_is,
    delivery_hook,
    in_order_of_needs,
    ingestion_hook,
    run_stage,
    stored_as_is,
)
from conduit_jax.registry import Hooks
from conduit_jax.schedule.trace import Recorder
from conduit_jax.schedule.worker import HostQueue, Pending, Worker
from conduit_jax.types import Records

PyTree = Any


def on_host(tree: PyTree) -> PyTree:
    """Return ``tree`` with every array as numpy, waited for."""
    return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


class HostIngestion:
    """One table's: ``insert(records, context, version)`` is the door of the table, ``schedule()`` its present schedule."""

    def __init__(self, hook: Hook, queue: HostQueue, recorder: Recorder):
        self.queue = queue
        self.arrived = False
        self._hook = ingestion_hook(concurrent_stages(hook.stages)) if hook.stages else hook
        self._worker = Worker(f"ingestion hook {hook.name}", queue, recorder)
        self._pending: deque[tuple[Pending, Any, int]] = deque()
        self._lock = threading.Lock()
        self._carry: PyTree = None
        self._first: Any = None
        self._insert: Callable[..., Any] | None = None
        self._admit: Callable[[float], None] = lambda deadline_s: None
        self._schedule: Callable[[], Any] | None = None

    def example(self, rollout: PyTree, context: PyTree) -> PyTree:
        """Return the records of the first unit, kept for its push: a hook may count its calls."""
        self._carry = self._hook.init_carry(rollout)
        self._first = self._run(rollout, context)
        return self._first

    def attach(
        self, insert: Callable[..., Any], schedule: Callable[[], Any], admit: Callable[[float], None]
    ) -> HostIngestion:
        """Join it to its table; ``admit(deadline_s)`` raises where the table takes no unit for so long."""
        self._insert, self._schedule, self._admit = insert, schedule, admit
        return self

    @property
    def deadline_s(self) -> float:
        """How long a unit may take: its hook and, in order of arrival, as long again for the table's limiter."""
        return self.queue.deadline_s * (2 if self.queue.order == "arrival" else 1)

    @property
    def dropped(self) -> int:
        """Units the queue dropped."""
        return self._worker.dropped

    @property
    def waiting(self) -> int:
        """Units whose records are not inserted yet."""
        return len(self._pending)

    def push(self, rollout: PyTree, context: PyTree, version: int, deadline_s: float = 0.0) -> Any:
        """Run the hook of one unit, or have it run, and insert what is due.

        The hook is not run for a unit that the table's limiter keeps out: it may have a carry.
        """
        assert self._insert is not None
        assert self._schedule is not None
        schedule = self._schedule()
        with self._lock:
            if self.queue.order != "arrival" and not schedule.overlap_ingestion:
                self._admit(deadline_s)
            first, self._first = self._first, None
            if self.queue.order == "arrival":
                self.arrived = True
                call = self._worker.submit(self._run_and_insert, first, _copied(rollout), context, version)
                self._pending = deque([one for one in self._pending if not one[0].done] + [(call, context, version)])
                return None
            if not schedule.overlap_ingestion:
                records = self._run(rollout, context) if first is None else first
                return self._insert(records, context, version)
            while len(self._pending) >= max(1, int(schedule.g_ingestion)):
                self._insert_oldest()
            call = (lambda *_: first) if first is not None else self._run
            self._pending.append((self._worker.submit(call, _copied(rollout), context), context, version))
            return None

    def flush(self) -> None:
        """Wait for all hooks and insert their records."""
        with self._lock:
            while self._pending:
                self._insert_oldest()

    def close(self) -> None:
        """End the worker."""
        self._worker.close()

    def _insert_oldest(self) -> None:
        pending, context, version = self._pending.popleft()
        records = pending.result(self.deadline_s)
        if not pending.dropped and self.queue.order == "program":
            assert self._insert is not None
            self._insert(records, context, version)

    def _run_and_insert(self, first: Any, rollout: PyTree, context: PyTree, version: int) -> None:
        assert self._insert is not None
        self._admit(self.queue.deadline_s)
        self._insert(self._run(rollout, context) if first is None else first, context, version)

    def _run(self, rollout: PyTree, context: PyTree) -> PyTree:
        try:
            self._carry, records = self._hook.function(self._carry, on_host(rollout), on_host(context))
        except ConduitError:
            raise
        except Exception as error:
            raise HookError(f"Host hook {self._hook.name!r} raised: {type(error).__name__}: {error}") from error
        if isinstance(records, Records) and (records.lengths is not None or records.priorities is not None):
            raise HookError(
                f"Host hook {self._hook.name!r} returns lengths or priorities; a host hook returns plain records."
            )
        return records.items if isinstance(records, Records) else records


def _copied(tree: PyTree) -> PyTree:
    """Return ``tree`` with host arrays copied: the caller may write to its own at once."""
    return jax.tree.map(lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, tree)


class HostDelivery:
    """Starts the hook of every batch that is drawn; ``Pending`` samples take the place of samples until handed over."""

    def __init__(self, hook: Hook, queue: HostQueue, recorder: Recorder):
        self._hook = hook
        self._worker = Worker(f"delivery hook {hook.name}", queue, recorder)

    def submit(self, samples: tuple) -> tuple:
        """Return what will become of ``samples``."""
        return tuple(self._worker.submit(self._run, sample) for sample in samples)

    def close(self) -> None:
        """End the worker."""
        self._worker.close()

    def _run(self, sample: Any) -> Any:
        sample = on_host(sample)
        try:
            return sample._replace(data=self._hook.function(sample.data, None, ()))
        except ConduitError:
            raise
        except Exception as error:
            raise HookError(f"Host hook {self._hook.name!r} raised: {type(error).__name__}: {error}") from error


def concurrent_stages(stages: Sequence[Stage]) -> Callable[[dict[str, PyTree]], dict[str, PyTree]]:
    """Return one host function over named columns: a stage starts when the columns it needs are there, beside the others.

    ``HookError`` for a need that nothing gives and for stages that wait for each other. Threads end with the call.
    """
    ordered, givers = in_order_of_needs(stages)

    def run(columns: dict[str, PyTree]) -> dict[str, PyTree]:
        with ThreadPoolExecutor(max_workers=len(ordered), thread_name_prefix="conduit_jax stage") as pool:
            futures: dict[str, Any] = {}

            def run_one(stage: Stage) -> dict[str, PyTree]:
                given = {need: futures[givers[need]].result()[need] for need in stage.needs if need in givers}
                return run_stage(stage, columns | given)

            for stage in ordered:  # in the order of their needs, a thread each: nobody waits for one not started
                futures[stage.name] = pool.submit(run_one, stage)
            result = dict(columns)
            for stage in ordered:
                result |= futures[stage.name].result()
            return result

    return run


class HostEnds:
    """The host hooks of one table: ``ingestion`` and ``delivery``, ``None`` where that end is traced."""

    def __init__(self, ingestion: HostIngestion | None, delivery: HostDelivery | None):
        self.ingestion, self.delivery = ingestion, delivery

    @property
    def timing_decided(self) -> bool:
        """Whether timing decided what was inserted, or in which order."""
        return self.ingestion is not None and bool(self.ingestion.arrived or self.ingestion.dropped)

    def attach(self, pipeline: Any, insert: Callable[[PyTree, int], Any]) -> None:
        """Join them to their table, into which ``insert(records, version)`` puts what a hook made."""
        if self.delivery is not None:
            pipeline.deliver_by(self.delivery.submit)
        if self.ingestion is not None:
            pipeline.apart = True
            entered = lambda records, _, version: insert(records, version)  # noqa: E731
            self.ingestion.attach(entered, lambda: pipeline.schedule, pipeline.admit)

    def flush(self) -> None:
        """Insert what hooks still work on."""
        if self.ingestion is not None:
            self.ingestion.flush()

    def close(self) -> None:
        """End the workers."""
        for end in (self.ingestion, self.delivery):
            if end is not None:
                end.close()


def host_ends(
    hooks: Hooks, rollout: PyTree, context: PyTree, queue: HostQueue, recorder: Recorder
) -> tuple[HostEnds, Hooks, PyTree]:
    """Return the host ends of a table, the traced hooks that are left, and what reaches them: the first unit's records."""
    ingestion = delivery = None
    if hooks.ingestion.host:
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(rollout)):
            refuse(
                HookError,
                f"Host hook {hooks.ingestion.name!r} cannot be asked for shapes.",
                got="shapes without values",
                fix="let the first push build the plane, or build with a real rollout",
            )
        ingestion = HostIngestion(hooks.ingestion, queue, recorder)
        rollout = ingestion.example(rollout, context)
        hooks = hooks._replace(ingestion=ingestion_hook(stored_as_is))
    if hooks.delivery.host:
        delivery = HostDelivery(hooks.delivery, queue, recorder)
        hooks = hooks._replace(delivery=delivery_hook(delivered_as_is))
    return HostEnds(ingestion, delivery), hooks, rollout


def settle(ends: HostEnds | None, pipeline: Any) -> None:
    """Insert what hooks still work on where a batch is wanted that cannot be had without it."""
    if ends is not None and ends.ingestion is not None and ends.ingestion.waiting and not pipeline.ready():
        ends.flush()


def check_batched(host: bool, batched: bool, init_carry: Any) -> None:
    """Raise ``HookError`` for a batched hook that is on the host or has a carry."""
    if batched and (host or init_carry is not None):
        got = "host=True" if host else "init_carry="
        refuse(
            HookError, "A batched hook sees all units of a call at once.", got=got, want="a traced hook without a carry"
        )
