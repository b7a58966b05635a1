"""Rollouts and evaluation against plain-Python loops over single steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conduit_jax.envs import autoreset, evaluate, make, make_cartpole, make_mountain_car, make_rollout, recent_return
from conduit_jax.errors import ConfigError, SpecError
from conduit_jax.types import next_observations

LANES, LENGTH, LIMIT = 3, 40, 15


def random_policy(parameters, observation, key):
    return jax.random.randint(key, observation.shape[:1], 0, 2, jnp.int32)


def policy_with_extras(parameters, observation, key):
    return random_policy(parameters, observation, key), {"score": observation @ parameters}


def balance(parameters, observation, key):
    return (observation[:, 2] + parameters * observation[:, 3] > 0).astype(jnp.int32)


class Loop:
    """The model: what ``make_rollout`` says, step by step in Python."""

    def __init__(self, env, policy, key):
        lane = autoreset(env)
        self.policy, self.step = jax.jit(policy), jax.jit(jax.vmap(lane.step))
        self.state, self.observation = jax.jit(jax.vmap(lane.reset))(jax.random.split(key, LANES))

    def rollout(self, parameters, key):
        rows = []
        for step_key in jax.random.split(key, LENGTH):
            seen = self.observation
            action, extras = self.policy(parameters, seen, step_key)
            self.state, stepped = self.step(self.state, action)
            self.observation = stepped.observation
            rows.append((seen, action, stepped, extras["score"]))
        seen, action, stepped, score = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
        return seen, action, stepped, score, np.asarray(self.observation)


@pytest.fixture(scope="module")
def runs():
    """Two rollouts in a row, ours and the model's."""
    env, parameters, key = make_cartpole(max_steps=LIMIT), jnp.arange(4.0), jax.random.key(0)
    init, rollout = make_rollout(env, policy_with_extras, LANES, LENGTH)
    rollout = jax.jit(rollout)
    loop, actor, ours, theirs = Loop(env, policy_with_extras, key), jax.jit(init)(key), [], []
    for i in range(2):
        actor, steps = rollout(actor, parameters, jax.random.key(10 + i))
        ours.append(steps)
        theirs.append(loop.rollout(parameters, jax.random.key(10 + i)))
    return actor, ours, theirs


def test_a_rollout_is_the_plain_loop_time_major(runs):
    _, ours, theirs = runs
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    for steps, (seen, action, stepped, score, bootstrap) in zip(ours, theirs, strict=True):
        assert steps.observation.shape == (LENGTH, LANES, 4)
        close(steps.observation, seen)
        np.testing.assert_array_equal(steps.action, action)
        np.testing.assert_array_equal(steps.reward, stepped.reward)
        np.testing.assert_array_equal(steps.terminated, stepped.terminated)
        np.testing.assert_array_equal(steps.truncated, stepped.truncated)
        close(steps.final_observation, stepped.final_observation)
        close(steps.extras["score"], score)
        close(steps.bootstrap_observation, bootstrap)
        assert steps.lengths is None
        assert steps.policy_version is None


def test_the_next_rollout_goes_on_where_the_last_one_stopped(runs):
    _, (first, second), _ = runs
    np.testing.assert_array_equal(first.bootstrap_observation, second.observation[0])


def test_next_observations_are_what_really_followed_even_across_resets(runs):
    _, (first, _), _ = runs
    np.testing.assert_array_equal(next_observations(first), first.final_observation)


def test_truncation_is_not_termination(runs):
    _, ours, _ = runs
    terminated = np.concatenate([steps.terminated for steps in ours])
    truncated = np.concatenate([steps.truncated for steps in ours])
    assert (truncated & ~terminated).any()
    assert (terminated & ~truncated).any()


def test_statistics_count_the_episodes_that_finished(runs):
    actor, ours, _ = runs
    reward = np.concatenate([steps.reward for steps in ours])
    ended = np.concatenate([steps.terminated | steps.truncated for steps in ours])
    for lane in range(LANES):
        ends = np.flatnonzero(ended[:, lane])
        returns = [part.sum() for part in np.split(reward[:, lane], ends + 1)]
        statistics = jax.tree.map(lambda leaf, lane=lane: leaf[lane].item(), actor.statistics)
        assert statistics.episodes == len(ends)
        assert statistics.return_sum == sum(returns[:-1])
        assert statistics.last_return == returns[-2] == statistics.last_length
        assert statistics.episode_return == returns[-1] == statistics.episode_length


