"""The synthetic world says where each row came from, and costs what it was told to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conduit_jax as conduit
from conduit_jax.envs import make_rollout, make_synthetic
from conduit_jax.envs.synthetic import STAMPS, content, intact, reward_of
from conduit_jax.errors import ConfigError

_content = jax.jit(content, static_argnums=2)


def model(stamp, step, dimension):
    """The same content in Python's own whole numbers."""

    def mix(word):
        word = ((word ^ (word >> 16)) * 0x85EBCA6B) % 2**32
        word = ((word ^ (word >> 13)) * 0xC2B2AE35) % 2**32
        return word ^ (word >> 16)

    start = mix((stamp * 0x9E3779B9 + step) % 2**32)
    return [stamp, step, *(mix(start ^ (i * 0x85EBCA77) % 2**32) >> 8 for i in range(dimension - 2))]


@given(stamp=st.integers(0, STAMPS - 1), step=st.integers(0, 2**20))
def test_content_is_what_the_model_says(stamp, step):
    np.testing.assert_array_equal(_content(np.uint32(stamp), np.int32(step), 9), np.array(model(stamp, step, 9)))


def random_policy(parameters, observation, key):
    return jax.random.randint(key, observation.shape[:1], 0, 4, jnp.int32)


@pytest.mark.parametrize("dimension", [2, 1000])
def test_what_a_plane_delivers_can_be_checked_from_the_rows_alone(dimension):
    init, rollout = make_rollout(make_synthetic(dimension, max_steps=7), random_policy, num_lanes=4, length=5)
    rollout = jax.jit(rollout)
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=32), replay=conduit.ReplayConfig(capacity=64), schedule="sequential"
    )
    plane.register_ingestion(lambda rollout: conduit.one_step_transitions(rollout, discount=1.0))
    actor = jax.jit(init)(jax.random.key(0))
    for number in range(6):  # more than the replay holds
        actor, steps = rollout(actor, None, jax.random.key(number))
        plane.push(steps)
    data = plane.pull().data
    assert bool(intact(data.observation).all())
    assert bool(intact(data.next_observation).all())
    stamp, step = data.observation[:, 0].astype(jnp.uint32), data.observation[:, 1].astype(jnp.int32)
    np.testing.assert_array_equal(data.next_observation[:, 1], step + 1)
    np.testing.assert_array_equal(data.reward, jax.vmap(reward_of)(stamp, step, data.action))


def test_a_changed_number_is_noticed():
    rows = jnp.stack([_content(np.uint32(5), np.int32(3), 6)] * 3)
    assert intact(rows).all()
    np.testing.assert_array_equal(intact(rows.at[1, 4].add(1)), [True, False, True])


def test_episodes_end_at_the_time_limit_only():
    env = make_synthetic(4, max_steps=3)
    state, _ = env.reset(jax.random.key(1))
    ends = []
    for _ in range(3):
        state, stepped = env.step(state, 0)
        ends.append((bool(stepped.terminated), bool(stepped.truncated)))
    assert ends == [(False, False), (False, False), (False, True)]


def test_a_step_costs_more_where_told_so_and_shows_the_same():
    cheap, dear = make_synthetic(8), make_synthetic(8, step_cost=1000)
    state, first = dear.reset(jax.random.key(0))
    after, stepped = jax.jit(dear.step)(state, 1)
    np.testing.assert_array_equal(first, cheap.reset(jax.random.key(0))[1])
    np.testing.assert_array_equal(stepped.observation, cheap.step(state, 1)[1].observation)
    assert np.isfinite(after.work).all()
    assert not np.array_equal(after.work, state.work)
    program = jax.jit(dear.step).lower(state, 1).compile().as_text()
    assert "while" in program, "the work is done, not optimized away"
    assert "while" not in jax.jit(cheap.step).lower(state, 1).compile().as_text()


@pytest.mark.parametrize("wrong", [{"dimension": 1}, {"max_steps": 0}, {"step_cost": -1}])
def test_what_is_out_of_range_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        make_synthetic(**wrong)
