"""gymnax's and brax's interfaces as pure worlds: laws on small worlds with those interfaces, then on the packages themselves.

The packages are extras (``gymnax``, ``brax``): where one is missing, its own tests are skipped by name and the laws still run.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from conduit_jax import envs
from conduit_jax.adapters.brax import from_brax, make_brax
from conduit_jax.adapters.gymnax import from_gymnax, make_gymnax
from conduit_jax.adapters.names import make_pure
from conduit_jax.errors import ConfigError
from conduit_jax.examples import dqn
from tests.adapters.extras import needs

LIMIT, GOAL = 5, 3


@struct.dataclass
class WalkState:
    """Where a walk stands: Python numbers to begin with, as in gymnax, so dtypes are weak at a reset and strong later."""

    place: Any
    time: Any
    noise: Any


class GymnaxWalk:
    """Action 1 goes right, 0 stays; it terminates at ``GOAL`` and is truncated after ``LIMIT`` steps; steps draw noise."""

    name = "Walk"
    default_params = SimpleNamespace(max_steps_in_episode=LIMIT)
    space: Any = SimpleNamespace(n=2)

    def reset_env(self, key, params):
        return jnp.zeros(2), WalkState(0, 0, 0.0)

    def step_env(self, key, state, action, params):
        state = WalkState(state.place + action, state.time + 1, jax.random.uniform(key))
        seen = jnp.stack([state.place, state.time]).astype(jnp.float32)
        return seen, state, 1 * state.place, state.place >= GOAL, {"noise": state.noise}

    def is_truncated(self, state, params):
        return state.time >= params.max_steps_in_episode

    def action_space(self, params):
        return self.space


@struct.dataclass
class BraxStep:
    obs: Any
    reward: Any
    done: Any
    info: dict[str, Any]
    metrics: dict[str, Any]


class BraxWalk:
    """The same walk with brax's interface: an action above 0 goes right; ``done`` is a float, and says nothing of limits."""

    action_size = 1

    def __init__(self, seen=lambda place, time: jnp.stack([place, time]), info=()):
        self.seen, self.info = seen, dict(info)

    def reset(self, key):
        zero = jnp.zeros(())
        return BraxStep(self.seen(zero, zero), zero, zero, {"place": 0, "time": 0} | self.info, {"place": zero})

    def step(self, state, action):
        place, time = state.info["place"] + (action[0] > 0), state.info["time"] + 1
        info = state.info | {"place": place, "time": time}
        seen = self.seen(1.0 * place, 1.0 * time)
        return state.replace(obs=seen, reward=1.0 * place, done=1.0 * (place >= GOAL), info=info)


def steps_of(env, actions):
    """Act in one lane that resets itself; return its first observation and its steps, every leaf ``(T, ...)``."""
    lane = envs.autoreset(env)
    state, first = lane.reset(jax.random.key(3))
    _, steps = jax.jit(lambda state, actions: jax.lax.scan(lane.step, state, actions))(state, jnp.asarray(actions))
    return np.asarray(first), jax.tree.map(np.asarray, steps)


WALKS = {"gymnax": lambda: from_gymnax(GymnaxWalk()), "brax": lambda: from_brax(BraxWalk(), max_steps=LIMIT)}


@pytest.mark.parametrize("kind", WALKS)
def test_a_walk_ends_at_its_goal_or_its_limit_and_what_followed_is_kept(kind):
    env = WALKS[kind]()
    actions = np.array([1, 1, 1, 0, 0, 0, 0, 0, 1, 1])
    _, steps = steps_of(env, actions if kind == "gymnax" else actions[:, None] * 2.0 - 1)
    np.testing.assert_array_equal(steps.terminated, [t == 2 for t in range(10)])
    np.testing.assert_array_equal(steps.truncated, [t == 7 for t in range(10)])
    np.testing.assert_array_equal(steps.reward, [1, 2, 3, 0, 0, 0, 0, 0, 1, 2])
    assert steps.reward.dtype == np.float32
    following = [[1, 1], [2, 2], [3, 3], [0, 1], [0, 2], [0, 3], [0, 4], [0, 5], [1, 1], [2, 2]]
    np.testing.assert_array_equal(steps.final_observation, following)
    shown = [[0, 0] if t in (2, 7) else row for t, row in enumerate(following)]
    np.testing.assert_array_equal(steps.observation, shown)
    assert env.spec.max_steps == LIMIT


