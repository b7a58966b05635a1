"""Laws of the adapter for RLlib that need no Ray runtime: learner, connector, env runner and buffer are built directly."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
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
    from ray.rllib.algorithms.appo.appo import APPOConfig
    from ray.rllib.algorithms.dqn.dqn import DQNConfig
    from ray.rllib.algorithms.ppo.ppo import PPOConfig
    from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
    from ray.rllib.algorithms.sac.sac import SACConfig
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode
    from ray.rllib.utils.minibatch_utils import ShardEpisodesIterator

    from conduit_jax.adapters import rllib as conduit_rllib
    from conduit_jax.adapters.rllib.algorithms import build_buffer
    from conduit_jax.adapters.rllib.connector import ReadyBatch

pytestmark = pytest.mark.filterwarnings("ignore")  # RLlib's own, many


def dqn(**buffer: Any) -> Any:
    config = DQNConfig().environment("CartPole-v1").debugging(seed=3)
    config.training(train_batch_size_per_learner=16, replay_buffer_config={"capacity": 1000, **buffer})
    return config.env_runners(num_env_runners=0, rollout_fragment_length=8)


def sac() -> Any:
    config = SACConfig().environment("Pendulum-v1").debugging(seed=3)
    config.training(replay_buffer_config={"capacity": 1000}, train_batch_size_per_learner=16)
    return config.env_runners(num_env_runners=0, rollout_fragment_length=1)


def frozen() -> Any:
    config = dqn()
    config.freeze()
    return config


class OwnLearner(PPOTorchLearner):
    pass


class OwnDQN(DQNConfig().algo_class):  # type: ignore[misc]
    pass


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "another algorithm": (APPOConfig, {}, "want: a DQNConfig, SACConfig or PPOConfig"),
    "staleness on policy": (PPOConfig, {"max_staleness": 2}, "used once"),
    "an own learner": (lambda: PPOConfig().learners(learner_class=OwnLearner), {}, "own learner class"),
    "no configuration": (dict, {}, "got:  dict"),
    "a class of configurations": (lambda: DQNConfig, {}, "got:  the class DQNConfig"),
    "another framework": (lambda: dqn().framework("tf2"), {}, "torch tensors"),
    "a class of one's own": (lambda: DQNConfig(algo_class=OwnDQN), {}, "derive your algorithm from"),
    "the old stack": (
        lambda: DQNConfig().api_stack(enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False),
        {},
        "old API stack",
    ),
    "an own connector": (lambda: dqn().learners(learner_connector=lambda *spaces: []), {}, "own learner connector"),
    "a recurrent module": (lambda: dqn().rl_module(model_config={"use_lstm": True}), {}, "Recurrent modules"),
    "burn-in": (lambda: dqn().training(burn_in_len=4), {}, "burn_in_len=4"),
    "a frozen configuration": (frozen, {}, "is frozen"),
    "another buffer": (lambda: dqn(type="ReplayBuffer"), {}, "kind of replay buffer"),
    "an unknown setting": (lambda: dqn(prioritized_replay_eps=1e-6), {}, "prioritized_replay_eps"),
    "lockstep": (lambda: dqn(replay_mode="lockstep"), {}, "independently"),
    "no capacity": (lambda: dqn(capacity=0), {}, "capacity"),
    "an unknown option": (dqn, {"max_stalenes": 3}, "did you mean 'max_staleness'"),
    "too stale": (dqn, {"granularity": 4, "max_staleness": 2}, "too stale"),
    "an odd prefetch": (dqn, {"prefetch": 2}, "want: 0, 1"),
    "an odd dtype": (dqn, {"observation_dtype": "float31"}, "did you mean 'float32'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_refused_when_it_is_attached(case: str) -> None:
    make, options, words = REFUSED[case]
    with pytest.raises(conduit.ConfigError, match=words.replace("(", r"\(")):
        conduit_rllib.attach(make(), **options)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda config: config.training(replay_buffer_config={"capacity": 5}), "capacity"),
        (
            lambda config: config.training(replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": 99}),
            "second",
        ),
        (lambda config: config.learners(learner_connector=lambda *spaces: []), "learner connector was changed"),
        (lambda config: config.learners(add_default_connectors_to_learner_pipeline=True), "connector was changed"),
    ],
)
def test_what_is_changed_after_attaching_is_refused_when_it_is_built(change: Callable[[Any], Any], words: str) -> None:
    config = conduit_rllib.attach(dqn())
    change(config)
    with pytest.raises(conduit.ConfigError, match=words):
        build_buffer(config)


@pytest.mark.parametrize("make", [dqn, PPOConfig])
def test_a_backend_that_is_not_there_is_refused_when_it_is_built(make: Callable[[], Any]) -> None:
    config = conduit_rllib.attach(make().environment("CartPole-v1"), backend="gpux")
    with pytest.raises(conduit.ConfigError, match="no such backend"):
        build_buffer(config) if make is dqn else config.build_learner(env=gym.make("CartPole-v1"))


def test_attaching_twice_takes_the_last_options_and_keeps_the_users_own_configuration() -> None:
    config = dqn(alpha=0.7, beta=0.3)
    assert conduit_rllib.attach(conduit_rllib.attach(config), max_staleness=0) is config
    assert config.algo_class is conduit_rllib.ConduitDQN
    buffer = build_buffer(config)
    assert (buffer.settings.capacity, buffer.settings.alpha, buffer.settings.beta) == (1000, 0.7, 0.3)
    assert buffer.options.max_staleness == 0
    config.validate()
    assert conduit_rllib.attach(sac()).algo_class is conduit_rllib.ConduitSAC


def filled(config: Any, samples: int = 12, **given: Any) -> tuple[Any, list[Any]]:
    """Return the buffer of ``config`` with experience of its own env runner, and the chunks that went in."""
    buffer, runner = build_buffer(config), SingleAgentEnvRunner(config=config)
    chunks = [chunk for _ in range(samples) for chunk in runner.sample(num_timesteps=8, random_actions=True)]
    buffer.add(chunks)
    return buffer, chunks


def of_sample(buffer: Any, batch: int = 16, n_step: Any = 1) -> Any:
    (ready,) = buffer.sample(num_items=batch, n_step=n_step, gamma=0.99, beta=None, sample_episodes=True)
    return ready


@pytest.mark.parametrize("make", [dqn, sac])
def test_a_learner_updates_from_ready_columns_and_returns_errors_row_by_row(make: Any) -> None:
    config = conduit_rllib.attach(make())
    buffer, _ = filled(config)
    learner = config.build_learner(env=gym.make(config.env))
    before = [parameter.detach().clone() for parameter in learner.module["default_policy"].parameters()]
    for _ in range(3):
        ready = of_sample(buffer)
        results = learner.update(episodes=[ready], timesteps={"num_env_steps_sampled_lifetime": 100})
        errors = np.concatenate([np.atleast_1d(part) for part in results["default_policy"].pop("td_error").peek()])
        assert errors.shape == (16,)
        buffer.update_priorities(errors, "default_policy")
    after = learner.module["default_policy"].parameters()
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def reference(config: Any, chunks: list[Any], ready: Any) -> dict[str, torch.Tensor]:
    """Return what RLlib's own path from episodes to columns makes of the transitions of ``ready``."""
    episodes: dict[str, Any] = {}
    for chunk in chunks:
        if chunk.id_ in episodes:
            episodes[chunk.id_].concat_episode(chunk)
        else:
            episodes[chunk.id_] = chunk
    where = {
        tuple(episode.get_observations(time).tolist()): (episode, time)
        for episode in episodes.values()
        for time in range(len(episode))
    }
    parts = []
    for row in ready.columns["default_policy"]["obs"].tolist():
        episode, time = where[tuple(row)]
        last = time + 1 == len(episode)
        part = SingleAgentEpisode(
            observations=[episode.get_observations(time), episode.get_observations(time + 1)],
            actions=[episode.get_actions(time)],
            rewards=[episode.get_rewards(time)],
            terminated=last and episode.is_terminated,
            truncated=last and episode.is_truncated,
            extra_model_outputs={"weights": [1.0], "n_step": [1]},
            len_lookback_buffer=0,
        )
        parts.append(part.to_numpy())
    learner = config.build_learner(env=gym.make(config.env))
    return learner._learner_connector(rl_module=learner.module, batch={}, episodes=parts, shared_data={})[
        "default_policy"
    ]


