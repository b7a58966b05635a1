"""The reaching task: what the picture shows, what is rewarded, that it can be solved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit_jax.envs import evaluate, make, make_reach, make_reach_continuous
from conduit_jax.envs.reach import FIELD, GOAL, HAND, MOVES, REACHED, START_DISTANCE, STEP, ReachState, render
from conduit_jax.errors import ConfigError

coordinate = st.floats(-FIELD, FIELD)
_render = jax.jit(render, static_argnums=1)


def place_of(picture, colour):
    """The middle of all pixels of exactly that colour, in the world's coordinates."""
    rows, columns = np.nonzero((np.asarray(picture) == np.array(colour, np.uint8)).all(axis=-1))
    size = picture.shape[0]
    return (2 * columns.mean() + 1) / size - 1, 1 - (2 * rows.mean() + 1) / size


@given(hand=st.tuples(coordinate, coordinate), goal=st.tuples(coordinate, coordinate), size=st.sampled_from([64, 128]))
def test_the_picture_shows_hand_and_goal_where_they_are(hand, goal, size):
    if np.hypot(*np.subtract(hand, goal)) < 0.25:
        return  # the hand covers part of the goal
    picture = _render(ReachState(jnp.array(hand, jnp.float32), jnp.array(goal, jnp.float32), jnp.int32(0)), size)
    assert (picture.shape, picture.dtype) == ((size, size, 3), jnp.uint8)
    np.testing.assert_allclose(place_of(picture, HAND), hand, atol=1.5 / size)
    np.testing.assert_allclose(
        place_of(picture, GOAL), goal, atol=6 / size
    )  # the arm never covers it, but its own edge is soft


@pytest.mark.parametrize(("name", "size", "kilobytes"), [("reach_128", 128, 48), ("reach_256", 256, 192)])
def test_the_two_sizes_are_the_papers_payloads(name, size, kilobytes):
    env = make(name)
    _, observation = env.reset(jax.random.key(0))
    assert env.spec.observation.shape == observation.shape == (size, size, 3)
    assert observation.nbytes == kilobytes * 1024


def test_it_starts_apart_and_on_the_field_anywhere():
    state, _ = jax.jit(jax.vmap(lambda key: make_reach(16).reset(key)))(jax.random.split(jax.random.key(0), 3000))
    distance = np.linalg.norm(state.hand - state.goal, axis=1)
    assert distance.min() >= START_DISTANCE - 1e-5
    assert np.abs(state.hand).max() <= FIELD + 1e-5
    for part in (state.hand, state.goal):
        np.testing.assert_allclose(part.min(axis=0), -FIELD, atol=0.05)
        np.testing.assert_allclose(part.max(axis=0), FIELD, atol=0.05)


def seeing_policy(parameters, observation, key):
    """Find both colours in the picture and move along the larger difference: solvable from pixels alone."""

    def act(picture):
        def middle(colour):
            near = jnp.sum(jnp.abs(picture.astype(jnp.float32) - jnp.array(colour)), axis=-1) < 60
            ys, xs = jnp.mgrid[: picture.shape[0], : picture.shape[1]]
            return jnp.array([jnp.sum(xs * near), -jnp.sum(ys * near)]) / jnp.maximum(jnp.sum(near), 1)

        x, y = middle(GOAL) - middle(HAND)
        return jnp.where(jnp.abs(x) > jnp.abs(y), jnp.where(x > 0, 1, 2), jnp.where(y > 0, 3, 4))

    return jax.vmap(act)(observation)


def returns_of(policy, **options):
    env = make_reach(32, **options)
    run = jax.jit(functools.partial(evaluate, env, policy, episodes=64))
    return np.asarray(run(None, jax.random.key(0)))


def test_a_policy_that_looks_solves_it_and_one_that_does_not_fails():
    assert returns_of(seeing_policy, shaped=False).mean() > 0.95
    idle = lambda parameters, observation, key: jnp.zeros(observation.shape[0], jnp.int32)  # noqa: E731
    np.testing.assert_array_equal(returns_of(idle, shaped=False), 0)


def test_shaping_adds_what_the_hand_came_nearer():
    env, plain = make_reach(16), make_reach(16, shaped=False)
    state, _ = env.reset(jax.random.key(3))
    start, given, sparse = float(jnp.linalg.norm(state.hand - state.goal)), 0.0, 0.0
    for action in (1, 3, 0, 2, 4, 1):
        _, without = plain.step(state, action)
        state, stepped = env.step(state, action)
        given, sparse = given + float(stepped.reward), sparse + float(without.reward)
    left = float(jnp.linalg.norm(state.hand - state.goal))
    assert given - sparse == pytest.approx(start - left, abs=1e-5)


def test_it_terminates_at_the_goal_and_truncates_at_the_limit():
    env = make_reach(16, max_steps=2)
    near = ReachState(jnp.array([0.0, 0.0]), jnp.array([STEP_TO_GOAL, 0.0]), jnp.int32(0))
    state, stepped = env.step(near, 1)
    assert bool(stepped.terminated)
    assert not bool(stepped.truncated)
    far = ReachState(jnp.array([-0.8, 0.0]), jnp.array([0.8, 0.0]), jnp.int32(1))
    state, stepped = env.step(far, 1)
    assert (bool(stepped.terminated), bool(stepped.truncated)) == (False, True)
    np.testing.assert_allclose(state.hand, [-0.65, 0.0], atol=1e-6)


STEP_TO_GOAL = 0.15 + REACHED / 2


@pytest.mark.parametrize("wrong", [{"size": 100}, {"size": 0}, {"max_steps": 0}])
def test_what_is_out_of_range_is_refused(wrong):
    for constructor in (make_reach, make_reach_continuous):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            constructor(**wrong)


@given(seed=st.integers(0, 2**31 - 1), x=st.floats(-3, 3, width=32), y=st.floats(-3, 3, width=32))
def test_a_continuous_move_goes_where_it_says_and_no_further_than_a_discrete_one(seed, x, y):
    state, step = _start(jax.random.key(seed))[0], _step
    moved, _ = step(state, jnp.array([x, y], jnp.float32))
    wanted = np.clip(np.asarray(state.hand) + STEP * np.clip([x, y], -1, 1), -FIELD, FIELD)
    np.testing.assert_allclose(moved.hand, wanted, atol=1e-6)
    for number, direction in enumerate(MOVES):
        discrete, stepped = _discrete(state, number)
        same, continuous = step(state, jnp.array(direction, jnp.float32))
        jax.tree.map(np.testing.assert_array_equal, (discrete, stepped), (same, continuous))


_start, _step = (jax.jit(function) for function in make_reach_continuous(16)[2:])
_discrete = jax.jit(make_reach(16).step)


def test_continuous_reaching_is_told_as_such():
    env = make("reach_continuous")
    assert (env.name, env.spec.observation.shape, env.spec.num_actions) == ("reach_continuous", (64, 64, 3), None)
    assert (env.spec.action.shape, env.spec.action_low, env.spec.action_high) == ((2,), -1.0, 1.0)
