"""Agents as lanes: a small parallel environment whose episodes are known in advance, and PettingZoo's own."""

import sys

import gymnasium
import numpy as np
import pytest

from conduit_jax.adapters.names import make_actor
from conduit_jax.adapters.pettingzoo import ParallelActor
from conduit_jax.errors import ConfigError, LifecycleError, SpecError
from conduit_jax.examples import dqn, ppo
from tests.adapters.extras import needs


class Counting:
    """Agent ``i`` sees (copy's episode, step, i); it terminates at step ``lives[i]``; the rest is truncated at step 4."""

    possible_agents = ("a", "b", "c")
    lives = (2, 9, 3)

    def __init__(self, alike=True):
        self.agents, self.episode, self.alike, self.seeds, self.taken = [], 0, alike, [], []

    def observation_space(self, agent):
        return gymnasium.spaces.Box(-1, 99, (3,) if self.alike or agent == "a" else (4,), np.float64)

    def action_space(self, agent):
        return gymnasium.spaces.Discrete(3)

    def _seen(self):
        return {agent: np.array([self.episode, self.step_number, "abc".index(agent)]) for agent in self.agents}

    def reset(self, seed=None):
        self.seeds.append(seed)
        self.agents, self.step_number, self.episode = list(self.possible_agents), 0, self.episode + 1
        return self._seen(), {}

    def step(self, actions):
        assert set(actions) == set(self.agents), "only those that play act"
        self.taken.append(actions)
        self.step_number += 1
        seen = self._seen()
        over = {agent: self.step_number >= self.lives["abc".index(agent)] for agent in self.agents}
        cut = {agent: self.step_number >= 4 for agent in self.agents}
        rewards = {agent: float(actions[agent]) for agent in self.agents}
        self.agents = [agent for agent in self.agents if not (over[agent] or cut[agent])]
        return seen, rewards, over, cut, {}

    def close(self):
        self.agents = None


def acting(observation):
    return (observation[:, 1] + observation[:, 2]).astype(int) % 3


@pytest.fixture
def steps():
    actor = ParallelActor(Counting, num_lanes=2, length=6, seed=5)
    return actor, actor.rollout(acting)


def test_every_agent_is_a_lane_that_ends_by_itself_and_begins_with_its_copy(steps):
    actor, rollout = steps
    assert (actor.agents, actor.lanes) == (("a", "b", "c"), 6)
    assert rollout.observation.shape == (6, 6, 3)
    assert rollout.observation.dtype == np.float32
    ends = {0: [0, 1, 1, 1, 0, 1], 1: [0, 0, 0, 0, 0, 0], 2: [0, 0, 1, 1, 0, 0]}
    for lane in range(6):
        np.testing.assert_array_equal(rollout.terminated[:, lane], ends[lane % 3])
        np.testing.assert_array_equal(rollout.truncated[:, lane], [lane % 3 == 1 and t == 3 for t in range(6)])


def test_rows_are_what_each_agent_saw_did_and_got_and_zeros_once_it_has_ended(steps):
    _, rollout = steps
    np.testing.assert_array_equal(
        rollout.observation[:, 0], [[1, 0, 0], [1, 1, 0], [0] * 3, [0] * 3, [2, 0, 0], [2, 1, 0]]
    )
    np.testing.assert_array_equal(rollout.observation[:, 4, 1], [0, 1, 2, 3, 0, 1])
    np.testing.assert_array_equal(rollout.final_observation[1, 0], [1, 2, 0])
    np.testing.assert_array_equal(rollout.final_observation[3, 1], [1, 4, 1])
    np.testing.assert_array_equal(rollout.reward[:, 0], [0, 1, 0, 0, 0, 1])
    np.testing.assert_array_equal(rollout.reward[:, 1], rollout.action[:, 1])
    np.testing.assert_array_equal(rollout.bootstrap_observation[:3], [[0, 0, 0], [2, 2, 1], [2, 2, 2]])


def test_the_next_rollout_goes_on_where_the_last_one_stopped(steps):
    actor, rollout = steps
    following = actor.rollout(acting)
    np.testing.assert_array_equal(following.observation[0], rollout.bootstrap_observation)
    assert [copy.seeds for copy in actor._copies] == [[5, *[None] * 3], [6, *[None] * 3]]
    actor.close()


def test_agents_that_differ_are_refused_and_so_are_actions_that_do_not_fit():
    with pytest.raises(ConfigError, match="Agents differ"):
        ParallelActor(lambda: Counting(alike=False), 1, 2)
    with pytest.raises(ConfigError, match="length"):
        ParallelActor(Counting, 1, 0)
    with pytest.raises(SpecError, match="do not fit"):
        ParallelActor(Counting, 1, 2).rollout(lambda observation: np.zeros(2, int))


def test_statistics_count_each_agents_own_episodes_and_go_on_from_a_checkpoint(steps):
    actor, rollout = steps
    statistics = actor.statistics
    np.testing.assert_array_equal(statistics.episodes, [2, 1, 1] * 2)
    np.testing.assert_array_equal(statistics.last_length, [2, 4, 3] * 2)
    np.testing.assert_array_equal(statistics.episode_length, [0, 2, 2] * 2)
    np.testing.assert_array_equal(statistics.return_sum[1], rollout.reward[:4, 1].sum())
    other = ParallelActor(Counting, num_lanes=2, length=6, seed=5)
    other.load_state_dict(actor.state_dict())
    np.testing.assert_array_equal(other.statistics.episodes, statistics.episodes)
    assert not other.statistics.episode_length.any()
    assert other._copies[0].seeds[-1] != actor._copies[0].seeds[0]


