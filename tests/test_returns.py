"""n-step transitions against a loop over one lane, and over any cutting of a stream into rollouts."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit_jax.errors import ConfigError, SpecError
from conduit_jax.returns import n_step_carry, n_step_transitions, n_step_transitions_carried, one_step_transitions
from conduit_jax.types import Records, Rollout, next_observations
from tests.replay.reference import n_step_windows

LANES, GAMMA = 2, 0.5  # halves and whole rewards: float32 is exact here
FINAL, BOOTSTRAP = 1000, 5000  # how observations that are not a step's own are told apart


def stream(steps: int, endings: list[list[int]], rewards: list[list[int]]) -> dict[str, np.ndarray]:
    """A stream of ``steps`` in which ``endings[lane][t]`` is 0 (goes on), 1 (terminated) or 2 (truncated)."""
    kind = np.array(endings).T.reshape(steps, LANES)
    own = np.arange(steps)[:, None] * 10 + np.arange(LANES)
    return {
        "observation": own.astype(np.float32),
        "reward": np.array(rewards, np.float32).T.reshape(steps, LANES),
        "terminated": kind == 1,
        "truncated": kind == 2,
        "final": (own + FINAL).astype(np.float32),
    }


def cut(whole: dict[str, np.ndarray], start: int, stop: int, lengths: np.ndarray | None = None) -> Rollout:
    part = {name: leaf[start:stop] for name, leaf in whole.items()}
    following = (
        whole["observation"][stop]
        if stop < len(whole["observation"])
        else np.arange(LANES, dtype=np.float32) + BOOTSTRAP
    )
    return Rollout(
        observation={"x": part["observation"], "y": part["observation"][..., None] * np.ones(2, np.float32)},
        action=part["observation"].astype(np.int32),
        reward=part["reward"],
        terminated=part["terminated"],
        truncated=part["truncated"],
        final_observation={"x": part["final"], "y": part["final"][..., None] * np.ones(2, np.float32)},
        bootstrap_observation={"x": following, "y": following[:, None] * np.ones(2, np.float32)},
        lengths=lengths,
    )


def expected_windows(whole: dict[str, np.ndarray], lane: int, steps: int, n: int) -> list[tuple[float, float, float]]:
    """``(return, discount, next observation)`` from each of a lane's first ``steps`` steps."""
    terminated, truncated = whole["terminated"][:steps, lane].tolist(), whole["truncated"][:steps, lane].tolist()
    windows = n_step_windows(whole["reward"][:steps, lane].tolist(), terminated, truncated, n, GAMMA)
    result = []
    for total, discount, last in windows:
        ended = terminated[last] or truncated[last]
        after = whole["observation"][last + 1, lane] if last + 1 < steps else lane + BOOTSTRAP
        result.append((total, discount, float(whole["final"][last, lane] if ended else after)))
    return result


def of_lane(items: Any, lane: int, count: int) -> list[tuple[float, float, float]]:
    reward, discount, following = (
        items.reward[:count, lane],
        items.discount[:count, lane],
        items.next_observation["x"][:count, lane],
    )
    return list(zip(reward.tolist(), discount.tolist(), following.tolist(), strict=True))


@cache
def n_step(n: int) -> Any:
    return jax.jit(lambda rollout: n_step_transitions(rollout, n=n, discount=GAMMA))


@cache
def carried(n: int) -> Any:
    return jax.jit(lambda carry, rollout: n_step_transitions_carried(carry, rollout, n=n, discount=GAMMA))


def draw_stream(data: st.DataObject, steps: int) -> dict[str, np.ndarray]:
    def table(values: Any) -> list[list[int]]:
        return data.draw(st.lists(st.lists(values, min_size=steps, max_size=steps), min_size=LANES, max_size=LANES))

    return stream(steps, table(st.sampled_from([0, 0, 0, 1, 2])), table(st.integers(-4, 4)))


SHAPES = pytest.mark.parametrize(("steps", "n"), [(1, 3), (5, 1), (5, 3), (3, 3), (4, 9)])