def test_the_recent_return_is_of_the_last_episodes_or_of_those_since_a_mark():
    init, rollout = make_rollout(make_mountain_car(max_steps=10), lambda p, o, k: jnp.ones(LANES, jnp.int32), LANES, 25)
    init, rollout = jax.jit(init), jax.jit(rollout)
    none = init(jax.random.key(0))
    start, _ = rollout(none, None, jax.random.key(1))
    later, _ = rollout(start, None, jax.random.key(2))
    assert np.isnan(recent_return(none.statistics))
    assert recent_return(later.statistics) == -10
    assert recent_return(later.statistics, since=start.statistics) == -10
    assert np.isnan(recent_return(start.statistics, since=start.statistics))


@pytest.mark.parametrize("jit", [jax.jit, lambda function: function], ids=["jitted", "eager"])
def test_no_two_arrays_of_actor_and_rollout_share_a_buffer(jit):
    init, rollout = make_rollout(make("cartpole"), balance, LANES, 4)
    actor = jit(init)(jax.random.key(0))
    for tree in (actor, jit(rollout)(actor, 0.5, jax.random.key(1))):
        leaves = [leaf for leaf in jax.tree.leaves(tree) if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
        assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_the_actor_may_be_donated_while_its_rollout_is_in_use():
    init, rollout = make_rollout(make("cartpole"), balance, LANES, 4)
    rollout = jax.jit(rollout, donate_argnums=0)
    actor, first = rollout(jax.jit(init)(jax.random.key(0)), 0.5, jax.random.key(1))
    kept = np.array(first.bootstrap_observation)
    rollout(actor, 0.5, jax.random.key(2))
    assert actor.observation.is_deleted()
    np.testing.assert_array_equal(first.bootstrap_observation, kept)


def test_x64_mode_changes_no_dtype():
    def run(key):
        init, rollout = make_rollout(make("cartpole"), lambda p, o, k: jnp.argmax(o[:, :2], axis=-1), LANES, 4)
        return rollout(init(key), None, key), evaluate(make("cartpole"), balance, 0.5, key, episodes=2)

    narrow = jax.eval_shape(run, jax.random.key(0))
    with jax.enable_x64(True):
        wide = jax.eval_shape(run, jax.random.key(0))
    assert [leaf.dtype for leaf in jax.tree.leaves(narrow)] == [leaf.dtype for leaf in jax.tree.leaves(wide)]


def test_evaluation_runs_each_episode_once_to_its_end():
    env, key, episodes = make_cartpole(max_steps=60), jax.random.key(4), 5
    returns = jax.jit(functools.partial(evaluate, env, random_policy, episodes=episodes))(None, key)
    assert returns.shape == (episodes,)
    assert returns.dtype == jnp.float32
    reset_key, policy_key = jax.random.split(key)
    state, observation = jax.jit(jax.vmap(env.reset))(jax.random.split(reset_key, episodes))
    step, wanted, ended = jax.jit(jax.vmap(env.step)), np.zeros(episodes), np.zeros(episodes, bool)
    for t in range(60):
        action = random_policy(None, observation, jax.random.fold_in(policy_key, t))
        state, stepped = step(state, action)
        observation = stepped.observation
        wanted += np.where(ended, 0, stepped.reward)
        ended |= np.asarray(stepped.terminated | stepped.truncated)
    np.testing.assert_array_equal(returns, wanted)


def test_evaluation_reaches_the_time_limit_under_a_good_policy():
    run = jax.jit(functools.partial(evaluate, make("cartpole"), balance))
    np.testing.assert_array_equal(run(0.5, jax.random.key(0)), np.full(20, 500.0))


@pytest.mark.parametrize("arguments", [(0, 4), (2, 0), (2, 1.5)])
def test_lanes_and_length_must_be_positive_integers(arguments):
    with pytest.raises(ConfigError, match="out of range"):
        make_rollout(make("cartpole"), random_policy, *arguments)


@pytest.mark.parametrize(
    "output",
    [
        lambda o: o[:, 0],  # not an integer
        lambda o: jnp.zeros((1,), jnp.int32),  # not one a lane
        lambda o: (jnp.zeros(LANES, jnp.int32), {}, {}),
    ],
    ids=["dtype", "shape", "tuple"],
)
def test_actions_that_do_not_fit_are_refused_when_traced(output):
    policy = lambda parameters, observation, key: output(observation)  # noqa: E731
    init, rollout = make_rollout(make("cartpole"), policy, LANES, 4)
    with pytest.raises(SpecError, match="policy"):
        jax.eval_shape(lambda key: rollout(init(key), None, key), jax.random.key(0))
    with pytest.raises(SpecError, match="policy"):
        jax.eval_shape(lambda key: evaluate(make("cartpole"), policy, None, key, episodes=LANES), jax.random.key(0))


def test_evaluating_no_episodes_is_refused():
    with pytest.raises(ConfigError, match="episodes"):
        evaluate(make("cartpole"), random_policy, None, jax.random.key(0), episodes=0)