def test_an_evaluation_plays_each_episode_once_and_leaves_training_alone(steps):
    actor, rollout = steps
    returns = actor.evaluate(acting, episodes=3, seed=1)
    # Agents a, b, c take (t + i) % 3 for 2, 4 and 3 steps.
    np.testing.assert_allclose(returns, [((0 + 1) + (1 + 2 + 0 + 1) + (2 + 0 + 1)) / 3] * 3)
    np.testing.assert_array_equal(actor.rollout(acting).observation[0], rollout.bootstrap_observation)
    actor.close()
    actor.close()
    with pytest.raises(LifecycleError, match="closed"):
        actor.rollout(acting)


class Joining(Counting):
    """Agent b joins at step 2; c says what it sees in 64-bit integers like the others."""

    def observation_space(self, agent):
        return gymnasium.spaces.Box(0, 99, (3,), np.int64)

    def reset(self, seed=None):
        super().reset(seed)
        self.agents.remove("b")
        return self._seen(), {}

    def step(self, actions):
        given = super().step(actions)
        if self.step_number == 2:
            self.agents.append("b")
            given[0].update(self._seen())
        return given


def test_an_agent_that_joins_late_is_ended_until_then_and_integers_are_narrowed():
    rollout = ParallelActor(Joining, num_lanes=1, length=4).rollout(acting)
    assert rollout.observation.dtype == np.int32
    np.testing.assert_array_equal(rollout.terminated[:, 1], [True, True, False, False])
    np.testing.assert_array_equal(rollout.observation[:, 1], [[0] * 3, [0] * 3, [1, 2, 1], [1, 3, 1]])
    assert rollout.truncated[3, 1]


def test_extras_are_kept_and_agents_that_are_not_named_beforehand_are_refused():
    actor = ParallelActor(Counting, num_lanes=2, length=3)
    rollout = actor.rollout(lambda seen: (acting(seen), {"value": seen[:, 1]}))
    np.testing.assert_array_equal(rollout.extras["value"], rollout.observation[:, :, 1])
    with pytest.raises(ConfigError, match="name its agents beforehand"):
        ParallelActor(type("Unknown", (Counting,), {"possible_agents": ()}), 1, 1)


def test_without_pettingzoo_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    with pytest.raises(ConfigError, match=r"pip install 'conduit_jax\[pettingzoo\]'"):
        make_actor("pettingzoo:butterfly/pistonball-v6", 1, 1)


KNIGHTS = "butterfly/knights_archers_zombies-v11"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (KNIGHTS.replace("archers", "archer"), f"did you mean '{KNIGHTS}'"),
        ("no_such_module.world_v1", "No module named 'no_such_module"),
        ("json", "no parallel environment"),
        ("", "Unknown PettingZoo environment"),
    ],
)
def test_an_unknown_name_is_told_what_there_is(name, message):
    needs("pettingzoo", "pettingzoo")
    with pytest.raises(ConfigError, match=message):
        make_actor(f"pettingzoo:{name}", 1, 1)


def test_pettingzoos_knights_die_one_by_one_and_each_step_is_theirs():
    pettingzoo = needs("pettingzoo", "pettingzoo")
    actor = make_actor(f"pettingzoo:{KNIGHTS}", 1, 200, seed=0)
    assert actor.agents == ("archer_0", "archer_1", "knight_0", "knight_1")
    rollout = actor.rollout(lambda seen: np.zeros(len(seen), int))
    env = pettingzoo.make("parallel", KNIGHTS)
    seen, _ = env.reset(seed=0)
    apart = False
    for t in range(200):
        playing = list(env.agents)
        for lane, agent in enumerate(actor.agents):
            wanted = seen[agent] if agent in playing else np.zeros((27, 5))
            np.testing.assert_array_equal(rollout.observation[t, lane], wanted.astype(np.float32))
        seen, rewards, terminated, _, _ = env.step(dict.fromkeys(playing, 0))
        for lane, agent in enumerate(actor.agents):
            assert rollout.terminated[t, lane] == (terminated[agent] if agent in playing else True)
            assert rollout.reward[t, lane] == (rewards[agent] if agent in playing else 0)
        apart |= 0 < len(env.agents) < 4
        if not env.agents:
            break
    assert apart, "no agent outlived another: the test shows nothing"
    actor.close()
    env.close()


@pytest.mark.parametrize("example", [dqn, pytest.param(ppo, marks=pytest.mark.slow)])
def test_an_algorithm_trains_in_pettingzoos_rock_paper_scissors(example):
    needs("pettingzoo", "pettingzoo")
    settings = example.settings_for("pettingzoo:classic/rps-v2", steps=2_000, evaluation_episodes=2)
    result = example.train(settings)
    assert result.evaluation_returns.shape == (2,)
    assert result.updates > 0
