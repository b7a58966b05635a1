"""A lock whose holder may leave work to a thread: whoever takes the lock next waits for that work, so program order is kept.

What a call of the plane has to dispatch for later calls runs while its caller waits for something else: who ran it makes no
difference to anything but time. It is left to the thread where that pays: where, lately, the caller waited between its calls
for something else, wanting no core, for longer than waking a thread takes, and the work took longer than that too. A caller
that computes, or goes on dispatching, would only share cores and the interpreter, and would seem to wait for what it shares:
so standing in line for a core is no waiting, and waits are measured in cycles that leave nothing.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, NamedTuple

import jax

from conduit_jax.schedule.clocks import wanted_s
from conduit_jax.schedule.latency import WAKING_S
from conduit_jax.schedule.trace import Event, Recorder

_MEMORY = 1 / 4  # weight of the latest in what is remembered of waits and of work
# Of so many cycles one has its waits measured, which are calls of the system, and leaves nothing: of the first ones, of later
# ones, of those that leave. Prime numbers: groups of any number of batches are met at each of theirs.
_FIRST, _CYCLES, _LEAVING = 5, 17, 67
_ARE_FIRST = 16  # measured cycles
_LONGEST_S = 10e-3  # that is counted of a wait: one long pause says little about the next ones
_END_S = 10.0  # that the end of a thread without work is waited for at most
_NAMES = (
    "jax_enable_x64",
    "jax_default_device",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_disable_jit",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_threefry_partitionable",
    "jax_thread_guard",
    "jax_transfer_guard",
)
_settings_here: Callable[[Any], Any] = attrgetter(*(name for name in _NAMES if name in jax.config.values))
Work = Callable[[], object]


class _Behind(NamedTuple):
    """Work that was left; ``done`` is locked until it is done, ``otherwise`` is run after it where it raises."""

    work: Work
    otherwise: Work
    excused: type[BaseException]
    done: Any


class Turns:
    """The lock of one table and what was left behind: ``with turns.lock, turns`` waits for that, and raises what it raised.

    The lock itself is taken first, let go last, and never handed on: Ctrl-C anywhere in here leaves it to the next call.

    ``waited_s`` and ``work_s`` are what its users lately waited between two ``pulled``, wanting no core, and what work took,
    under the present schedule.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.recorder: Recorder | None = None
        self.waited_s, self.work_s, self._last_s, self._watched = 0.0, 0.0, float("inf"), 0
        self._schedule: Hashable = None
        self._under: dict[Hashable, tuple[float, float, float, int]] = {}  # these four, by schedule
        self._watching, self._waiting_s = False, 0.0
        self._pulls_left = _FIRST  # until the next one that begins a cycle whose waits are measured
        self._left: tuple[int, float, float] = (0, 0.0, 0.0)  # who left last, when, and what it had wanted till then
        self._behind: _Behind | None = None
        self._error: BaseException | None = None
        self._thread: _Thread | None = None
        self._condition, self._hoping = threading.Condition(self.lock), 0
        self._process = os.getpid()

    def __enter__(self) -> None:
        if self._behind is not None:
            self._catch_up()
        if self._watching or self._error is not None:
            self._entered()

    def __exit__(self, *_: object) -> None:
        if self._watching:
            self._left = (threading.get_ident(), time.perf_counter(), wanted_s())

    def _catch_up(self) -> None:
        """Wait for work that was left. The caller holds the lock, which the thread does not need for it."""
        behind = self._behind
        if behind is None:
            return
        with nullcontext() if self.recorder is None else self.recorder.wait("dispatch"):
            behind.done.acquire()

    def _entered(self) -> None:
        caller, since, wanted = self._left
        if self._watching and caller == threading.get_ident():
            waited = time.perf_counter() - since - (wanted_s() - wanted)
            self._waiting_s += min(max(waited, 0.0), _LONGEST_S)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait_for(self, predicate: Callable[[], bool], seconds: float) -> bool:
        """Let others have turns, for ``seconds`` at most, until ``predicate``; return it. The caller has its turn."""

        def now() -> bool:
            self._catch_up()
            return predicate()

        self._hoping += 1
        try:
            return self._condition.wait_for(now, seconds)
        finally:
            self._hoping -= 1

    def notify(self) -> None:
        """Have whoever waits look again: at once, or once the work that calls this is done."""
        if self._hoping and self._behind is None:
            self._condition.notify_all()

    @property
    def pays(self) -> bool:
        """Whether leaving work is expected to save its caller time; a cycle measured to wait for nothing ends it at once."""
        return min(self.waited_s, self._last_s, self.work_s) > WAKING_S

    def under(self, schedule: Hashable) -> None:
        """Go on with what was measured under ``schedule``: it decides what callers wait for, and what work takes."""
        self._under[self._schedule] = self.waited_s, self.work_s, self._last_s, self._watched
        self.waited_s, self.work_s, self._last_s, self._watched = self._under.get(schedule, (0.0, 0.0, float("inf"), 0))
        self._schedule, self._watching, self._pulls_left = schedule, False, _FIRST

    def pulled(self) -> None:
        """Begin another cycle of calls; in one of so many what is waited between them is measured."""
        if self._watching:
            self._watched, self._last_s = self._watched + 1, self._waiting_s
            self.waited_s += max(_MEMORY, 1 / self._watched) * (self._waiting_s - self.waited_s)
            self._left, self._waiting_s, self._watching = (0, 0.0, 0.0), 0.0, False
        self._pulls_left -= 1
        if self._pulls_left <= 0:
            self._watching = True
            self._pulls_left = _LEAVING if self.pays else _FIRST if self._watched < _ARE_FIRST else _CYCLES

    def leave(self, work: Work, otherwise: Work, excused: type[BaseException]) -> None:
        """Run ``work``, the last of a turn: on the thread, where that pays; else here.

        ``otherwise`` is run after work that was left raised: nobody is there any more to be told. The next call raises it,
        but not what is ``excused``: whoever needs that work meets it again, in a call that knows what to do about it.
        """
        if not self._watching and self.pays and (thread := self._alike()) is not None:
            done = threading.Lock()
            done.acquire()
            behind = _Behind(work, otherwise, excused, done)
            run, put = partial(self._run_behind, behind), thread.put
            self._behind = behind
            put(run)  # a function of C: Ctrl-C cannot come between
            return
        start = time.perf_counter()
        work()
        self._took(time.perf_counter() - start)

    def settle(self) -> None:
        """Wait for work that was left; what it raised is for the next call to raise."""
        if self._behind is not None and os.getpid() == self._process:  # a forked child has no such thread
            with self.lock:
                self._catch_up()

    def close(self) -> None:
        """End the thread, after the work it has."""
        if self._thread is None or os.getpid() != self._process:
            return
        with self.lock:
            self._catch_up()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.end()

    def _alike(self) -> _Thread | None:
        """Return the thread, if a program called on it is the one called here: compiled by the same settings, in no mesh."""
        if not jax.sharding.get_abstract_mesh().empty:
            return None
        if self._thread is None:
            self._thread = _Thread(self)
        return self._thread if self._thread.agrees(_settings_here(jax.config)) else None

    def _took(self, seconds: float) -> None:
        self.work_s += (_MEMORY if self.work_s else 1.0) * (seconds - self.work_s)

    def _run_behind(self, behind: _Behind) -> None:
        start = time.perf_counter()
        try:
            behind.work()
        except BaseException as error:  # the next call raises it, whatever else it is
            self._error = None if isinstance(error, behind.excused) else error
            try:
                behind.otherwise()
            except BaseException as worse:  # or the thread would end, and whoever waits for it wait for ever
                self._error = worse
        finally:
            end = time.perf_counter()
            self._took(end - start)
            if self.recorder is not None:
                self.recorder.add(Event("dispatch", "left behind", start, end))
            self._behind = None
            behind.done.release()
        if self._hoping:
            with self.lock:
                self._condition.notify_all()


