"""DQN on an Experience Data Plane, in one file, read top to bottom.

    conduit-jax train dqn --env cartpole
    python -m conduit_jax.examples.dqn            # the same with the defaults below

Double Q-learning (van Hasselt et al. 2016) with n-step returns, a Polyak-averaged target network and a learning rate
that decays to zero; prioritized replay (Schaul et al. 2016) by choice. The policy that is evaluated is the one that
stands after the last update: no checkpoint is picked.
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
from conduit_jax.examples.replayed import make_replay_plane
from conduit_jax.examples.running import NOTHING_KEPT, Keep, Observe, Result, show, show_progress, unobserved
from conduit_jax.examples.running import train as run
from conduit_jax.examples.worlds import Algorithm, Ingestion, with_preset


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is made of: ``lanes * rollout_length`` environment steps and ``updates_per_rollout`` updates an iteration.

    ``hold_exploration``: a lane that explores keeps one random action for the whole rollout, where single random steps
    lead nowhere. Vector observations enter the network as ``(observation - offset) * scale``; ``reward_scale`` brings
    values near 1 and changes targets only, never what is reported.
    """

    env: str = "cartpole"
    steps: int = 100_000
    seed: int = 0
    lanes: int = 20
    rollout_length: int = 5
    updates_per_rollout: int = 8
    batch_size: int = 128
    capacity: int = 100_000
    min_size: int = 1_000
    sampler: str = "uniform"
    max_staleness: int = 4
    n_step: int = 3
    discount: float = 0.99
    learning_rate: float = 1e-3
    polyak: float = 0.05
    hidden: tuple[int, ...] = (64, 64)
    epsilon_final: float = 0.05
    exploration_fraction: float = 0.2
    hold_exploration: bool = False
    observation_offset: tuple[float, ...] = ()
    observation_scale: tuple[float, ...] = ()
    reward_scale: float = 1.0
    gradient_clip: float = 10.0
    placement: str = "auto"
    schedule: str | conduit.Schedule = "auto"
    evaluation_episodes: int = 20

    @property
    def iterations(self) -> int:
        """Iterations that make up ``steps``."""
        return max(1, self.steps // (self.lanes * self.rollout_length))

    @property
    def updates(self) -> int:
        """Updates of a whole run."""
        return self.iterations * self.updates_per_rollout


CARTPOLE: dict[str, Any] = dict(learning_rate=2e-3, observation_scale=(0.5, 0.5, 5.0, 0.5))
MOUNTAIN_CAR: dict[str, Any] = dict(
    steps=300_000,
    rollout_length=15,
    updates_per_rollout=10,
    learning_rate=2e-3,
    hold_exploration=True,
    observation_offset=(-0.3, 0.0),
    observation_scale=(1 / 0.9, 1 / 0.07),
    reward_scale=0.02,
)
AGENTS: dict[str, Any] = CARTPOLE | dict(lanes=8, observation_scale=(0.5, 0.5, 5.0, 0.5, 1.0))
ATARI: dict[str, Any] = dict(
    lanes=8,
    rollout_length=16,
    updates_per_rollout=32,
    batch_size=32,
    capacity=20_000,
    learning_rate=1e-4,
    hidden=(512,),
    reward_scale=0.04,  # a cube of Qbert's is 25
)
PRESETS = {
    "ALE/Qbert-v5": ATARI,
    "multi_agent_cartpole": AGENTS,
    "cartpole": CARTPOLE,
    "CartPole-v1": CARTPOLE,
    "mountain_car": MOUNTAIN_CAR,
    "MountainCar-v0": MOUNTAIN_CAR,
}
PRIORITIZED: dict[str, Any] = dict(updates_per_rollout=12, learning_rate=1e-3)  # prioritized draws want smaller steps


def settings_for(env: str, **chosen: Any) -> Settings:
    """Return the settings for ``env``: its preset where there is one, then what was ``chosen`` (``None``: not chosen)."""
    more = PRIORITIZED if chosen.get("sampler") == "prioritized" else {}
    settings = with_preset(Settings(env=env), PRESETS, more, **chosen)
    return replace(settings, min_size=min(settings.min_size, settings.capacity))


class QNetwork(nn.Module):
    """Action values: an MLP on vectors, three convolutions (Mnih et al. 2015) before it on ``uint8`` images."""

    num_actions: int
    hidden: tuple[int, ...]

    @nn.compact
    def __call__(self, observation: jax.Array) -> jax.Array:
        x = observation.astype(jnp.float32)
        if observation.dtype == jnp.uint8 and observation.ndim > 2:
            x = _channels_last(x) / 255
            for features, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
                x = nn.relu(nn.Conv(features, (kernel, kernel), (stride, stride))(x))
        x = x.reshape(x.shape[0], -1)
        for width in self.hidden:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.num_actions)(x)


def _channels_last(images: jax.Array) -> jax.Array:
    """Return a batch of images as ``(batch, height, width, channels)``: grey ones get a channel, leading channels move back."""
    if images.ndim == 3:
        return images[..., None]
    leading = images.shape[1] <= 4 < images.shape[-1]
    return jnp.moveaxis(images, 1, -1) if leading else images


