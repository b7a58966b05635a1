"""Laws of PPO's path: the same steps and advantages as RLlib's own, each step once an epoch, without a Ray runtime."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest

import conduit_jax as conduit
from tests.adapters.rllib_world import chunk

pytest.importorskip("torch", reason="torch is not installed (extra: rllib)")
pytest.importorskip("ray.rllib", reason="RLlib is not installed (extra: rllib)", exc_type=ImportError)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of RLlib's own imports
    import gymnasium as gym
    import torch
    from ray.rllib.algorithms.ppo.ppo import PPOConfig
    from ray.rllib.core.learner.training_data import TrainingData
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

    from conduit_jax.adapters import rllib as conduit_rllib
    from conduit_jax.adapters.rllib import rollouts

pytestmark = pytest.mark.filterwarnings("ignore")  # RLlib's own, many


def ppo(environment: str = "CartPole-v1") -> Any:
    config = PPOConfig().environment(environment).debugging(seed=5)
    return config.env_runners(num_env_runners=0).training(minibatch_size=32, num_epochs=3, gamma=0.97, lambda_=0.9)


def learner_of(config: Any) -> Any:
    return config.build_learner(env=gym.make(config.env))


def rollout(config: Any, steps: int = 100) -> list[Any]:
    runner = SingleAgentEnvRunner(config=config)
    return [episode for _ in range(2) for episode in runner.sample(num_timesteps=steps, random_actions=False)]


def batches(learner: Any, episodes: list[Any], size: int | None, epochs: int, shuffled: bool = True) -> list[Any]:
    iterator = learner._create_iterator_if_necessary(
        training_data=TrainingData(episodes=copy.deepcopy(episodes)),
        minibatch_size=size,
        num_epochs=epochs,
        shuffle_batch_per_epoch=shuffled,
    )
    return [batch.policy_batches["default_policy"] for batch in iterator]


@pytest.mark.parametrize("environment", ["CartPole-v1", "Pendulum-v1"])
def test_steps_and_value_targets_are_rllibs_own_and_advantages_but_for_their_scale(environment: str) -> None:
    stock = learner_of(ppo(environment))
    ours = learner_of(conduit_rllib.attach(ppo(environment)))
    ours.module.set_state(stock.module.get_state())
    episodes = rollout(ppo(environment))
    (want,) = batches(stock, episodes, None, 1)
    (got,) = batches(ours, episodes, None, 1)
    real = want["loss_mask"]
    assert len(got["obs"]) == int(real.sum()) == sum(len(episode) for episode in episodes)
    for name in ("obs", "actions", "action_logp", "action_dist_inputs"):
        assert torch.equal(got[name].to(want[name].dtype), want[name][real]), name
    torch.testing.assert_close(got["value_targets"], want["value_targets"][real], rtol=1e-4, atol=1e-4)
    ratio = got["advantages"].numpy() - np.polyval(
        np.polyfit(want["advantages"][real].numpy(), got["advantages"].numpy(), 1), want["advantages"][real].numpy()
    )
    assert np.abs(ratio).max() < 1e-4, "one is a linear function of the other"
    assert abs(float(got["advantages"].mean())) < 1e-4
    assert float(got["advantages"].std(correction=0)) == pytest.approx(1, abs=1e-3)


def test_an_epoch_has_every_step_once_and_is_shuffled_by_the_seed() -> None:
    config = conduit_rllib.attach(ppo())
    episodes = rollout(config)
    seen = batches(learner_of(config), episodes, 40, 3)
    assert [len(batch) for batch in seen] == [40] * 15
    rows = torch.cat([batch["obs"] for batch in seen]).reshape(3, 200, 4).tolist()
    epochs = [sorted(map(tuple, epoch)) for epoch in rows]
    assert epochs[0] == epochs[1] == epochs[2]
    assert rows[0] != rows[1] != rows[2]
    again = batches(learner_of(config), episodes, 40, 3)
    assert all(torch.equal(one["obs"], other["obs"]) for one, other in zip(seen, again, strict=True))
    plain = batches(learner_of(config), episodes, 64, 2, shuffled=False)
    whole = torch.cat([batch["obs"] for batch in plain])
    assert len(plain) == 7, "what is left of an epoch shares a minibatch with the next"
    assert torch.equal(whole[:200], whole[200:400])


def test_the_learner_updates_and_tells_what_was_exposed() -> None:
    config = conduit_rllib.attach(ppo())
    learner = learner_of(config)
    before = [value.clone() for value in learner.module["default_policy"].state_dict().values()]
    results = learner.update(
        episodes=rollout(config),
        timesteps={"num_env_steps_sampled_lifetime": 200},
        num_epochs=3,
        minibatch_size=32,
        shuffle_batch_per_epoch=True,
    )
    after = learner.module["default_policy"].state_dict().values()
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert results["__all_modules__"]["conduit_exposed_s"].peek() > 0


def test_images_are_packed_as_bytes_and_cast_a_minibatch_at_a_time() -> None:
    form = {"shape": (16, 16, 3), "dtype": "uint8"}
    packed = rollouts.pack([chunk(1, 0, 5, **form), chunk(1, 5, 5), chunk(1, 5, 9, "terminated", **form)], ())
    assert packed is not None
    assert (packed.steps, packed.used) == (9, 11)
    assert packed.observations[0].dtype == np.uint8
    import jax

    made = rollouts.Rollout(packed, jax.devices("cpu")[0], "float32")
    made.estimate(np.zeros(11, np.float32), 0.9, 0.9)
    (columns,) = made.deliver(made.dispatch(np.arange(9, dtype=np.int32)[None]))
    assert columns["obs"].dtype == torch.float32
    assert columns["obs"].reshape(9, -1)[:, 1].tolist() == list(range(9))
    assert columns["actions"].tolist() == [100 + time for time in range(9)]
    assert torch.cat(list(made.observations())).dtype == torch.uint8


def test_what_the_path_cannot_serve_is_refused() -> None:
    made = chunk(1, 0, 5)
    made.extra_model_outputs = {}
    with pytest.raises(conduit.SpecError, match="does not tell"):
        rollouts.pack([made], ("action_logp",))
    assert rollouts.pack([chunk(1, 0, 0)], ()) is None
