"""Laws of the adapter for RLlib with several agents: each module has a replay, the mapping fills it. No Ray runtime."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import conduit_jax as conduit

pytest.importorskip("torch", reason="torch is not installed (extra: rllib)")
pytest.importorskip("ray.rllib", reason="RLlib is not installed (extra: rllib)", exc_type=ImportError)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of RLlib's own imports
    import gymnasium as gym
    import torch
    from ray.rllib.algorithms.dqn.dqn import DQNConfig
    from ray.rllib.env.multi_agent_env import MultiAgentEnv
    from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
    from ray.rllib.examples.envs.classes.multi_agent import MultiAgentCartPole

    from conduit_jax.adapters import rllib as conduit_rllib
    from conduit_jax.adapters.rllib.algorithms import build_buffer
    from tests.adapters.test_rllib import of_sample

pytestmark = pytest.mark.filterwarnings("ignore")  # RLlib's own, many


def multi_agent() -> Any:
    config = DQNConfig().environment(MultiAgentCartPole, env_config={"num_agents": 3}).debugging(seed=1)
    config.training(replay_buffer_config={"type": "MultiAgentPrioritizedEpisodeReplayBuffer", "capacity": 1000})
    config.multi_agent(
        policies={"left", "right"}, policy_mapping_fn=lambda agent, *_, **__: "right" if agent == 2 else "left"
    )
    return conduit_rllib.attach(config.env_runners(num_env_runners=0))


def test_each_module_has_a_replay_of_its_own_filled_by_the_mapping() -> None:
    config = multi_agent()
    buffer, runner = build_buffer(config), MultiAgentEnvRunner(config=config)
    for _ in range(6):
        buffer.add(runner.sample(num_timesteps=20, random_actions=True))
    ready = of_sample(buffer)
    assert set(ready.columns) == {"left", "right"}
    assert len(ready) == 16
    assert buffer.get_num_timesteps("left") > buffer.get_num_timesteps("right") > 50
    assert buffer.get_num_timesteps() == buffer.get_added_timesteps() <= 3 * 120
    learner = config.build_learner(env=MultiAgentCartPole({"num_agents": 3}))
    results = learner.update(episodes=[ready], timesteps={"num_env_steps_sampled_lifetime": 100})
    for name in ("right", "left"):
        buffer.update_priorities(np.concatenate(results[name].pop("td_error").peek(), axis=None), name)


class Turns(MultiAgentEnv):
    """Two agents take turns; what an agent sees is its number and the world's time. It earns the time at which it acts again."""

    possible_agents = agents = [0, 1]  # noqa: RUF012

    def __init__(self, config: Any):
        super().__init__()
        self.observation_spaces = {agent: gym.spaces.Box(0, 99, (2,)) for agent in (0, 1)}
        self.action_spaces = {agent: gym.spaces.Discrete(2) for agent in (0, 1)}
        self.time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.time = 0
        return {0: np.array([0, 0], np.float32)}, {}

    def step(self, actions: Any) -> Any:
        self.time += 1
        agent, over = self.time % 2, self.time == 13
        seen = {one: np.array([one, self.time], np.float32) for one in ((0, 1) if over else (agent,))}
        return seen, {one: float(self.time) for one in seen}, {"__all__": over}, {"__all__": False}, {}


@pytest.mark.parametrize("length", [1, 3, 5])
def test_agents_that_take_turns_keep_their_transitions_however_episodes_are_cut(length: int) -> None:
    config = DQNConfig().environment(Turns).debugging(seed=1)
    config.training(replay_buffer_config={"type": "MultiAgentEpisodeReplayBuffer", "capacity": 1000})
    config.multi_agent(policies={"p0", "p1"}, policy_mapping_fn=lambda agent, *_, **__: f"p{agent}")
    config = conduit_rllib.attach(config.env_runners(num_env_runners=0), max_staleness=0)
    buffer, runner = build_buffer(config), MultiAgentEnvRunner(config=config)
    for _ in range(78 // length):
        buffer.add(runner.sample(num_timesteps=length, random_actions=True))
    for agent in (0, 1):
        assert buffer._tables[f"p{agent}"].broken == 0
    columns = of_sample(buffer, 256).columns
    for agent, times in ((0, range(0, 13, 2)), (1, range(1, 13, 2))):
        part = columns[f"p{agent}"]
        assert set(part["obs"][:, 1].tolist()) == set(times), "every step an agent took is drawn, and no other"
        gap = part["new_obs"][:, 1] - part["obs"][:, 1]
        last = part["new_obs"][:, 1] == 13
        assert ((gap == 2) | last).all()
        assert torch.equal(part["rewards"], part["new_obs"][:, 1])
        assert torch.equal(part["terminateds"], last)


def test_a_module_that_is_not_declared_is_refused_and_one_that_is_not_trained_is_left_out() -> None:
    config = multi_agent()
    runner = MultiAgentEnvRunner(config=config)
    episodes = runner.sample(num_timesteps=20, random_actions=True)
    config.policies_to_train = ["left"]
    buffer = build_buffer(config)
    buffer.add(episodes)
    assert set(of_sample(buffer).columns) == {"left"}
    config.policies = {"left"}
    with pytest.raises(conduit.SpecError, match="policy_mapping_fn"):
        build_buffer(config).add(episodes)