@pytest.mark.parametrize("make", [dqn, sac])
def test_columns_are_those_of_rllibs_own_path_bit_for_bit(make: Any) -> None:
    buffer, chunks = filled(conduit_rllib.attach(make()), 40)
    ready = of_sample(buffer)
    want = reference(make(), chunks, ready)
    got = ready.columns["default_policy"]
    for name in ("obs", "new_obs", "actions", "rewards", "terminateds", "truncateds", "n_step"):
        assert got[name].shape == want[name].shape, name
        assert torch.equal(got[name].to(want[name].dtype), want[name]), name
        if name not in ("actions", "n_step"):
            assert got[name].dtype == want[name].dtype, name


def test_several_learners_get_neighbouring_rows_in_order_so_that_errors_come_back_in_order() -> None:
    buffer, _ = filled(conduit_rllib.attach(dqn()))
    ready = of_sample(buffer)
    shards = list(ShardEpisodesIterator([ready], num_shards=2))
    parts = [pickle.loads(pickle.dumps(part)) for shard in shards for part in shard]
    assert [len(shard) for shard in shards] == [1, 1]
    assert [len(part) for part in parts] == [8, 8]
    for name, whole in ready.columns["default_policy"].items():
        joined = torch.cat([part.columns["default_policy"][name] for part in parts])
        assert torch.equal(joined, whole), name
        assert joined.dtype == whole.dtype


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float16", "bfloat16"])
def test_a_part_of_a_batch_travels_in_its_own_dtype_and_alone(dtype: str) -> None:
    values = torch.arange(40_000).reshape(4, 10_000).to(getattr(torch, dtype))
    part = ReadyBatch({"policy": {"obs": values, "rewards": torch.arange(4.0)}})[1:2]
    sent = pickle.dumps(part, protocol=5)
    assert len(sent) < 1.5 * values[0].nbytes + 5000
    columns = pickle.loads(sent).columns["policy"]
    assert columns["obs"].dtype == values.dtype
    assert torch.equal(columns["obs"], values[1:2])
    assert columns["rewards"].tolist() == [1.0]


