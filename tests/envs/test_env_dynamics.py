"""The pure environments against Gymnasium's, step by step.

Gymnasium computes in float64 and ours in float32. Where single steps are compared, ours starts each one from
Gymnasium's state rounded to float32, and a step that ends within ``MARGIN`` of a threshold may fall on either side.
"""

from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit_jax import envs
from conduit_jax.envs.acrobot import AcrobotState
from conduit_jax.envs.cartpole import CartPoleState
from conduit_jax.envs.mountain_car import MountainCarState
from conduit_jax.envs.pendulum import PendulumState
from conduit_jax.errors import ConfigError

MARGIN = 1e-6


class World(NamedTuple):
    """What is known of a world: Gymnasium's id, our state, what is compared how closely.

    ``thresholds`` are (component of the observation, limit); ``bounds`` those of the states to search; ``starts`` those
    of the states a reset gives. ``good`` acts so that episodes end well.
    """

    id: str
    make: Any
    state: Any
    bounds: list[tuple[float, float]]
    starts: list[tuple[float, float]]
    good: Any
    thresholds: tuple[tuple[int, float], ...] = ()
    atol: float = MARGIN
    both_endings: bool = True


def swing(state):
    return 2 if state[1] >= 0 else 0


WORLDS = {
    "acrobot": World(
        "Acrobot-v1",
        envs.make_acrobot,
        AcrobotState,
        bounds=[(-3.14, 3.14), (-3.14, 3.14), (-12.0, 12.0), (-28.0, 28.0)],
        starts=[(-0.1, 0.1)] * 4,
        good=lambda state: 2 if state[3] > 0 else 0,
        atol=1e-4,  # four derivatives of velocities near 30
    ),
    "cartpole": World(
        "CartPole-v1",
        envs.make_cartpole,
        CartPoleState,
        bounds=[(-2.4, 2.4), (-4.0, 4.0), (-0.2, 0.2), (-4.0, 4.0)],
        starts=[(-0.05, 0.05)] * 4,
        good=lambda state: int(state[2] + 0.5 * state[3] > 0),
        thresholds=((0, 2.4), (2, 12 * 2 * np.pi / 360)),
    ),
    "mountain_car": World(
        "MountainCar-v0",
        envs.make_mountain_car,
        MountainCarState,
        bounds=[(-1.2, 0.6), (-0.07, 0.07)],
        starts=[(-0.6, -0.4), (0.0, 0.0)],
        good=swing,
        thresholds=((0, -1.2), (0, 0.5)),
    ),
    "mountain_car_continuous": World(
        "MountainCarContinuous-v0",
        envs.make_mountain_car_continuous,
        MountainCarState,
        bounds=[(-1.2, 0.6), (-0.07, 0.07)],
        starts=[(-0.6, -0.4), (0.0, 0.0)],
        good=lambda state: np.array([swing(state) - 1], np.float32),
        thresholds=((0, -1.2), (0, 0.45)),
    ),
    "pendulum": World(
        "Pendulum-v1",
        envs.make_pendulum,
        PendulumState,
        bounds=[(-3.14, 3.14), (-8.0, 8.0)],
        starts=[(-np.pi, np.pi), (-1.0, 1.0)],
        good=lambda state: np.clip([-10 * np.sin(state[0]) - state[1]], -2, 2).astype(np.float32),
        atol=1e-5,
        both_endings=False,  # it never terminates
    ),
}
each_environment = pytest.mark.parametrize("name", sorted(WORLDS))
each_that_terminates = pytest.mark.parametrize("name", [name for name in sorted(WORLDS) if WORLDS[name].both_endings])


def make(name, **options):
    return WORLDS[name].make(**options)


def random_action(space, rng):
    return int(rng.integers(space.n)) if hasattr(space, "n") else rng.uniform(-2.5, 2.5, 1).astype(np.float32)


def gymnasium_steps(name, count, skill, max_episode_steps=None, seed=0):
    """Return columns of ``count`` steps: state before, steps before, action, observation, reward, both endings."""
    env = gymnasium.make(WORLDS[name].id, max_episode_steps=max_episode_steps)
    rng = np.random.default_rng(seed)
    rows, steps = [], 0
    env.reset(seed=seed)
    for _ in range(count):
        state = np.array(env.unwrapped.state, np.float64)
        action = WORLDS[name].good(state) if rng.random() < skill else random_action(env.action_space, rng)
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
    return WORLDS[name].state(*parts, steps=jnp.asarray(steps, jnp.int32))


