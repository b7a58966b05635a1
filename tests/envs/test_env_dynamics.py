"""The pure environments against Gymnasium's, step by step.

Gymnasium computes in float64 and ours in float32. Where single steps are compared, ours starts each one from
Gymnasium's state rounded to float32, and a step that ends within ``MARGIN`` of a threshold may fall on either side.
"""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit_jax.envs import ENVIRONMENTS, make, make_cartpole, make_mountain_car
from conduit_jax.envs.cartpole import CartPoleState
from conduit_jax.envs.mountain_car import MountainCarState
from conduit_jax.errors import ConfigError

MARGIN = 1e-6
GYMNASIUM_IDS = {"cartpole": "CartPole-v1", "mountain_car": "MountainCar-v0"}
STATES = {"cartpole": CartPoleState, "mountain_car": MountainCarState}
# Thresholds by component of the state: track and angle limits; left wall and goal.
THRESHOLDS = {"cartpole": [(0, 2.4), (2, 12 * 2 * np.pi / 360)], "mountain_car": [(0, -1.2), (0, 0.5)]}
CONSTRUCTORS = {"cartpole": make_cartpole, "mountain_car": make_mountain_car}

each_environment = pytest.mark.parametrize("name", sorted(ENVIRONMENTS))


def good_action(name, state):
    """Balance the pole; swing the car."""
    if name == "cartpole":
        return int(state[2] + 0.5 * state[3] > 0)
    return 2 if state[1] >= 0 else 0


def gymnasium_steps(name, count, skill, max_episode_steps=None, seed=0):
    """Return columns of ``count`` steps: state before, steps before, action, observation, reward, both endings."""
    env = gymnasium.make(GYMNASIUM_IDS[name], max_episode_steps=max_episode_steps)
    rng = np.random.default_rng(seed)
    rows, steps = [], 0
    env.reset(seed=seed)
    for _ in range(count):
        state = np.array(env.unwrapped.state, np.float64)
        action = good_action(name, state) if rng.random() < skill else int(rng.integers(env.action_space.n))
        observation, reward, terminated, truncated, _ = env.step(action)
        rows.append((state, steps, action, observation, reward, terminated, truncated))
        steps += 1
        if terminated or truncated:
            env.reset()
            steps = 0
    env.close()
    return [np.stack(column) for column in zip(*rows, strict=True)]


def to_state(name, state, steps):
    parts = [jnp.asarray(part, jnp.float32) for part in np.moveaxis(np.asarray(state), -1, 0)]
    return STATES[name](*parts, steps=jnp.asarray(steps, jnp.int32))


def clear_of_thresholds(name, observation):
    return np.all([np.abs(observation[..., i] - limit) > MARGIN for i, limit in THRESHOLDS[name]], axis=0)


def assert_steps_agree(name, env, rows):
    state, steps, action, observation, reward, terminated, truncated = rows
    _, ours = jax.jit(jax.vmap(env.step))(to_state(name, state, steps), jnp.asarray(action, jnp.int32))
    clear = clear_of_thresholds(name, observation) | ((observation[..., 0] == np.float32(-1.2)) & (name != "cartpole"))
    assert clear.mean() > 0.99
    np.testing.assert_allclose(ours.observation[clear], observation[clear], rtol=1e-6, atol=MARGIN)
    np.testing.assert_array_equal(ours.terminated[clear], terminated[clear])
    np.testing.assert_array_equal(ours.reward, reward)
    np.testing.assert_array_equal(ours.truncated, truncated)


@each_environment
@pytest.mark.parametrize("skill", [0.0, 0.5, 1.0])
def test_every_single_step_agrees_with_gymnasium(name, skill):
    rows = gymnasium_steps(name, 3000, skill)
    assert_steps_agree(name, make(name), rows)


@each_environment
def test_the_steps_compared_hold_both_kinds_of_ending(name):
    rows = [gymnasium_steps(name, 3000, skill) for skill in (0.0, 1.0)]
    assert any(columns[5].any() for columns in rows)
    assert any(columns[6].any() for columns in rows)


