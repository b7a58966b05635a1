"""A table at run time, as far as it is bound to where it lives: arrays, programs, account, and replacing them as a whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from conduit_jax.replay.interface import ReplayState
from conduit_jax.schedule.ledger import Ledger
from conduit_jax.schedule.programs import Drawn, Programs, Unit, at_home, stays
from conduit_jax.schedule.semantics import Schedule
from conduit_jax.schedule.trace import Recorder
from conduit_jax.schedule.turns import Turns
from conduit_jax.sharding.intake import Intake
from conduit_jax.sharding.mesh import on_host

Array = jax.Array
PyTree = Any


class Residence(NamedTuple):
    """What of a table is bound to its placement and to what its items look like; ``key`` is that of the draws."""

    programs: Programs
    state: ReplayState
    carry: PyTree
    key: Array
    ledger: Ledger
    door: Intake | None


class Resident:
    """One table's arrays, programs and account, what waits on either side of them, and the lock that orders whoever uses them."""

    def __init__(
        self,
        programs: Programs,
        state: ReplayState,
        carry: PyTree,
        ledger: Ledger,
        schedule: Schedule,
        key: Array,
        unit_steps: int,
        door: Intake | None = None,
    ):
        self._ledger, self._door = ledger, door
        self._lock = Turns()
        self.schedule = schedule
        self._programs, self._key, self._unit_steps = programs, key, unit_steps
        self._submit: Callable[[tuple], tuple] | None = None
        self._recorder: Recorder | None = None
        self.apart = False  # a hook on the host, or another table's rows, come between the buffer and the loop
        self._storage, self._control, self._carry = state.storage, state.control, carry
        self._waiting: deque[Unit] = deque()
        self._drawn: deque[Drawn] = deque()
        self._shapes_of_ingest = getattr(programs.ingest, "shapes", None)
        self._known_contexts: set[Any] = set()
        self._none_applied: Array | None = None
        self.updated_from: set[bool] = set()  # whether priorities came from the host: each way is a program of its own

    @property
    def schedule(self) -> Schedule:
        """What is run."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._lock.under(schedule)
        self._units_a_call, self._batches_a_call = int(schedule.g_ingestion), int(schedule.g_delivery)
        self._overlaps = schedule.overlap_ingestion or schedule.overlap_delivery

    @property
    def state(self) -> ReplayState:
        """The present arrays. Do not keep them: the next call donates them."""
        self._lock.settle()
        return ReplayState(self._storage, self._control)

    @property
    def ledger(self) -> Any:
        """The account, with all calls made so far in it."""
        self._lock.settle()
        return self._ledger

    @ledger.setter
    def ledger(self, ledger: Any) -> None:
        self._ledger = ledger

    @property
    def programs(self) -> Programs:
        """The compiled functions."""
        return self._programs

    @property
    def mesh(self) -> Mesh:
        """The mesh of the programs."""
        return self._programs.mesh

    @property
    def one_site(self) -> bool:
        """Whether the buffer alone is in device memory where the learner computes, and all hooks are traced."""
        return self._programs.one_site and not self.apart

    @property
    def key(self) -> Array:
        """The raw key all draws derive from, uint32 ``(2,)``."""
        return self._key

    @property
    def store(self) -> tuple[PyTree, PyTree, PyTree]:
        """(storage, control, carry): what a fused program takes over, and gives back by ``resume``."""
        self._lock.settle()
        return self._storage, self._control, self._carry

    def resume(self, store: tuple[PyTree, PyTree, PyTree], units: int, batches: int, *, prioritized: bool) -> None:
        """Go on with ``store`` after ``units`` were inserted and ``batches`` delivered, none drawn ahead, by others."""
        with self._lock.lock, self._lock:
            self._storage, self._control, self._carry = store
            self._ledger.advance(units, units * self._unit_steps, batches, batches if prioritized else 0)

    @property
    def waited_s(self) -> float:
        """Seconds that whoever pulls lately waited between two pulls, wanting no core."""
        return self._lock.waited_s

    @property
    def undelivered(self) -> int:
        """Batches drawn and not yet delivered."""
        self._lock.settle()
        return len(self._drawn)

    @property
    def waiting_units(self) -> int:
        """Units pushed and not yet inserted."""
        self._lock.settle()
        return len(self._waiting)

    def record(self, recorder: Recorder) -> None:
        """Enter every transfer to the learner from here on."""
        self._recorder = self._lock.recorder = recorder
        move = self._programs.batch_to_learner
        if move is not stays:
            move = recorder.timed("transfer", "batches to the learner", move)
            self._programs = self._programs._replace(batch_to_learner=move)

    def deliver_by(self, submit: Callable[[tuple], tuple]) -> None:
        """Hand every batch that is drawn to ``submit``, and what that returns to whoever pulls."""
        to_learner, self._submit = self._programs.batch_to_learner, submit
        self.apart = True
        self._programs = self._programs._replace(batch_to_learner=lambda samples: submit(to_learner(samples)))

    def live_items(self) -> int:
        """Return the number of live items read from the device: a sync point."""
        with self._lock.lock, self._lock:
            live = int(self._live_by_partition().sum())
            self._ledger.observe(live)
            return live

    def inserted_items(self) -> int:
        """Return the number of items inserted so far, padding not counted: a sync point."""
        with self._lock.lock, self._lock:
            return self._inserted_items()

    def faults(self) -> dict[str, int]:
        """Return what device-side values did wrong, by name, over all partitions: a sync point."""
        with self._lock.lock, self._lock:
            return {name: int(np.sum(on_host(count))) for name, count in self._control.faults._asdict().items()}

    def _inserted_items(self) -> int:
        ring = jax.tree.map(on_host, self._control.ring)
        steps = ring.laps.astype(np.int64) * self._ledger.length + ring.head
        lanes = self._ledger.lanes // steps.shape[0] if steps.ndim == 1 else 1
        return int(steps.sum()) * lanes + self._ledger.inserted_elsewhere

    def _live_by_partition(self) -> np.ndarray:
        """Return live items, ``(partitions,)``: a sync point. A ring counts for all lanes, or one a lane where ragged."""
        filled = jax.tree.map(on_host, self._control.ring).filled  # reading on the device asks for its own mesh
        return filled * (self._ledger.lanes // filled.shape[0]) if filled.ndim == 1 else filled.sum(axis=1)

    def close(self) -> None:
        """End the thread that work was left to, after the work it has."""
        self._lock.close()


def relocate(resident: Resident, move: Callable[[Residence], Residence]) -> None:
    """Put what ``move`` returns in the place of what it is given: nobody pushes, pulls or updates meanwhile.

    Where ``move`` raises, all stays as it was. Batches that were drawn are with the learner already and stay as they are;
    units that wait are brought to the new door.
    """
    own = resident
    with own._lock.lock, own._lock:
        old = Residence(own._programs, own.state, own._carry, own._key, own._ledger, own._door)
        new = move(old)
        waiting = deque(at_home(unit, new.door) for unit in own._waiting)
        own._programs, (own._storage, own._control) = new.programs, new.state
        own._carry, own._key, own._ledger, own._door, own._waiting = new.carry, new.key, new.ledger, new.door, waiting
        own._shapes_of_ingest = getattr(new.programs.ingest, "shapes", None)
        own._known_contexts, own._none_applied = set(), None
        if own._recorder is not None:
            own.record(own._recorder)
        if own._submit is not None:
            own.deliver_by(own._submit)
