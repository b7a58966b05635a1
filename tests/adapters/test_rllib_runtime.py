"""RLlib's algorithms on conduit's replay, whole, in a Ray runtime of this process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conduit_jax as conduit

pytest.importorskip("torch", reason="torch is not installed (extra: rllib)")
pytest.importorskip("ray.rllib", reason="RLlib is not installed (extra: rllib)", exc_type=ImportError)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import gymnasium as gym
    import ray
    import torch
    from ray import tune
    from ray.rllib.algorithms.dqn.dqn import DQN

    from conduit_jax.adapters import rllib as conduit_rllib
    from tests.adapters.test_rllib import dqn, of_sample, sac
    from tests.adapters.test_rllib_ppo import ppo

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


def errors_of(results: list[Any]) -> np.ndarray:
    """Return the TD errors of all learners, put together as DQN does."""
    return np.concatenate(
        [np.ravel(part) for result in results for part in result["default_policy"].pop("td_error").peek()]
    )


def test_with_two_learners_and_a_remote_runner_errors_belong_to_their_rows() -> None:
    config = dqn().env_runners(num_env_runners=1, rollout_fragment_length="auto")
    config.training(n_step=(1, 3), train_batch_size_per_learner=8).learners(num_learners=2)
    algo = short(config).build_algo()
    assert algo.train()["conduit"]["batches"] > 10
    assert algo.local_replay_buffer._tables["default_policy"].broken == 0
    ready = of_sample(algo.local_replay_buffer, 16, (1, 3))
    n_step = [of_sample(algo.local_replay_buffer, 16, (1, 3)).columns["default_policy"]["n_step"] for _ in range(4)]
    assert set(torch.cat(n_step).tolist()) == {1, 2, 3}
    local = algo.config.copy(copy_frozen=False).learners(num_learners=0).build_learner(env=gym.make("CartPole-v1"))
    local.module.set_state(algo.learner_group.get_state()["learner"]["rl_module"])
    steps = {"num_env_steps_sampled_lifetime": 200}
    want = errors_of([local.update(episodes=[ready], timesteps=steps)])
    got = errors_of(algo.learner_group.update(episodes=[ready], timesteps=steps))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    algo.stop()


def test_tune_runs_the_attached_class_with_evaluation(tmp_path: Path) -> None:
    config = short(dqn().evaluation(evaluation_interval=1, evaluation_duration=1))
    running = tune.RunConfig(stop={"training_iteration": 1}, storage_path=str(tmp_path), verbose=0)
    (result,) = tune.Tuner(config.algo_class, param_space=config, run_config=running).fit()
    assert result.error is None
    assert result.metrics["conduit"]["stored_steps"] == 160
    assert result.metrics["evaluation"]["env_runners"]["num_episodes"] >= 1


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
