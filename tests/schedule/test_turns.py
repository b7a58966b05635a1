"""Laws of a lock whose holder leaves work to a thread: program order, errors at the next call, nothing left running."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from conduit_jax.schedule.latency import WAKING_S
from conduit_jax.schedule.trace import Recorder
from conduit_jax.schedule.turns import Turns

CONFIG: Any = jax.config


def nothing() -> None: ...


@pytest.fixture
def turns() -> Turns:
    """A lock whose users wait long, and leave long work."""
    turns = Turns()
    turns.waited_s = turns.work_s = 1.0
    return turns


def leave(turns: Turns, work: Callable[[], Any], otherwise: Callable[[], Any] = nothing) -> None:
    with turns.lock, turns:
        turns.leave(work, otherwise, EOFError)


def dispatch_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "conduit_jax dispatch"}


def test_whoever_comes_next_finds_the_work_done(turns: Turns) -> None:
    done: list[str] = []
    leave(turns, lambda: (time.sleep(0.02), done.append(threading.current_thread().name)))
    with turns.lock, turns:
        assert done == ["conduit_jax dispatch"]
    turns.close()


def test_settling_waits_for_the_work_and_takes_no_turn(turns: Turns) -> None:
    done: list[int] = []
    leave(turns, lambda: (time.sleep(0.02), done.append(1)))
    turns.settle()
    assert done == [1]
    assert not turns.lock.locked()
    turns.close()


def test_turns_of_many_threads_exclude_each_other_and_the_work_they_leave(turns: Turns) -> None:
    inside, most, total = [0], [0], [0]

    def step() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.0002)
        total[0] += 1
        inside[0] -= 1

    def use() -> None:
        for _ in range(30):
            with turns.lock, turns:
                step()
                turns.work_s = turns.waited_s = 1.0
                turns.leave(step, nothing, EOFError)

    users = [threading.Thread(target=use) for _ in range(4)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    turns.settle()
    assert (most, total) == ([1], [240])
    turns.close()


def test_what_left_work_raises_is_raised_once_by_the_next_call_after_it_was_undone(turns: Turns) -> None:
    undone: list[int] = []
    leave(turns, lambda: 1 / 0, lambda: undone.append(1))
    with pytest.raises(ZeroDivisionError), turns.lock, turns:
        raise AssertionError("the block may not be entered")
    assert undone == [1]
    with turns.lock, turns:
        pass
    turns.close()


def test_what_cannot_be_undone_either_is_raised_with_both_reasons_and_the_thread_goes_on(turns: Turns) -> None:
    undone: list[int] = []
    for _ in range(2):
        leave(turns, lambda: 1 / 0, lambda: {}["undoing"])
        with pytest.raises(KeyError, match="undoing") as raised, turns.lock, turns:
            raise AssertionError("the block may not be entered")
        assert isinstance(raised.value.__context__, ZeroDivisionError)
    leave(turns, lambda: undone.append(1))
    with turns.lock, turns:
        assert undone == [1]
    turns.close()


def test_work_that_is_not_left_raises_where_it_was_asked_for() -> None:
    turns, undone = Turns(), []
    with pytest.raises(ZeroDivisionError):
        leave(turns, lambda: 1 / 0, lambda: undone.append(1))
    assert not undone
    with turns.lock, turns:
        pass


@pytest.mark.parametrize(
    ("waited", "work", "pays"), [(1, 1, True), (0.5, 9, False), (9, 0.5, False), (0, 0, False), (2, 3, True)]
)
def test_work_is_left_where_both_it_and_the_wait_are_longer_than_waking(waited: float, work: float, pays: bool) -> None:
    turns = Turns()
    turns.waited_s, turns.work_s = waited * 1.01 * WAKING_S, work * 1.01 * WAKING_S
    assert turns.pays == pays


@pytest.mark.parametrize(("passes_s", "wants_s", "waited_s"), [(5e-3, 5e-3, 0.0), (5e-3, 1e-3, 8e-3), (1.0, 0.0, 2e-2)])
def test_what_is_waited_is_time_in_which_no_core_is_wanted_between_two_pulls_and_no_long_pause(
    monkeypatch: pytest.MonkeyPatch, passes_s: float, wants_s: float, waited_s: float
) -> None:
    """Two gaps lie between two pulls: before and after a push."""
    clock = SimpleNamespace(wall=0.0, wanted=0.0)
    monkeypatch.setattr("conduit_jax.schedule.turns.time.perf_counter", lambda: clock.wall)
    monkeypatch.setattr("conduit_jax.schedule.turns.wanted_s", lambda: clock.wanted)
    turns = Turns()
    for _ in range(800):
        for pull in (True, False):
            with turns.lock, turns:
                if pull:
                    turns.pulled()
            clock.wall, clock.wanted = clock.wall + passes_s, clock.wanted + wants_s
    assert turns.waited_s == pytest.approx(waited_s, abs=1e-6)


def cycle(turns: Turns, clock: SimpleNamespace, waits_s: float, work: Callable[[], Any] = nothing) -> None:
    with turns.lock, turns:
        turns.pulled()
        turns.leave(work, nothing, EOFError)
    clock.wall += waits_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(wall=0.0)
    monkeypatch.setattr("conduit_jax.schedule.turns.time.perf_counter", lambda: clock.wall)
    monkeypatch.setattr("conduit_jax.schedule.turns.wanted_s", lambda: 0.0)
    return clock


def test_what_was_measured_under_a_schedule_counts_under_that_one_alone(clock: SimpleNamespace) -> None:
    turns = Turns()

    def work() -> None:
        clock.wall += 1e-3

    for number in range(60):
        turns.under(("in order", "overlapping")[number // 10 % 2])
        for _ in range(10):
            cycle(turns, clock, (5e-3, 0.0)[number // 10 % 2], work)
        assert turns.waited_s == (0.0 if number // 10 % 2 else pytest.approx(5e-3, rel=0.5))
        assert turns.pays == (number // 10 % 2 == 0)
    turns.close()


def test_one_measured_cycle_without_a_wait_ends_the_leaving(clock: SimpleNamespace) -> None:
    turns, ran = Turns(), []

    def work() -> None:
        ran.append(threading.current_thread().name)
        clock.wall += 1e-3

    for waits_s, cycles in ((5e-3, 40), (0.0, 2 * 67)):
        for _ in range(cycles):
            cycle(turns, clock, waits_s, work)
            turns.settle()
        assert turns.pays == (waits_s > 0)
        assert turns.waited_s > WAKING_S
    assert ran[39] == "conduit_jax dispatch"
    assert ran[-1] != "conduit_jax dispatch"
    turns.close()


def test_a_program_is_called_under_its_callers_settings_and_mesh(turns: Turns) -> None:
    seen: list[tuple[str, bool]] = []

    def work() -> None:
        seen.append((threading.current_thread().name, bool(CONFIG.jax_enable_x64)))

    here = threading.current_thread().name
    with jax.enable_x64(not CONFIG.jax_enable_x64):
        leave(turns, work)
        assert seen.pop() == (here, bool(CONFIG.jax_enable_x64))
    with jax.set_mesh(Mesh(np.array(jax.devices()[:1]), ("x",))):
        leave(turns, work)
    assert seen.pop() == (here, bool(CONFIG.jax_enable_x64))
    leave(turns, work)
    turns.settle()
    assert seen.pop() == ("conduit_jax dispatch", bool(CONFIG.jax_enable_x64))
    turns.close()


def test_settings_that_are_changed_for_all_threads_are_noticed(turns: Turns) -> None:
    leave(turns, nothing)
    turns.settle()
    before, names = CONFIG.jax_default_matmul_precision, []
    CONFIG.update("jax_default_matmul_precision", "highest")
    try:
        for _ in range(200):
            leave(turns, lambda: names.append(threading.current_thread().name))
            turns.settle()
            if "conduit_jax dispatch" in names:
                break
            time.sleep(0.005)
    finally:
        CONFIG.update("jax_default_matmul_precision", before)
    assert names[0] != "conduit_jax dispatch"
    assert names[-1] == "conduit_jax dispatch"
    turns.close()


def test_no_thread_is_left_by_a_lock_that_is_closed_or_forgotten(turns: Turns) -> None:
    before = dispatch_threads()
    for end in ("close", "forget"):
        own = Turns()
        own.waited_s = own.work_s = 1.0
        leave(own, nothing)
        own.settle()
        (thread,) = dispatch_threads() - before
        if end == "close":
            own.close()
            own.close()
        del own
        gc.collect()
        thread.join(10)
        assert not thread.is_alive()


def test_left_work_is_a_track_of_the_timeline_and_waiting_for_it_a_stall(turns: Turns) -> None:
    turns.recorder = Recorder()
    leave(turns, lambda: time.sleep(0.02))
    with turns.lock, turns:
        pass
    assert [event.track for event in turns.recorder.events] == ["dispatch", "wait"] or [
        event.track for event in turns.recorder.events
    ] == ["wait", "dispatch"]
    assert list(turns.recorder.stalls_s) == ["dispatch"]
    turns.close()


def test_waiting_for_left_work_is_no_reason_to_leave_more(turns: Turns) -> None:
    """A caller that comes back at once only waits for the thread: after a while the work is its own again."""
    ran: list[str] = []
    turns.waited_s = 5e-3

    def work() -> None:
        ran.append(threading.current_thread().name)
        time.sleep(3e-4)

    for _ in range(800):
        with turns.lock, turns:
            turns.pulled()
            turns.leave(work, nothing, EOFError)
        with turns.lock, turns:
            pass
    turns.close()
    assert ran[0] == "conduit_jax dispatch"
    assert set(ran[-20:]) == {threading.current_thread().name}
