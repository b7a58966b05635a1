"""A plane whose pulls leave their work to the thread, always: the same bits and counts, errors at the next call, nothing lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conduit_jax as conduit
from conduit_jax.schedule.turns import Turns
from conduit_jax.sharding.pressure import MemoryPressure
from conduit_jax.testing import count_traces, delayed
from tests.reference_plane import run_program, unit
from tests.schedule.test_lag import LAG
from tests.schedule.test_lag import plane_with as queue_with
from tests.schedule.test_pipeline import ROUNDS, SCHEDULES, bits, plane_with

LATE = sorted(name for name, one in SCHEDULES.items() if one.overlap_ingestion or one.overlap_delivery)


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Leave all work that may be left; yield the names of the threads that ran some, which are ended afterwards."""
    ran, used, run_behind = [], set(), Turns._run_behind

    def watched(self: Turns, *work: Any) -> None:
        ran.append(threading.current_thread().name)
        used.add(self)
        run_behind(self, *work)

    monkeypatch.setattr(Turns, "pays", property(lambda _: True))
    monkeypatch.setattr(Turns, "_run_behind", watched)
    yield ran
    for turns in used:
        turns.close()


def table_of(plane: conduit.ExperiencePlane) -> Any:
    return plane._tables["experience"].pipeline


def leave_nothing(plane: conduit.ExperiencePlane) -> None:
    table_of(plane)._lock.leave = lambda work, *_: work()


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("delays", [False, True])
def test_it_changes_no_bit_and_no_count(name: str, delays: bool, always: list[str]) -> None:
    plane = plane_with(SCHEDULES[name])
    plane.build(unit(0))
    if delays:
        with delayed(plane, pause=time.sleep, seed=len(name)):
            batches = run_program(plane, ROUNDS)
    else:
        batches = run_program(plane, ROUNDS)
    assert set(always) == {"conduit_jax dispatch"}
    calm = plane_with(SCHEDULES[name])
    calm.build(unit(0))
    leave_nothing(calm)
    assert bits(batches) == bits(run_program(calm, ROUNDS))
    assert vars(table_of(plane).ledger) == vars(table_of(calm).ledger)


def test_a_steady_plane_traces_nothing_on_the_thread() -> None:
    plane = plane_with("overlap")
    plane.push(unit(0))
    for number in range(1, 3):
        plane.push(unit(number))
        plane.pull()
    with count_traces() as traces:
        for number in range(3, 8):
            plane.push(unit(number))
            plane.pull()
        plane.flush()
    assert traces.count == 0


def test_counts_are_those_of_all_calls_made_so_far() -> None:
    plane = plane_with("overlap")
    plane.push(unit(0))
    for number in range(1, 6):
        plane.push(unit(number))
        plane.pull()
        assert table_of(plane).ledger.delivered_batches == number
        stats = plane.stats().tables["experience"]
        assert (stats.delivered_batches, stats.undelivered_batches, stats.waiting_units) == (number, 1, 0)


def drawn_once_and_what_follows() -> tuple[Any, list[Any], list[Any]]:
    """Return a plane with work left from its first pull, that pull, and what four pulls undisturbed deliver."""
    plane, calm = plane_with("overlap"), plane_with("overlap")
    for one in (plane, calm):
        one.push(unit(0))
    want, got = [calm.pull() for _ in range(4)], [plane.pull()]
    table_of(plane).flush()
    return plane, got, want


def test_a_draw_that_fails_is_raised_by_the_next_call_and_loses_no_batch() -> None:
    plane, got, want = drawn_once_and_what_follows()
    pipeline = table_of(plane)
    programs = pipeline._programs
    pipeline._programs = programs._replace(deliver=lambda *_: 1 / 0)
    got.append(plane.pull())  # drawn before
    with pytest.raises(ZeroDivisionError):
        plane.pull()
    assert (pipeline.undelivered, pipeline.ledger.delivered_batches) == (0, 2)
    pipeline._programs = programs
    got += [plane.pull() for _ in range(2)]
    assert bits(got) == bits(want)


def test_memory_too_full_for_a_draw_ahead_is_met_again_by_the_pull_that_needs_it() -> None:
    plane, got, want = drawn_once_and_what_follows()
    pipeline = table_of(plane)
    programs, tried = pipeline._programs, []

    def too_full(*_: Any) -> None:
        tried.append(threading.current_thread().name)
        raise MemoryPressure("full")

    pipeline._programs = programs._replace(deliver=too_full)
    got.append(plane.pull())  # drawn before
    assert plane.ready()
    assert plane.stats().tables["experience"].undelivered_batches == 0
    pipeline._programs = programs
    got += [plane.pull() for _ in range(2)]
    assert tried == ["conduit_jax dispatch"]
    assert bits(got) == bits(want)


