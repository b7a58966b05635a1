"""Laws of PPO's path: the same steps and advantages as RLlib's own, each step once an epoch, without a Ray runtime."""

from __future__ import annotations

import copy
import pickle
import warnings
from types import SimpleNamespace
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
    from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
    from ray.rllib.core.learner.training_data import TrainingData
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

    from conduit_jax.adapters import rllib as conduit_rllib
    from conduit_jax.adapters.rllib import rollouts, streaming
    from conduit_jax.adapters.rllib.ppo import check_attached

pytestmark = pytest.mark.filterwarnings("ignore")  # RLlib's own, many


def ppo(environment: str = "CartPole-v1") -> Any:
    config = PPOConfig().environment(environment).debugging(seed=5)
    return config.env_runners(num_env_runners=0).training(minibatch_size=32, num_epochs=3, gamma=0.97, lambda_=0.9)


def learner_of(config: Any) -> Any:
    made = gym.make(config.env) if isinstance(config.env, str) else config.env({})
    return config.build_learner(env=made)


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
    again = batches(learner_of(conduit_rllib.attach(ppo(), prefetch=0)), episodes, 40, 3)
    assert all(torch.equal(one["obs"], other["obs"]) for one, other in zip(seen, again, strict=True))
    plain = batches(learner_of(config), episodes, 64, 2, shuffled=False)
    whole = torch.cat([batch["obs"] for batch in plain])
    assert len(plain) == 7, "what is left of an epoch shares a minibatch with the next"
    assert torch.equal(whole[:200], whole[200:400])


def test_a_restored_learner_goes_on_with_the_shuffles_that_were_to_come() -> None:
    config = conduit_rllib.attach(ppo())
    episodes, one, other = rollout(config), learner_of(config), learner_of(config)
    first = torch.cat([batch["obs"] for batch in batches(one, episodes, 50, 2)])
    state = one.get_state()
    second = torch.cat([batch["obs"] for batch in batches(one, episodes, 50, 2)])
    assert not torch.equal(first, second)
    other.set_state(pickle.loads(pickle.dumps(state)))
    assert torch.equal(torch.cat([batch["obs"] for batch in batches(other, episodes, 50, 2)]), second)
    assert "conduit_draws" not in one.get_state(components="rl_module"), "weights are sent alone"
    other.set_state({name: part for name, part in state.items() if name != "conduit_draws"})


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


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.learners(learner_class=PPOTorchLearner),
        lambda config: config.learners(learner_connector=lambda *spaces: []),
        lambda config: setattr(config, "learner_config_dict", {}),
    ],
    ids=["learner", "connector", "mark"],
)
def test_a_learner_that_is_changed_after_attaching_is_refused_when_it_is_built(change: Any) -> None:
    config = conduit_rllib.attach(ppo())
    check_attached(config)
    change(config)
    with pytest.raises(conduit.ConfigError, match="changed after attach"):
        check_attached(config)


def test_images_are_packed_as_bytes_and_cast_a_minibatch_at_a_time() -> None:
    form = {"shape": (16, 16, 3), "dtype": "uint8"}
    packing = rollouts.pack([chunk(1, 0, 5, **form), chunk(1, 5, 5), chunk(1, 5, 9, "terminated", **form)], ())
    assert (packing.steps, packing.used) == (9, 11)
    assert torch.cat(list(packing.tensors(0, 11))).dtype == torch.uint8
    packing.value(np.zeros(11, np.float32))
    packed = packing.finish()
    assert packed is not None
    assert packed.observations[0].dtype == np.uint8
    import jax

    made = rollouts.Rollout(packed, jax.devices("cpu")[0], "float32", gamma=0.9, lambda_=0.9)
    (columns,) = rollouts.minibatches({"policy": made}, {"policy": np.arange(9, dtype=np.int32)[None]})
    columns = columns["policy"]
    assert columns["obs"].dtype == torch.float32
    assert columns["obs"].reshape(9, -1)[:, 1].tolist() == list(range(9))
    assert columns["actions"].tolist() == [100 + time for time in range(9)]


def test_what_the_path_cannot_serve_is_refused() -> None:
    made = chunk(1, 0, 5)
    made.extra_model_outputs = {}
    with pytest.raises(conduit.SpecError, match="does not tell"):
        rollouts.pack([made], ("action_logp",))
    assert rollouts.pack([chunk(1, 0, 0)], ()).finish() is None


@pytest.mark.parametrize("expected", [0, 30])
def test_chunks_of_a_group_are_packed_as_though_they_had_not_been_cut(expected: int) -> None:
    """Two environments in turn, cut three times: rows are shared at the cuts, steps follow each other by episode."""
    pieces = [(1, 0, 4, "open"), (2, 0, 4, "open"), (1, 4, 9, "terminated"), (2, 4, 8, "open"), (3, 0, 0, "open")]
    pieces += [(3, 0, 3, "open"), (2, 8, 11, "truncated")]
    cut, whole = rollouts.Packing((), expected), rollouts.Packing(())
    for piece in pieces:
        cut.value(np.arange(*cut.add(chunk(*piece, lookback=2), 0), dtype=np.float32))
    for piece in [(1, 0, 9, "terminated"), (2, 0, 11, "truncated"), (3, 0, 3, "open")]:
        whole.add(chunk(*piece), 0)
    got, want = cut.finish(), whole.finish()
    assert got is not None
    assert want is not None
    assert (got.steps, got.used) == (want.steps, want.used) == (23, 26)
    for name in ("rewards", "going", "joined"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), name)
    np.testing.assert_array_equal(got.columns["actions"][0], want.columns["actions"][0])
    for name in ("row", "after"):
        rows = [packed.observations[0][getattr(packed, name)[:23]] for packed in (got, want)]
        np.testing.assert_array_equal(*rows, name)
    assert got.values[:26].tolist() == list(range(26)), "each row has been valued once"
    apart = rollouts.Packing(())
    for number, piece in enumerate(pieces):
        apart.add(chunk(*piece), number)
    parts = apart.finish()
    assert parts is not None
    assert parts.used == 23 + 6, "what RLlib cut stays cut"


