"""Laws of the fused mode and of automatic schedules: the bits of the sequential one, in one program; histories repeat runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conduit_jax as conduit
from conduit_jax.schedule import tuning
from conduit_jax.schedule.semantics import SEQUENTIAL

pytestmark = pytest.mark.slow

STEPS, LANES, ITERATIONS = 4, 8, 13


class Learner(NamedTuple):
    weights: jax.Array
    target: jax.Array
    updates: jax.Array


def new_learner() -> Learner:
    weights = jnp.asarray([[0.1], [0.2], [-0.3]])
    return Learner(weights, weights, jnp.int32(0))


@jax.jit
def rollout(actor: jax.Array, policy: Any, key: jax.Array) -> tuple[jax.Array, conduit.Rollout]:
    keys = jax.random.split(key, 3)
    x = jax.random.normal(keys[0], (STEPS, LANES, 3))
    ended = jax.random.uniform(keys[1], (STEPS, LANES)) < 0.1
    reward = (jnp.sin(x) @ policy["weights"])[..., 0] + actor * 0.01
    none = jnp.zeros((STEPS, LANES), bool)
    return actor + 1, conduit.Rollout(x, ended.astype(jnp.int32), reward, ended, none, x + 1, x[-1])


def train_step(learner: Learner, sample: conduit.Sample) -> tuple[Learner, dict[str, jax.Array], jax.Array]:
    data = sample.data

    def loss_of(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        goal = data.reward + data.discount * (data.next_observation @ learner.target)[:, 0]
        error = (jnp.tanh(data.observation) @ weights)[:, 0] - goal
        return jnp.mean(sample.weights * error**2), jnp.abs(error)

    (loss, error), gradient = jax.value_and_grad(loss_of, has_aux=True)(learner.weights)
    weights = learner.weights - 0.03 * gradient
    metrics = {"loss": loss, "versions": sample.info.policy_version}
    return Learner(weights, learner.weights, learner.updates + 1), metrics, error


def step_without_priorities(learner: Learner, sample: conduit.Sample) -> tuple[Learner, dict[str, jax.Array]]:
    return train_step(learner, sample)[:2]


def n_step(carry: Any, rollout: conduit.Rollout) -> tuple:
    return conduit.n_step_transitions_carried(carry, rollout, n=3, discount=0.97)


def make_loop(
    schedule: Any, *, algorithm: Any = None, prioritized: bool = True, publish_every: int = 1, **options: Any
) -> conduit.Loop:
    algorithm = algorithm or conduit.OffPolicy(batch_size=16, updates_per_rollout=2)
    sampler = conduit.Prioritized() if prioritized else conduit.Uniform()
    on_policy = isinstance(algorithm, conduit.OnPolicy)
    replay = None if on_policy else conduit.ReplayConfig(capacity=128, min_size=3 * STEPS * LANES, sampler=sampler)
    plane = conduit.ExperiencePlane(algorithm=algorithm, replay=replay, schedule=schedule, **options)
    if on_policy:
        plane.register_ingestion(lambda unit: conduit.n_step_transitions(unit, n=1, discount=0.97))
        plane.register_finalize(
            lambda records: records._replace(reward=records.reward - records.reward.mean() / records.reward.std())
        )
    else:
        plane.register_ingestion(n_step, init_carry=lambda rollout: conduit.n_step_carry(rollout, n=3, discount=0.97))
    plane.register_delivery(lambda data, key: data._replace(reward=data.reward * 0.7 + jax.random.normal(key) * 0.1))
    step = train_step if prioritized and not on_policy else step_without_priorities
    policy = lambda learner: {"weights": learner.weights}  # noqa: E731
    return conduit.wrap(step, rollout=rollout, policy=policy, plane=plane, publish_every=publish_every)


def run(loop: conduit.Loop, iterations: int = ITERATIONS, every: Any = None) -> tuple[bytes, conduit.Loop]:
    end = loop.run(new_learner(), jnp.int32(0), iterations=iterations, every=every)
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(end)), loop


ON_POLICY = conduit.OnPolicy(num_minibatches=4, num_epochs=2, units_per_iteration=2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prioritized": False, "publish_every": 3},
        pytest.param({"algorithm": conduit.OffPolicy(batch_size=16)}, marks=pytest.mark.slow),
        {"algorithm": ON_POLICY},
        pytest.param({"algorithm": ON_POLICY, "publish_every": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_fused_iterations_end_with_the_bits_of_sequential_ones(options: dict[str, Any]) -> None:
    want, plain = run(make_loop("sequential", **options))
    got, fused = run(make_loop(conduit.Schedule(fused=5), **options))
    assert got == want
    assert (fused.iteration, fused.updates) == (plain.iteration, plain.updates)
    assert fused.plane.policy_version == plain.plane.policy_version
    keys = ("pushed_units", "inserted_items", "delivered_batches", "priority_updates", "live_items", "staleness")
    tables = [loop.plane.stats().tables["experience"] for loop in (fused, plain)]
    assert [getattr(tables[0], key) for key in keys] == [getattr(tables[1], key) for key in keys]


def test_callbacks_come_at_their_iterations_and_calls_by_hand_go_on_from_there() -> None:
    seen: list[tuple[int, int]] = []
    every = {4: lambda state: seen.append((state.iteration, int(state.learner.updates)))}
    loops = [run(make_loop(schedule), every=every)[1] for schedule in ("fused", "sequential")]
    assert seen[:3] == seen[3:]
    assert [iteration for iteration, _ in seen] == [4, 8, 12] * 2
    ends = [jax.tree.map(np.asarray, loop.plane.pull()) for loop in loops]
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_one_program_serves_chunks_of_every_length() -> None:
    _, loop = run(make_loop("fused"), 40, every={7: lambda state: None, 16: lambda state: None})
    assert loop._conductor._run._program.compiled._cache_size() == 1
    assert loop.measure(*loop.state[:2], iterations=4, blocks=2).blocks == 2


@pytest.mark.slow
def test_on_a_mesh_the_fused_program_does_the_same() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    ends = []
    for schedule in ("sequential", "fused"):
        loop = make_loop(schedule, mesh=mesh)
        learner = jax.device_put(new_learner(), jax.NamedSharding(mesh, jax.P()))
        ends.append(loop.run(learner, jax.device_put(jnp.int32(0), jax.NamedSharding(mesh, jax.P())), iterations=8)[0])
    np.testing.assert_allclose(np.asarray(ends[0].weights), np.asarray(ends[1].weights), rtol=1e-5)


# ---------------------------------------------------------------- refused when it is set


def test_fusing_what_cannot_be_is_refused_before_anything_runs() -> None:
    with pytest.raises(conduit.ConfigError, match="sequential order"):
        conduit.Schedule(fused=4, g_delivery=2)
    with pytest.raises(conduit.ConfigError, match="bounded lag cannot be fused"):
        conduit.ExperiencePlane(algorithm=conduit.BoundedLag(batch_size=8, max_policy_lag=1), schedule="fused")
    loop = make_loop("fused")
    loop._conductor._acting = loop._conductor._acting._replace(
        rollout=lambda actor, policy, key: rollout(actor + float(actor), policy, key)
    )
    with pytest.raises(conduit.HookError, match="rollout that JAX can trace"):
        run(loop)
    with pytest.raises(conduit.HookError, match="actor made of arrays"):
        make_loop("fused").run(new_learner(), object(), iterations=1)
    with pytest.raises(conduit.ConfigError, match="cannot run fused"):
        run(make_loop("fused", placement="pinned_host"))


# ---------------------------------------------------------------- automatic, and repeated


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuner that decides after a few iterations."""
    for name, value in (("WORTH", 0), ("WORTH_S", 0), ("SETTLE", 3), ("TRIAL", 4), ("REST", 8)):
        monkeypatch.setattr(tuning, name, value)