class Learner(NamedTuple):
    """Everything an update changes."""

    params: Any
    target: Any
    optimizer: Any
    updates: jax.Array


class Policy(NamedTuple):
    """What actors are given: parameters, how often to explore, and a key that is one for a whole rollout."""

    params: Any
    epsilon: jax.Array
    rollout_key: jax.Array


def make_dqn(spec: envs.EnvironmentSpec, settings: Settings) -> Algorithm:
    """Return DQN for observations and actions of ``spec``; ``ConfigError`` where actions are continuous."""
    actions = envs.discrete_actions(spec, "DQN")
    network = QNetwork(actions, settings.hidden)
    learning_rate = optax.linear_schedule(settings.learning_rate, 0.0, settings.updates)
    optimizer = optax.chain(optax.clip_by_global_norm(settings.gradient_clip), optax.adam(learning_rate))
    offset = jnp.asarray(settings.observation_offset or (0.0,), jnp.float32)
    explored = max(1, int(settings.exploration_fraction * settings.updates))
    epsilon = optax.linear_schedule(1.0, settings.epsilon_final, explored)

    def init(key: jax.Array) -> Learner:
        params = network.init(key, jnp.zeros((1, *spec.observation.shape), spec.observation.dtype))
        return Learner(params, params, optimizer.init(params), jnp.zeros((), jnp.int32))

    def values(params: Any, observation: jax.Array) -> jax.Array:
        if settings.observation_scale:
            observation = (observation - offset) * jnp.asarray(settings.observation_scale, jnp.float32)
        return cast(jax.Array, network.apply(params, observation))

    def policy(learner: Learner) -> Policy:
        return Policy(learner.params, jnp.asarray(epsilon(learner.updates), jnp.float32), jax.random.key(0))

    def act(policy: Policy, observation: jax.Array, key: jax.Array) -> jax.Array:
        explore_key, action_key = jax.random.split(policy.rollout_key if settings.hold_exploration else key)
        greedy = jnp.argmax(values(policy.params, observation), axis=-1)
        explore = jax.random.uniform(explore_key, greedy.shape) < policy.epsilon
        return jnp.where(explore, jax.random.randint(action_key, greedy.shape, 0, actions), greedy)

    def act_greedily(policy: Policy, observation: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.argmax(values(policy.params, observation), axis=-1)

    def begin(policy: Policy, key: jax.Array) -> Policy:
        return policy._replace(rollout_key=key)

    def loss(params: Any, target: Any, sample: conduit.Sample) -> tuple[jax.Array, jax.Array]:
        data = sample.data
        rows = jnp.arange(data.action.shape[0])
        chosen = jnp.argmax(values(params, data.next_observation), axis=-1)
        bootstrap = values(target, data.next_observation)[rows, chosen]
        goal = jax.lax.stop_gradient(settings.reward_scale * data.reward + data.discount * bootstrap)
        error = values(params, data.observation)[rows, data.action] - goal
        return jnp.mean(sample.weights * optax.l2_loss(error)), jnp.abs(error) + 1e-3

    def train_step(learner: Learner, sample: conduit.Sample) -> tuple[Learner, dict[str, jax.Array], jax.Array]:
        (value, error), gradient = jax.value_and_grad(loss, has_aux=True)(learner.params, learner.target, sample)
        change, optimizer_state = optimizer.update(gradient, learner.optimizer, learner.params)
        params = optax.apply_updates(learner.params, change)
        target = optax.incremental_update(params, learner.target, settings.polyak)
        return Learner(params, target, optimizer_state, learner.updates + 1), {"loss": value}, error

    return Algorithm(init, policy, act, act_greedily, train_step, begin)


def make_ingestion(settings: Settings) -> Ingestion:
    """Return n-step transitions, full windows across rollouts; the steps that wait for their window are the carry."""
    n, discount = settings.n_step, settings.discount
    if n == 1:  # nothing waits
        return Ingestion(
            lambda rollout: (),
            lambda carry, rollout: (carry, conduit.Records(conduit.one_step_transitions(rollout, discount=discount))),
        )
    return Ingestion(
        lambda rollout: conduit.n_step_carry(rollout, n=n, discount=discount),
        lambda carry, rollout: conduit.n_step_transitions_carried(carry, rollout, n=n, discount=discount),
    )


def make_plane(settings: Settings) -> conduit.ExperiencePlane:
    """Return the plane: n-step transitions in, prioritized or uniform batches out."""
    return make_replay_plane(settings, make_ingestion(settings))


def train(
    settings: Settings, observe: Observe = unobserved, report_every: int = 50, keep: Keep = NOTHING_KEPT
) -> Result:
    """Train for ``settings.steps`` environment steps and evaluate the final policy, greedily, with a fresh key."""
    make_algorithm = lambda spec: make_dqn(spec, settings)  # noqa: E731
    return run(settings, make_algorithm, lambda _: make_plane(settings), observe, report_every, keep)


if __name__ == "__main__":
    show(train(Settings(), observe=show_progress))
