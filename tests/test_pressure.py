"""Laws of memory pressure: a program that would not fit is not dispatched, so nothing is lost, and the buffer may move away."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conduit_jax as conduit
from conduit_jax import relocation
from conduit_jax.sharding import pressure
from conduit_jax.sharding.pressure import MemoryPressure, extra_bytes, watched
from tests.reference_plane import BATCH, CAPACITY, ReferencePlane, assert_same_batch, unit

CONFIG = conduit.ReplayConfig(capacity=CAPACITY, sampler=conduit.Prioritized())


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Switch: from its call on, hardly anything is free, as every dispatch finds out, until a buffer has moved away."""
    monkeypatch.setattr(pressure, "_SMALL_EVERY", 1)
    free = [1 << 40]
    monkeypatch.setattr(pressure, "available_bytes", lambda device, kind: free[0])
    move = relocation._move

    def freeing(*arguments: Any) -> Any:
        done = move(*arguments)
        free[0] = 1 << 40
        return done

    monkeypatch.setattr(relocation, "_move", freeing)
    return lambda size=0: free.__setitem__(0, size)


def make_plane(where: Any) -> conduit.ExperiencePlane:
    algorithm = conduit.OffPolicy(batch_size=BATCH)
    return conduit.ExperiencePlane(algorithm=algorithm, replay=CONFIG, placement=where, schedule="sequential", seed=3)


@pytest.mark.parametrize("call", ["push", "pull"])
def test_a_buffer_placed_automatically_moves_away_and_delivers_the_same(call: str, full: Any) -> None:
    plane, reference = make_plane("auto"), ReferencePlane(CONFIG, 1, seed=3)
    for one in (plane, reference):
        one.push(unit(0), version=0)
    assert_same_batch(plane.pull(), reference.pull())
    full()
    if call == "push":
        for one in (plane, reference):
            one.push(unit(1), version=1)
    assert_same_batch(plane.pull(), reference.pull())
    stats = plane.stats().tables["experience"]
    assert (stats.placement, stats.moves[0].reason) == ("disk", "memory pressure")
    for one in (plane, reference):
        one.push(unit(2), version=2)
    assert_same_batch(plane.pull(), reference.pull())


def test_relief_keeps_to_what_may_be_chosen(full: Any) -> None:
    for request in (conduit.AutoPlacement(limits={"disk": 0}), conduit.AutoPlacement(only=("single_device",))):
        plane = make_plane(request)
        plane.push(unit(0), version=0)
        full()
        with pytest.raises(conduit.PlacementError, match="too full"):
            plane.push(unit(1), version=1)
        assert plane.stats().tables["experience"].placement == "device"
        full(1 << 40)
        plane.push(unit(1), version=1)


def test_memory_that_is_not_to_be_had_is_no_end_of_relief_but_its_reason(
    full: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA and the kernel raise what they like where they have no memory: the buffer stays, and the plane says what it tried."""
    plane = make_plane("auto")
    plane.push(unit(0), version=0)

    def exhausted(*_: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")

    monkeypatch.setattr(relocation, "_allocated", exhausted)
    full()
    with pytest.raises(
        conduit.PlacementError, match=r"too full[\s\S]*tried disk: [\s\S]*RESOURCE_EXHAUSTED[\s\S]*fix:"
    ):
        plane.push(unit(1), version=1)
    assert plane.stats().tables["experience"].placement == "device"
    monkeypatch.undo()
    plane.push(unit(1), version=1)


def test_several_threads_that_find_memory_full_move_the_buffer_once(full: Any) -> None:
    plane = make_plane("auto")
    plane.push(unit(0), version=0)
    plane.pull()
    full()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            plane.pull()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    assert [move.target for move in plane.stats().tables["experience"].moves] == ["disk"]


@pytest.mark.parametrize("where", ["device", pytest.param("disk", marks=pytest.mark.slow)])
def test_a_buffer_that_was_put_somewhere_stays_and_the_error_says_what_to_do(where: str, full: Any) -> None:
    plane, reference = make_plane(where), ReferencePlane(CONFIG, 1, seed=3)
    for one in (plane, reference):
        one.push(unit(0), version=0)
    assert_same_batch(plane.pull(), reference.pull())
    full()
    for call in (lambda: plane.push(unit(1), version=1), plane.pull):
        with pytest.raises(conduit.PlacementError, match=r"too full[\s\S]*bytes needed, 0 free[\s\S]*plane\.migrate"):
            call()
    full(1 << 40)
    for one in (plane, reference):
        one.push(unit(2), version=2)
    assert_same_batch(plane.pull(), reference.pull())
    assert plane.stats().tables["experience"].pushed_units == 2


def test_what_a_program_needs_is_what_its_compiler_says() -> None:
    device = jax.devices()[0]
    state, batch = jnp.zeros((1000, 8)), jnp.ones((64, 8))
    grow = jax.jit(lambda state, batch: (state.at[:64].set(batch), batch @ batch.T), donate_argnums=0)
    assert 64 * 64 * 4 <= extra_bytes(grow.lower(state, batch).compile()) < state.nbytes
    ready: list[np.ndarray] = []

    def program(*values: Any) -> Any:
        ready.append(np.asarray(values[1]))
        return values

    program.ahead = lambda *values: grow.lower(*values).compile()  # type: ignore[attr-defined]
    program.shapes = program.compiled = None  # type: ignore[attr-defined]
    call = watched(program, [device])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pressure, "available_bytes", lambda device, kind: 100)
        with pytest.raises(MemoryPressure):
            call(state, batch)
    assert ready == []
    call(state, batch)
    assert len(ready) == 1


def test_memory_is_looked_at_rarely_where_little_of_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(pressure, "check_room", lambda device, needed_bytes: looks.append(needed_bytes))
    for needed, looked in ((2**20, -(-2049 // 64)), (2**20 - 1, 3)):
        monkeypatch.setattr(pressure, "extra_bytes", lambda compiled, needed=needed: needed)

        def program(value: Any) -> Any:
            return value

        program.ahead = program.shapes = program.compiled = program  # type: ignore[attr-defined]
        call, looks[:] = watched(program, jax.devices()[:1]), []
        for number in range(2049):
            assert call(number) == number
        assert looks == [needed] * looked
