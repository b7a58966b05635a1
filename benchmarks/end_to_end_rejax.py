"""Upstream rejax (fully jitted) on our environments, with the networks' sizes, losses and schedules of our examples.

rejax 0.1.3 steps environments as gymnax 0.0 did, five values a step; gymnax 1.0 gives six. It is handed our own environments in
that form instead, so that both sides simulate the same world. Everything else of it is as it comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import rejax
from gymnax.environments import spaces

from conduit_jax import envs
from conduit_jax.examples import dqn, ppo

Train = Callable[[jax.Array], Any]


class Parameters(NamedTuple):
    """What rejax reads of an environment's parameters."""

    max_steps_in_episode: int


class Adapted:
    """One of our environments as rejax steps it: episodes reset within the step that ends them, a time limit ends them too.

    ``reward_scale`` is that of the targets in our own algorithm, which rejax has no setting for.
    """

    def __init__(self, env: envs.Environment, scale: tuple[float, ...], reward_scale: float = 1.0):
        self._env, self._lane, self._reward_scale = env, envs.autoreset(env), reward_scale
        self._scale = jnp.asarray(scale or (1.0,), jnp.float32)
        self.default_params = Parameters(env.spec.max_steps or 0)

    def reset(self, key: jax.Array, params: Parameters) -> tuple[jax.Array, Any]:
        """Return ``(observation, state)``."""
        state, observation = self._lane.reset(key)
        return observation * self._scale, state

    def step(self, key: jax.Array, state: Any, action: jax.Array, params: Parameters) -> tuple:
        """Return ``(observation, state, reward, done, info)``."""
        state, stepped = self._lane.step(state, action.astype(self._env.spec.action.dtype))
        reward, ended = self._reward_scale * stepped.reward, stepped.terminated | stepped.truncated
        return stepped.observation * self._scale, state, reward, ended, {}

    def observation_space(self, params: Parameters) -> spaces.Box:
        """Return the shape of observations; their bounds are not used."""
        return spaces.Box(-jnp.inf, jnp.inf, self._env.spec.observation.shape, jnp.float32)

    def action_space(self, params: Parameters) -> spaces.Discrete:
        """Return how many actions there are."""
        return spaces.Discrete(envs.discrete_actions(self._env.spec, "rejax"))


def _training(algorithm: Any, spec: envs.EnvironmentSpec) -> tuple[Train, Callable[[Any], Callable]]:
    """Return ``train(key) -> (state,)`` without rejax's evaluations on the way, and ``act(state) -> (observation, key)``."""
    algorithm = algorithm.replace(eval_callback=lambda *_: (), skip_initial_evaluation=True)
    return lambda key: (algorithm.train(key)[0],), algorithm.make_act


def dqn_training(settings: dqn.Settings, env: envs.Environment) -> tuple[Train, Callable[[Any], Callable]]:
    """Return rejax's DQN with ``settings``: an update for every step of the lanes, a target averaged as often."""
    updates = settings.steps // settings.lanes
    algorithm = rejax.DQN.create(
        env=Adapted(env, settings.observation_scale, settings.reward_scale),
        agent_kwargs={"activation": "relu"},
        num_envs=settings.lanes,
        num_epochs=settings.updates_per_rollout // settings.rollout_length,
        buffer_size=settings.capacity,
        fill_buffer=settings.min_size,
        batch_size=settings.batch_size,
        total_timesteps=settings.steps,
        eval_freq=settings.steps,
        learning_rate=optax.linear_schedule(settings.learning_rate, 0.0, updates),
        max_grad_norm=settings.gradient_clip,
        gamma=settings.discount,
        polyak=1 - settings.polyak,
        eps_end=settings.epsilon_final,
        exploration_fraction=settings.exploration_fraction,
    )
    return _training(algorithm, env.spec)


def ppo_training(settings: ppo.Settings, env: envs.Environment) -> tuple[Train, Callable[[Any], Callable]]:
    """Return rejax's PPO with ``settings``."""
    algorithm = rejax.PPO.create(
        env=Adapted(env, settings.observation_scale),
        agent_kwargs={"activation": "tanh", "hidden_layer_sizes": settings.hidden},
        num_envs=settings.lanes,
        num_steps=settings.rollout_length,
        num_minibatches=settings.minibatches,
        num_epochs=settings.epochs,
        total_timesteps=settings.steps,
        eval_freq=settings.steps,
        learning_rate=optax.linear_schedule(settings.learning_rate, 0.0, settings.updates),
        max_grad_norm=settings.gradient_clip,
        gamma=settings.discount,
        gae_lambda=settings.trace,
        clip_eps=settings.clip,
        vf_coef=settings.value_weight,
        ent_coef=settings.entropy_weight,
        normalize_rewards=settings.scale_rewards,
    )
    return _training(algorithm, env.spec)


def evaluated(train: Train, act_of: Callable[[Any], Callable], settings: Any, env: envs.Environment, seeds: int) -> Any:
    """Train ``seeds`` seeds in one program and return each final policy's mean return, as rejax evaluates it."""
    adapted = Adapted(env, settings.observation_scale)
    keys = jax.vmap(jax.random.key)(100 + jnp.arange(seeds))

    def returns(key: jax.Array) -> jax.Array:
        state = train(key)[0]
        limit, count = env.spec.max_steps, settings.evaluation_episodes
        run = rejax.evaluate.evaluate
        return jnp.mean(
            run(act_of(state), jax.random.fold_in(key, 1), adapted, adapted.default_params, count, limit)[1]
        )

    return jax.device_get(jax.jit(jax.vmap(returns))(keys))
