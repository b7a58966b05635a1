"""The Gymnasium actor against single environments driven by hand."""

import subprocess
import sys

import gymnasium
import jax
import numpy as np
import pytest

from conduit_jax.adapters.gymnasium import GymnasiumActor
from conduit_jax.envs import EpisodeStatistics, make, recent_return
from conduit_jax.errors import ConduitError, ConfigError, LifecycleError, SpecError, ValueRefusedError
from conduit_jax.types import Rollout, next_observations

LANES, LENGTH, SEED = 3, 60, 11


class Frames(gymnasium.Env):
    """Pixels that say which episode and step they belong to; actions are numbered from 5; truncated after 4 steps."""

    observation_space = gymnasium.spaces.Box(0, 255, (6, 5, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2, start=5)
    episode = 0

    def frame(self):
        return np.full((6, 5, 3), 10 * self.episode + self.steps, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        return self.frame(), {}

    def step(self, action):
        assert action in (5, 6)
        self.steps += 1
        return self.frame(), float(action), False, False, {}


class Odd(gymnasium.Env):
    """An environment of whatever spaces a test asks for."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space


BOX, TWO = gymnasium.spaces.Box(-1, 1, (2,), np.float64), gymnasium.spaces.Discrete(2)


@pytest.fixture(scope="module", autouse=True)
def _registered():
    gymnasium.register("ConduitFrames-v0", Frames, max_episode_steps=4)
    gymnasium.register("ConduitEndless-v0", Frames)
    unbounded = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    gymnasium.register("ConduitUnbounded-v0", Odd, kwargs={"observation_space": BOX, "action_space": unbounded})
    dictionary = gymnasium.spaces.Dict(a=BOX)
    gymnasium.register("ConduitDict-v0", Odd, kwargs={"observation_space": dictionary, "action_space": TWO})
    yield
    for name in ("Frames", "Endless", "Unbounded", "Dict"):
        del gymnasium.registry[f"Conduit{name}-v0"]


def push_where_it_falls(observation):
    """A policy of the observation alone, so that lanes driven apart act alike; it falls now and then."""
    return (observation[:, 2] > 0).astype(np.int64)


def balance(observation):
    return (observation[:, 2] + 0.5 * observation[:, 3] > 0).astype(np.int32)


def by_hand(env_id, seed, policy_step, steps):
    """Return one lane's columns, resetting within the step that ended an episode."""
    env = gymnasium.make(env_id)
    observation, _ = env.reset(seed=seed)
    rows = []
    for _ in range(steps):
        seen = observation
        action = policy_step(seen[None])[0]
        observation, reward, terminated, truncated, _ = env.step(action)
        final = observation if terminated or truncated else np.zeros_like(observation)
        rows.append((seen, action, reward, terminated, truncated, final))
        if terminated or truncated:
            observation, _ = env.reset()
    env.close()
    return [np.stack(column) for column in zip(*rows, strict=True)], observation


def assert_equals_by_hand(rollouts, policy_step):
    for lane in range(LANES):
        columns, bootstrap = by_hand("CartPole-v1", SEED + lane, policy_step, LENGTH * len(rollouts))
        for name, column in zip(Rollout._fields, columns, strict=False):
            ours = np.concatenate([getattr(rollout, name)[:, lane] for rollout in rollouts])
            np.testing.assert_array_equal(ours, column.astype(ours.dtype), err_msg=name)
        np.testing.assert_array_equal(rollouts[-1].bootstrap_observation[lane], bootstrap)


@pytest.fixture(scope="module")
def actor():
    with GymnasiumActor("CartPole-v1", LANES, LENGTH, SEED) as actor:
        yield actor


@pytest.fixture(scope="module")
def rollouts(actor):
    return [actor.rollout(push_where_it_falls) for _ in range(2)]


def test_every_lane_equals_a_single_environment_driven_by_hand(rollouts):
    assert rollouts[0].terminated.any()
    assert_equals_by_hand(rollouts, push_where_it_falls)


def test_lanes_in_worker_processes_give_the_same_bytes(rollouts):
    with GymnasiumActor("CartPole-v1", LANES, LENGTH, SEED, workers=2) as actor:
        again = [actor.rollout(push_where_it_falls) for _ in range(2)]
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(rollouts), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_rollout_is_time_major_numpy_in_the_dtypes_of_the_pure_environments(rollouts):
    leaves = {name: leaf for name, leaf in rollouts[0]._asdict().items() if leaf is not None}
    assert all(type(leaf) is np.ndarray for leaf in leaves.values())
    assert {name: (leaf.shape, leaf.dtype.name) for name, leaf in leaves.items()} == {
        "observation": ((LENGTH, LANES, 4), "float32"),
        "action": ((LENGTH, LANES), "int32"),
        "reward": ((LENGTH, LANES), "float32"),
        "terminated": ((LENGTH, LANES), "bool"),
        "truncated": ((LENGTH, LANES), "bool"),
        "final_observation": ((LENGTH, LANES, 4), "float32"),
        "bootstrap_observation": ((LANES, 4), "float32"),
    }


def test_no_array_of_a_rollout_is_written_again(actor, rollouts):
    for a in jax.tree.leaves(rollouts[0]):
        assert not any(np.shares_memory(a, b) for b in jax.tree.leaves(rollouts[1]))
    kept = jax.tree.map(np.copy, rollouts[1])
    actor.rollout(push_where_it_falls)
    jax.tree.map(np.testing.assert_array_equal, kept, rollouts[1])


def test_a_time_limit_truncates_and_does_not_terminate():
    with GymnasiumActor("CartPole-v1", 2, 501) as actor:
        rollout = actor.rollout(balance)
        assert not rollout.terminated.any()
        assert [list(np.flatnonzero(column)) for column in rollout.truncated.T] == [[499], [499]]
        assert np.abs(rollout.observation[500]).max() <= 0.05
        assert np.abs(rollout.final_observation[499]).max() > 0.05
        np.testing.assert_array_equal(next_observations(rollout)[499], rollout.final_observation[499])
        assert list(actor.statistics.last_return) == [500, 500]


def test_pixels_stay_uint8_and_actions_count_from_zero():
    with GymnasiumActor("ConduitFrames-v0", 2, 10) as actor:
        rollout = actor.rollout(lambda observation: np.array([0, 1]))
        assert (actor.spec.num_actions, actor.spec.observation.shape) == (2, (6, 5, 3))
    assert rollout.observation.dtype == rollout.final_observation.dtype == np.uint8
    assert list(rollout.observation[:, 0, 0, 0, 0]) == [10, 11, 12, 13, 20, 21, 22, 23, 30, 31]
    assert list(rollout.final_observation[[3, 7], 1, 0, 0, 0]) == [14, 24]
    assert list(np.flatnonzero(rollout.truncated[:, 0])) == [3, 7]
    assert rollout.reward[0].tolist() == [5, 6]
    assert rollout.action[0].tolist() == [0, 1]


def test_wide_observations_are_narrowed_as_jax_would():
    with GymnasiumActor("Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3", 1, 2) as actor:
        assert actor.observation_dtype == np.int32
        assert actor.rollout(lambda observation: np.zeros(1, int)).observation.shape == (2, 1)


def test_extras_are_kept_with_their_step_even_if_the_policy_reuses_its_array():
    scores = np.zeros((LANES, 2), np.float32)

    def policy_step(observation):
        scores[:] = observation[:, 2:]
        return balance(observation), {"score": scores}

    with GymnasiumActor("CartPole-v1", LANES, 5) as actor:
        rollout = actor.rollout(policy_step)
    np.testing.assert_array_equal(rollout.extras["score"], rollout.observation[..., 2:])


def test_statistics_are_those_of_the_pure_environments():
    with GymnasiumActor("ConduitFrames-v0", 2, 10) as actor:
        before = actor.statistics
        actor.rollout(lambda observation: np.array([0, 1]))
        statistics = actor.statistics
    assert isinstance(statistics, EpisodeStatistics)
    assert {name: value.tolist() for name, value in statistics._asdict().items()} == {
        "episode_return": [10, 12],
        "episode_length": [2, 2],
        "last_return": [20, 24],
        "last_length": [4, 4],
        "episodes": [2, 2],
        "return_sum": [40, 48],
    }
    assert recent_return(statistics) == recent_return(statistics, since=before) == 22
    assert [leaf.dtype.name for leaf in statistics] == ["float32", "int32", "float32", "int32", "int32", "float32"]


def test_the_spec_is_that_of_the_pure_environment(actor):
    assert actor.spec == make("cartpole").spec


def test_evaluation_seeds_episode_i_with_seed_plus_i_and_leaves_training_alone(actor):
    before = actor.statistics
    returns = actor.evaluate(push_where_it_falls, episodes=5, seed=SEED)
    assert returns.dtype == np.float32
    wanted = []
    for seed in range(SEED, SEED + 5):
        (_, _, reward, terminated, truncated, _), _ = by_hand("CartPole-v1", seed, push_where_it_falls, 200)
        wanted.append(reward[: np.flatnonzero(terminated | truncated)[0] + 1].sum())
    assert returns.tolist() == wanted
    jax.tree.map(np.testing.assert_array_equal, before, actor.statistics)


def test_an_evaluation_episode_that_does_not_end_is_refused(monkeypatch):
    monkeypatch.setattr("conduit_jax.adapters.gymnasium.UNLIMITED_EVALUATION_STEPS", 50)
    with GymnasiumActor("ConduitEndless-v0", 1, 2) as actor, pytest.raises(ConfigError, match="did not end"):
        actor.evaluate(lambda observation: np.zeros(1, int), episodes=1)


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (np.zeros(LANES), SpecError, "float64"),
        (np.zeros(LANES + 1, int), SpecError, "do not fit"),
        (np.full(LANES, 2), ValueRefusedError, "0 to 1"),
        (np.full(LANES, -1), ValueRefusedError, "0 to 1"),
        ((np.zeros(LANES, int), {"value": np.zeros(1)}), SpecError, "lane axis"),
    ],
)
def test_actions_that_do_not_fit_are_refused_before_a_step_is_taken(actor, output, error, message):
    before = actor.statistics
    with pytest.raises(error, match=message):
        actor.rollout(lambda observation: output)
    jax.tree.map(np.testing.assert_array_equal, before, actor.statistics)