def test_a_learner_refuses_episodes_that_are_not_of_conduits_replay() -> None:
    config = conduit_rllib.attach(dqn())
    _, chunks = filled(config)
    learner = config.build_learner(env=gym.make(config.env))
    with pytest.raises(conduit.LifecycleError, match="not by RLlib's DQN or SAC"):
        learner.update(episodes=chunks, timesteps={"num_env_steps_sampled_lifetime": 100})


class Bytes(gym.Env):
    """Observations of four bytes that count the steps."""

    def __init__(self, config: Any):
        self.observation_space = gym.spaces.Box(0, 255, (4,), np.uint8)
        self.action_space = gym.spaces.Discrete(2)
        self.time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.time = 0
        return np.zeros(4, np.uint8), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return np.full(4, self.time, np.uint8), 1.0, self.time == 20, False, {}


def test_bytes_stay_bytes_in_episodes_and_replay_and_are_floats_for_the_modules() -> None:
    config = dqn().environment(Bytes).env_runners(env_to_module_connector=conduit_rllib.cast_observations)
    config = conduit_rllib.attach(config, observation_dtype="float32")
    buffer, runner = build_buffer(config), SingleAgentEnvRunner(config=config)
    chunks = [chunk for _ in range(6) for chunk in runner.sample(num_timesteps=8, random_actions=False)]
    assert {chunk.observations.data.dtype for chunk in chunks} == {np.dtype(np.uint8)}
    buffer.add(chunks)
    assert [leaf.dtype for leaf in buffer._tables["default_policy"].layout.observation] == [np.uint8]
    ready = of_sample(buffer)
    columns = ready.columns["default_policy"]
    assert columns["obs"].dtype == columns["new_obs"].dtype == torch.float32
    assert torch.equal(columns["new_obs"], columns["obs"] + 1)
    config.build_learner(env=Bytes({})).update(episodes=[ready], timesteps={"num_env_steps_sampled_lifetime": 100})


def test_sequences_are_refused() -> None:
    buffer, _ = filled(conduit_rllib.attach(dqn()))
    with pytest.raises(conduit.ConfigError, match="single transitions"):
        buffer.sample(num_items=4, batch_length_T=8, lookback=1)


def test_the_figures_of_an_iteration_are_those_since_the_last() -> None:
    buffer, _ = filled(conduit_rllib.attach(dqn(), max_staleness=2))
    for _ in range(6):
        of_sample(buffer)
    report = buffer.report()
    assert report["batches"] == 6
    assert report["draw_staleness_updates_max"] == 2
    assert report["stored_steps"] == 96
    assert report["exposed_s"] > 0
    assert buffer.report()["batches"] == 0


def test_saved_and_restored_the_buffer_goes_on_with_the_same_bits_and_another_configuration_is_refused() -> None:
    config = conduit_rllib.attach(dqn())
    buffer, _ = filled(config)
    of_sample(buffer)
    other = build_buffer(config)
    other.set_state(pickle.loads(pickle.dumps(buffer.get_state())))
    for _ in range(7):
        want, got = of_sample(buffer).columns["default_policy"], of_sample(other).columns["default_policy"]
        assert all(torch.equal(want[name], got[name]) for name in want)
    with pytest.raises(conduit.CheckpointError, match="configured otherwise"):
        build_buffer(conduit_rllib.attach(dqn(capacity=500))).set_state(buffer.get_state())


def test_actors_load_the_configuration_without_jax() -> None:
    import ray.cloudpickle

    config = conduit_rllib.attach(dqn())
    code = (
        "import sys, warnings, pickle; warnings.simplefilter('ignore');"
        "config = pickle.loads(sys.stdin.buffer.read());"
        "from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner as Runner;"
        "print(len(Runner(config=config).sample(num_timesteps=8, random_actions=True)), 'jax' in sys.modules)"
    )
    env = os.environ | {"RLLIB_TEST_NO_JAX_IMPORT": "1"}  # RLlib itself imports it where flax is installed
    done = subprocess.run(
        [sys.executable, "-c", code], input=ray.cloudpickle.dumps(config), capture_output=True, env=env
    )
    assert done.stdout.decode().strip().endswith("False"), done.stderr.decode()[-2000:]