class _Thread:
    """Runs calls, until it is ended or its owner is gone."""

    def __init__(self, owner: Turns):
        self._calls: SimpleQueue[Work | None] = SimpleQueue()
        self.put = self._calls.put  # runs what it is given after what came before
        self._settings: list[Any] = []  # of the thread, latest last
        self._asked: Any = None
        started = threading.Event()
        arguments = (self._calls, self._settings, started)
        self._thread = threading.Thread(target=_serve, args=arguments, name="conduit_jax dispatch", daemon=True)
        self._thread.start()
        started.wait()
        at_exit = partial(_settle, weakref.ref(owner))
        atexit.register(at_exit)  # before JAX ends its backends, which were there first
        self._end = weakref.finalize(owner, _end, self._calls, at_exit)
        self._end.atexit = False

    def agrees(self, settings: Any) -> bool:
        """Whether the thread has these ``settings``; asks it for its own anew where it has not."""
        if self._settings[-1] == settings:
            return True
        if self._asked != settings:
            self._asked = settings
            self._calls.put(_nothing)
        return False

    def end(self) -> None:
        """End the thread and wait for its end: it has no work."""
        self._end()
        if self._thread is not threading.current_thread():
            self._thread.join(_END_S)


def _serve(calls: SimpleQueue, settings: list[Any], started: threading.Event) -> None:
    while True:
        settings[:] = [_settings_here(jax.config)]
        started.set()
        call = calls.get()
        if call is None:
            return
        call()
        del call


def _nothing() -> None:
    """Done."""


def _end(calls: SimpleQueue, at_exit: Callable[[], None]) -> None:
    calls.put(None)
    atexit.unregister(at_exit)


def _settle(owner: weakref.ref[Turns]) -> None:
    if (turns := owner()) is not None:
        turns.settle()
