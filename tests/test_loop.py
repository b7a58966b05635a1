"""Laws of the training loop: it learns, leaves the caller's learner alone, publishes versions truly, ends cleanly."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conduit_jax as conduit
from conduit_jax import loop as loops
from conduit_jax import steps

TRUTH = np.array([[1.0], [-2.0], [0.5]], np.float32)
STEPS, LANES = 4, 8


class Learner(NamedTuple):
    """A linear regression, its target copy, and how often it was updated."""

    weights: jax.Array
    target: jax.Array
    updates: jax.Array


def new_learner() -> Learner:
    weights = jnp.zeros((3, 1))
    return Learner(weights, weights, jnp.int32(0))  # target *is* weights: the usual slip


def rollout(actor: jax.Array, policy: dict[str, jax.Array], key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    x = jax.random.normal(key, (STEPS, LANES, 3))
    acted = jnp.broadcast_to(policy["updates"], (STEPS, LANES))
    made = jnp.broadcast_to(actor, (STEPS, LANES))
    return actor + 1, {"x": x, "y": x @ TRUTH, "acted": acted, "made": made}


def train_step(learner: Learner, sample: conduit.Sample) -> tuple[Learner, dict[str, jax.Array]]:
    def loss_of(weights: jax.Array) -> jax.Array:
        return jnp.mean(sample.weights[:, None] * (sample.data["x"] @ weights - sample.data["y"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(learner.weights)
    weights = learner.weights - 0.1 * gradient
    metrics = {
        "loss": loss,
        "version_lag": jnp.max(jnp.abs(sample.data["acted"] - sample.info.policy_version.astype(jnp.int32))),
    }
    return Learner(weights, learner.weights, learner.updates + 1), metrics


def train_step_with_priorities(
    learner: Learner, sample: conduit.Sample
) -> tuple[Learner, dict[str, jax.Array], jax.Array]:
    learner, metrics = train_step(learner, sample)
    return learner, metrics, jnp.abs(sample.data["x"] @ learner.weights - sample.data["y"])[:, 0]


def policy_of(learner: Learner) -> dict[str, jax.Array]:
    return {"updates": learner.updates, "weights": learner.weights}


def make_loop(
    step: Any = train_step,
    *,
    algorithm: Any = None,
    publish_every: int = 1,
    schedule: str = "sequential",
    **config: Any,
) -> conduit.Loop:
    algorithm = algorithm or conduit.OffPolicy(batch_size=32)
    replay = None if isinstance(algorithm, conduit.OnPolicy) else conduit.ReplayConfig(**({"capacity": 512} | config))
    plane = conduit.ExperiencePlane(algorithm=algorithm, replay=replay, schedule=schedule)
    return conduit.wrap(step, rollout=jax.jit(rollout), policy=policy_of, plane=plane, publish_every=publish_every)


@pytest.mark.parametrize(("schedule", "prioritized"), [("sequential", False), ("overlap", True)])
def test_a_loop_learns_and_counts_what_it_did(schedule: str, prioritized: bool) -> None:
    sampler = conduit.Prioritized() if prioritized else conduit.Uniform()
    step = train_step_with_priorities if prioritized else train_step
    loop = make_loop(step, schedule=schedule, sampler=sampler, min_size=3 * STEPS * LANES)
    learner, actor, metrics = loop.run(new_learner(), jnp.int32(0), iterations=60)
    np.testing.assert_allclose(np.asarray(learner.weights), TRUTH, atol=0.05)
    assert int(actor) == loop.iteration == 60
    assert int(learner.updates) == loop.updates == 58, "two iterations pass before min_size is reached"
    assert float(metrics["loss"]) < 1e-2
    stats = loop.plane.stats().tables["experience"]
    assert (stats.pushed_units, stats.delivered_batches) == (60, 58)
    assert stats.priority_updates == (58 if prioritized else 0)
    assert set(stats.staleness) == ({0, 1} if schedule == "overlap" else {0})


def test_the_callers_learner_stays_usable_and_its_aliases_do_no_harm() -> None:
    mine = new_learner()
    learner, _, _ = make_loop().run(mine, jnp.int32(0), iterations=5)
    np.testing.assert_array_equal(np.asarray(mine.weights), 0)
    assert mine.target is mine.weights
    assert not np.array_equal(np.asarray(learner.weights), np.asarray(learner.target))
    again, _, _ = make_loop().run(mine, jnp.int32(0), iterations=5)
    np.testing.assert_array_equal(np.asarray(again.weights), np.asarray(learner.weights))


def test_own_copy_gives_every_leaf_a_buffer_of_its_own_and_keeps_the_bits() -> None:
    mine = new_learner()._replace(weights=(shared := jnp.arange(3.0)[:, None]), target=shared)
    own = loops.own_copy(mine)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((mine.weights, own))]
    assert len(set(pointers)) == len(pointers)
    jax.tree.map(lambda have, want: np.testing.assert_array_equal(np.asarray(have), np.asarray(want)), own, mine)


def test_an_aliased_learner_given_to_a_donating_step_by_hand_is_explained_leaf_by_leaf() -> None:
    def reads_both(learner: Learner, sample: conduit.Sample) -> tuple[Learner, dict[str, jax.Array]]:
        return train_step(learner._replace(weights=(learner.weights + learner.target) / 2), sample)

    loop = make_loop(reads_both)
    loop.run(new_learner(), jnp.int32(0), iterations=1)
    with pytest.raises(conduit.ConfigError, match=r"one buffer twice[\s\S]*\.weights and \.target[\s\S]*jnp.copy"):
        steps.explained(loop._train.one, new_learner(), loop.plane.pull())


def test_a_train_step_that_returns_something_else_is_told_what_to_return() -> None:
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=32), replay=conduit.ReplayConfig(capacity=512)
    )
    loop = conduit.wrap(
        lambda learner, sample: {"updates": learner["updates"] + 1},
        rollout=rollout,
        policy=lambda learner: learner,
        plane=plane,
    )
    with pytest.raises(conduit.ConduitError, match=r"\(learner, metrics\) or \(learner, metrics, priorities\)"):
        loop.run({"updates": jnp.int32(0)}, jnp.int32(0), iterations=1)


@pytest.mark.parametrize("publish_every", [1, 3])
def test_rows_carry_the_version_of_the_parameters_that_acted(publish_every: int) -> None:
    """The number of updates in the published policy is stored with each row; it must be the row's policy version."""
    loop = make_loop(publish_every=publish_every)
    seen: list[int] = []
    loop.run(
        new_learner(),
        jnp.int32(0),
        iterations=12,
        every={1: lambda state: seen.append(int(state.metrics["version_lag"]))},
    )
    assert seen == [0] * 12
    loop.plane.flush()
    sample = loop.plane.pull()
    made = np.asarray(sample.data["made"])
    np.testing.assert_array_equal(np.asarray(sample.info.policy_version), made // publish_every * publish_every)
    assert len(set(made)) > 3


def test_callbacks_come_every_so_many_iterations_with_the_present_state() -> None:
    calls: dict[int, list[tuple[int, int, int]]] = {2: [], 5: []}

    def note(period: int) -> Any:
        return lambda state: calls[period].append((state.iteration, int(state.learner.updates), int(state.actor)))

    make_loop().run(new_learner(), jnp.int32(0), iterations=11, every={period: note(period) for period in calls})
    assert calls == {2: [(n, n, n) for n in (2, 4, 6, 8, 10)], 5: [(5, 5, 5), (10, 10, 10)]}


def test_an_interrupt_ends_after_the_present_iteration_and_restores_the_handler() -> None:
    loop, before = make_loop(), signal.getsignal(signal.SIGINT)

    def interrupt(state: conduit.LoopState) -> None:
        if state.iteration == 7:
            os.kill(os.getpid(), signal.SIGINT)

    learner, actor, _ = loop.run(new_learner(), jnp.int32(0), iterations=10_000, every={1: interrupt})
    assert loop.interrupted
    assert loop.iteration == int(actor) in (7, 8)
    assert int(learner.updates) == loop.iteration
    assert signal.getsignal(signal.SIGINT) is before
    assert loop.plane.stats().tables["experience"].pushed_units == loop.iteration
    loop.plane.close()


def test_a_second_interrupt_does_not_wait() -> None:
    def interrupt_twice(state: conduit.LoopState) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        make_loop().run(new_learner(), jnp.int32(0), iterations=3, every={1: interrupt_twice})
    assert signal.getsignal(signal.SIGINT) is before


def test_a_loop_runs_outside_the_main_thread() -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(make_loop().run(new_learner(), jnp.int32(0), iterations=4)))
    thread.start()
    thread.join(60)
    assert int(results[0][0].updates) == 4


