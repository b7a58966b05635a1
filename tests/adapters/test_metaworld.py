"""Meta-World's own robot tasks as lanes: states, goals drawn by seed, time limits; pixels, or why there are none."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from conduit_jax.adapters.metaworld import metaworld_lane
from conduit_jax.adapters.names import make_actor
from conduit_jax.errors import ConfigError
from conduit_jax.examples import sac
from tests.adapters.extras import needs


def test_without_meta_world_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "metaworld", None)
    with pytest.raises(ConfigError, match=r"pip install 'conduit_jax\[metaworld\]'"):
        make_actor("metaworld:reach-v3", 1, 1)


@pytest.mark.parametrize(
    ("name", "message"), [("reach-v9", "did you mean 'reach-v3'"), ("reach-v3:pixel", "did you mean 'pixels'")]
)
def test_a_wrong_task_is_told_the_nearest(name, message):
    needs("metaworld", "metaworld")
    with pytest.raises(ConfigError, match=message):
        metaworld_lane(name)


def test_lanes_see_their_goals_repeat_by_seed_and_are_truncated_at_the_limit():
    needs("metaworld", "metaworld")

    def rolled(seed):
        with make_actor("metaworld:reach-v3", 2, 502, seed=seed) as actor:
            assert actor.spec.observation.shape == (39,)
            assert (actor.spec.action.shape, actor.spec.action_low, actor.max_steps) == ((4,), -1.0, 500)
            return actor.rollout(lambda seen: np.full((2, 4), 0.25, np.float32))

    rollout, again, other = rolled(3), rolled(3), rolled(4)
    for name in ("observation", "reward", "final_observation"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(again, name))
    goals = rollout.observation[..., -3:]
    assert (goals[:500] == goals[0]).all(), "the goal stays for an episode"
    assert (goals[0, 0] != goals[0, 1]).any()
    assert (goals[500] != goals[0]).any(axis=-1).all(), "and is drawn anew for the next"
    assert (goals[0] != other.observation[0, :, -3:]).any()
    np.testing.assert_array_equal(rollout.truncated[:, 0], [t == 499 for t in range(502)])
    assert not rollout.terminated.any()
    assert np.isfinite(rollout.observation).all()


def test_pixels_are_images_where_they_can_be_drawn_and_else_the_reason_is_told():
    needs("metaworld", "metaworld")
    try:
        lane, reason = metaworld_lane("reach-v3:pixels"), ""
    except ConfigError as error:
        lane, reason = None, str(error)
    if lane is None:
        assert "cannot be drawn here" in reason
        assert "MUJOCO_GL" in reason
        return
    env = lane.make()
    seen, _ = env.reset(seed=0)
    assert (seen.dtype, seen.shape) == (np.uint8, (128, 128, 3))
    assert len(np.unique(seen)) > 10
    env.close()


@pytest.mark.slow
def test_sac_trains_in_meta_worlds_reaching():
    needs("metaworld", "metaworld")
    settings = sac.settings_for("metaworld:reach-v3", steps=600, evaluation_episodes=1)
    assert sac.train(settings).evaluation_returns.shape == (1,)