def frames() -> Any:
    """Return a class that actors get by value."""

    class Frames(gym.Env):
        """Frames whose sum tells the step; an episode has 23 steps."""

        def __init__(self, config: Any):
            self.observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.float32)
            self.action_space = gym.spaces.Discrete(2)
            self.time = 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.time = 0
            return np.zeros((64, 64, 3), np.float32), {}

        def step(self, action: Any) -> Any:
            self.time += 1
            seen = np.full((64, 64, 3), self.time, np.float32)
            return seen, float(self.time % 3), self.time == 23, False, {}

    return Frames


def ppo_frames() -> Any:
    config = ppo().environment(frames()).training(train_batch_size_per_learner=150)
    model = {"conv_filters": [[4, 8, 8]], "head_fcnet_hiddens": [8], "fcnet_hiddens": [8]}
    return config.rl_module(model_config=model)


@pytest.mark.parametrize("environments", [1, 3])
def test_a_fragment_sampled_in_pieces_is_the_fragment(environments: int) -> None:
    config = ppo_frames().env_runners(num_envs_per_env_runner=environments)
    assert streaming.is_worth_it(config, config.env({}).observation_space)
    assert not streaming.is_worth_it(config, gym.spaces.Box(0, 1, (4,)))
    torch.manual_seed(0)
    whole = SingleAgentEnvRunner(config=config).sample()
    torch.manual_seed(0)
    runner, taken = SingleAgentEnvRunner(config=config), []
    group = SimpleNamespace(local_env_runner=runner, num_remote_env_runners=lambda: 0)
    sampled = streaming.sample_streamed(group, config, lambda chunks, turn: taken.append((turn, chunks)))
    assert sampled.pieces == len(streaming.boundaries(150 // environments)) == len(taken)
    assert {turn for turn, _ in taken} == {0}
    assert len(sampled.metrics) == 1
    assert sampled.episodes == [chunk for _, chunks in taken for chunk in chunks]
    assert sum(map(len, sampled.episodes)) == sum(map(len, whole))
    joined: dict[str, list[Any]] = {}
    for part in sampled.episodes:
        joined.setdefault(part.id_, []).append(part)
    found = {tuple(np.concatenate([part.get_rewards() for part in parts])) for parts in joined.values()}
    assert found == {tuple(part.get_rewards()) for part in whole}
    learner = learner_of(conduit_rllib.attach(config))
    streamed = []
    for beside in (True, False):
        learner.begin_stream(150, beside=beside)
        for turn, chunks in taken:
            learner.stream(chunks, turn)
        streamed += whole_batch(learner, sampled.episodes)
        assert learner.waited > 0
    got, after = streamed
    for name in ("obs", "advantages", "value_targets"):
        assert torch.equal(got[name], after[name]), "valued beside sampling or after it"
    (want,) = whole_batch(learner, whole)
    assert len(got["obs"]) == len(want["obs"]) == sum(map(len, whole))
    order, other = (np.lexsort(batch["action_logp"].numpy()[None]) for batch in (got, want))
    for name in ("obs", "advantages", "value_targets"):
        torch.testing.assert_close(got[name][order], want[name][other], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("slower", [True, False])
def test_values_are_made_beside_sampling_where_that_was_quicker_by_the_median(slower: bool) -> None:
    trial, tried = streaming.Trial(), []
    while trial.left:
        tried.append(trial.beside)
        outlier = 50.0 if len(tried) in (1, 4) else 0.0  # compilation, and something that hits what is quicker
        trial.enter(outlier + (1.1 if tried[-1] is slower else 1.0))
    assert sorted(tried[2:]) == [False] * 4 + [True] * 4
    for _ in range(3):
        assert trial.beside is not slower
        trial.enter(0.0 if slower else 9.0)
    assert (streaming.Trial(kept=True).left, streaming.Trial(kept=True).beside) == (0, True)


def whole_batch(learner: Any, episodes: list[Any]) -> list[Any]:
    iterator = learner._create_iterator_if_necessary(training_data=TrainingData(episodes=episodes))
    return [batch.policy_batches["default_policy"] for batch in iterator]


def test_what_breaks_on_the_streaming_thread_is_raised_by_the_update() -> None:
    learner = learner_of(conduit_rllib.attach(ppo()))
    made = chunk(1, 0, 5)
    made.extra_model_outputs = {}
    learner.begin_stream(5)
    learner.stream([made], 0)
    with pytest.raises(conduit.SpecError, match="does not tell"):
        whole_batch(learner, [made])


def test_pieces_cover_a_fragment_and_the_last_is_small() -> None:
    for length in (1, 2, 7, 8, 100, 400):
        ends = streaming.boundaries(length)
        assert ends[-1] == length
        assert ends == sorted(set(ends))
    assert np.diff([0, *streaming.boundaries(400)]).tolist() == [50] * 7 + [25, 13, 12]
