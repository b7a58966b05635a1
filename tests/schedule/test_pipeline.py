"""Laws of a running schedule: which priorities a batch sees, what the ledger counts, same bits whatever the timing."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conduit_jax as conduit
from conduit_jax.schedule.semantics import draw_staleness
from conduit_jax.sharding.staging import aligned_empty
from conduit_jax.testing import delayed
from tests.reference_plane import (
    BATCH,
    CAPACITY,
    ReferencePlane,
    assert_intact,
    assert_same_batch,
    priorities_for,
    run_program,
    unit,
)

ROUNDS = 8
PRIORITIZED = conduit.ReplayConfig(capacity=CAPACITY, sampler=conduit.Prioritized())
SCHEDULES = {
    "sequential": conduit.Schedule(),
    "late_inserts": conduit.Schedule(overlap_ingestion=True),
    "drawn_ahead": conduit.Schedule(overlap_delivery=True),
    "overlap": conduit.Schedule(overlap_ingestion=True, overlap_delivery=True),
    "grouped": conduit.Schedule(g_ingestion=3, g_delivery=2),
    "grouped_ahead": conduit.Schedule(overlap_ingestion=True, overlap_delivery=True, g_ingestion=2, g_delivery=2),
    "many_a_call": conduit.Schedule(overlap_ingestion=True, g_delivery=5),
}


def reference_of(schedule: conduit.Schedule) -> ReferencePlane:
    return ReferencePlane(
        PRIORITIZED, 1, ahead=schedule.prefetch, late_inserts=schedule.overlap_ingestion,
        g_ingestion=int(schedule.g_ingestion), g_delivery=int(schedule.g_delivery),
    )  # fmt: skip


def plane_with(
    schedule: Any, *, seed: int = 0, config: conduit.ReplayConfig = PRIORITIZED, **options: Any
) -> conduit.ExperiencePlane:
    return conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=options.pop("batch_size", BATCH)),
        replay=config, placement="device", schedule=schedule, seed=seed, **options,
    )  # fmt: skip


@cache
def finished_run(name: str) -> tuple[conduit.ExperiencePlane, list[conduit.Sample]]:
    """A plane that has run undisturbed, and its batches."""
    plane = plane_with(SCHEDULES[name])
    return plane, run_program(plane, ROUNDS)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_delivers_what_its_program_order_says(name: str) -> None:
    """Batch k sees exactly the priorities after update k - 1 - q, q batches being drawn ahead; inserts keep their place."""
    for got, want in zip(finished_run(name)[1], run_program(reference_of(SCHEDULES[name]), ROUNDS), strict=True):
        assert_same_batch(got, want)
        assert_intact(got.data)


def test_the_schedules_deliver_sequences_of_their_own() -> None:
    slots = [np.stack([batch.data["id"] for batch in finished_run(name)[1]]) for name in SCHEDULES]
    for index, one in enumerate(slots):
        assert not any(np.array_equal(one, other) for other in slots[index + 1 :])


@settings(max_examples=6)
@given(st.sampled_from(sorted(SCHEDULES)), st.lists(st.sampled_from(["push", "pull", "update"]), max_size=24))
def test_any_program_of_calls_delivers_what_the_plain_model_says(name: str, program: list[str]) -> None:
    schedule = SCHEDULES[name]
    planes: list[Any] = [plane_with(schedule), reference_of(schedule)]
    last: list[Any] = [None, None]
    pushed = 0
    for call in ["push", *program, "pull", "pull"]:
        if call == "push":
            for plane in planes:
                plane.push(unit(pushed), version=pushed)
            pushed += 1
        elif call == "pull":
            last = [plane.pull() for plane in planes]
            assert_same_batch(jax.tree.map(np.asarray, last[0]), jax.tree.map(np.asarray, last[1]))
        elif last[0] is not None:
            for plane, sample in zip(planes, last, strict=True):
                plane.update_priorities(sample.info, priorities_for(sample))


@pytest.mark.parametrize("name", ["grouped"])
def test_granularity_stores_and_draws_what_single_calls_do(name: str) -> None:
    """The same draws, one call each, from the same contents: floats of hooks included."""
    ones = conduit.Schedule()
    units, batches = int(SCHEDULES[name].g_ingestion), int(SCHEDULES[name].g_delivery)
    grouped = dataclasses.replace(ones, g_ingestion=units, g_delivery=batches)
    runs = []
    for schedule in (ones, grouped):
        plane = plane_with(schedule)
        plane.register_ingestion(
            lambda carry, one: (carry * 0.9 + one["large"].mean(), {"x": jnp.exp(-one["large"][..., :2]) * carry}),
            init_carry=lambda one: jnp.float32(1),
        )
        plane.register_delivery(lambda data, key: {"x": jnp.log1p(data["x"]) * jax.random.normal(key, data["x"].shape)})
        for number in range(2 * units):
            plane.push(unit(number))
        runs.append(bits([plane.pull() for _ in range(2 * batches)]))
    assert runs[0] == runs[1]


def test_a_new_schedule_loses_nothing_and_delivers_what_was_drawn_first() -> None:
    plane, calm = plane_with(SCHEDULES["grouped_ahead"]), plane_with(SCHEDULES["grouped_ahead"])
    for one in (plane, calm):
        for number in range(4):
            one.push(unit(number))
    first = [plane.pull()]
    pipeline = plane._tables["experience"].pipeline
    pipeline.reschedule(conduit.Schedule())
    assert (pipeline.waiting_units, pipeline.undelivered) == (0, 3)
    assert bits(first + [plane.pull() for _ in range(3)]) == bits([calm.pull() for _ in range(4)])
    assert pipeline.undelivered == 0
    plane.pull()
    assert plane.stats().tables["experience"].inserted_items == 4 * 32


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_batch_is_staler_than_its_schedule_may_make_it(name: str) -> None:
    seen = finished_run(name)[0].stats().tables["experience"].staleness
    assert max(seen) == min(draw_staleness(SCHEDULES[name]), ROUNDS - 1)


@pytest.mark.parametrize(("name", "behind"), [("sequential", 1), ("drawn_ahead", 2)])
def test_a_batch_sees_every_update_up_to_its_draw_and_none_after(name: str, behind: int) -> None:
    """Update k gives all items priority 2**k, so a drawn priority names the last update its batch saw."""
    config = conduit.ReplayConfig(capacity=32, sampler=conduit.Prioritized())
    plane = plane_with(SCHEDULES[name], config=config, batch_size=32)
    plane.push({"x": jnp.arange(32.0).reshape(4, 8)})
    everything = None
    for batch in range(1, 9):
        sample = plane.pull()
        seen = np.unique(np.asarray(sample.info.priority))
        assert seen.tolist() == [2.0 ** max(0, batch - behind)]
        if everything is None:  # an info that names every slot once
            everything = sample.info._replace(slot=jnp.arange(32, dtype=jnp.int32), generation=jnp.ones(32, jnp.uint32))
            lap = plane._tables["experience"].pipeline.state.control.ring.laps
            everything = everything._replace(generation=jnp.full(32, lap[0] - 1, jnp.uint32))
        assert int(plane.update_priorities(everything, np.full(32, 2.0**batch, np.float32))[0]) == 32


def bits(batches: list[conduit.Sample]) -> bytes:
    return b"".join(leaf.tobytes() for leaf in jax.tree.leaves(batches))


@pytest.mark.parametrize("name", SCHEDULES)
def test_random_delays_change_no_bit(name: str) -> None:
    slow = plane_with(SCHEDULES[name])
    slow.build(unit(0))
    with delayed(slow, pause=time.sleep, seed=len(name)):
        assert bits(run_program(slow, ROUNDS)) == bits(finished_run(name)[1])


def test_equal_seeds_give_equal_bits_and_other_seeds_others() -> None:
    again, other = (bits(run_program(plane_with("overlap", seed=seed), ROUNDS)) for seed in (0, 1))
    assert again == bits(finished_run("overlap")[1])
    assert other != again


@pytest.mark.parametrize(
    ("name", "staleness"), [("sequential", {0: 8}), ("late_inserts", {0: 8}), ("overlap", {0: 1, 1: 7})]
)
def test_staleness_is_counted_batch_by_batch_and_within_the_bound(name: str, staleness: dict[int, int]) -> None:
    stats = finished_run(name)[0].stats().tables["experience"]
    assert stats.staleness == staleness
    assert (stats.delivered_batches, stats.undelivered_batches) == (ROUNDS, SCHEDULES[name].prefetch)
    assert stats.drawn_batches == ROUNDS + SCHEDULES[name].prefetch
    assert stats.priority_updates == ROUNDS


@settings(max_examples=12)
@given(st.lists(st.sampled_from(["push", "pull", "update", "stats"]), min_size=1, max_size=25), st.booleans())
def test_the_ledger_agrees_with_the_device_after_any_program(program: list[str], overlap: bool) -> None:
    plane, _ = finished_run("overlap" if overlap else "sequential")
    pipeline = plane._tables["experience"].pipeline
    sample, pushed, pulled = plane.pull(), pipeline.ledger.pushed_units, pipeline.ledger.delivered_batches
    for step in program:
        if step == "push":
            plane.push(unit(pipeline.ledger.pushed_units))
        elif step == "pull":
            sample = plane.pull()
        elif step == "update":
            plane.update_priorities(sample.info, np.ones(BATCH, np.float32))
        else:
            plane.stats()
    plane.flush()
    counts = Counter(program)
    assert pipeline.ledger.pushed_units == pushed + counts["push"]
    assert pipeline.ledger.delivered_batches == pulled + counts["pull"]
    inserted = pipeline.inserted_items()
    assert inserted == pipeline.ledger.pushed_units * 32
    on_device = int(np.asarray(pipeline.state.control.ring.filled)[0]) * 8
    assert pipeline.ledger.size == on_device == pipeline.live_items() == min(pipeline.ledger.capacity, inserted)


def counted_plane(**options: Any) -> conduit.ExperiencePlane:
    """A plane whose hook says on the device how many steps are real."""
    plane = conduit.ExperiencePlane(algorithm=conduit.OffPolicy(batch_size=4), replay=conduit.ReplayConfig(**options))
    plane.register_ingestion(lambda rollout: conduit.Records({"x": rollout["x"]}, rollout["real"][0]))
    return plane


def ragged_unit(*real: int) -> dict[str, jax.Array]:
    return {"x": jnp.ones((4, len(real))), "real": jnp.asarray([real], jnp.int32)}


def test_lengths_on_the_device_are_what_readiness_counts() -> None:
    plane = counted_plane(capacity=64, min_size=5)
    plane.push(ragged_unit(2, 1))
    assert not plane.ready(), "3 of 5 items are there, although 8 rows were pushed"
    with pytest.raises(conduit.NotReadyError, match=r"got:  3 items[\s\S]*min_size=5"):
        plane.pull()
    plane.push(ragged_unit(2, 0))
    assert plane.ready()
    assert bool(plane.pull().valid.all())
    assert plane.stats().tables["experience"].live_items == 5


def test_reading_statistics_does_not_change_readiness() -> None:
    plane = counted_plane(capacity=64, min_size=3)
    plane.push(ragged_unit(2, 1))
    assert plane.stats().tables["experience"].live_items == 3
    assert plane.ready()


def test_a_batch_waits_until_every_partition_can_serve_its_share() -> None:
    plane = counted_plane(capacity=64, min_size=4, partitions=4)
    plane.push(ragged_unit(4, 0, 0, 0))
    assert not plane.ready(), "three partitions are empty and would deliver rows nobody pushed"
    plane.push(ragged_unit(0, 1, 2, 1))
    assert plane.ready()
    assert bool(plane.pull().valid.all())


def test_a_carried_n_step_hook_is_ready_when_its_first_full_windows_are_there() -> None:
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=4),
        replay=conduit.ReplayConfig(capacity=64, min_size=4),
        schedule="sequential",
    )

    def n_step(carry: Any, rollout: conduit.Rollout) -> tuple:
        return conduit.n_step_transitions_carried(carry, rollout, n=3, discount=0.5)

    plane.register_ingestion(n_step, init_carry=lambda rollout: conduit.n_step_carry(rollout, n=3, discount=0.5))
    ready = []
    for number in range(4):
        time_of = number * 1.0 + jnp.zeros((1, 2))
        plane.push(
            conduit.Rollout(
                observation=time_of, action=jnp.zeros((1, 2), jnp.int32), reward=time_of,
                terminated=jnp.zeros((1, 2), bool), truncated=jnp.zeros((1, 2), bool),
                final_observation=time_of, bootstrap_observation=time_of[0] + 1,
            )
        )  # fmt: skip
        ready.append(plane.ready())
    assert ready == [False, False, False, True], "windows of 3 steps: 2 items after unit 3, 4 after unit 4"
    sample = plane.pull()
    start = np.asarray(sample.data.observation)
    np.testing.assert_allclose(np.asarray(sample.data.reward), start + 0.5 * (start + 1) + 0.25 * (start + 2))
    np.testing.assert_array_equal(np.asarray(sample.data.next_observation), start + 3)


def test_too_little_experience_is_said_at_once_and_ends_when_there_is_enough() -> None:
    plane = plane_with(
        "overlap", config=conduit.ReplayConfig(capacity=CAPACITY, min_size=64, sampler=conduit.Prioritized())
    )
    plane.push(unit(0))
    with pytest.raises(conduit.NotReadyError, match="min_size=64"):
        plane.pull()
    plane.push(unit(1))
    assert plane.ready()
    assert bool(plane.pull().valid.all())


@jax.jit
def busy(rounds: int) -> jax.Array:
    return jax.lax.fori_loop(0, rounds, lambda _, x: jnp.tanh(x @ x), jnp.full((256, 256), 0.1))


def test_host_priorities_may_be_overwritten_right_after_the_call() -> None:
    plane = plane_with(
        "sequential", config=conduit.ReplayConfig(capacity=256, sampler=conduit.Prioritized()), batch_size=256
    )
    plane.push({"x": jnp.zeros((32, 8))})
    sample, given = plane.pull(), aligned_empty((256,), np.dtype(np.float32))
    for _ in range(10):
        busy(10)  # the update waits behind it
        given[:] = 1
        plane.update_priorities(sample.info, given)
        given[:] = 777
    plane.flush()
    assert float(plane._tables["experience"].pipeline.state.control.selector.max_priority[0]) == 1


# ---------------------------------------------------------------- errors lose nothing


def test_a_pull_that_fails_to_draw_ahead_loses_no_batch() -> None:
    plane, calm = plane_with("overlap"), plane_with("overlap")
    for one in (plane, calm):
        one.push(unit(0))
    want = [calm.pull() for _ in range(4)]
    got = [plane.pull()]
    pipeline = plane._tables["experience"].pipeline
    programs = pipeline._programs
    pipeline._programs = programs._replace(deliver=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plane.pull()
    assert (pipeline.undelivered, pipeline.ledger.delivered_batches) == (1, 1)
    pipeline._programs = programs
    got += [plane.pull() for _ in range(3)]
    assert bits(got) == bits(want)


def test_a_context_the_hook_cannot_take_raises_at_its_own_push_and_costs_no_unit() -> None:
    plane = plane_with("overlap")
    plane.register_ingestion(lambda rollout, context: {"id": rollout["id"] + context["shift"]})
    good = {"shift": jnp.int32(0)}
    plane.build(unit(0), context=good)
    plane.push(unit(0), context=good)
    with pytest.raises(KeyError):
        plane.push(unit(1), context={"other": jnp.int32(0)})
    plane.push(unit(1), context=good)
    plane.flush()
    assert plane.stats().tables["experience"].inserted_items == 64


def test_a_unit_whose_insert_fails_goes_on_waiting() -> None:
    plane = plane_with("overlap")
    plane.push(unit(0))
    pipeline = plane._tables["experience"].pipeline
    programs = pipeline._programs
    pipeline._programs = programs._replace(ingest=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plane.pull()
    pipeline._programs = programs
    assert bool(plane.pull().valid.all())
    assert plane.stats().tables["experience"].inserted_items == 32


# ---------------------------------------------------------------- nothing to update, and what is not run


def test_a_uniform_replay_checks_priorities_and_dispatches_nothing() -> None:
    plane = plane_with("sequential", config=conduit.ReplayConfig(capacity=CAPACITY, partitions=2))
    plane.push(unit(0))
    sample = plane.pull()
    pipeline = plane._tables["experience"].pipeline
    control = pipeline.state.control
    assert np.asarray(plane.update_priorities(sample.info, np.ones(BATCH, np.float32))).tolist() == [0, 0]
    plane.update_priorities(sample.info, jnp.full(BATCH, jnp.nan))
    assert pipeline.state.control is control
    assert plane.stats().tables["experience"].refused_updates == 0
    with pytest.raises(conduit.ValueRefusedError, match="nan at index 0"):
        plane.update_priorities(sample.info, np.full(BATCH, np.nan))
    with pytest.raises(conduit.ValueRefusedError, match="different batches"):
        plane.update_priorities(sample.info, np.ones(BATCH + 1, np.float32))


def test_the_minimum_size_may_be_the_limiters() -> None:
    plane = plane_with(
        "sequential", config=conduit.ReplayConfig(capacity=CAPACITY, limiter=conduit.MinSize(min_size=64))
    )
    plane.push(unit(0))
    assert not plane.ready()
    plane.push(unit(1))
    assert plane.ready()


def test_explain_says_why_each_feasible_setting_was_not_taken() -> None:
    plane = plane_with("auto")
    plane.push(unit(0))
    text = plane.explain()
    assert "(overlap=1, g=1), (overlap=1, g=2): feasible, but overlap hides nothing" in text