def clear_of_thresholds(name, observation):
    """Whether no threshold is near enough for rounding to decide; at the very wall both say the wall."""
    clear = [np.abs(observation[..., i] - limit) > MARGIN for i, limit in WORLDS[name].thresholds]
    at_wall = observation[..., 0] == np.float32(-1.2)
    return np.all(clear, axis=0) | (at_wall & (name != "cartpole")) if clear else np.ones(observation.shape[:-1], bool)


def assert_steps_agree(name, env, rows):
    state, steps, action, observation, reward, terminated, truncated = rows
    _, ours = jax.jit(jax.vmap(env.step))(to_state(name, state, steps), jnp.asarray(action, env.spec.action.dtype))
    clear, atol = clear_of_thresholds(name, observation), WORLDS[name].atol
    assert clear.mean() > 0.99
    np.testing.assert_allclose(ours.observation[clear], observation[clear], rtol=1e-6, atol=atol)
    np.testing.assert_array_equal(ours.terminated[clear], terminated[clear])
    np.testing.assert_allclose(ours.reward[clear], reward[clear], rtol=1e-6, atol=atol)
    np.testing.assert_array_equal(ours.truncated, truncated)


@each_environment
@pytest.mark.parametrize("skill", [0.0, 0.5, 1.0])
def test_every_single_step_agrees_with_gymnasium(name, skill):
    rows = gymnasium_steps(name, 3000, skill)
    assert_steps_agree(name, make(name), rows)


@each_environment
def test_the_steps_compared_hold_both_kinds_of_ending(name):
    rows = [gymnasium_steps(name, 3000, skill) for skill in (0.0, 1.0)]
    assert any(columns[5].any() for columns in rows) is WORLDS[name].both_endings
    assert any(columns[6].any() for columns in rows)


@each_environment
def test_an_episode_left_to_itself_stays_with_gymnasium(name):
    """No re-syncing: the same actions from the same start, to the end of the episode.

    The pole's actions are random, so its episode is short: it is unstable, and every rounding error grows with time.
    """
    rows = gymnasium_steps(name, 200, {"cartpole": 0.0}.get(name, 0.5), seed=3)
    ends = np.flatnonzero(rows[5] | rows[6])
    length = int(ends[0]) + 1 if ends.size else 200
    length = min(length, 20) if name == "acrobot" else length  # chaotic: rounding errors grow fast
    state, steps, action, observation, _, terminated, truncated = (column[:length] for column in rows)
    _, ours = jax.lax.scan(make(name).step, to_state(name, state[0], steps[0]), jnp.asarray(action))
    np.testing.assert_allclose(ours.observation, observation, rtol=1e-4, atol=10 * WORLDS[name].atol)
    np.testing.assert_array_equal(ours.terminated, terminated)
    np.testing.assert_array_equal(ours.truncated, truncated)


@each_that_terminates
def test_an_episode_may_terminate_and_be_truncated_at_the_same_step(name):
    skill = {"cartpole": 0.0}.get(name, 1.0)
    ends = np.flatnonzero(gymnasium_steps(name, 500, skill)[5])
    limit = int(ends[0]) + 1
    rows = gymnasium_steps(name, limit, skill, max_episode_steps=limit)
    assert rows[5][-1]
    assert rows[6][-1]
    assert_steps_agree(name, make(name, max_steps=limit), rows)


@pytest.fixture(scope="module", params=sorted(WORLDS))
def pair(request):
    name = request.param
    theirs = gymnasium.make(WORLDS[name].id).unwrapped
    theirs.reset(seed=0)
    return name, jax.jit(make(name).step), theirs


@given(data=st.data())
def test_a_step_from_any_state_agrees_with_gymnasium(pair, data):
    name, step, theirs = pair
    state = np.array([data.draw(st.floats(low, high)) for low, high in WORLDS[name].bounds]).astype(np.float32)
    count = make(name).spec.num_actions
    drawn = data.draw(st.integers(0, count - 1) if count else st.floats(-2.5, 2.5, width=32))
    action = drawn if count else np.array([drawn], np.float32)
    theirs.state = state.astype(np.float64)
    theirs.steps_beyond_terminated = None
    observation, reward, terminated, _, _ = theirs.step(action)
    _, ours = step(to_state(name, state, 0), action)
    if clear_of_thresholds(name, observation):
        np.testing.assert_allclose(ours.observation, observation, rtol=1e-6, atol=WORLDS[name].atol)
        assert bool(ours.terminated) == terminated
        assert float(ours.reward) == pytest.approx(reward, rel=1e-6, abs=WORLDS[name].atol)


