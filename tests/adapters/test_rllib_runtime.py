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
    import ray
    import torch
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
