"""Agents as lanes, against a small parallel environment whose episodes are known in advance."""

import gymnasium
import numpy as np
import pytest

from conduit_jax.adapters.pettingzoo import ParallelActor
from conduit_jax.errors import ConfigError, SpecError


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