def test_an_error_of_the_users_functions_passes_through_and_the_plane_stays_usable() -> None:
    def failing(actor: jax.Array, policy: Any, key: jax.Array) -> Any:
        if int(actor) == 3:
            raise RuntimeError("the world ended")
        return rollout(actor, policy, key)

    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=32), replay=conduit.ReplayConfig(capacity=512)
    )
    loop = conduit.wrap(train_step, rollout=failing, policy=policy_of, plane=plane)
    with pytest.raises(RuntimeError, match="the world ended"):
        loop.run(new_learner(), jnp.int32(0), iterations=10)
    assert loop.iteration == 3
    assert bool(plane.pull().valid.all())


def test_equal_seeds_train_to_equal_bits() -> None:
    ends = [make_loop(schedule="overlap").run(new_learner(), jnp.int32(0), iterations=20)[0] for _ in range(2)]
    assert np.asarray(ends[0].weights).tobytes() == np.asarray(ends[1].weights).tobytes()


def test_on_policy_updates_use_this_iterations_rows_only() -> None:
    made: list[tuple[int, int]] = []

    def step(learner: Learner, sample: conduit.Sample) -> tuple[Learner, dict[str, jax.Array]]:
        learner, _ = train_step(learner, sample)
        return learner, {"first": sample.data["made"].min(), "last": sample.data["made"].max()}

    loop = make_loop(step, algorithm=conduit.OnPolicy(num_minibatches=4, num_epochs=2, units_per_iteration=2))
    learner, _, _ = loop.run(
        new_learner(),
        jnp.int32(0),
        iterations=10,
        every={2: lambda state: made.append((int(state.metrics["first"]), int(state.metrics["last"])))},
    )
    assert int(learner.updates) == loop.updates == 5 * 4 * 2
    for number, (first, last) in enumerate(made):
        assert {first, last} <= {2 * number, 2 * number + 1}
    assert len(made) == 5