@pytest.mark.usefixtures("hasty")
def test_auto_ends_with_the_sequential_bits_where_it_fuses_and_says_what_it_did() -> None:
    _, loop = run(make_loop("auto"), 12)
    history = loop.plane.stats().schedule_history
    assert [change.schedule.fused > 0 for change in history][:2] == [False, True]
    assert "trial of the fused program" in history[1].reason
    assert "trial of the fused program" in loop.plane.explain()
    assert run(make_loop("auto"), 12)[0] == run(make_loop("sequential"), 12)[0]


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    "algorithm", [pytest.param(None, marks=pytest.mark.slow), ON_POLICY], ids=["off-policy", "on-policy"]
)
def test_a_history_that_is_pinned_repeats_a_run_bit_for_bit(algorithm: Any) -> None:
    loop = make_loop("auto", algorithm=algorithm)
    loop._rollout = lambda *arguments: rollout(*arguments)  # not known to be traceable: granularities are profiled
    loop._conductor._acting = loop._conductor._acting._replace(rollout=loop._rollout)
    first, _ = run(loop, 44)
    history = loop.plane.stats().schedule_history
    assert len(history) >= 2, "where the last one tried is the fastest, nothing changes after it"
    again, repeated = run(make_loop(history, algorithm=algorithm), 44)
    assert again == first
    assert [change[:2] for change in repeated.plane.stats().schedule_history] == [change[:2] for change in history]


def test_a_short_run_is_left_alone() -> None:
    assert len(run(make_loop("auto"), 40)[1].plane.stats().schedule_history) == 1


def test_a_run_in_short_slices_is_tuned_when_it_has_shown_to_be_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORTH", 60), ("WORTH_S", 0), ("SETTLE", 3), ("TRIAL", 4)):
        monkeypatch.setattr(tuning, name, value)
    loop = make_loop("auto")
    run(loop, 40)
    assert len(loop.plane.stats().schedule_history) == 1, "40 iterations are not worth it"
    run(loop, 40)
    assert loop.plane.stats().schedule_history[1].schedule.fused
    assert 40 < loop.plane.stats().schedule_history[1].iteration < 80


def test_what_is_no_history_is_refused() -> None:
    for wrong in ([], [(3, SEQUENTIAL)], [(0, "overlap")], [(0, SEQUENTIAL), (-1, SEQUENTIAL)]):
        with pytest.raises(conduit.ConfigError, match="This is no schedule"):
            make_loop(wrong)
    with pytest.raises(conduit.ConfigError, match="does not allow"):
        make_loop([(0, SEQUENTIAL), (5, conduit.Schedule(g_delivery=8))])