@pytest.mark.parametrize(("name", "action"), [("mountain_car", 0), ("mountain_car_continuous", np.array([-1.0]))])
def test_the_left_wall_stops_the_car(name, action):
    state = MountainCarState(jnp.float32(-1.19), jnp.float32(-0.05), jnp.int32(0))
    state, stepped = make(name).step(state, action)
    np.testing.assert_array_equal(stepped.observation, np.array([-1.2, 0.0], np.float32))


@each_environment
def test_resets_start_where_gymnasium_starts(name):
    env = make(name)
    start = jax.jit(jax.vmap(lambda key: jnp.stack(env.reset(key)[0][:-1])))
    starts = start(jax.random.split(jax.random.key(0), 2000))
    low, high = np.array(WORLDS[name].starts).T
    assert np.all(starts >= np.float32(low))
    assert np.all(starts <= np.float32(high))
    np.testing.assert_allclose(starts.min(axis=0), low, atol=5e-3)
    np.testing.assert_allclose(starts.max(axis=0), high, atol=5e-3)


@each_environment
def test_a_reset_shows_what_gymnasium_shows_of_the_same_state(name):
    theirs, env = gymnasium.make(WORLDS[name].id).unwrapped, make(name)
    observation, _ = theirs.reset(seed=0)
    state, ours = env.reset(jax.random.key(3))
    parts = [float(part) for part in state[:-1]]
    theirs.state = np.array(parts)
    shown = {"Pendulum-v1": "_get_obs", "Acrobot-v1": "_get_ob"}.get(WORLDS[name].id)
    expected = getattr(theirs, shown)() if shown else np.array(parts, np.float32)
    assert ours.shape == observation.shape
    np.testing.assert_allclose(ours, expected, atol=1e-6)


@each_environment
def test_the_spec_tells_the_truth_and_agrees_with_gymnasium(name):
    env = make(name)
    state, observation = jax.eval_shape(env.reset, jax.random.key(0))
    _, stepped = jax.eval_shape(env.step, state, env.spec.action)
    wanted = env.spec.observation
    assert (observation.shape, observation.dtype) == (wanted.shape, wanted.dtype)
    assert (stepped.observation.shape, stepped.observation.dtype) == (wanted.shape, wanted.dtype)
    theirs = gymnasium.make(WORLDS[name].id)
    if env.spec.num_actions is None:
        low, high = theirs.action_space.low, theirs.action_space.high
        assert (env.spec.action_low, env.spec.action_high) == (low.item(), high.item())
        assert (env.spec.action.shape, env.spec.action.dtype) == (theirs.action_space.shape, theirs.action_space.dtype)
    else:
        assert env.spec.num_actions == theirs.action_space.n
    assert env.spec.max_steps == theirs.spec.max_episode_steps
    assert wanted.shape == theirs.observation_space.shape
    assert isinstance(hash(env), int)


@each_environment
def test_x64_mode_changes_nothing(name):
    def episode(key):
        env = make(name)
        state, first = env.reset(key)
        actions = jnp.arange(50, dtype=jnp.int32) // 3 % (env.spec.num_actions or 3)
        actions = actions if env.spec.num_actions else (actions[:, None] - 1).astype(jnp.float32)
        return first, jax.lax.scan(env.step, state, actions)

    narrow = jax.jit(episode)(jax.random.key(7))
    with jax.enable_x64(True):
        wide = jax.jit(episode)(jax.random.key(7))
    for a, b in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_an_unknown_environment_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'cartpole'"):
        envs.make("cartpol")


@each_environment
@pytest.mark.parametrize("max_steps", [0, -1, 2.5])
def test_a_time_limit_that_is_no_positive_integer_is_refused(name, max_steps):
    with pytest.raises(ConfigError, match="max_steps"):
        make(name, max_steps=max_steps)
