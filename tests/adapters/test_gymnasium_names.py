"""Environment names on the command line, and what a wrong one is told."""

import sys

import pytest

from conduit_jax.adapters.gymnasium import GymnasiumActor
from conduit_jax.adapters.names import parse_environment_name
from conduit_jax.errors import ConfigError
from conduit_jax.examples import dqn


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("cartpole", ("jax", "cartpole")),
        ("jax:mountain_car", ("jax", "mountain_car")),
        ("gymnasium:CartPole-v1", ("gymnasium", "CartPole-v1")),
        ("gymnasium:gymnasium.envs:CartPole-v1", ("gymnasium", "gymnasium.envs:CartPole-v1")),
    ],
)
def test_a_name_says_its_source(name, parsed):
    assert parse_environment_name(name) == parsed


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cartpol", "did you mean 'cartpole'"),
        ("CartPole-v1", "did you mean 'gymnasium:CartPole-v1'"),
        ("gymnasum:CartPole-v1", "did you mean 'gymnasium'"),
        ("gymnasium:CartPol-v1", "Did you mean: `CartPole`"),
        ("gymnasium:CartPole-v9", "`v1`"),
        ("gymnasium:no_such_module:CartPole-v1", "No module named 'no_such_module'"),
        ("gymnasium:", "Unknown Gymnasium environment"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(name, message):
    with pytest.raises(ConfigError, match=message):
        parse_environment_name(name)


def test_an_actor_of_an_unknown_environment_is_refused_alike():
    with pytest.raises(ConfigError, match="Did you mean: `CartPole`"):
        GymnasiumActor("CartPol-v1", 1, 1)


def test_without_gymnasium_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"pip install 'conduit_jax\[gymnasium\]'"):
        parse_environment_name("gymnasium:CartPole-v1")
    with pytest.raises(ConfigError, match=r"pip install 'conduit_jax\[gymnasium\]'"):
        GymnasiumActor("CartPole-v1", 1, 1)


def test_a_preset_is_found_whoever_runs_the_world():
    for name in ("gymnasium:CartPole-v1", "gymnax:CartPole-v1"):
        assert dqn.settings_for(name).observation_scale == dqn.CARTPOLE["observation_scale"]
    assert dqn.settings_for("jax:mountain_car").hold_exploration
