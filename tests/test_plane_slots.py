"""Laws of planes over slots: what is delivered is what the pure replay driven by hand delivers, wherever and however."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conduit_jax as conduit
from tests.reference_gated import (
    BATCH,
    CAPACITY,
    LANES,
    OLDEST,
    QUEUE,
    STEADY,
    STEPS,
    TABLES,
    UNIT,
    Both,
    assert_account_holds,
    config_of,
    plane_of,
    table_of,
    unit,
)
from tests.sharding.places import uneven

SELECTORS = [
    conduit.Fifo(),
    conduit.Lifo(),
    conduit.MinHeap(),
    conduit.MaxHeap(),
    conduit.Uniform(),
    conduit.Prioritized(),
]
BY_PAIR = [(sampler, remover) for sampler in [*SELECTORS, conduit.Epochs()] for remover in SELECTORS]


FEW = ("queue", "uniform twice")  # the others are as slow to compile as there are programs


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in TABLES]
)
def test_a_plane_delivers_what_the_pure_replay_delivers_by_hand(name: str) -> None:
    both = Both(config_of(**TABLES[name]))
    both.run([*STEADY, "delete", "pull", "push", "reset", "pull", "push", "pull"])
    stats = both.plane.stats().tables["experience"]
    assert stats.inserted_items == both.pushed * UNIT
    sizes = [
        state.control.table.live.size if not both.ring else state.control.ring.filled * LANES
        for state in both.model.states
    ]
    assert stats.live_items == int(np.sum(sizes))


@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "remover"), BY_PAIR, ids=str)
def test_every_pair_of_sampler_and_remover_does(sampler: Any, remover: Any) -> None:
    Both(config_of(sampler=sampler, remover=remover, storage="slots")).run([*STEADY, "delete", *STEADY])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["queue", "max heap, uniform"])
def test_over_partitions_of_a_mesh_too(name: str) -> None:
    config = config_of(**TABLES[name], partitions=4) if name != "queue" else config_of(**QUEUE, partitions=2)
    mesh = jax.make_mesh((config.partitions,), ("data",), devices=jax.devices()[: config.partitions])
    assert config.partitions is not None
    Both(config, config.partitions, plane_of(config, mesh=mesh)).run([*STEADY, "delete", "pull", "push", "pull"])


@pytest.mark.parametrize(
    ("placement", "partitions"),
    [
        pytest.param("pinned_host", 1, marks=pytest.mark.slow),
        pytest.param("disk", 1, marks=pytest.mark.slow),
        pytest.param(uneven(3, 1), 4, id="scattered"),
    ],
)
def test_in_every_memory_too(placement: Any, partitions: int) -> None:
    config = config_of(**TABLES["max heap, uniform"], partitions=partitions)
    plane = plane_of(config, placement=placement)
    Both(config, partitions, plane).run([*STEADY, "delete", "pull", "push", "pull", "reset", "push", "pull"])


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("stack", "min heap, max heap", "ring, ratio")]


@pytest.mark.parametrize("name", ["queue", "uniform twice", *SLOW])
@settings(max_examples=6)
@given(program=st.lists(st.sampled_from(["push", "push", "pull", "pull", "update", "delete", "reset"]), max_size=20))
def test_any_program_of_calls_keeps_the_laws(name: str, program: list[str]) -> None:
    both = standing(name)
    both.reset()
    both.last = None
    both.run(program)


@cache
def standing(name: str) -> Both:
    return Both(config_of(**TABLES[name]))


# ---------------------------------------------------------------- schedules, loops, moves, checkpoints


def test_slots_under_a_minimum_size_run_every_schedule() -> None:
    ids = {}
    for name in ("sequential", "overlap"):
        plane = plane_of(config_of(**OLDEST), schedule=name)
        plane.push(unit(0))
        batches = [plane.pull() for _ in range(3)]
        plane.delete(batches[0].info)
        ids[name] = [np.asarray(batch.data["id"]).tolist() for batch in batches]
        plane.pull() if plane.ready() else None
    assert ids["sequential"] == ids["overlap"]


def test_a_deleted_table_draws_nothing_ahead_that_it_does_not_hold() -> None:
    plane = plane_of(config_of(**OLDEST), schedule="overlap")
    plane.push(unit(0)), plane.flush()
    first = plane.pull()
    assert int(np.sum(plane.delete(first.info))) == 1  # a fifo draws the oldest item again and again
    assert bool(np.asarray(plane.pull().valid).all())  # the batch that was ahead
    assert not plane.ready()
    with pytest.raises(conduit.NotReadyError, match="7 < 8"):
        plane.pull()


def loop_of(config: conduit.ReplayConfig, updates: int, **options: Any) -> conduit.Loop:
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=BATCH, updates_per_rollout=updates), replay=config, **options
    )

    def rollout(actor: jax.Array, policy: jax.Array, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return actor + UNIT, {"id": actor + jnp.arange(UNIT, dtype=jnp.int32).reshape(STEPS, LANES)}

    def train_step(learner: jax.Array, sample: conduit.Sample) -> tuple[jax.Array, dict[str, jax.Array]]:
        return learner + sample.data["id"].sum(), {}

    return conduit.wrap(train_step, rollout=jax.jit(rollout), policy=lambda learner: learner, plane=plane)


def test_a_loop_over_a_queue_trains_on_every_item_once_and_never_fuses() -> None:
    loop = loop_of(config_of(**QUEUE), updates=3)
    learner, _, _ = loop.run(jnp.int32(0), jnp.int32(0), 5)
    assert int(learner) == sum(range(5 * UNIT))
    assert loop.updates == 10
    assert str(loop.plane.running().schedule) == str(conduit.Schedule())  # type: ignore[union-attr]
    assert "draws decide what may be inserted" in loop.plane.explain()


def test_a_loop_that_trains_too_little_for_its_limiter_ends_with_what_blocks_it() -> None:
    loop = loop_of(config_of(**QUEUE), updates=1)
    with pytest.raises(conduit.BackpressureError, match=r"16 > 12[\s\S]*updates_per_rollout"):
        loop.run(jnp.int32(0), jnp.int32(0), 5)
    assert loop.state.iteration == 2


def test_a_fused_schedule_over_slots_has_the_bits_of_the_sequential_one() -> None:
    config, ends = config_of(**OLDEST), []
    for schedule in ("sequential", "fused"):
        loop = loop_of(config, 2, schedule=schedule)
        ends.append(int(loop.run(jnp.int32(0), jnp.int32(0), 6)[0]))
        assert loop.plane.stats().tables["experience"].live_items == CAPACITY
        assert_account_holds(loop.plane)
    assert ends[0] == ends[1]


def test_a_limited_table_comes_back_from_a_checkpoint_with_its_account(tmp_path: Any) -> None:
    both = Both(config_of(**QUEUE))
    both.run(STEADY)
    both.plane.save(tmp_path)
    account = table_of(both.plane).ledger.account
    both.plane = plane_of(config_of(**QUEUE))
    both.plane.restore(tmp_path)
    assert table_of(both.plane).ledger.account == account
    both.run(["push", "pull", "update", "pull", "push", "pull"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("partitions", "places"),
    [(1, ("pinned_host", "disk", "device")), (4, (uneven(1, 3), "device"))],
    ids=["tiers", "scattered"],
)
def test_a_table_of_slots_moves_to_another_memory_and_goes_on(partitions: int, places: tuple[Any, ...]) -> None:
    config = config_of(**TABLES["min heap, max heap"], partitions=partitions)
    both = Both(config, partitions, plane_of(config))
    both.run(STEADY)
    for placement in places:
        both.plane.migrate(placement)
        both.run(["pull", "push", "pull", "update", "delete", "pull", "push"])