@pytest.mark.parametrize("kind", WALKS)
def test_lanes_carry_states_through_a_scan_whatever_dtypes_they_began_with(kind):
    env = WALKS[kind]()
    move = (lambda lanes: jnp.ones(lanes, jnp.int32)) if kind == "gymnax" else (lambda lanes: jnp.ones((lanes, 1)))
    functions = envs.make_rollout(env, lambda parameters, seen, key: move(seen.shape[0]), num_lanes=3, length=7)
    actor = functions.init(jax.random.key(0))
    actor, rollout = jax.jit(functions.rollout)(actor, None, jax.random.key(1))
    np.testing.assert_array_equal(rollout.terminated, np.tile([[False], [False], [True]], (3, 3))[:7])
    assert rollout.observation.shape == (7, 3, 2)
    again = jax.jit(functions.rollout)(functions.init(jax.random.key(0)), None, jax.random.key(1))[1]
    jax.tree.map(np.testing.assert_array_equal, rollout, again)


def test_what_a_gymnax_step_draws_comes_from_the_lanes_first_key():
    env = from_gymnax(GymnaxWalk())
    noise = lambda key: env.step(env.reset(jax.random.key(key))[0], 0)[0].environment.noise  # noqa: E731
    assert noise(0) == noise(0)
    assert noise(0) != noise(1)


def test_a_brax_wrappers_time_limit_truncates_and_one_that_resets_or_has_lanes_is_refused():
    class Limited(BraxWalk):
        def step(self, state, action):
            stepped = super().step(state, action)
            cut = 1.0 * (stepped.info["time"] >= 2)
            return stepped.replace(done=jnp.maximum(stepped.done, cut), info=stepped.info | {"truncation": cut})

    _, steps = steps_of(from_brax(Limited(info={"truncation": 0.0})), -np.ones((4, 1)))
    np.testing.assert_array_equal(steps.truncated, [False, True, False, True])
    assert not steps.terminated.any()
    with pytest.raises(ConfigError, match="resets itself already"):
        from_brax(BraxWalk(info={"first_obs": 0.0}))
    lanes = SimpleNamespace(reset=jax.vmap(BraxWalk().reset), action_size=1)
    with pytest.raises(ConfigError, match="lanes of its own"):
        from_brax(SimpleNamespace(reset=lambda key: lanes.reset(jax.random.split(key, 2)), action_size=1))


def test_of_observations_by_name_one_is_kept_and_without_a_choice_they_are_refused():
    def seen(place, time):
        return {"state": jnp.stack([place, time]), "hidden": place}

    env = from_brax(BraxWalk(seen), max_steps=LIMIT, observation_key="state")
    assert env.spec.observation.shape == (2,)
    np.testing.assert_array_equal(steps_of(env, np.ones((1, 1)))[1].final_observation, [[1, 1]])
    with pytest.raises(ConfigError, match="not one array"):
        from_brax(BraxWalk(seen))
    with pytest.raises(ConfigError, match="no such observation"):
        from_brax(BraxWalk(seen), observation_key="stat")


