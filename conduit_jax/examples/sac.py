"""SAC on an Experience Data Plane, in one file, read top to bottom.

    conduit-jax train sac --env pendulum
    python -m conduit_jax.examples.sac            # the same with the defaults below

Soft actor-critic with twin critics and an automatic temperature (Haarnoja et al. 2018b), for continuous actions; vectors
or uint8 images. The policy that is evaluated is the mean action of the one that stands after the last update.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import conduit_jax as conduit
from conduit_jax import envs
from conduit_jax.examples.networks import patches, windows
from conduit_jax.examples.replayed import make_replay_plane
from conduit_jax.examples.running import NOTHING_KEPT, Keep, Observe, Result, show, show_progress, unobserved
from conduit_jax.examples.running import train as run
from conduit_jax.examples.worlds import Algorithm, Ingestion, with_preset


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is made of: ``lanes * rollout_length`` environment steps and ``updates_per_rollout`` updates an iteration.

    Vector observations enter the networks times ``observation_scale``; ``reward_scale`` brings values near 1 and changes
    targets only, never what is reported. The temperature keeps the policy's entropy near minus the number of actions'
    components, in units of the action's half range.
    """

    env: str = "pendulum"
    steps: int = 25_000
    seed: int = 0
    lanes: int = 5
    rollout_length: int = 4
    updates_per_rollout: int = 16
    batch_size: int = 128
    capacity: int = 100_000
    min_size: int = 500
    sampler: str = "uniform"
    max_staleness: int = 4
    discount: float = 0.99
    learning_rate: float = 1e-3
    polyak: float = 0.01
    hidden: tuple[int, ...] = (64, 64)
    observation_scale: tuple[float, ...] = ()
    reward_scale: float = 1.0
    initial_temperature: float = 0.2
    placement: str = "auto"
    schedule: str = "auto"
    evaluation_episodes: int = 20

    @property
    def iterations(self) -> int:
        """Iterations that make up ``steps``."""
        return max(1, self.steps // (self.lanes * self.rollout_length))


PENDULUM: dict[str, Any] = dict(observation_scale=(1.0, 1.0, 0.125), reward_scale=0.1)
REACH: dict[str, Any] = dict(
    steps=20_000, lanes=8, updates_per_rollout=8, batch_size=64, capacity=20_000, discount=0.95, hidden=(128,)
)
PRESETS = {"pendulum": PENDULUM, "Pendulum-v1": PENDULUM, "reach_continuous": REACH}


def settings_for(env: str, **chosen: Any) -> Settings:
    """Return the settings for ``env``: its preset where there is one, then what was ``chosen`` (``None``: not chosen)."""
    settings = with_preset(Settings(env=env), PRESETS, **chosen)
    return replace(settings, min_size=min(settings.min_size, settings.capacity))


class Torso(nn.Module):
    """What both kinds of network see: an MLP on vectors, two strided convolutions (as matrix products) before it on images."""

    hidden: tuple[int, ...]

    @nn.compact
    def __call__(self, observation: jax.Array, *more: jax.Array) -> jax.Array:
        x = observation.astype(jnp.float32)
        if observation.dtype == jnp.uint8 and observation.ndim == 4:
            x = nn.relu(nn.Dense(16)(patches(x / 255)))
            x = nn.relu(nn.Dense(32)(windows(x, 4, 2)))
        x = jnp.concatenate([x.reshape(x.shape[0], -1), *more], axis=-1)
        for width in self.hidden:
            x = nn.relu(nn.Dense(width)(x))
        return x


class Actor(nn.Module):
    """A Gaussian before squashing: ``(mean, log standard deviation)``, each ``(batch, size)``."""

    size: int
    hidden: tuple[int, ...]

    @nn.compact
    def __call__(self, observation: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = Torso(self.hidden)(observation)
        return nn.Dense(self.size)(x), jnp.clip(nn.Dense(self.size)(x), -5.0, 2.0)


class Critic(nn.Module):
    """The value of an action, ``(batch,)``."""

    hidden: tuple[int, ...]

    @nn.compact
    def __call__(self, observation: jax.Array, action: jax.Array) -> jax.Array:
        return nn.Dense(1)(Torso(self.hidden)(observation, action))[:, 0]


class Learner(NamedTuple):
    """Everything an update changes; ``critics`` and ``target`` have a leading axis of two."""

    actor: Any
    critics: Any
    target: Any
    log_temperature: jax.Array
    optimizers: Any
    key: jax.Array
    updates: jax.Array


class ActionRange(NamedTuple):
    """From [-1, 1] to the environment's actions and back."""

    middle: jax.Array
    half: jax.Array

    def to_environment(self, action: jax.Array) -> jax.Array:
        return self.middle + self.half * action

    def from_environment(self, action: jax.Array) -> jax.Array:
        return (action - self.middle) / self.half


def squashed(mean: jax.Array, log_std: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draw actions in (-1, 1) and return them with their log-probabilities: a Gaussian through tanh (appendix C)."""
    noise = jax.random.normal(key, mean.shape)
    raw = mean + jnp.exp(log_std) * noise
    gaussian = -0.5 * noise**2 - log_std - 0.5 * jnp.log(2 * jnp.pi)
    log_slope = 2 * (
        jnp.log(2.0) - raw - nn.softplus(-2 * raw)
    )  # log(1 - tanh(raw)^2), where that would round to log 0
    return jnp.tanh(raw), jnp.sum(gaussian - log_slope, axis=-1)


def make_sac(spec: envs.EnvironmentSpec, settings: Settings) -> Algorithm:
    """Return SAC for observations and actions of ``spec``; ``ConfigError`` where actions are discrete."""
    low, high = envs.continuous_actions(spec, "SAC")
    size = spec.action.size
    actions = ActionRange((high + low).reshape(size) / 2, (high - low).reshape(size) / 2)
    actor, critic = Actor(size, settings.hidden), Critic(settings.hidden)
    optimizer = optax.adam(settings.learning_rate)

    def scaled(observation: jax.Array) -> jax.Array:
        scale = settings.observation_scale
        return observation * jnp.asarray(scale, jnp.float32) if scale else observation

    def act_on(params: Any, observation: jax.Array) -> tuple[jax.Array, jax.Array]:
        return cast(tuple[jax.Array, jax.Array], actor.apply(params, scaled(observation)))

    def values(critics: Any, observation: jax.Array, action: jax.Array) -> jax.Array:
        """Return both critics' values, ``(2, batch)``."""
        observation = scaled(observation)
        return jax.vmap(lambda params: cast(jax.Array, critic.apply(params, observation, action)))(critics)

    def init(key: jax.Array) -> Learner:
        actor_key, critic_key, key = jax.random.split(key, 3)
        observation = jnp.zeros((1, *spec.observation.shape), spec.observation.dtype)
        params = actor.init(actor_key, observation)
        critics = jax.vmap(lambda key: critic.init(key, observation, jnp.zeros((1, size))))(
            jax.random.split(critic_key)
        )
        temperature = jnp.log(jnp.asarray(settings.initial_temperature, jnp.float32))
        optimizers = tuple(optimizer.init(part) for part in (params, critics, temperature))
        return Learner(params, critics, critics, temperature, optimizers, key, jnp.zeros((), jnp.int32))

    def to_world(action: jax.Array) -> jax.Array:
        return actions.to_environment(action).reshape(-1, *spec.action.shape)

    def act(params: Any, observation: jax.Array, key: jax.Array) -> jax.Array:
        return to_world(squashed(*act_on(params, observation), key)[0])

    def act_greedily(params: Any, observation: jax.Array, key: jax.Array) -> jax.Array:
        return to_world(jnp.tanh(act_on(params, observation)[0]))

    def critic_loss(critics: Any, learner: Learner, sample: conduit.Sample, key: jax.Array) -> tuple:
        data = sample.data
        action, log_prob = squashed(*act_on(learner.actor, data.next_observation), key)
        value = jnp.min(values(learner.target, data.next_observation, action), axis=0)
        value = value - jnp.exp(learner.log_temperature) * log_prob
        goal = jax.lax.stop_gradient(settings.reward_scale * data.reward + data.discount * value)
        taken = actions.from_environment(data.action.reshape(-1, size))
        error = values(critics, data.observation, taken) - goal
        return jnp.mean(sample.weights * optax.l2_loss(error)), jnp.mean(jnp.abs(error), axis=0) + 1e-3

    def actor_loss(params: Any, critics: Any, learner: Learner, sample: conduit.Sample, key: jax.Array) -> tuple:
        action, log_prob = squashed(*act_on(params, sample.data.observation), key)
        value = jnp.min(values(critics, sample.data.observation, action), axis=0)
        return jnp.mean(jnp.exp(learner.log_temperature) * log_prob - value), jnp.mean(log_prob)

    def train_step(learner: Learner, sample: conduit.Sample) -> tuple[Learner, dict[str, jax.Array], jax.Array]:
        key, critic_key, actor_key = jax.random.split(learner.key, 3)
        of_critics = jax.value_and_grad(critic_loss, has_aux=True)
        (loss, error), gradient = of_critics(learner.critics, learner, sample, critic_key)
        critics, critic_state = _step(optimizer, gradient, learner.optimizers[1], learner.critics)
        of_actor = jax.grad(actor_loss, has_aux=True)
        gradient, log_prob = of_actor(learner.actor, critics, learner, sample, actor_key)
        params, actor_state = _step(optimizer, gradient, learner.optimizers[0], learner.actor)
        excess = jax.lax.stop_gradient(-log_prob) + size  # entropy above its goal: the temperature falls
        temperature, temperature_state = _step(optimizer, excess, learner.optimizers[2], learner.log_temperature)
        target = optax.incremental_update(critics, learner.target, settings.polyak)
        optimizers = (actor_state, critic_state, temperature_state)
        learner = Learner(params, critics, target, temperature, optimizers, key, learner.updates + 1)
        metrics = {"loss": loss, "entropy": -log_prob, "temperature": jnp.exp(temperature)}
        return learner, metrics, error

    return Algorithm(init, lambda learner: learner.actor, act, act_greedily, train_step)


def _step(optimizer: optax.GradientTransformation, gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
    change, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, change), state


def make_ingestion(settings: Settings) -> Ingestion:
    """Return one-step transitions; nothing is carried."""

    def hook(carry: Any, rollout: conduit.Rollout) -> tuple[Any, conduit.Records]:
        return carry, conduit.Records(conduit.one_step_transitions(rollout, discount=settings.discount))

    return Ingestion(lambda rollout: (), hook)


def make_plane(settings: Settings) -> conduit.ExperiencePlane:
    """Return the plane: one-step transitions in, prioritized or uniform batches out."""
    return make_replay_plane(settings, make_ingestion(settings))


def train(
    settings: Settings, observe: Observe = unobserved, report_every: int = 50, keep: Keep = NOTHING_KEPT
) -> Result:
    """Train for ``settings.steps`` environment steps and evaluate the final policy, greedily, with a fresh key."""
    make_algorithm = lambda spec: make_sac(spec, settings)  # noqa: E731
    return run(settings, make_algorithm, lambda _: make_plane(settings), observe, report_every, keep)


if __name__ == "__main__":
    show(train(settings_for("pendulum"), observe=show_progress))
