"""Generalized advantages against the sum they abbreviate, one lane and one step at a time."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit_jax.errors import ConfigError
from conduit_jax.returns import generalized_advantages

STEPS, LANES = 7, 2
_compiled = jax.jit(generalized_advantages, static_argnames=("discount", "trace"))


def by_the_sum(reward, value, next_value, kind, discount, trace):
    """A_t = sum over k of (discount * trace)^k d_{t+k}, as far as the episode goes."""
    total = 0.0
    for k in range(len(reward)):
        total += (discount * trace) ** k * (reward[k] + discount * next_value[k] * (kind[k] != 1) - value[k])
        if kind[k]:
            break
    return total


def numbers(draw):
    cell = st.integers(-8, 8).map(float)
    return np.array(draw(st.lists(cell, min_size=STEPS * LANES, max_size=STEPS * LANES)), np.float32).reshape(STEPS, -1)


@given(data=st.data(), trace=st.sampled_from([0.0, 0.5, 1.0]))
def test_an_advantage_is_the_discounted_sum_of_errors_to_the_episodes_end(data, trace):
    reward, value, next_value = (numbers(data.draw) for _ in range(3))
    cells = st.lists(st.sampled_from([0, 0, 1, 2]), min_size=STEPS * LANES, max_size=STEPS * LANES)
    kind = np.array(data.draw(cells)).reshape(STEPS, LANES)  # 0 goes on, 1 terminated, 2 truncated
    ours = _compiled(reward, value, next_value, kind == 1, kind > 0, discount=0.5, trace=trace)
    for t in range(STEPS):
        for lane in range(LANES):
            rest = [column[t:, lane] for column in (reward, value, next_value, kind)]
            assert ours[t, lane] == pytest.approx(by_the_sum(*rest, 0.5, trace), abs=1e-4)


def test_a_time_limit_is_bootstrapped_through_and_a_termination_is_not():
    ones, last = np.ones((1, 2), np.float32), np.array([[True, False]])
    ours = _compiled(0 * ones, 0 * ones, 4 * ones, last, np.array([[True, True]]), discount=0.5, trace=1.0)
    np.testing.assert_array_equal(ours, [[0.0, 2.0]])


@pytest.mark.parametrize("name", ["discount", "trace"])
def test_what_is_no_fraction_is_refused(name):
    ones, no = np.ones((1, 2), np.float32), np.zeros((1, 2), bool)
    with pytest.raises(ConfigError, match=name):
        generalized_advantages(ones, ones, ones, no, no, **({"discount": 0.9, "trace": 0.9} | {name: 1.5}))
