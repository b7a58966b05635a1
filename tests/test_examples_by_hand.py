"""The examples that use the plane by hand, or its functions without it: fused runs, demonstrations, a loop that was there before."""

from __future__ import annotations

import subprocess
import sys

import jax
import numpy as np
import pytest

from conduit_jax.errors import ConfigError
from conduit_jax.examples import dqn, fused, ppo, rlpd, sac, wrap_your_step

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("example", "env", "chosen"),
    [
        (dqn, "cartpole", {"sampler": "prioritized", "updates_per_rollout": 2}),
        pytest.param(sac, "pendulum", {"updates_per_rollout": 2}, marks=pytest.mark.slow),
    ],
    ids=["dqn", "sac"],
)
def test_a_fused_run_makes_every_update_it_should_in_every_seed(example, env, chosen):
    settings = example.settings_for(env, steps=1_000, min_size=300, hidden=(16,), evaluation_episodes=3, **chosen)
    result = fused.train(example, settings, seeds=2)
    steps = settings.lanes * settings.rollout_length
    held_back = (getattr(settings, "n_step", 1) - 1) * settings.lanes
    collecting = -(-(300 + held_back) // steps) - 1  # iterations before the replay is ready
    np.testing.assert_array_equal(result.learner.updates, 2 * (settings.iterations - collecting))
    assert result.returns.shape == (2, 3)
    assert result.curve.shape == (2, settings.iterations - collecting)
    first = jax.tree.leaves(result.learner)[0]
    assert np.isfinite(first).all()
    assert not np.array_equal(first[0], first[1]), "seeds differ"


def test_seeds_draw_their_parameters_one_after_the_other():
    """A QR decomposition of several matrices hangs in a program on two cores."""
    training, _, _ = fused.make_training(ppo, ppo.settings_for("cartpole", steps=2_000))
    program = jax.jit(jax.vmap(training)).lower(jax.vmap(jax.random.key)(np.arange(3))).as_text()
    decompositions = [line for line in program.splitlines() if "geqrf" in line and "custom_call" in line]
    assert decompositions
    assert not [line for line in decompositions if "tensor<3x" in line]


def test_a_fused_run_needs_a_world_in_pure_jax():
    with pytest.raises(ConfigError, match="pure JAX"):
        fused.train(dqn, dqn.settings_for("gymnasium:CartPole-v1"), seeds=1)


def test_a_fused_run_that_would_make_no_update_is_refused():
    with pytest.raises(ConfigError, match=r"steps=500.*\n.*steps >= 1100"):
        fused.train(dqn, dqn.settings_for("cartpole", steps=500), seeds=2)


@pytest.mark.parametrize(
    ("module", "wrong", "said"),
    [
        ("fused", ("--seeds", "0"), "--seeds: 0 is not a positive integer"),
        ("fused", ("--steps", "many"), "--steps: invalid count value: 'many'"),
        ("rlpd", ("--steps", "-1"), "--steps: -1 is not a positive integer"),
        ("offline", ("--data", "no/such/folder/x.hdf5"), "--data: the folder no/such/folder does not exist"),
        ("wrap_your_step", ("--iterations", "0"), "--iterations: 0 is not a positive integer"),
        ("fused", ("--steps", "500"), "want: steps >= 1100"),
        ("rlpd", ("--steps", "10"), "want: steps >= 500"),
    ],
)
def test_an_example_refuses_nonsense_in_a_line_and_not_with_a_traceback(module, wrong, said):
    command = [sys.executable, "-m", f"conduit_jax.examples.{module}", *wrong]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr


def test_the_controller_that_demonstrates_swings_the_pendulum_up():
    assert rlpd.controllers_return() > -300


def test_half_of_every_batch_is_demonstrated_and_the_demonstrations_stay():
    settings = sac.settings_for("pendulum", batch_size=16, min_size=20)
    plane = rlpd.make_plane(settings, demonstrated=50)
    for number in range(3):
        plane.push(_rollout(settings, number))
    batch = plane.pull()
    assert batch.data.reward.shape == batch.weights.shape == (16,)
    np.testing.assert_array_equal(batch.info.table, [0] * 8 + [1] * 8)
    tables = plane.stats().tables
    assert (tables[rlpd.DEMONSTRATIONS].pushed_units, tables[rlpd.DEMONSTRATIONS].live_items) == (1, 50)
    assert tables[rlpd.ONLINE].pushed_units == 3


def _rollout(settings: sac.Settings, number: int):
    world, algorithm = fused.make_pure_world(settings, lambda spec: sac.make_sac(spec, settings))
    learner = algorithm.init(jax.random.key(0))
    actor = jax.jit(world.init)(jax.random.key(number))
    return jax.jit(world.rollout)(actor, algorithm.policy(learner), jax.random.key(number))[1]


@pytest.mark.slow
def test_training_with_demonstrations_runs_to_its_evaluation():
    settings = sac.settings_for("pendulum", steps=200, min_size=40, updates_per_rollout=1, evaluation_episodes=2)
    result = rlpd.train(settings, demonstrated=100)
    assert result.evaluation_returns.shape == (2,)
    assert np.isfinite(result.evaluation_returns).all()
    assert result.stats.tables[rlpd.DEMONSTRATIONS].delivered_batches >= result.updates > 0


@pytest.mark.parametrize("training", [wrap_your_step.by_hand, wrap_your_step.through_the_plane])
def test_the_loop_that_was_there_and_the_plane_make_the_same_number_of_updates(training):
    learner = training(3)
    assert int(learner.updates) == 3 * wrap_your_step.UPDATES
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(learner.params))