@SHAPES
@given(data=st.data())
def test_n_step_transitions_are_the_windows_of_each_lane(steps: int, n: int, data: st.DataObject) -> None:
    whole = draw_stream(data, steps)
    rollout = cut(whole, 0, steps)
    items = jax.tree.map(np.asarray, n_step(n)(rollout))
    for lane in range(LANES):
        assert of_lane(items, lane, steps) == expected_windows(whole, lane, steps, n)
    np.testing.assert_array_equal(items.observation["x"], rollout.observation["x"])
    np.testing.assert_array_equal(items.action, rollout.action)
    np.testing.assert_array_equal(items.next_observation["y"], np.repeat(items.next_observation["x"][..., None], 2, -1))
    assert items.reward.dtype == items.discount.dtype == np.float32


@SHAPES
@given(data=st.data())
def test_with_lengths_no_window_reaches_beyond_a_lanes_last_real_step(steps: int, n: int, data: st.DataObject) -> None:
    whole = draw_stream(data, steps)
    lengths = np.array(data.draw(st.lists(st.integers(0, steps), min_size=LANES, max_size=LANES)), np.int32)
    records = n_step(n)(cut(whole, 0, steps, lengths))
    assert isinstance(records, Records)
    assert records.lengths.tolist() == lengths.tolist()
    for lane, length in enumerate(lengths.tolist()):
        assert of_lane(records.items, lane, length) == expected_windows(whole, lane, length, n)


@pytest.mark.parametrize("n", [1, 2, 4])
@given(data=st.data())
def test_any_cutting_of_a_stream_gives_the_windows_of_the_uncut_stream(n: int, data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.sampled_from([1, 1, 2, 5]), min_size=1, max_size=8))
    steps = sum(pieces)
    whole = draw_stream(data, steps)
    carry = n_step_carry(cut(whole, 0, 1), n=n, discount=GAMMA)
    got: list[list[tuple[float, float, float]]] = [[] for _ in range(LANES)]
    observations: list[float] = []
    start = 0
    for piece in pieces:
        carry, records = carried(n)(carry, cut(whole, start, start + piece))
        start += piece
        count = int(records.lengths)
        observations += records.items.observation["x"][:count, 0].tolist()
        for lane in range(LANES):
            got[lane] += of_lane(records.items, lane, count)
    full = max(steps - (n - 1), 0)  # the rest wait in the carry for what follows
    assert observations == whole["observation"][:full, 0].tolist()
    for lane in range(LANES):
        assert got[lane] == expected_windows(whole, lane, steps, n)[:full]


@pytest.mark.parametrize("n", [1, 3])
def test_truncation_bootstraps_from_the_final_observation_and_termination_does_not(n: int) -> None:
    whole = stream(4, [[0, 1, 0, 0], [0, 2, 0, 0]], [[1, 1, 1, 1]] * LANES)
    items = n_step(n)(cut(whole, 0, 4))
    dead, cut_short = of_lane(items, 0, 4)[1], of_lane(items, 1, 4)[1]
    assert dead[1] == 0.0
    assert cut_short == (1.0, GAMMA, float(whole["final"][1, 1]))


def test_both_flags_at_once_count_as_termination() -> None:
    whole = stream(2, [[1, 0], [1, 0]], [[1, 1]] * LANES)
    whole["truncated"] = whole["terminated"].copy()
    assert n_step(2)(cut(whole, 0, 2)).discount[0].tolist() == [0.0, 0.0]


