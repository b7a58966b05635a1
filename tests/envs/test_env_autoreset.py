"""``autoreset`` against a loop that resets by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conduit_jax.envs import autoreset, make_cartpole, make_mountain_car
from conduit_jax.errors import ConfigError

LIMIT = 12  # short, so that cartpole under random actions both falls and is truncated
STEPS = 120


def random_actions(key, steps=STEPS):
    return jax.random.randint(key, (steps,), 0, 2, jnp.int32)


def by_hand(env, key, actions):
    """Return what each step gave, resetting in Python where an episode ended."""

    @jax.jit
    def new_episode(key):
        key, reset_key = jax.random.split(key)
        return key, *env.reset(reset_key)

    step = jax.jit(env.step)
    key, state, observation = new_episode(key)
    rows = []
    for action in np.asarray(actions):
        seen = observation
        state, stepped = step(state, action)
        observation = stepped.observation
        if stepped.terminated or stepped.truncated:
            key, state, observation = new_episode(key)
        rows.append((seen, observation, stepped.reward, stepped.terminated, stepped.truncated, stepped.observation))
    return [np.stack(column) for column in zip(*rows, strict=True)]


@pytest.fixture(scope="module")
def run():
    env = autoreset(make_cartpole(max_steps=LIMIT))
    key, actions = jax.random.key(1), random_actions(jax.random.key(2))
    state, first = jax.jit(env.reset)(key)
    _, steps = jax.jit(lambda state: jax.lax.scan(env.step, state, actions))(state)
    return first, steps, by_hand(make_cartpole(max_steps=LIMIT), key, actions)


def test_it_gives_what_a_loop_that_resets_by_hand_gives(run):
    first, steps, (seen, *rows) = run
    np.testing.assert_array_equal(first, seen[0])
    for ours, theirs in zip(steps, rows, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_the_final_observation_of_an_ended_episode_is_kept_and_the_next_one_is_a_start(run):
    _, steps, _ = run
    ended = np.asarray(steps.terminated | steps.truncated)
    assert np.asarray(steps.terminated).any()
    assert np.asarray(steps.truncated & ~steps.terminated).any()
    assert np.all(np.abs(steps.observation[ended]) <= 0.05)
    assert np.all(np.abs(steps.final_observation[ended]).max(axis=-1) > 0.05)
    np.testing.assert_array_equal(steps.observation[~ended], steps.final_observation[~ended])


def test_no_two_episodes_start_alike(run):
    _, steps, _ = run
    starts = np.asarray(steps.observation)[np.asarray(steps.terminated | steps.truncated)]
    assert len(np.unique(starts, axis=0)) == len(starts)


def test_a_lane_is_the_same_alone_and_among_others():
    env = autoreset(make_mountain_car(max_steps=7))
    keys = jax.random.split(jax.random.key(3), 4)
    actions = jax.random.randint(jax.random.key(4), (4, 30), 0, 3, jnp.int32)

    def lane(key, actions):
        return jax.lax.scan(env.step, env.reset(key)[0], actions)[1]

    together = jax.jit(jax.vmap(lane))(keys, actions)
    for i in range(4):
        alone = jax.jit(lane)(keys[i], actions[i])
        for a, b in zip(alone, jax.tree.map(lambda leaf, i=i: leaf[i], together), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_raw_uint32_keys_do_as_well_as_typed_ones():
    env = autoreset(make_cartpole(max_steps=3))
    actions = random_actions(jax.random.key(0), 10)

    @jax.jit
    def observations(key):
        return jax.lax.scan(env.step, env.reset(key)[0], actions)[1].observation

    np.testing.assert_array_equal(observations(jax.random.PRNGKey(5)), observations(jax.random.key(5)))


def test_wrapping_twice_is_refused():
    twice = autoreset(autoreset(make_cartpole()))
    state, _ = jax.eval_shape(twice.reset, jax.random.key(0))
    with pytest.raises(ConfigError, match="resets itself already"):
        jax.eval_shape(twice.step, state, jnp.int32(0))
