"""RLlib's algorithms on conduit's replay, whole, in a Ray runtime of this process with two CPUs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import conduit_jax as conduit

pytest.importorskip("torch", reason="torch is not installed (extra: rllib)")
pytest.importorskip("ray.rllib", reason="RLlib is not installed (extra: rllib)", exc_type=ImportError)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import gymnasium as gym
    import numpy as np
    import ray
    import torch
    from ray import tune
    from ray.rllib.algorithms.dqn.dqn import DQN

    from conduit_jax.adapters import rllib as conduit_rllib
    from conduit_jax.adapters.rllib.streaming import Trial
    from tests.adapters.test_rllib import dqn, of_sample, sac
    from tests.adapters.test_rllib_agents import multi_agent
    from tests.adapters.test_rllib_ppo import ppo, ppo_frames

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def runtime() -> Iterator[None]:
    variables = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=100 << 20,
        )
        yield
        ray.shutdown()


def short(config: Any, **options: Any) -> Any:
    config.training(num_steps_sampled_before_learning_starts=64)
    config.reporting(min_sample_timesteps_per_iteration=160, min_time_s_per_iteration=0)
    return conduit_rllib.attach(config, **options)


@pytest.mark.parametrize("make", [dqn, sac])
def test_an_algorithm_trains_reports_and_carries_its_replay_through_a_checkpoint(make: Any, tmp_path: Path) -> None:
    algo = short(make()).build_algo()
    results = [algo.train() for _ in range(2)]
    figures = results[-1]["conduit"]
    assert figures["batches"] > 10
    assert 0 < figures["draw_staleness_updates_max"] <= 4
    assert figures["stored_steps"] == 320
    assert "learners" in results[-1]
    path = algo.save_to_path(str(tmp_path / "checkpoint"))
    restored = type(algo).from_checkpoint(path)
    assert len(restored.local_replay_buffer) == 320
    for _ in range(6):
        want, got = of_sample(algo.local_replay_buffer, 16), of_sample(restored.local_replay_buffer, 16)
        columns = want.columns["default_policy"]
        assert all(torch.equal(columns[name], got.columns["default_policy"][name]) for name in columns)
    assert restored.train()["conduit"]["stored_steps"] == 480
    smaller = make()
    smaller.training(replay_buffer_config={"capacity": 400})
    other = short(smaller).build_algo()
    with pytest.raises(conduit.CheckpointError, match="configured otherwise"):
        other.restore_from_path(path)
    for one in (algo, restored, other):
        one.stop()


def test_equal_seeds_give_equal_training() -> None:
    weights = []
    for _ in range(2):
        algo = short(dqn()).build_algo()
        algo.train()
        weights.append([value for value in algo.get_module("default_policy").state_dict().values()])
        algo.stop()
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_remote_runners_and_a_remote_learner_with_steps_in_a_range() -> None:
    config = dqn().env_runners(num_env_runners=1, rollout_fragment_length="auto")
    config.training(n_step=(1, 3)).learners(num_learners=1)
    algo = short(config).build_algo()
    results = [algo.train() for _ in range(2)]
    assert results[-1]["conduit"]["batches"] > 10
    assert algo.local_replay_buffer._tables["default_policy"].broken == 0
    n_step = [of_sample(algo.local_replay_buffer, 16, (1, 3)).columns["default_policy"]["n_step"] for _ in range(4)]
    assert set(torch.cat(n_step).tolist()) == {1, 2, 3}
    algo.stop()


def errors_of(results: list[Any]) -> Any:
    parts = [part for result in results for part in result["default_policy"].pop("td_error").peek()]
    return np.concatenate(parts, axis=None)


def test_errors_of_two_learners_come_back_in_the_order_of_the_rows() -> None:
    config = dqn(type="PrioritizedEpisodeReplayBuffer").learners(num_learners=2)
    algo = short(config).build_algo()
    assert algo.train()["conduit"]["batches"] > 10
    alone = config.copy(copy_frozen=False).learners(num_learners=0).build_learner(env=gym.make("CartPole-v1"))
    states = [found.get() for found in algo.learner_group.foreach_learner(lambda one: one.module.get_state())]
    alone.module.set_state(states[0])
    ready, timesteps = of_sample(algo.local_replay_buffer, 16), {"num_env_steps_sampled_lifetime": 100}
    got = errors_of(algo.learner_group.update(episodes=[ready], timesteps=timesteps))
    want = errors_of([alone.update(episodes=[ready], timesteps=timesteps)])
    assert len(np.unique(want)) > 8, "rows can be told apart"
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    algo.local_replay_buffer.update_priorities(got, "default_policy")
    algo.stop()


def test_evaluation_workers_beside_training_do_not_touch_the_replay() -> None:
    config = dqn().evaluation(
        evaluation_interval=1, evaluation_num_env_runners=1, evaluation_duration=2, evaluation_parallel_to_training=True
    )
    algo = short(config).build_algo()
    results = [algo.train() for _ in range(2)]
    assert results[-1]["evaluation"]["env_runners"]["num_episodes"] >= 2
    assert results[-1]["conduit"]["stored_steps"] == results[-1]["num_env_steps_sampled_lifetime"]
    algo.stop()


def test_tune_trains_it_and_keeps_its_figures(tmp_path: Path) -> None:
    config = short(dqn())
    config.training(lr=tune.grid_search([1e-3]))
    run = tune.RunConfig(stop={"training_iteration": 1}, storage_path=str(tmp_path), verbose=0)
    (result,) = tune.Tuner(conduit_rllib.ConduitDQN, param_space=config, run_config=run).fit()
    assert result.error is None
    assert result.metrics is not None
    assert result.metrics["conduit"]["batches"] > 10


def test_an_agent_mapped_to_an_unknown_module_is_refused_when_it_is_built() -> None:
    config = multi_agent()
    config.multi_agent(policy_mapping_fn=lambda agent, *_, **__: "middle" if agent == 1 else "left")
    with pytest.raises(conduit.ConfigError, match="Agent 1 is mapped"):
        config.build_algo()


def test_a_recurrent_module_and_rllibs_own_class_are_refused() -> None:
    config = conduit_rllib.attach(dqn())
    config.rl_module(model_config={"use_lstm": True, "max_seq_len": 8})
    with pytest.raises(conduit.ConfigError, match="Recurrent modules"):
        config.build_algo()
    stock = short(dqn())
    algo = DQN(config=stock)
    with pytest.raises(conduit.LifecycleError, match="not by RLlib's DQN or SAC"):
        algo.train()  # 160 steps, learning begins at 64
    algo.stop()


def test_ppo_trains_and_tells_what_was_exposed() -> None:
    config = conduit_rllib.attach(ppo().training(train_batch_size_per_learner=200))
    algo = config.build_algo()
    results = [algo.train() for _ in range(2)]
    assert results[-1]["conduit"]["exposed_s"] > 0
    assert results[-1]["conduit"]["value_forward_s"] > 0
    assert results[-1]["num_env_steps_sampled_lifetime"] == 400
    algo.stop()


@pytest.mark.parametrize("runners", [0, 1])
def test_rollouts_valued_while_sampling_train_as_those_valued_afterwards(runners: int) -> None:
    """To the bit where they are sampled in the same pieces."""
    config = ppo_frames().env_runners(num_env_runners=runners, env_to_module_connector=None)
    learned = []
    for kept in (True, False, None):
        algo = conduit_rllib.attach(config.copy(copy_frozen=False), prefetch=1).build_algo()
        assert algo._streamed is not None
        if kept is None:
            algo._streamed = None  # sampled whole
        else:
            algo._trial = Trial(kept=kept)
        results = [algo.train() for _ in range(2)]
        assert results[-1]["num_env_steps_sampled_lifetime"] == 300
        assert results[-1]["conduit"]["value_wait_s"] > 0
        assert results[-1]["conduit"].get("valued_beside") is kept
        assert "episode_return_mean" in results[-1]["env_runners"]
        learned.append(algo.get_module("default_policy").state_dict())
        algo.stop()
    for name, value in learned[0].items():
        assert torch.equal(value, learned[1][name]), name
        torch.testing.assert_close(value, learned[2][name], rtol=1e-3, atol=1e-4)


def test_an_iteration_of_the_trial_tells_how_its_own_values_were_made() -> None:
    algo = conduit_rllib.attach(ppo_frames().env_runners(env_to_module_connector=None)).build_algo()
    found = [algo.train()["conduit"] for _ in range(3)]
    algo.stop()
    assert [each["valued_beside"] for each in found] == [True, False, False]
    assert [each["trial_left"] for each in found] == [9, 8, 7]


def test_ppo_learns_the_same_with_two_learners_which_stay_equal() -> None:
    """Each learner packs and standardizes its own share of the chunks, as with RLlib; their gradients are averaged."""
    config = ppo().training(train_batch_size_per_learner=100).learners(num_learners=2)
    algo = conduit_rllib.attach(config.env_runners(rollout_fragment_length=200)).build_algo()
    results = [algo.train() for _ in range(2)]
    assert results[-1]["num_env_steps_sampled_lifetime"] == 400
    assert results[-1]["conduit"]["exposed_s"] > 0
    trained = results[-1]["learners"]["__all_modules__"]["num_module_steps_trained"]
    assert trained > 0
    states = [found.get() for found in algo.learner_group.foreach_learner(lambda one: one.module.get_state())]
    one, other = (state["default_policy"] for state in states)
    assert all(np.array_equal(one[name], other[name]) for name in one)
    algo.stop()