def test_a_unit_whose_insert_fails_goes_on_waiting_and_a_push_that_raises_has_pushed_nothing() -> None:
    plane = plane_with("overlap")
    plane.push(unit(0))
    plane.pull()
    plane.push(unit(1))
    pipeline = table_of(plane)
    pipeline.flush()
    plane.push(unit(2))
    programs = pipeline._programs
    pipeline._programs = programs._replace(ingest=lambda *_: 1 / 0)
    plane.pull()
    with pytest.raises(ZeroDivisionError):
        plane.push(unit(3))
    pipeline._programs = programs
    plane.push(unit(3))
    plane.flush()
    assert plane.stats().tables["experience"].inserted_items == 4 * 32


def test_closing_raises_what_left_work_raised_and_ends_the_thread() -> None:
    before = set(threading.enumerate())
    plane = plane_with("overlap")
    plane.push(unit(0))
    plane.pull()
    pipeline = table_of(plane)
    pipeline.flush()
    pipeline._programs = pipeline._programs._replace(deliver=lambda *_: 1 / 0)
    plane.pull()
    with pytest.raises(ZeroDivisionError):
        plane.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


def test_a_saved_plane_holds_what_was_left_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    plane, calm = plane_with("overlap"), plane_with("overlap")
    for one in (plane, calm):
        run_program(one, 4)
    plane.save(tmp_path)
    again = plane_with("overlap")
    again.restore(tmp_path)
    got, want = [], []
    for number in range(5, 9):
        for one, batches in ((again, got), (calm, want)):
            one.push(unit(number), version=7 + number)
            batches.append(jax.tree.map(np.asarray, one.pull()))
    assert bits(got) == bits(want)


def test_a_table_moves_between_a_pull_and_what_it_left() -> None:
    plane, calm = plane_with("overlap"), plane_with("overlap")
    got, want = [], []
    for one, batches in ((plane, got), (calm, want)):
        one.push(unit(0))
        for number in range(1, 6):
            one.push(unit(number))
            batches.append(jax.tree.map(np.asarray, one.pull()))
            if one is plane and number == 3:
                one.migrate("pinned_host")
    assert bits(got) == bits(want)


def test_lag_is_that_of_the_version_at_the_pull() -> None:
    plane = queue_with(conduit.Schedule(overlap_ingestion=True, overlap_delivery=True))
    plane.build(unit(0))
    with delayed(plane, pause=time.sleep, seed=1):
        for number in range(6):
            plane.push(unit(number), version=plane.policy_version)
            plane.pull()
            plane.policy_version += 1  # while work that was left may still run
    lag = plane.stats().tables["experience"].lag
    assert max(lag) <= LAG
    calm = queue_with(conduit.Schedule(overlap_ingestion=True, overlap_delivery=True))
    for number in range(6):
        calm.push(unit(number), version=calm.policy_version)
        calm.pull()
        calm.flush()
        calm.policy_version += 1
    assert lag == calm.stats().tables["experience"].lag


def test_producers_and_a_learner_in_threads_get_what_one_thread_gets() -> None:
    plane = plane_with("overlap")
    plane.push(unit(0))
    errors: list[BaseException] = []

    def learn() -> None:
        try:
            for _ in range(30):
                assert bool(plane.pull().valid.all())
        except BaseException as error:
            errors.append(error)

    learner = threading.Thread(target=learn)
    learner.start()
    for number in range(1, 30):
        plane.push(unit(number))
    learner.join()
    assert not errors
    plane.flush()
    stats = plane.stats().tables["experience"]
    assert (stats.inserted_items, stats.delivered_batches) == (30 * 32, 30)


def test_a_loop_trains_to_the_same_bits() -> None:
    def run(*, leaves: bool) -> bytes:
        plane = plane_with("overlap", config=conduit.ReplayConfig(capacity=256), batch_size=32)
        loop = conduit.wrap(
            lambda learner, sample: (learner + sample.data["x"].mean(), {"loss": learner}),
            rollout=lambda actor, policy, key: (actor, {"x": jax.random.normal(key, (4, 8)) + policy}),
            policy=lambda learner: learner,
            plane=plane,
        )
        if not leaves:
            plane.build({"x": jnp.zeros((4, 8))}, jnp.float32(0))
            leave_nothing(plane)
        return np.asarray(loop.run(jnp.float32(0), jnp.int32(0), 12)[0]).tobytes()

    assert run(leaves=True) == run(leaves=False)
