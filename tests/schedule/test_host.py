"""Laws of host hooks and producers: program order decides, whatever the timing; queues are bounded; nothing is left running."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conduit_jax as conduit
from conduit_jax.schedule.trace import Recorder
from conduit_jax.schedule.worker import Worker
from tests.reference_plane import BATCH, CAPACITY, assert_intact, priorities_for, unit

SCHEDULES = [
    conduit.Schedule(),
    conduit.Schedule(overlap_ingestion=True, overlap_delivery=True),
    conduit.Schedule(overlap_ingestion=True, g_ingestion=2, g_delivery=2),
]


def plane_with(schedule: Any = "sequential", **options: Any) -> conduit.ExperiencePlane:
    return conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=BATCH),
        replay=conduit.ReplayConfig(capacity=CAPACITY, sampler=conduit.Prioritized()),
        placement="device", schedule=schedule, **options,
    )  # fmt: skip


def hooked(schedule: Any, pause_s: float = 0.0, **options: Any) -> conduit.ExperiencePlane:
    """A plane whose two hooks read values, sleep at random, and count their calls."""
    plane, draws, calls = plane_with(schedule, **options), np.random.default_rng(0), [0]

    @plane.register_ingestion(host=True)
    def ingestion(rollout: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        time.sleep(pause_s * draws.uniform())
        assert isinstance(rollout["id"], np.ndarray)
        calls[0] += 1
        return rollout | {
            "call": np.full_like(rollout["id"], calls[0]),
            "sum": rollout["id"] + int(rollout["id"].sum()),
        }

    @plane.register_delivery(host=True)
    def delivery(data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        time.sleep(pause_s * draws.uniform())
        return data | {"twice": data["sum"] * 2}

    return plane


def run(plane: conduit.ExperiencePlane, rounds: int = 10) -> list[Any]:
    batches = []
    for number in range(rounds):
        plane.push(unit(number), version=number)
        sample = plane.pull()
        assert_intact({name: sample.data[name] for name in ("id", "pixels", "half", "large")})
        np.testing.assert_array_equal(sample.data["twice"], sample.data["sum"] * 2)
        batches.append(jax.tree.map(np.asarray, sample))
        plane.update_priorities(sample.info, priorities_for(sample))
    return batches


def bits(batches: list[Any]) -> bytes:
    return b"".join(leaf.tobytes() for leaf in jax.tree.leaves(batches))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_host_hooks_deliver_the_same_bits_however_long_they_take(schedule: conduit.Schedule) -> None:
    runs = []
    for pause_s in (0.0, 0.02):
        with hooked(schedule, pause_s) as plane:
            runs.append(bits(run(plane)))
            plane.flush()
            stats = plane.stats()
            assert stats.deterministic
            assert stats.tables["experience"].inserted_items == 10 * 32, "each unit once"
    assert runs[0] == runs[1]


def test_no_thread_is_started_without_host_hooks_and_none_left_after_them() -> None:
    before = set(threading.enumerate())  # threads of planes that tests forgot may end meanwhile
    with plane_with("overlap") as plane:
        plane.push(unit(0))
        plane.pull()
        assert set(threading.enumerate()) <= before
    with hooked("overlap") as plane:
        run(plane, 3)
        assert set(threading.enumerate()) - before
    assert set(threading.enumerate()) <= before


def test_an_exception_of_a_host_hook_surfaces_at_the_call_that_needs_it() -> None:
    plane = plane_with("overlap")

    @plane.register_ingestion(host=True)
    def failing(rollout: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if rollout["id"][0, 0] == 32:
            raise RuntimeError("the disk is full")
        return rollout

    plane.push(unit(0))
    plane.push(unit(1))
    with pytest.raises(conduit.HookError, match=r"failing[\s\S]*the disk is full"):
        plane.push(unit(2))
    plane.push(unit(3))
    plane.flush()
    assert plane.stats().tables["experience"].inserted_items == 2 * 32
    plane.close()


def test_host_arrays_may_be_overwritten_right_after_a_push() -> None:
    with hooked("overlap", 0.02) as plane:
        mine = unit(0)
        for number in range(4):
            for name, leaf in unit(number).items():
                mine[name][...] = leaf
            plane.push(mine)
        for leaf in mine.values():
            leaf[...] = 0
        plane.flush()
        data = plane.pull().data
        assert_intact({name: data[name] for name in mine})


def test_independent_stages_run_side_by_side_and_see_what_they_need() -> None:
    plane, meeting = plane_with(), threading.Barrier(2, timeout=20)

    def meet(**columns: np.ndarray) -> np.ndarray:
        meeting.wait()  # both have to be running at once
        return columns["id"] + 1

    plane.register_ingestion(lambda id: {"left": meet(id=id)}, stage="left", needs=("id",), gives=("left",), host=True)
    plane.register_ingestion(
        lambda id: {"right": meet(id=id)}, stage="right", needs=("id",), gives=("right",), host=True
    )
    plane.register_ingestion(
        lambda left, right: {"both": left + right}, stage="both", needs=("left", "right"), gives=("both",)
    )
    plane.push({"id": np.arange(32, dtype=np.int32).reshape(4, 8)})
    data = plane.pull().data
    np.testing.assert_array_equal(np.asarray(data["both"]), 2 * np.asarray(data["id"]) + 2)
    lonely = plane_with()
    lonely.register_ingestion(lambda gone: {"x": gone}, stage="x", needs=("gone",), gives=("x",), host=True)
    with pytest.raises(conduit.HookError, match="needs columns nobody gives"):
        lonely.push(unit(0))


def test_on_policy_host_hooks_deliver_what_traced_ones_do() -> None:
    def square(tree: Any) -> Any:
        return {"y": tree["id"] * tree["id"]}

    ends = []
    for host in (False, True):
        algorithm = conduit.OnPolicy(num_minibatches=4, num_epochs=2, units_per_iteration=2)
        with conduit.ExperiencePlane(algorithm=algorithm, schedule="overlap" if host else "sequential") as plane:
            plane.register_ingestion(square, host=host)
            plane.register_delivery(lambda data: {"z": data["y"] + 1}, host=host)
            for number in range(2):
                plane.push({"id": unit(number)["id"]})
            ends.append(bits([sample.data for sample in plane.epochs()]))
    assert ends[0] == ends[1]


def test_a_batched_hook_sees_all_units_of_a_call() -> None:
    plane = plane_with(conduit.Schedule(g_ingestion=3))

    @plane.register_ingestion(batched=True)
    def together(rollouts: dict[str, jax.Array]) -> dict[str, jax.Array]:
        count = rollouts["id"].shape[0]
        return {"id": rollouts["id"], "seen": jnp.full_like(rollouts["id"], count)}

    for number in range(4):
        plane.push(unit(number))
    plane.flush()
    data = plane.pull().data
    np.testing.assert_array_equal(np.asarray(data["seen"]), np.where(np.asarray(data["id"]) < 96, 3, 1))


# ---------------------------------------------------------------- queues and producers


def test_a_full_queue_blocks_until_its_deadline_or_drops_its_oldest() -> None:
    gate = threading.Event()
    for when_full in ("block", "drop_oldest"):
        gate.clear()
        queue = conduit.HostQueue(units=2, deadline_s=0.05, when_full=when_full)
        worker = Worker("hook", queue, Recorder())
        first = worker.submit(gate.wait)
        while worker.depth:
            time.sleep(0.001)  # it has been started
        waiting = [worker.submit(lambda number=number: number) for number in range(2)]
        if when_full == "block":
            with pytest.raises(conduit.BackpressureError, match=r"stayed full[\s\S]*2 units for 0.05 s"):
                worker.submit(int)
            with pytest.raises(conduit.BackpressureError, match="did not end in time"):
                first.result(0.01)
        else:
            waiting.append(worker.submit(lambda: 2))
            assert (worker.dropped, waiting.pop(0).dropped) == (1, True)
        gate.set()
        assert [one.result() for one in waiting] == ([0, 1] if when_full == "block" else [1, 2])
        worker.close()
        with pytest.raises(conduit.LifecycleError):
            worker.submit(int)


def test_units_inserted_as_they_arrive_are_all_there_and_the_run_says_so() -> None:
    with hooked("sequential", 0.005, host_queue=conduit.HostQueue(order="arrival")) as plane:
        for number in range(5):
            plane.push(unit(number))
        plane.flush()
        stats = plane.stats()
        assert stats.tables["experience"].inserted_items == 5 * 32
        assert not stats.deterministic


@pytest.mark.parametrize(
    ("option", "match"),
    [({"units": 0}, "at least one unit"), ({"when_full": "wait"}, "when_full"), ({"order": "random"}, "order")],
)
def test_queues_that_cannot_work_are_refused_when_set(option: dict[str, Any], match: str) -> None:
    with pytest.raises(conduit.ConfigError, match=match):
        conduit.HostQueue(**option)


def test_producers_take_turns_whatever_their_timing_and_one_that_left_is_not_waited_for() -> None:
    orders = []
    for seed in range(2):
        plane, draws = plane_with(), np.random.default_rng(seed)
        plane.build(unit(0))
        producers = plane.producers(3, deadline_s=30)
        pauses = draws.uniform(0, 0.01, (3, 4))

        def produce(number: int, producers: Any = producers, pauses: Any = pauses) -> None:
            for turn in range(4 if number else 2):
                time.sleep(pauses[number, turn])
                producers.push(number, unit(turn * 3 + number))
            producers.leave(number)

        threads = [threading.Thread(target=produce, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        orders.append((list(producers.log), bits([plane.pull()])))
        assert plane.stats().deterministic
    assert orders[0] == orders[1]
    assert orders[0][0] == [0, 1, 2, 0, 1, 2, 1, 2, 1, 2]


def test_a_producer_whose_turn_never_comes_is_told_for_whom_it_waits() -> None:
    plane = plane_with()
    producers = plane.producers(2, deadline_s=0.02)
    with pytest.raises(conduit.BackpressureError, match=r"Producer 1[\s\S]*producer 0 did not push"):
        producers.push(1, unit(0))
    arriving = plane.producers(2, order="arrival")
    arriving.push(1, unit(0))
    assert not plane.stats().deterministic