@pytest.mark.parametrize(
    ("env_id", "message"), [("ConduitUnbounded-v0", "with bounds"), ("ConduitDict-v0", "FlattenObservation")]
)
def test_spaces_it_cannot_serve_are_refused(env_id, message):
    with pytest.raises(ConfigError, match=message):
        GymnasiumActor(env_id, 1, 2)


@pytest.mark.parametrize("wrong", [{"num_lanes": 0}, {"length": 0}, {"seed": -1}, {"workers": -1}, {"timeout_s": -1}])
def test_arguments_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        GymnasiumActor("CartPole-v1", **{"num_lanes": 1, "length": 1, **wrong})


def test_a_closed_actor_says_so_and_closes_twice():
    actor = GymnasiumActor("CartPole-v1", 1, 2)
    actor.close()
    actor.close()
    with pytest.raises(LifecycleError, match="closed"):
        actor.rollout(balance)
    with pytest.raises(LifecycleError, match="closed"):
        actor.evaluate(balance)


def test_a_worker_that_does_not_answer_is_an_error_and_no_wait_for_ever(tmp_path, monkeypatch):
    module = "import time, gymnasium\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
    module += "class Slow(CartPoleEnv):\n    def step(self, action):\n        time.sleep(60)\n"
    (tmp_path / "conduit_slow_env.py").write_text(module + "gymnasium.register('ConduitSlow-v0', Slow)\n")
    monkeypatch.syspath_prepend(tmp_path)  # spawned workers are given this process' sys.path
    with (
        GymnasiumActor("conduit_slow_env:ConduitSlow-v0", 1, 2, workers=1, timeout_s=0.2) as actor,
        pytest.raises(ConduitError, match="did not answer"),
    ):
        actor.rollout(balance)
    del gymnasium.registry["ConduitSlow-v0"]


