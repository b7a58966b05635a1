"""Many agents: against as many CartPoles of Gymnasium stepped as PettingZoo's parallel interface says, and as lanes."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conduit_jax.envs import agents_as_lanes, make, make_multi_agent_cartpole, make_rollout, stack_agents
from conduit_jax.envs.cartpole import CartPoleState
from conduit_jax.envs.multi_agent_cartpole import MultiAgentCartPoleState
from conduit_jax.errors import ConfigError

AGENTS = 3
NAMES = [f"pole_{number}" for number in range(AGENTS)]


class Parallel:
    """The model: PettingZoo's parallel interface over Gymnasium's CartPoles; ``agents`` are those still playing."""

    def __init__(self, starts):
        self.poles = {name: gymnasium.make("CartPole-v1").unwrapped for name in NAMES}
        for name, start in zip(NAMES, starts, strict=True):
            self.poles[name].reset()
            self.poles[name].state = np.array(start, np.float64)
        self.agents = list(NAMES)

    def step(self, actions):
        observations, terminations, shared = {}, {}, len(self.agents) / AGENTS
        for name in list(self.agents):
            pole = self.poles[name]
            pole.state = np.array(pole.state, np.float32).astype(np.float64)  # ours keeps float32
            observations[name], _, terminations[name], _, _ = pole.step(actions[name])
        self.agents = [name for name in self.agents if not terminations[name]]
        return observations, shared, terminations


def test_every_agent_is_a_cartpole_until_it_falls_and_all_share_one_reward():
    starts = np.random.default_rng(0).uniform(-0.05, 0.05, (AGENTS, 4)).astype(np.float32)
    poles = CartPoleState(*(jnp.asarray(part) for part in starts.T), steps=jnp.zeros(AGENTS, jnp.int32))
    state = MultiAgentCartPoleState(poles, jnp.ones(AGENTS, bool), jnp.int32(0))
    theirs, step, rng, fallen = (
        Parallel(starts),
        jax.jit(make_multi_agent_cartpole(AGENTS).step),
        np.random.default_rng(1),
        0,
    )
    while theirs.agents:
        actions = {name: int(rng.integers(2)) for name in NAMES}
        observations, shared, terminations = theirs.step(actions)
        state, ours = step(state, actions)
        assert float(ours.reward) == pytest.approx(shared)
        for name in NAMES:
            row = np.asarray(ours.observation[name])
            if name in observations:
                np.testing.assert_allclose(row[:4], observations[name], rtol=1e-4, atol=1e-5)
                assert row[4] == (0 if terminations[name] else 1)
                fallen += terminations[name]
            else:
                np.testing.assert_array_equal(row, 0)
        assert bool(ours.terminated) == (not theirs.agents)
    assert fallen == AGENTS


def test_the_spec_has_every_agent_and_the_time_limit_truncates():
    env = make("multi_agent_cartpole", num_agents=2, max_steps=1)
    state, observation = env.reset(jax.random.key(0))
    assert set(observation) == set(env.spec.observation) == set(env.spec.action) == {"pole_0", "pole_1"}
    assert all(observation[name].shape == env.spec.observation[name].shape for name in observation)
    _, stepped = env.step(state, {"pole_0": 0, "pole_1": 1})
    assert (bool(stepped.terminated), bool(stepped.truncated)) == (False, True)


def test_stacking_changes_the_form_and_nothing_else():
    env = make_multi_agent_cartpole(AGENTS)
    stacked, key = stack_agents(env), jax.random.key(2)
    assert stacked.spec.observation.shape == (AGENTS, 5)
    (state, seen), (same, rows) = env.reset(key), stacked.reset(key)
    for action in ([0, 1, 1], [1, 0, 0], [0, 0, 0]):
        state, stepped = env.step(state, dict(zip(NAMES, action, strict=True)))
        same, row = stacked.step(same, jnp.array(action))
        np.testing.assert_array_equal(row.observation, [stepped.observation[name] for name in NAMES])
        assert (row.reward, row.terminated, row.truncated) == (stepped.reward, stepped.terminated, stepped.truncated)
    assert rows.shape == (AGENTS, 5)
    assert set(seen) == set(NAMES)


def test_as_lanes_every_agent_keeps_its_own_rows_and_its_own_end():
    env = stack_agents(make_multi_agent_cartpole(AGENTS, max_steps=30))

    def policy(parameters, observation, key):  # agent 0 falls first, always pushed one way; the others are balanced
        score = (observation[..., 2] + 0.5 * observation[..., 3] > 0).astype(jnp.int32)
        return score.at[:, 0].set(1), {"agent": jnp.broadcast_to(jnp.arange(AGENTS), score.shape)}

    init, rollout = make_rollout(env, policy, num_lanes=2, length=40)
    _, made = jax.jit(rollout)(jax.jit(init)(jax.random.key(0)), None, jax.random.key(1))
    lanes = agents_as_lanes(made)
    assert lanes.reward.shape == (40, 2 * AGENTS)
    np.testing.assert_array_equal(lanes.observation.reshape(made.observation.shape), made.observation)
    np.testing.assert_array_equal(lanes.extras["agent"][0], [0, 1, 2] * 2)
    np.testing.assert_array_equal(lanes.bootstrap_observation.reshape(2, AGENTS, 5), made.bootstrap_observation)
    for lane in range(2):
        first, second = lanes.terminated[:, lane * AGENTS], lanes.terminated[:, lane * AGENTS + 1]
        falls = int(np.argmax(first))
        assert 5 < falls < 15
        np.testing.assert_array_equal(first[falls:30], True)  # it stays ended until the reset
        assert not second[:30].any()
        np.testing.assert_array_equal(lanes.truncated[:, lane * AGENTS], np.arange(40) == 29)
        assert not first[30]  # and plays again after it
    np.testing.assert_array_equal(lanes.reward[:, 0], lanes.reward[:, 1])


def test_no_agents_are_refused():
    with pytest.raises(ConfigError, match="num_agents"):
        make_multi_agent_cartpole(0)