@given(data=st.data())
def test_one_step_transitions_are_n_step_with_n_one(data: st.DataObject) -> None:
    rollout = cut(draw_stream(data, 5), 0, 5)
    one, same = one_step_transitions(rollout, discount=GAMMA), n_step(1)(rollout)
    for got, wanted in zip(jax.tree.leaves(one), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_one_step_transitions_of_a_ragged_rollout_are_refused_as_padding_would_be_stored() -> None:
    rollout = cut(stream(2, [[0, 0]] * LANES, [[0, 0]] * LANES), 0, 2)
    with pytest.raises(ConfigError, match="n_step_transitions"):
        one_step_transitions(rollout._replace(lengths=np.array([2, 1], np.int32)), discount=GAMMA)


def test_next_observations_never_cross_a_reset() -> None:
    whole = stream(3, [[0, 1, 0], [0, 0, 2]], [[0] * 3] * LANES)
    following = jax.jit(next_observations)(cut(whole, 0, 3))["x"]
    assert following[:, 0].tolist() == [10.0, 10.0 + FINAL, BOOTSTRAP]
    assert following[:, 1].tolist() == [11.0, 21.0, 21.0 + FINAL]


def test_returns_keep_the_rewards_dtype_with_x64_on() -> None:
    rollout = cut(stream(3, [[0, 1, 0], [0, 0, 2]], [[1] * 3] * LANES), 0, 3)

    def both(rollout: Rollout) -> Any:
        carry = n_step_carry(rollout, n=2, discount=0.99)
        return n_step_transitions(rollout, n=2, discount=0.99), n_step_transitions_carried(
            carry, rollout, n=2, discount=0.99
        )

    narrow = jax.jit(both)(rollout)
    with jax.enable_x64(True):
        wide = jax.jit(lambda rollout: both(rollout))(rollout)
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow)} == {
        jnp.dtype(kind) for kind in ("float32", "int32", "bool")
    }
    for got, wanted in zip(jax.tree.leaves(wide), jax.tree.leaves(narrow), strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("n", "discount"), [(0, 0.9), (-1, 0.9), (1.5, 0.9), (True, 0.9), (3, 1.1), (3, -0.1), (3, float("nan"))]
)
def test_impossible_parameters_are_refused(n: Any, discount: float) -> None:
    rollout = cut(stream(2, [[0, 0]] * LANES, [[0, 0]] * LANES), 0, 2)
    with pytest.raises(ConfigError, match="out of range"):
        n_step_transitions(rollout, n=n, discount=discount)
    with pytest.raises(ConfigError, match="out of range"):
        n_step_carry(rollout, n=n, discount=discount)


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.bool_, np.float16])
def test_whole_and_narrow_rewards_give_the_returns_of_their_float32_values(dtype: Any) -> None:
    whole = stream(4, [[0, 1, 0, 0], [0, 0, 2, 0]], [[1, 0, 1, 1]] * LANES)
    rollout = cut(whole, 0, 4)
    narrow, wide = n_step(3)(rollout._replace(reward=rollout.reward.astype(dtype))), n_step(3)(rollout)
    assert narrow.discount.max() > 0
    for got, wanted in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)
    carry = n_step_carry(rollout._replace(reward=rollout.reward.astype(dtype)), n=3, discount=GAMMA)
    assert carry.steps.reward.dtype == carry.steps.discount.dtype == np.float32


@pytest.mark.parametrize("name", ["terminated", "truncated"])
@pytest.mark.parametrize(
    "make", [one_step_transitions, lambda rollout, discount: n_step_transitions(rollout, n=2, discount=discount)]
)
def test_flags_that_are_not_bool_are_refused_by_name(name: str, make: Any) -> None:
    rollout = cut(stream(2, [[0, 1]] * LANES, [[0, 0]] * LANES), 0, 2)
    with pytest.raises(SpecError, match=rf"Rollout\({name}=\) is not bool[\s\S]*int32"):
        make(rollout._replace(**{name: getattr(rollout, name).astype(np.int32)}), discount=GAMMA)


def test_a_rollout_that_hides_what_followed_is_refused() -> None:
    rollout = cut(stream(2, [[0, 0]] * LANES, [[0, 0]] * LANES), 0, 2)
    for missing in ("final_observation", "bootstrap_observation"):
        with pytest.raises(ConfigError, match="bootstrap_observation="):
            n_step_transitions(rollout._replace(**{missing: None}), n=2, discount=GAMMA)


def test_windows_are_not_carried_over_ragged_rollouts() -> None:
    rollout = cut(stream(2, [[0, 0]] * LANES, [[0, 0]] * LANES), 0, 2)
    carry = n_step_carry(rollout, n=2, discount=GAMMA)
    with pytest.raises(ConfigError, match="ragged"):
        n_step_transitions_carried(carry, rollout._replace(lengths=np.array([1, 2])), n=2, discount=GAMMA)
