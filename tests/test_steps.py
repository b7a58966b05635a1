"""Laws of updates on batches drawn together: one program, the bits of one update after the other, the priorities they saw."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conduit_jax as conduit
from conduit_jax import steps
from conduit_jax.testing import count_traces

STEPS, LANES, UPDATES = 4, 8, 6


class Learner(NamedTuple):
    weights: jax.Array
    key: jax.Array
    updates: jax.Array


def new_learner() -> Learner:
    return Learner(jnp.asarray([[0.1], [0.2], [-0.3]]), jax.random.key(7), jnp.int32(0))


@jax.jit
def rollout(actor: jax.Array, policy: Any, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    x = jax.random.normal(key, (STEPS, LANES, 3))
    return actor + 1, {"x": x, "y": jnp.sin(x).sum(-1) + policy["weights"].sum()}


def train_step(learner: Learner, sample: conduit.Sample) -> tuple[Learner, dict[str, jax.Array], jax.Array]:
    key, noise_key = jax.random.split(learner.key)

    def loss_of(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        error = (jnp.tanh(sample.data["x"]) @ weights)[:, 0] - sample.data["y"]
        error = error + 0.1 * jax.random.normal(noise_key, error.shape)
        return jnp.mean(sample.weights * error**2), jnp.abs(error)

    (loss, error), gradient = jax.value_and_grad(loss_of, has_aux=True)(learner.weights)
    return Learner(learner.weights - 0.03 * gradient, key, learner.updates + 1), {"loss": loss}, error


def plane_with(schedule: Any, *, prioritized: bool = True, **options: Any) -> conduit.ExperiencePlane:
    sampler = conduit.Prioritized() if prioritized else conduit.Uniform()
    algorithm = conduit.OffPolicy(batch_size=16, updates_per_rollout=UPDATES, max_staleness=16)
    replay = conduit.ReplayConfig(capacity=128, min_size=2 * STEPS * LANES, sampler=sampler)
    return conduit.ExperiencePlane(algorithm=algorithm, replay=replay, placement="device", schedule=schedule, **options)


def loop_around(plane: conduit.ExperiencePlane, step: Any = train_step) -> conduit.Loop:
    return conduit.wrap(step, rollout=rollout, policy=lambda learner: {"weights": learner.weights}, plane=plane)


def bits(tree: Any) -> list[bytes]:
    plain = jax.tree.map(
        lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf, tree
    )
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(plain)]


def one_by_one(plane: conduit.ExperiencePlane, iterations: int) -> tuple[Learner, Any]:
    """The loop written out: a pull, an update and its priorities at a time."""
    learner, actor, metrics = steps.own_copy(new_learner()), jnp.int32(0), None
    update = jax.jit(train_step)
    for iteration in range(iterations):
        actor, unit = rollout(actor, {"weights": learner.weights}, plane.iteration_key(iteration))
        plane.push(unit)
        for _ in range(UPDATES if plane.ready() else 0):
            sample = plane.pull()
            learner, metrics, priorities = update(learner, sample)
            plane.update_priorities(sample.info, priorities)
    return learner, metrics


SCHEDULES = {
    "all": conduit.Schedule(g_delivery=UPDATES),
    "two": conduit.Schedule(g_delivery=2),
    "four": conduit.Schedule(g_delivery=4),  # does not divide the updates: what is left is updated with one by one
    "more": conduit.Schedule(g_delivery=8),
    "ahead": conduit.Schedule(overlap_ingestion=True, overlap_delivery=True, g_ingestion=2, g_delivery=3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_loop_ends_with_the_bits_of_single_pulls_updates_and_priorities(name: str) -> None:
    loop = loop_around(plane_with(SCHEDULES[name]))
    learner, _, metrics = loop.run(new_learner(), jnp.int32(0), iterations=11)
    by_hand, last = one_by_one(plane_with(SCHEDULES[name]), 11)
    assert bits((learner, metrics)) == bits((by_hand, last))
    assert loop.updates == int(learner.updates) == 10 * UPDATES


@pytest.mark.parametrize("algorithm", ["uniform", "on_policy"])
def test_granularity_changes_no_bit_where_draws_look_at_no_priority(algorithm: str) -> None:
    def on_policy(schedule: Any) -> conduit.Loop:
        algorithm = conduit.OnPolicy(num_minibatches=4, num_epochs=3)
        return loop_around(conduit.ExperiencePlane(algorithm=algorithm, schedule=schedule), _without_priorities)

    if algorithm == "on_policy":
        overlapped = conduit.Schedule(overlap_delivery=True, g_delivery=Fraction(1, 4))
        loops = [on_policy(schedule) for schedule in ("sequential", overlapped)]
    else:
        loops = [loop_around(plane_with(one, prioritized=False)) for one in (conduit.Schedule(), SCHEDULES["all"])]
    ends = [loop.run(new_learner(), jnp.int32(0), iterations=9) for loop in loops]
    assert bits(ends[0]) == bits(ends[1])


def _without_priorities(learner: Learner, sample: conduit.Sample) -> tuple:
    return train_step(learner, sample)[:2]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_group_holds_what_as_many_pulls_return_and_asks_for_no_draw_between(name: str) -> None:
    planes = [plane_with(SCHEDULES[name]) for _ in range(2)]
    for plane in planes:
        for number in range(4):
            plane.push(rollout(jnp.int32(number), {"weights": jnp.zeros(3)}, jax.random.key(number))[1])
    grouped, single = planes
    for _ in range(5):
        before = grouped.stats().tables["experience"].drawn_batches
        group = grouped.pull_group(UPDATES)
        drawn = grouped.stats().tables["experience"].drawn_batches - before
        g = int(SCHEDULES[name].g_delivery)
        assert 1 <= len(group) <= min(UPDATES, g)
        assert drawn in (0, g, 2 * g)
        assert bits(group) == bits([single.pull() for _ in group])
        for plane in planes:
            for sample in group:
                plane.update_priorities(sample.info, jnp.full(16, 0.5 + int(sample.info.slot[0])))
    assert planes[0].stats().tables == planes[1].stats().tables


def batches(count: int, width: int = 3) -> list[conduit.Sample]:
    plane = plane_with(conduit.Schedule(g_delivery=count), prioritized=False)
    for number in range(2):
        x = jax.random.normal(jax.random.key(number), (STEPS, LANES, width))
        plane.push({"x": x, "y": x.sum(-1)})
    return plane.pull_group(count)


def programs_of(updates: steps.Updates) -> int:
    return updates._several._cache_size()  # type: ignore[attr-defined]


def test_one_program_serves_a_group_and_single_updates_what_it_may_not() -> None:
    small = batches(3)
    together = steps.Updates(train_step, on_policy=False)
    learner, metrics, priorities = together(steps.own_copy(new_learner()), small, together=True)
    assert programs_of(together) == 1
    single = steps.Updates(train_step, on_policy=False)
    by_one = single(steps.own_copy(new_learner()), small, together=False)
    assert programs_of(single) == 0
    assert bits((learner, metrics, priorities)) == bits(by_one)


def test_large_batches_and_learners_that_change_their_kind_are_updated_with_one_by_one() -> None:
    def sums(learner: dict, sample: conduit.Sample) -> tuple[dict, dict]:
        return {"sum": learner["sum"] + sample.data["x"].sum()}, {}

    def widens(learner: dict, sample: conduit.Sample) -> tuple[dict, dict]:
        return {**learner, f"sum_{len(learner)}": sample.data["x"].sum()}, {}

    wide = steps.TOGETHER_BYTES // (16 * 4) + 1
    for step, given, length in ((sums, batches(2, wide), 1), (widens, batches(2), 3)):
        updates = steps.Updates(step, on_policy=False)
        learner, _, priorities = updates({"sum": jnp.zeros(1)}, given, together=True)
        assert programs_of(updates) == 0
        assert (len(learner), priorities) == (length, [])


def test_batches_whose_items_have_grown_too_large_are_updated_with_one_by_one() -> None:
    updates = steps.Updates(lambda learner, sample: (learner + sample.data["x"].sum(), {}), on_policy=False)
    learner, _, _ = updates(jnp.float32(0), batches(2), together=True)
    assert programs_of(updates) == 1
    wide = steps.TOGETHER_BYTES // (16 * 4) + 1
    updates(learner, batches(2, wide), together=True)
    assert programs_of(updates) == 1


def test_a_loop_that_is_run_on_in_slices_traces_and_compiles_nothing_anew() -> None:
    loop = loop_around(plane_with(SCHEDULES["all"]))
    end = loop.run(new_learner(), jnp.int32(0), iterations=9)
    end = loop.run(*end[:2], iterations=2)
    with count_traces() as traces:
        loop.run(*end[:2], iterations=2)
    assert (traces.count, traces.compiled) == (0, 0)
