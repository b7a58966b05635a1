"""The running scale of rewards against numpy over all that was seen."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conduit_jax as conduit
from conduit_jax.errors import ConfigError
from conduit_jax.normalization import reward_scale_carry, scale_rewards
from conduit_jax.types import Rollout

LANES, GAMMA = 3, 0.5
_scale = jax.jit(scale_rewards, static_argnames="discount")


def rollout(reward, ended) -> Rollout:
    return Rollout(None, None, reward, ended, np.zeros_like(ended))


def all_returns(reward, ended):
    """The discounted return of every step of every lane, begun anew behind an end."""
    running, returns = np.zeros(LANES), []
    for now, over in zip(reward.astype(np.float64), ended, strict=True):
        running = GAMMA * running + now
        returns.append(running)
        running = np.where(over, 0, running)
    return np.array(returns)


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 2**16))
def test_rewards_are_divided_by_the_spread_of_all_returns_so_far_however_they_were_cut(lengths, seed):
    rng = np.random.default_rng(seed)
    reward = rng.normal(2, 3, (sum(lengths), LANES)).astype(np.float32)
    ended = rng.random(reward.shape) < 0.2
    carry, start = reward_scale_carry(rollout(reward, ended)), 0
    for length in lengths:
        part = slice(start, start + length)
        carry, scaled = _scale(carry, rollout(reward[part], ended[part]), discount=GAMMA)
        start += length
        spread = np.sqrt(all_returns(reward[:start], ended[:start]).var() + 1e-8)
        np.testing.assert_allclose(scaled, reward[part] / spread, rtol=1e-3)


def test_rewards_that_never_differ_stay_finite():
    reward, ended = np.ones((4, LANES), np.float32), np.ones((4, LANES), bool)
    _, scaled = _scale(reward_scale_carry(rollout(reward, ended)), rollout(reward, ended), discount=GAMMA)
    assert np.isfinite(scaled).all()


def test_a_discount_that_is_no_fraction_is_refused():
    one = rollout(np.ones((1, LANES), np.float32), np.zeros((1, LANES), bool))
    with pytest.raises(ConfigError, match="discount"):
        scale_rewards(reward_scale_carry(one), one, discount=2.0)


def test_the_carry_goes_from_one_iteration_to_the_next_in_an_on_policy_plane():
    """Its leaves begin as one zero: each has to get a buffer of its own, for every one is donated."""
    plane = conduit.ExperiencePlane(algorithm=conduit.OnPolicy(num_minibatches=1))

    @plane.register_ingestion(init_carry=reward_scale_carry)
    def ingestion(carry, steps):
        carry, scaled = scale_rewards(carry, steps, discount=GAMMA)
        return carry, {"scaled": scaled}

    rng, seen, carry = np.random.default_rng(0), [], None
    for _ in range(3):
        steps = rollout(rng.normal(size=(4, LANES)).astype(np.float32), rng.random((4, LANES)) < 0.3)
        plane.push(steps)
        carry, wanted = _scale(carry or reward_scale_carry(steps), steps, discount=GAMMA)
        (batch,) = plane.epochs()
        seen.append(np.sort(np.asarray(batch.data["scaled"])))
        np.testing.assert_allclose(seen[-1], np.sort(np.asarray(wanted).reshape(-1)), rtol=1e-5)
