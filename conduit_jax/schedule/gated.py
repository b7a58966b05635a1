"""Runs a table whose limiter, bounded draws or deletes decide what may come next: the gate is asked before every dispatch.

What the account does not decide is read from the device, which then is waited for. A unit that may not be inserted is
refused before anything of it is, so no program ever leaves one out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from conduit_jax.errors import BackpressureError, NotReadyError, SpecError, nearest_multiples, refuse
from conduit_jax.schedule.gates import Account, GatedLedger
from conduit_jax.schedule.pipeline import ReplayPipeline
from conduit_jax.sharding.mesh import in_callers_mesh, on_host
from conduit_jax.types import SampleInfo

Array = jax.Array
PyTree = Any
_WORD = 2**32


class GatedPipeline(ReplayPipeline):
    """A table of slots, or one with a limiter of samples per insert, at run time."""

    _ledger: GatedLedger
    _draws_surely = False

    @property
    def deletes(self) -> bool:
        """Whether single items can be deleted."""
        return self._ledger.gate.independent

    def delete(self, info: SampleInfo) -> Array:
        """Remove the items of ``info`` that still are what they were when drawn; return how many, int32 a partition.

        Batches that were drawn ahead are delivered as they were drawn.
        """
        if not self.deletes:
            return super().delete(info)
        (named,), partitions = info.shape, self._ledger.partitions
        if named % partitions:
            want = f"{nearest_multiples(named, partitions)}, a batch as it was delivered"
            refuse(SpecError, "The infos do not divide over the partitions.", got=f"{named} items", want=want)
        with self._lock.lock, self._lock:
            info = self._programs.to_placement(info)
            self._control, deleted = self._programs.delete(self._control, info)
            self._ledger.delete(named)
            self._lock.notify()
            return in_callers_mesh(deleted)

    def _admit(self, deadline_s: float) -> None:
        if not (self._may_insert() or (deadline_s and self._lock.wait_for(self._may_insert, deadline_s))):
            waited = f" for {deadline_s:g} s" if deadline_s else ""
            fix = "plane.pull() first (a loop: OffPolicy(updates_per_rollout=)), or push(deadline_s=) beside a thread that pulls"
            if not self._may_draw():
                fix = "plane.reset(): no batch may be drawn either"
            refuse(
                BackpressureError,
                f"The rate limiter did not let a unit in{waited}; nothing was pushed.",
                got=self._blocked("insert"),
                fix=fix,
            )

    def _refill(self, context: PyTree, ahead: int) -> None:
        g = self._batches_a_call
        while len(self._drawn) <= ahead * g and self._may_draw():
            self._draw(g, context)

    def _ready(self) -> bool:
        if self._drawn:
            return True
        if not self._may_draw():
            self._insert_waiting()
        return self._may_draw()

    def _refuse_not_ready(self) -> None:
        fix = "push more rollouts first, or pull(deadline_s=) beside a thread that pushes"
        if not self._may_insert():
            fix = "plane.reset(): no unit may be inserted either"
        refuse(NotReadyError, "The table cannot give a whole batch now.", got=self._blocked("sample"), fix=fix)

    def sure_units(self) -> int | None:
        """Return how many units may go in with no doubt that batches may be drawn behind each; ``None``: any number."""
        with self._lock.lock, self._lock:
            gate, account = self._ledger.gate, self._ledger.account
            if gate.sure_units(account) == 0:
                self._ledger.see(self._accounts())
            return gate.sure_units(self._ledger.account)

    def _may_insert(self) -> bool:
        return self._decided(self._ledger.gate.admits)

    def _may_draw(self) -> bool:
        return self._decided(self._ledger.gate.allows)

    def _decided(self, verdict: Callable[[Account], bool | None]) -> bool:
        """Return the verdict of the account, or that of the device where the account has none."""
        known = verdict(self._ledger.account)
        if known is not None:
            return known
        accounts = self._accounts()
        self._ledger.see(accounts)
        return all(verdict(one) for one in accounts)

    def _blocked(self, operation: str) -> str:
        """Return what blocks the first partition that is blocked, in words."""
        reasons = [self._ledger.gate.explain(one, operation) for one in self._accounts()]
        reason = next(filter(None, reasons), "")
        return reason if len(reasons) == 1 else f"{reason}, in one of {len(reasons)} partitions"

    def _accounts(self) -> list[Account]:
        """Return every partition's account, read from the device."""
        live, control, gate = self._live_by_partition().tolist(), self._control, self._ledger.gate
        debts, left, found = ([0] * len(live) for _ in range(3))
        if gate.limiter.min_debt is not None or gate.limiter.max_debt is not None:
            high, low = (on_host(word).astype(object) for word in control.limiter.debt)
            debts = (high * _WORD + low).tolist()
        if gate.max_times_sampled:
            left = on_host(control.draws_left).tolist()
        if gate.least:
            found = on_host(self._programs.size(control)[0]).tolist()
        return [Account(*((one, one) for one in numbers)) for numbers in zip(live, debts, left, found, strict=True)]

    def _live_by_partition(self) -> np.ndarray:
        return on_host(self._control.table.live.size) if self._ledger.gate.independent else super()._live_by_partition()

    def _inserted_items(self) -> int:
        """Return the items inserted so far; where a hook counts them on the device, modulo 2**32 in a partition."""
        gate = self._ledger.gate
        if not gate.independent:
            return super()._inserted_items()
        if gate.counted:
            return int(on_host(self._control.inserts).sum(dtype=np.int64))
        return self._ledger.pushed_units * gate.unit * self._ledger.partitions