def test_the_learners_mesh_decides_where_batches_go() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    learner = jax.device_put(new_learner(), jax.NamedSharding(mesh, jax.P()))
    loop = make_loop()
    trained, _, _ = loop.run(learner, jnp.int32(0), iterations=6)
    sample = loop.plane.pull()
    assert all(leaf.sharding.spec[0] == "data" for leaf in jax.tree.leaves(sample))
    assert "8 partition(s)" in loop.plane.explain()
    assert int(trained.updates) == 6


@pytest.mark.parametrize("publish_every", [0, -1])
def test_publishing_never_is_refused(publish_every: int) -> None:
    with pytest.raises(conduit.ConfigError, match="publish_every"):
        make_loop(publish_every=publish_every)


@pytest.mark.parametrize("algorithm", [conduit.OffPolicy(batch_size=32), conduit.OnPolicy(num_minibatches=4)])
def test_measuring_exposed_latency_leaves_learner_and_actor_usable(algorithm: Any) -> None:
    loop = make_loop(algorithm=algorithm)
    learner, actor, _ = loop.run(new_learner(), jnp.int32(0), iterations=4)
    exposed = loop.measure(learner, actor, iterations=3, blocks=2, buffers=3)
    assert exposed.full_s > 0 < exposed.ablated_s
    assert exposed.exposed_s == exposed.full_s - exposed.ablated_s
    assert (exposed.blocks, exposed.iterations_per_block) == (2, 3)
    assert np.isfinite(np.asarray(learner.weights)).all()
    loop.run(learner, actor, iterations=2)


def test_what_each_stage_costs_alone_is_still_told_when_a_run_becomes_fused() -> None:
    """A few iterations before ran stage by stage; what shows of the path is not known then, and not called nothing."""
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=32),
        replay=conduit.ReplayConfig(capacity=512),
        schedule=[(0, conduit.Schedule()), (40, conduit.Schedule(fused=4))],
    )
    loop = conduit.wrap(train_step, rollout=jax.jit(rollout), policy=policy_of, plane=plane)
    loop.run(new_learner(), jnp.int32(0), iterations=60)
    latency = plane.stats().latency
    assert all(stage.count >= 2 and stage.p50 > 0 for stage in latency.stages_s.values()), latency
    assert np.isnan(latency.exposed_s)