@each_environment
def test_an_episode_left_to_itself_stays_with_gymnasium(name):
    """No re-syncing: the same actions from the same start, to the end of the episode.

    The pole's actions are random, so its episode is short: it is unstable, and every rounding error grows with time.
    """
    rows = gymnasium_steps(name, 200, {"cartpole": 0.0, "mountain_car": 0.5}[name], seed=3)
    length = int(np.flatnonzero(rows[5] | rows[6])[0]) + 1
    state, steps, action, observation, _, terminated, truncated = (column[:length] for column in rows)
    _, ours = jax.lax.scan(make(name).step, to_state(name, state[0], steps[0]), jnp.asarray(action, jnp.int32))
    np.testing.assert_allclose(ours.observation, observation, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(ours.terminated, terminated)
    np.testing.assert_array_equal(ours.truncated, truncated)


@each_environment
def test_an_episode_may_terminate_and_be_truncated_at_the_same_step(name):
    skill = {"cartpole": 0.0, "mountain_car": 1.0}[name]
    ends = np.flatnonzero(gymnasium_steps(name, 300, skill)[5])
    limit = int(ends[0]) + 1
    rows = gymnasium_steps(name, limit, skill, max_episode_steps=limit)
    assert rows[5][-1]
    assert rows[6][-1]
    assert_steps_agree(name, CONSTRUCTORS[name](max_steps=limit), rows)


BOUNDS = {
    "cartpole": [(-2.4, 2.4), (-4.0, 4.0), (-0.2, 0.2), (-4.0, 4.0)],
    "mountain_car": [(-1.2, 0.6), (-0.07, 0.07)],
}


@pytest.fixture(scope="module", params=sorted(ENVIRONMENTS))
def pair(request):
    name = request.param
    theirs = gymnasium.make(GYMNASIUM_IDS[name]).unwrapped
    theirs.reset(seed=0)
    return name, jax.jit(make(name).step), theirs


@given(data=st.data())
def test_a_step_from_any_state_agrees_with_gymnasium(pair, data):
    name, step, theirs = pair
    state = np.array([data.draw(st.floats(low, high)) for low, high in BOUNDS[name]]).astype(np.float32)
    action = data.draw(st.integers(0, make(name).spec.num_actions - 1))
    theirs.state = state.astype(np.float64)
    theirs.steps_beyond_terminated = None
    observation, reward, terminated, _, _ = theirs.step(action)
    _, ours = step(to_state(name, state, 0), action)
    if clear_of_thresholds(name, observation):
        np.testing.assert_allclose(ours.observation, observation, rtol=1e-6, atol=MARGIN)
        assert bool(ours.terminated) == terminated
    assert float(ours.reward) == reward


def test_the_left_wall_stops_the_car():
    state = MountainCarState(jnp.float32(-1.19), jnp.float32(-0.05), jnp.int32(0))
    state, stepped = make("mountain_car").step(state, 0)
    np.testing.assert_array_equal(stepped.observation, np.array([-1.2, 0.0], np.float32))


@each_environment
def test_resets_start_where_gymnasium_starts(name):
    starts = jax.vmap(lambda key: make(name).reset(key)[1])(jax.random.split(jax.random.key(0), 2000))
    if name == "cartpole":
        low, high = np.full(4, -0.05), np.full(4, 0.05)
    else:
        low, high = np.array([-0.6, 0.0]), np.array([-0.4, 0.0])
    assert np.all(starts >= np.float32(low))
    assert np.all(starts <= np.float32(high))
    np.testing.assert_allclose(starts.min(axis=0), low, atol=1e-3)
    np.testing.assert_allclose(starts.max(axis=0), high, atol=1e-3)


@each_environment
def test_the_spec_tells_the_truth_and_agrees_with_gymnasium(name):
    env = make(name)
    state, observation = jax.eval_shape(env.reset, jax.random.key(0))
    _, stepped = jax.eval_shape(env.step, state, env.spec.action)
    wanted = env.spec.observation
    assert (observation.shape, observation.dtype) == (wanted.shape, wanted.dtype)
    assert (stepped.observation.shape, stepped.observation.dtype) == (wanted.shape, wanted.dtype)
    theirs = gymnasium.make(GYMNASIUM_IDS[name])
    assert env.spec.num_actions == theirs.action_space.n
    assert env.spec.max_steps == theirs.spec.max_episode_steps
    assert wanted.shape == theirs.observation_space.shape
    assert isinstance(hash(env), int)


@each_environment
def test_x64_mode_changes_nothing(name):
    def episode(key):
        env = make(name)
        state, first = env.reset(key)
        actions = jnp.arange(50, dtype=jnp.int32) // 3 % env.spec.num_actions
        return first, jax.lax.scan(env.step, state, actions)

    narrow = jax.jit(episode)(jax.random.key(7))
    with jax.enable_x64(True):
        wide = jax.jit(episode)(jax.random.key(7))
    for a, b in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_an_unknown_environment_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'cartpole'"):
        make("cartpol")


@each_environment
@pytest.mark.parametrize("max_steps", [0, -1, 2.5])
def test_a_time_limit_that_is_no_positive_integer_is_refused(name, max_steps):
    with pytest.raises(ConfigError, match="max_steps"):
        CONSTRUCTORS[name](max_steps=max_steps)
