"""Frames stored once and stacked when sampled: what a policy saw is what is drawn; Atari's own games where ale-py is there."""

from __future__ import annotations

import sys

import jax
import numpy as np
import pytest

import conduit_jax as conduit
from conduit_jax.adapters.atari import atari_lane
from conduit_jax.adapters.gymnasium import GymnasiumActor
from conduit_jax.adapters.names import make_actor
from conduit_jax.errors import ConfigError
from conduit_jax.examples import atari, dqn
from tests.adapters.extras import needs

STACK = 3


def test_a_policy_sees_stacks_that_begin_with_their_episode_and_rollouts_hold_each_frame_once():
    seen = []

    def acting(stacks):
        assert stacks.shape == (2, STACK, 4)
        seen.append(stacks)
        return np.ones(2, int)  # falls within about ten steps

    actor = GymnasiumActor("CartPole-v1", num_lanes=2, length=40, seed=1, stack=STACK)
    assert actor.spec.observation.shape == (STACK, 4)
    rollout = actor.rollout(acting)
    assert rollout.observation.shape == (40, 2, 4)
    assert rollout.terminated.any(axis=0).all()
    for lane in range(2):
        frames = []
        for t in range(40):
            frames = (
                [rollout.observation[t, lane]] * STACK if not frames else [*frames, rollout.observation[t, lane]]
            )[-STACK:]
            np.testing.assert_array_equal(seen[t][lane], frames)
            if rollout.terminated[t, lane]:
                frames = []
    returns = actor.evaluate(acting, episodes=2, seed=5)
    assert ((returns > 5) & (returns < 15)).all()
    actor.close()


def test_what_is_drawn_is_the_stack_the_policy_saw_and_what_followed():
    seen = []
    lanes, length = 2, 48
    with GymnasiumActor("CartPole-v1", num_lanes=lanes, length=length, seed=1, stack=STACK) as actor:
        rollout = actor.rollout(lambda stacks: seen.append(stacks) or np.ones(lanes, int))
    view = conduit.TransitionView(discount=0.9, stack=STACK)
    config = conduit.ReplayConfig(capacity=lanes * length)
    replay = conduit.make_transition_view(config, view, batch_size=64, lanes=lanes)
    steps = conduit.steps_of(rollout)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), steps)
    state, _ = jax.jit(replay.add)(replay.init(one), steps)
    _, sample = jax.jit(replay.sample)(state.control, state.storage, jax.random.key(0))
    slots = np.asarray(sample.info.slot)
    for row, (lane, t) in enumerate(zip(slots // length, slots % length, strict=True)):
        np.testing.assert_array_equal(sample.data.observation[row], seen[t][lane])
        followed = rollout.final_observation[t, lane] if rollout.terminated[t, lane] else seen[t + 1][lane][-1]
        np.testing.assert_array_equal(sample.data.next_observation[row][-1], followed)
        np.testing.assert_array_equal(sample.data.next_observation[row][:-1], seen[t][lane][1:])
        assert sample.data.discount[row] == (0 if rollout.terminated[t, lane] else np.float32(0.9))


def test_without_ale_py_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    for make in (atari_lane, lambda name: make_actor(f"gymnasium:{name}", 1, 1)):
        with pytest.raises(ConfigError, match=r"ale-py is not installed.*\n.*pip install 'conduit_jax\[atari\]'"):
            make("ALE/Qbert-v5")


def test_qbert_is_seen_in_grey_frames_that_repeat_by_seed():
    needs("ale_py", "atari")

    def rolled(seed):
        with make_actor("gymnasium:ALE/Qbert-v5", 2, 12, seed=seed) as actor:
            assert actor.spec.observation.shape == (4, 84, 84)
            return actor.rollout(lambda seen: np.arange(2) + 1)

    rollout, again, other = rolled(3), rolled(3), rolled(4)
    assert rollout.observation.dtype == np.uint8
    np.testing.assert_array_equal(rollout.observation, again.observation)
    np.testing.assert_array_equal(rollout.observation[1:, :, :3], rollout.observation[:-1, :, 1:])
    assert (rollout.observation != other.observation).any()


def test_a_wrong_game_is_refused():
    needs("ale_py", "atari")
    with pytest.raises(ConfigError, match="Unknown Gymnasium environment"):
        make_actor("gymnasium:ALE/Qbrt-v5", 1, 1)


@pytest.mark.slow
def test_dqn_trains_in_qbert_with_each_frame_stored_once():
    needs("ale_py", "atari")
    settings = dqn.Settings(
        env="ALE/Qbert-v5", steps=256, lanes=2, rollout_length=16, capacity=200, min_size=60, batch_size=4, hidden=(16,)
    )
    with GymnasiumActor("ALE/Qbert-v5", 2, 16, lane=atari_lane("ALE/Qbert-v5"), stack=4) as actor:
        outcome = atari.train(settings, actor)
    assert outcome.updates >= 40
    assert outcome.stored_frames == 200
    assert np.isfinite(outcome.loss)