def test_gymnax_boxes_keep_their_bounds_and_what_cannot_be_taken_is_refused():
    def spec(**space):
        env = GymnaxWalk()
        env.space = SimpleNamespace(**space)
        return from_gymnax(env).spec

    one = spec(low=-2.0, high=2.0, shape=(3,))
    assert (one.num_actions, one.action.shape, one.action_low, one.action_high) == (None, (3,), -2.0, 2.0)
    each = spec(low=np.array([-1.0, -2.0]), high=np.array([1.0, 1.0]), shape=(2,))
    assert (each.action_low, each.action_high) == ((-1.0, -2.0), 1.0)
    with pytest.raises(ConfigError, match="without bounds"):
        spec(low=-np.inf, high=1.0, shape=(1,))
    with pytest.raises(ConfigError, match="cannot be taken"):
        spec(spaces=())
    with pytest.raises(ConfigError, match="truncation from termination"):
        from_gymnax(SimpleNamespace(name="old", default_params=None))


@pytest.mark.parametrize(("name", "extra"), [("gymnax:CartPole-v1", "gymnax"), ("brax:ant", "brax")])
def test_where_a_package_is_missing_the_message_names_the_extra(name, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, extra, None)
    monkeypatch.setitem(sys.modules, f"{extra}.envs", None)
    with pytest.raises(ConfigError, match=rf"pip install 'conduit_jax\[{extra}\]'"):
        make_pure(name)


GYMNAX = ("CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0", "Breakout-MinAtar", "Catch-bsuite")


@pytest.mark.parametrize("name", GYMNAX)
def test_gymnaxs_own_steps_are_given_bit_for_bit(name):
    gymnax = needs("gymnax", "gymnax")
    theirs, params = gymnax.make(name)
    env = make_gymnax(name)
    space = theirs.action_space(params)
    actions = jax.vmap(space.sample)(jax.random.split(jax.random.key(7), 60))
    key, reset_key = jax.random.split(jax.random.split(jax.random.key(3))[1])
    observation, state = theirs.reset_env(reset_key, params)
    lane, first = env.reset(jax.random.split(jax.random.key(3))[1])
    np.testing.assert_array_equal(first, observation)
    step = jax.jit(lambda key, state, action: theirs.step_env(key, state, action, params))  # constants in both
    take = jax.jit(env.step)
    for action in actions:
        key, step_key = jax.random.split(key)
        observation, state, reward, terminated, _ = step(step_key, state, action)
        lane, given = take(lane, action)
        np.testing.assert_array_equal(given.observation, observation)
        assert (given.reward, given.terminated) == (reward, terminated)
        assert given.truncated == theirs.is_truncated(state, params)
        if terminated:
            return


def test_an_unknown_gymnax_name_is_told_the_nearest():
    needs("gymnax", "gymnax")
    with pytest.raises(ConfigError, match="did you mean 'CartPole-v1'"):
        make_pure("gymnax:CartPol-v1")


def test_dqn_trains_in_gymnaxs_cartpole():
    needs("gymnax", "gymnax")
    result = dqn.train(dqn.settings_for("gymnax:CartPole-v1", steps=2_000, min_size=500, evaluation_episodes=4))
    assert result.env_steps == 2_000
    assert (result.evaluation_returns > 0).all()


@pytest.mark.filterwarnings("ignore:Brax System:UserWarning")
def test_braxs_own_steps_are_given_bit_for_bit_and_the_limit_truncates():
    brax = needs("brax.envs", "brax")
    theirs, env = brax.get_environment("fast"), make_brax("fast", max_steps=3)
    state, (lane, first) = theirs.reset(jax.random.key(1)), env.reset(jax.random.key(1))
    np.testing.assert_array_equal(first, state.obs)
    for number in range(3):
        action = jnp.full(theirs.action_size, 0.5)
        state, (lane, given) = theirs.step(state, action), env.step(lane, action)
        np.testing.assert_array_equal(given.observation, state.obs)
        assert (given.reward, given.terminated, given.truncated) == (state.reward, state.done > 0, number == 2)


def test_a_brax_name_may_name_its_backend_and_wrong_ones_are_told_the_nearest():
    needs("brax.envs", "brax")
    with pytest.raises(ConfigError, match="did you mean 'ant'"):
        make_pure("brax:antt")
    with pytest.raises(ConfigError, match="did you mean 'spring'"):
        make_pure("brax:ant:sprin")
