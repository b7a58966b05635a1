"""The shipped examples, run short: they finish, act within bounds, and use what the plane gave them."""

from __future__ import annotations

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import conduit_jax as conduit
from conduit_jax import envs
from conduit_jax.examples import distributions, dqn, ppo, sac
from conduit_jax.examples.running import Keep

pytestmark = pytest.mark.slow


def test_a_squashed_gaussians_log_probability_is_that_of_its_actions():
    """By the change of variables, and where tanh is flat too: there log(1 - tanh^2) would be log 0."""
    mean, log_std = jnp.array([[0.3, -1.0], [9.0, -9.0]]), jnp.array([[-0.5, 0.2], [0.0, 0.0]])
    action, log_prob = sac.squashed(mean, log_std, jax.random.key(0))
    raw = np.arctanh(np.asarray(action[0], np.float64))
    density = stats.norm(np.asarray(mean[0]), np.exp(log_std[0])).logpdf(raw) - np.log(1 - np.tanh(raw) ** 2)
    assert float(log_prob[0]) == pytest.approx(density.sum(), rel=1e-4)
    assert np.isfinite(log_prob).all()


@pytest.mark.parametrize(("low", "high", "shape"), [(-2.0, 2.0, (1,)), ((-1.0, 0.0), (1.0, 3.0), (2,))])
def test_sac_acts_within_the_environments_range(low, high, shape):
    spec = envs.make("pendulum").spec._replace(
        action=jax.ShapeDtypeStruct(shape, jnp.float32), action_low=low, action_high=high
    )
    algorithm = sac.make_sac(spec, sac.Settings())
    learner = algorithm.init(jax.random.key(0))
    action = algorithm.act(algorithm.policy(learner), 100 * jnp.ones((64, 3)), jax.random.key(1))
    assert action.shape == (64, *shape)
    assert np.all(action >= np.asarray(low))
    assert np.all(action <= np.asarray(high))


def test_the_distributions_are_those_of_scipy():
    low, high = jnp.array([-2.0, 0.0]), jnp.array([2.0, 1.0])
    family, said, free = distributions.gaussian(low, high), jnp.array([[0.5, -0.2]]), jnp.array([-0.7, 0.1])
    action = family.draw(said, free, jax.random.key(0))
    half = np.array([2.0, 0.5])
    model = stats.norm(np.asarray((low + high) / 2 + half * said[0]), half * np.exp(free))
    # ours is the density of the action in units of half the range
    assert float(family.log_prob(said, free, action)[0]) == pytest.approx(
        model.logpdf(np.asarray(action[0])).sum() + np.log(half).sum(), rel=1e-4
    )
    assert float(family.entropy(said, free)[0]) == pytest.approx(model.entropy().sum() - np.log(half).sum(), rel=1e-4)
    logits = jnp.array([[0.1, 2.0, -1.0]])
    three, probability = distributions.categorical(3), np.exp(logits[0]) / np.exp(logits[0]).sum()
    assert float(three.log_prob(logits, free, jnp.array([2]))[0]) == pytest.approx(np.log(probability[2]), rel=1e-5)
    assert float(three.entropy(logits, free)[0]) == pytest.approx(stats.entropy(probability), rel=1e-5)


@pytest.mark.parametrize(
    ("example", "env", "chosen"),
    [
        (dqn, "multi_agent_cartpole", {"steps": 200, "lanes": 4, "min_size": 80, "updates_per_rollout": 1}),
        (sac, "pendulum", {"steps": 200, "min_size": 40, "updates_per_rollout": 1}),
        (ppo, "pendulum", {"steps": 128, "lanes": 4, "rollout_length": 16}),
        pytest.param(
            *(ppo, "reach_128", {"steps": 32, "lanes": 2, "rollout_length": 8, "minibatches": 2, "epochs": 1}),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dqn_of_agents", "sac", "ppo_continuous", "ppo_pixels"],
)
def test_a_short_run_updates_the_learner_and_evaluates_it(example, env, chosen):
    settings = example.settings_for(env, evaluation_episodes=2, **chosen)
    seen = []
    result = example.train(settings, observe=seen.append, report_every=1)
    assert result.env_steps == settings.iterations * settings.lanes * settings.rollout_length
    assert int(result.learner.updates) == result.updates > 0
    assert np.isfinite(result.evaluation_returns).all()
    assert len(seen) == len(result.curve) == settings.iterations
    assert np.isfinite(seen[-1].loss)


@pytest.mark.parametrize("report_every", [3, 4, 50])
def test_a_curve_ends_with_the_last_iteration(report_every):
    settings = dqn.settings_for("cartpole", steps=800, min_size=200, updates_per_rollout=1, evaluation_episodes=2)
    seen = []
    result = dqn.train(settings, observe=seen.append, report_every=report_every)
    steps = [point for point, _ in result.curve]
    assert steps[-1] == result.env_steps == 800
    assert len(set(steps)) == len(steps) == len(seen) == -(-8 // report_every)


def test_what_is_logged_has_the_return_beside_the_loss(tmp_path):
    path = tmp_path / "run.csv"
    settings = dqn.settings_for("cartpole", steps=800, min_size=200, updates_per_rollout=1, evaluation_episodes=2)
    with conduit.CsvSink(path) as sink:
        result = dqn.train(settings, report_every=4, keep=Keep(sinks=(sink,)))
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    logged = [(float(row["metrics/env_steps"]), float(row["metrics/recent_return"])) for row in rows]
    assert logged == result.curve
    assert np.isfinite(float(rows[-1]["metrics/loss"]))