def test_acting_imports_neither_jax_nor_before_an_actor_is_built_gymnasium():
    program = """
import sys
import conduit_jax.adapters.gymnasium as adapter
assert "jax" not in sys.modules
assert "gymnasium" not in sys.modules
with adapter.GymnasiumActor("CartPole-v1", 2, 3) as actor:
    steps = actor.collect(lambda observation: [0, 1])
    actor.evaluate(lambda observation: [0, 1], episodes=1)
assert steps["observation"].shape == (3, 2, 4)
assert "jax" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_continuous_actions_are_kept_as_given_and_clipped_on_their_way():
    """Against one plain Pendulum: same start, same torques, three of them beyond the bounds."""
    torques = np.array([0.5, 3.0, -1.0, -7.0, 2.5, 0.0], np.float32)
    turn = iter(torques)
    with GymnasiumActor("Pendulum-v1", 1, len(torques), seed=4) as actor:
        steps = actor.rollout(lambda observation: np.array([[next(turn)]]))
        spec = actor.spec
    plain = gymnasium.make("Pendulum-v1")
    seen, _ = plain.reset(seed=4)
    for t, torque in enumerate(torques):
        np.testing.assert_array_equal(steps.observation[t, 0], seen)
        seen, reward, *_ = plain.step(np.array([np.clip(torque, -2, 2)], np.float32))
        assert steps.reward[t, 0] == pytest.approx(reward, rel=1e-6)
    np.testing.assert_array_equal(steps.action[:, 0, 0], torques)
    assert (spec.num_actions, spec.action_low, spec.action_high) == (None, -2.0, 2.0)
    assert (spec.action.shape, spec.action.dtype) == ((1,), np.float32)


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (np.zeros((1, 1), int), SpecError, "floats"),
        (np.zeros(1), SpecError, "do not fit"),
        (np.full((1, 1), np.nan), ValueRefusedError, "not finite"),
    ],
)
def test_continuous_actions_that_do_not_fit_are_refused(output, error, message):
    with GymnasiumActor("Pendulum-v1", 1, 2) as actor, pytest.raises(error, match=message):
        actor.rollout(lambda observation: output)


def test_a_resumed_actor_goes_on_counting_in_new_episodes():
    with GymnasiumActor("CartPole-v1", 3, 40) as actor, GymnasiumActor("CartPole-v1", 3, 40) as resumed:
        actor.rollout(balance)
        before, state = actor.statistics, actor.state_dict()
        resumed.load_state_dict(state)
        np.testing.assert_array_equal(resumed.statistics.episodes, before.episodes)
        np.testing.assert_array_equal(resumed.statistics.return_sum, before.return_sum)
        assert not resumed.statistics.episode_length.any()
        first = [
            np.array(one.rollout(balance).observation[0]) for one in (resumed, GymnasiumActor("CartPole-v1", 3, 1))
        ]
        assert not np.array_equal(*first)
        assert resumed.state_dict()["seed"] != state["seed"]
