"""Laws of bounded lag: each item once, oldest first, never older than allowed; what is lost is counted."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conduit_jax as conduit
from conduit_jax.testing import count_traces, delayed
from tests.reference_plane import assert_intact, unit

BATCH, LAG, ITEMS = 16, 2, 32
SCHEDULES = [
    conduit.Schedule(),
    conduit.Schedule(overlap_ingestion=True, overlap_delivery=True),
    conduit.Schedule(g_ingestion=2, g_delivery=3),
]


def plane_with(schedule: Any = "sequential", *, lag: int = LAG, **config: Any) -> conduit.ExperiencePlane:
    algorithm = conduit.BoundedLag(batch_size=BATCH, max_policy_lag=lag)
    replay = conduit.ReplayConfig(**({"capacity": 96} | config))
    return conduit.ExperiencePlane(algorithm=algorithm, replay=replay, schedule=schedule)


class ReferenceQueue:
    """Items as (id, version) in plain lists, one a partition; ``capacity`` over all of them."""

    def __init__(self, partitions: int, capacity: int = 96):
        self.lanes = [deque() for _ in range(partitions)]
        self.capacity, self.version = capacity, 0
        self.lost: Counter[str] = Counter()

    def push(self, rollout: dict[str, np.ndarray], version: int) -> None:
        if self.version - version > LAG:
            self.lost["refused"] += ITEMS
            return
        for own, ids in zip(self.lanes, np.split(rollout["id"], len(self.lanes), axis=1), strict=True):
            own.extend((int(number), version) for number in ids.reshape(-1))
            while len(own) > self.capacity // len(self.lanes):
                own.popleft()
                self.lost["overflow"] += 1

    def pull(self) -> np.ndarray | None:
        for index, own in enumerate(self.lanes):
            fresh = deque(item for item in own if self.version - item[1] <= LAG)
            self.lost["stale"] += len(own) - len(fresh)
            self.lanes[index] = fresh
        share = BATCH // len(self.lanes)
        if len(self.lanes[0]) < share:
            return None
        return np.asarray([own.popleft()[0] for own in self.lanes for _ in range(share)])


STEPS = st.lists(
    st.one_of(st.just("pull"), st.just("publish"), st.tuples(st.just("push"), st.integers(0, 4))), max_size=30
)


@settings(max_examples=10)
@given(STEPS, st.sampled_from([1, 2]))
def test_any_program_delivers_the_oldest_items_that_are_fresh_enough_once(program: list[Any], partitions: int) -> None:
    plane, reference = plane_with(partitions=partitions), ReferenceQueue(partitions)
    plane.build(unit(0))
    for number, step in enumerate([("push", 0), *program]):
        if step == "publish":
            plane.policy_version = reference.version = reference.version + 1
        elif step == "pull":
            want = reference.pull()
            assert plane.ready() == (want is not None)
            if want is None:
                with pytest.raises(conduit.NotReadyError):
                    plane.pull()
                continue
            sample = jax.tree.map(np.asarray, plane.pull())
            np.testing.assert_array_equal(sample.data["id"], want)
            assert_intact(sample.data)
            assert (reference.version - sample.info.policy_version.astype(np.int64)).max() <= LAG
        else:
            version = reference.version - step[1]
            for queue in (plane, reference):
                queue.push(unit(number), version=version)
    stats = plane.stats().tables["experience"]
    assert stats.refused_items == reference.lost["refused"]
    assert stats.overflow_items == reference.lost["overflow"]
    assert max(stats.lag, default=0) <= LAG
    assert sum(stats.lag.values()) == stats.delivered_batches * BATCH


def run(plane: conduit.ExperiencePlane, iterations: int = 8) -> list[conduit.Sample]:
    """One push, what batches there are, one version, again and again."""
    samples = []
    for number in range(iterations):
        plane.push(unit(number))
        while plane.ready():
            samples.append(jax.tree.map(np.asarray, plane.pull()))
        plane.policy_version += 1
    return samples


def bits(batches: list[conduit.Sample]) -> bytes:
    return b"".join(leaf.tobytes() for leaf in jax.tree.leaves(batches))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_under_every_schedule_items_come_once_in_order_and_delays_change_no_bit(schedule: conduit.Schedule) -> None:
    calm, slow = plane_with(schedule), plane_with(schedule)
    samples = run(calm)
    ids = np.concatenate([sample.data["id"] for sample in samples])
    assert (np.diff(ids) > 0).all(), "each once, oldest first"
    assert len(ids) >= 6 * ITEMS
    slow.build(unit(0))
    with delayed(slow, pause=time.sleep, seed=3):
        assert bits(run(slow)) == bits(samples)


def test_a_batch_drawn_ahead_that_grew_too_old_is_dropped_and_counted() -> None:
    plane = plane_with(conduit.Schedule(overlap_delivery=True), lag=1)
    plane.push(unit(0))
    assert plane.pull().info.policy_version.max() == 0
    plane.policy_version = 2
    assert not plane.ready()
    plane.push(unit(1), version=2)
    assert int(plane.pull().data["id"].min()) == ITEMS
    stats = plane.stats().tables["experience"]
    assert (stats.stale_items, stats.lag) == (BATCH, {0: 2 * BATCH})


def test_the_version_a_rollout_carries_counts() -> None:
    plane = plane_with(lag=0)
    plane.register_ingestion(lambda rollout: {"x": rollout.reward})
    x, none = jnp.zeros((4, 8)), jnp.zeros((4, 8), bool)
    plane.policy_version = 5
    plane.push(conduit.Rollout(x, x, x, none, none, policy_version=jnp.uint32(4)))
    plane.push(conduit.Rollout(x, x, x, none, none, policy_version=jnp.uint32(5)))
    assert set(np.asarray(plane.pull().info.policy_version)) == {5}
    assert plane.stats().tables["experience"].refused_items == ITEMS


def test_age_says_how_many_newer_steps_the_lane_holds() -> None:
    plane = plane_with()
    plane.push(unit(0))
    sample = plane.pull()
    np.testing.assert_array_equal(np.asarray(sample.info.age), 3 - np.asarray(sample.data["id"]) // 8)
    np.testing.assert_array_equal(np.asarray(sample.info.table_size), ITEMS)


def test_without_a_replay_config_the_queue_holds_what_the_lag_lets_anybody_use() -> None:
    plane = conduit.ExperiencePlane(algorithm=conduit.BoundedLag(batch_size=BATCH, max_policy_lag=3))
    plane.push(unit(0))
    assert plane.stats().tables["experience"].capacity_items == 5 * ITEMS


def test_a_steady_queue_traces_nothing() -> None:
    plane = plane_with()
    run(plane, 3)
    with count_traces() as traces:
        run(plane, 20)
    assert (traces.count, traces.compiled) == (0, 0)


def test_prioritized_draws_and_counted_records_are_refused() -> None:
    with pytest.raises(conduit.ConfigError, match="oldest first"):
        plane_with(sampler=conduit.Prioritized()).push(unit(0))
    plane = plane_with()
    plane.register_ingestion(lambda one: conduit.Records({"id": one["id"]}, jnp.int32(2)))
    with pytest.raises(conduit.ConfigError, match="cannot have lengths"):
        plane.push(unit(0))


def test_a_loop_trains_on_items_of_bounded_lag() -> None:
    plane = conduit.ExperiencePlane(
        algorithm=conduit.BoundedLag(batch_size=8, max_policy_lag=4, updates_per_rollout=4), schedule="sequential"
    )

    def rollout(actor: jax.Array, policy: Any, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return actor + 1, {"x": jax.random.normal(key, (4, 8))}

    def step(learner: jax.Array, sample: conduit.Sample) -> tuple[jax.Array, jax.Array]:
        return learner + 1, sample.data["x"].mean()

    loop = conduit.wrap(step, rollout=jax.jit(rollout), policy=lambda learner: learner, plane=plane)
    learner, actor, _ = loop.run(jnp.int32(0), jnp.int32(0), iterations=10)
    assert (int(learner), int(actor)) == (40, 10)
    assert plane.stats().tables["experience"].lag == {0: 40 * 8}
    assert loop.measure(learner, actor, iterations=2, blocks=2).blocks == 2
