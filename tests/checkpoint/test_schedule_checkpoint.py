"""Laws of checkpoints where the schedule has a history, hooks run on the host, or iterations are fused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conduit_jax as conduit
from tests.checkpoint.test_plane_checkpoint import assert_equal_bits, make_plane, step
from tests.reference_plane import BATCH, CAPACITY, priorities_for, unit

pytestmark = pytest.mark.slow

OVERLAP = conduit.Schedule(overlap_ingestion=True, overlap_delivery=True, g_ingestion=2, g_delivery=2)


def host_plane(schedule: Any, *, delivery: bool, own_kind: bool = False, **queue: Any) -> conduit.ExperiencePlane:
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=BATCH),
        replay=conduit.ReplayConfig(capacity=CAPACITY, sampler=conduit.Prioritized()),
        schedule=schedule,
        host_queue=conduit.HostQueue(**queue) if queue else None,
    )

    @plane.register_ingestion(host=True, init_carry=lambda rollout: {"seen": 0, "sum": np.zeros(2, np.int64)})
    def ingestion(carry: Any, rollout: Any) -> Any:
        seen = {"seen": carry["seen"] + 1, "sum": carry["sum"] + rollout["id"].sum()}
        return seen, {"id": rollout["id"], "number": np.full(rollout["id"].shape, carry["seen"], np.int32)}

    if delivery:

        @plane.register_delivery(host=True)
        def deliver(data: Any) -> Any:
            return {**data, "doubled": np.asarray(data["id"]) * 2}

    return plane


@pytest.mark.parametrize("delivery", [False, True])
@pytest.mark.parametrize("schedule", ["sequential", OVERLAP], ids=["sequential", "overlap"])
def test_host_hooks_go_on_with_their_carry_and_what_they_had_made(
    tmp_path: Path, schedule: Any, *, delivery: bool
) -> None:
    whole, saved = (host_plane(schedule, delivery=delivery) for _ in range(2))
    with whole, saved, host_plane("auto", delivery=delivery) as restored:
        for number in range(5):
            assert_equal_bits(host_step(saved, number), host_step(whole, number))
        saved.save(tmp_path)
        restored.restore(tmp_path)
        for number in range(5, 11):
            want = host_step(whole, number)
            assert_equal_bits(host_step(saved, number), want)
            assert_equal_bits(host_step(restored, number), want)


def host_step(plane: conduit.ExperiencePlane, number: int) -> Any:
    plane.push(unit(number), version=number)
    sample = plane.pull()
    plane.update_priorities(sample.info, priorities_for(sample))
    return jax.tree.map(np.array, sample)


def test_hooks_that_insert_as_they_end_are_waited_for(tmp_path: Path) -> None:
    saved = host_plane("sequential", delivery=False, order="arrival")
    with saved, host_plane("sequential", delivery=False, order="arrival") as restored:
        for number in range(2):
            saved.push(unit(number))
        saved.save(tmp_path)
        restored.restore(tmp_path)
        restored.push(unit(2))
        restored.flush()
        assert restored.stats().tables["experience"].pushed_units == 3
        numbers = {int(value) for _ in range(8) for value in np.asarray(restored.pull().data["number"])}
        assert numbers == {0, 1, 2}, "the carry went on counting"


def test_the_history_of_schedules_comes_back_and_a_pinned_one_goes_on(tmp_path: Path) -> None:
    def changed(plane: conduit.ExperiencePlane) -> conduit.ExperiencePlane:
        for number in range(3):
            step(plane, number)
        plane.reschedule(type(plane.history.changes[0])(3, OVERLAP, "a test"))
        step(plane, 3)
        return plane

    whole, saved = changed(make_plane(schedule="sequential")), changed(make_plane(schedule="sequential"))
    saved.save(tmp_path)
    for schedule in ("sequential", "auto", saved.stats().schedule_history):
        restored = make_plane(schedule=schedule)
        restored.restore(tmp_path)
        assert restored.stats().schedule_history == whole.stats().schedule_history
        assert restored.running().schedule == OVERLAP
    assert_equal_bits(
        [step(restored, number) for number in range(4, 9)], [step(whole, number) for number in range(4, 9)]
    )


def traceable_loop(schedule: str) -> conduit.Loop:
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=16, updates_per_rollout=2),
        replay=conduit.ReplayConfig(capacity=160, min_size=64, sampler=conduit.Prioritized()),
        schedule=schedule,
    )

    @jax.jit
    def rollout(actor: Any, policy: Any, key: Any) -> Any:
        x = jax.random.normal(key, (4, 8, 3)) + 0.1 * jnp.sin(actor)
        return actor + 1, {"x": x, "y": x.sum(-1) + 0.1 * jnp.tanh(policy.sum())}

    def train_step(learner: Any, sample: Any) -> Any:
        error = sample.data["x"] @ learner - sample.data["y"]
        return (
            learner - 0.001 * (error * sample.weights) @ sample.data["x"],
            {"loss": (error**2).mean()},
            jnp.abs(error),
        )

    return conduit.wrap(train_step, rollout=rollout, policy=lambda learner: learner, plane=plane, publish_every=3)


@pytest.mark.parametrize("cut", [5, 14])
def test_a_fused_run_is_resumed_bit_for_bit(tmp_path: Path, cut: int) -> None:
    begin = (jnp.zeros(3), jnp.float32(0))
    want = traceable_loop("fused").run(*begin, 24)
    traceable_loop("fused").run(*begin, cut, checkpoint_dir=tmp_path, checkpoint_every=4)
    got = traceable_loop("fused").run(*begin, 24, checkpoint_dir=tmp_path, resume=True)
    assert_equal_bits(got, want)
