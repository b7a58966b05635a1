"""A thread that runs host functions in the order they were submitted, behind a bounded queue.

Only functions that cannot be traced need it: everything else is asynchronous by itself. An exception is kept and raised
where the result is asked for. ``close`` ends the thread; what was not started is dropped.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conduit_jax.errors import BackpressureError, LifecycleError, check_at_least, check_choice, check_integer, refuse
from conduit_jax.schedule.trace import Event, Recorder

BLOCK, DROP_OLDEST = "block", "drop_oldest"


@dataclass(frozen=True, kw_only=True)
class HostQueue:
    """How far a host hook may fall behind: ``units`` wait at most, then ``when_full`` a push blocks or the oldest is dropped.

    A blocked call raises ``BackpressureError`` after ``deadline_s``. ``order="program"`` inserts a unit at its place in the
    order of calls, whenever its hook ends; ``"arrival"`` as soon as it ends: faster where pushes come in bursts, and not
    repeatable (``stats().deterministic`` is False, as it is once a unit was dropped).
    """

    units: int = 8
    deadline_s: float = 60.0
    when_full: str = BLOCK
    order: str = "program"

    def __post_init__(self) -> None:
        check_integer("HostQueue(units=)", self.units, 1, fix="a queue holds at least one unit")
        check_at_least("HostQueue(deadline_s=)", self.deadline_s, 0.0)
        check_choice("HostQueue(when_full=)", self.when_full, (BLOCK, DROP_OLDEST))
        check_choice("HostQueue(order=)", self.order, ("program", "arrival"))


class Pending:
    """A result that is being computed."""

    def __init__(self, function: Callable[..., Any], arguments: tuple, recorder: Recorder, name: str):
        self._function, self._arguments = function, arguments
        self._recorder, self._name = recorder, name
        self._value: Any = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        self.dropped = False

    def run(self) -> None:
        """Compute it, on the worker."""
        start = time.perf_counter()
        try:
            self._value = self._function(*self._arguments)
        except BaseException as error:  # the caller gets it, whatever it is
            self._error = error
        self._arguments = ()
        self._recorder.add(Event("host hooks", self._name, start, time.perf_counter()))
        self._done.set()

    @property
    def done(self) -> bool:
        """Whether it ended well: one that raised is kept for its caller."""
        return self._done.is_set() and self._error is None

    def drop(self, error: BaseException | None = None) -> None:
        """Give it up unrun."""
        self.dropped, self._error, self._arguments = True, error, ()
        self._done.set()

    def result(self, deadline_s: float = 60.0) -> Any:
        """Return the value or raise what it raised; ``BackpressureError`` after ``deadline_s``."""
        if not self._done.is_set():
            with self._recorder.wait(self._name):
                if not self._done.wait(deadline_s):
                    refuse(
                        BackpressureError,
                        f"{self._name} did not end in time.",
                        got=f"more than {deadline_s} s",
                        fix="raise HostQueue(deadline_s=), or see what the hook waits for",
                    )
        if self._error is not None:
            raise self._error
        return self._value


class Worker:
    """One thread, started with the first call; ``queue`` bounds what waits for it."""

    def __init__(self, name: str, queue: HostQueue, recorder: Recorder):
        self.name, self.queue, self.dropped = name, queue, 0
        self._recorder = recorder
        self._waiting: deque[Pending] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def depth(self) -> int:
        """Calls that wait to be started."""
        return len(self._waiting)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Pending:
        """Queue a call; where the queue is full, wait or drop its oldest, as it says."""
        pending = Pending(function, arguments, self._recorder, self.name)
        with self._changed:
            if self._closed:
                refuse(LifecycleError, f"{self.name} was called after its plane was closed.")
            if len(self._waiting) >= self.queue.units:
                self._make_room()
            self._waiting.append(pending)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"conduit_jax {self.name}", daemon=True)
                self._thread.start()
        return pending

    def _make_room(self) -> None:
        if self.queue.when_full == DROP_OLDEST:
            self._waiting.popleft().drop()
            self.dropped += 1
            return
        with self._recorder.wait(f"queue of {self.name}"):
            free = self._changed.wait_for(
                lambda: len(self._waiting) < self.queue.units or self._closed, self.queue.deadline_s
            )
        if not free:
            refuse(
                BackpressureError,
                f"The queue of {self.name} stayed full.",
                got=f"{self.queue.units} units for {self.queue.deadline_s} s",
                fix="raise HostQueue(units=) or (deadline_s=), or take when_full='drop_oldest'",
            )

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                pending = self._waiting.popleft()
                self._changed.notify_all()
            pending.run()

    def close(self, deadline_s: float = 10.0) -> None:
        """Drop what was not started and end the thread; what runs is waited for, up to ``deadline_s``."""
        with self._changed:
            self._closed = True
            for pending in self._waiting:
                pending.drop(LifecycleError(f"{self.name} was dropped: the plane was closed"))
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(deadline_s)
