"""PPO on an Experience Data Plane, in one file, read top to bottom.

    conduit-jax train ppo --env cartpole
    python -m conduit_jax.examples.ppo            # the same with the defaults below

Proximal policy optimization (Schulman et al. 2017) with generalized advantage estimation (Schulman et al. 2016), for
discrete or continuous actions, vectors or uint8 images. The path is the plane's: an ingestion hook that scales rewards by
the running spread of their returns and adds the value of what followed, a finalize hook that runs the GAE recursion over
a whole iteration, mini-batches by epochs. The policy that is evaluated is the most probable action of the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import conduit_jax as conduit
from conduit_jax import envs
from conduit_jax.examples.distributions import categorical, gaussian
from conduit_jax.examples.running import NOTHING_KEPT, Algorithm, Keep, Observe, Result, unobserved
from conduit_jax.examples.running import train as run


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is made of: an iteration is ``lanes * rollout_length`` environment steps, seen ``epochs`` times.

    Vector observations enter the networks times ``observation_scale``. ``scale_rewards`` divides rewards by the running
    standard deviation of discounted returns; what is reported is never scaled.
    """

    env: str = "cartpole"
    steps: int = 300_000
    seed: int = 0
    lanes: int = 16
    rollout_length: int = 64
    minibatches: int = 4
    epochs: int = 4
    discount: float = 0.99
    trace: float = 0.95
    clip: float = 0.2
    learning_rate: float = 1e-3
    entropy_weight: float = 0.01
    value_weight: float = 0.5
    gradient_clip: float = 0.5
    hidden: tuple[int, ...] = (64, 64)
    observation_scale: tuple[float, ...] = ()
    scale_rewards: bool = True
    placement: str = "auto"
    schedule: str = "auto"
    evaluation_episodes: int = 20

    @property
    def iterations(self) -> int:
        """Iterations that make up ``steps``."""
        return max(1, self.steps // (self.lanes * self.rollout_length))

    @property
    def updates(self) -> int:
        """Updates of a whole run."""
        return self.iterations * self.epochs * self.minibatches


CARTPOLE: dict[str, Any] = dict(observation_scale=(0.5, 0.5, 5.0, 0.5))
PENDULUM: dict[str, Any] = dict(observation_scale=(1.0, 1.0, 0.125), discount=0.95, epochs=8, entropy_weight=0.0)
REACH: dict[str, Any] = dict(steps=40_960, epochs=3, hidden=(128,), scale_rewards=False, discount=0.95)
PRESETS = {
    "cartpole": CARTPOLE,
    "CartPole-v1": CARTPOLE,
    "pendulum": PENDULUM | dict(steps=200_000),
    "Pendulum-v1": PENDULUM | dict(steps=200_000),
    "reach_128": REACH,
    "reach_256": REACH,
}


def settings_for(env: str, **chosen: Any) -> Settings:
    """Return the settings for ``env``: its preset where there is one, then what was ``chosen`` (``None``: not chosen)."""
    preset = PRESETS.get(env.removeprefix("gymnasium:").removeprefix("jax:"), {})
    return replace(Settings(env=env), **(preset | {name: value for name, value in chosen.items() if value is not None}))


class ActorCritic(nn.Module):
    """What the policy says, ``(batch, outputs)``, and the state's value, ``(batch,)``.

    Vectors go through an MLP for each; ``uint8`` images are cut into 16 x 16 patches, each seen by one layer (a convolution as a
    matrix product, which a CPU is fast at), then go through a strided convolution and an MLP that both share.
    """

    outputs: int
    hidden: tuple[int, ...]

    @nn.compact
    def __call__(self, observation: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = observation.astype(jnp.float32)
        if observation.dtype == jnp.uint8 and observation.ndim == 4:
            x = nn.relu(nn.Dense(16)(_patches(x / 255, observation.shape[1] // 16)))
            x = nn.relu(nn.Conv(32, (4, 4), (2, 2))(x))
            shared = _mlp(x.reshape(x.shape[0], -1), self.hidden, nn.relu)
            policy, value = shared, shared
        else:
            x = x.reshape(x.shape[0], -1)
            policy, value = _mlp(x, self.hidden, nn.tanh), _mlp(x, self.hidden, nn.tanh)
        said = nn.Dense(self.outputs, kernel_init=nn.initializers.orthogonal(0.01))(policy)
        return said, nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0))(value)[:, 0]


def _patches(images: jax.Array, size: int) -> jax.Array:
    """Return ``(batch, height, width, channels)`` as ``(batch, height / size, width / size, size * size * channels)``."""
    batch, height, width, channels = images.shape
    cut = images.reshape(batch, height // size, size, width // size, size, channels)
    return jnp.swapaxes(cut, 2, 3).reshape(batch, height // size, width // size, -1)


def _mlp(x: jax.Array, hidden: tuple[int, ...], activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
    for width in hidden:
        x = activation(nn.Dense(width, kernel_init=nn.initializers.orthogonal(2**0.5))(x))
    return x


class Params(NamedTuple):
    """The network's parameters, and the distribution's free ones."""

    network: Any
    free: jax.Array


class Learner(NamedTuple):
    """Everything an update changes."""

    params: Params
    optimizer: Any
    updates: jax.Array


class Step(NamedTuple):
    """What is stored of a step: ``value`` and ``next_value`` are estimates of the policy that acted."""

    observation: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    next_value: jax.Array
    terminated: jax.Array
    ended: jax.Array


class Batch(NamedTuple):
    """What the learner takes: advantages are standardized over the iteration, ``target`` is what the value should be."""

    observation: jax.Array
    action: jax.Array
    log_prob: jax.Array
    advantage: jax.Array
    target: jax.Array


def make_ppo(spec: envs.EnvironmentSpec, settings: Settings) -> Algorithm:
    """Return PPO for observations and actions of ``spec``."""
    count = spec.num_actions
    distribution = gaussian(*envs.continuous_actions(spec, "PPO")) if count is None else categorical(count)
    network = ActorCritic(distribution.outputs, settings.hidden)
    learning_rate = optax.linear_schedule(settings.learning_rate, 0.0, settings.updates)
    optimizer = optax.chain(optax.clip_by_global_norm(settings.gradient_clip), optax.adam(learning_rate, eps=1e-5))

    def look(params: Params, observation: jax.Array) -> tuple[jax.Array, jax.Array]:
        if settings.observation_scale:
            observation = observation * jnp.asarray(settings.observation_scale, jnp.float32)
        return cast(tuple[jax.Array, jax.Array], network.apply(params.network, observation))

    def init(key: jax.Array) -> Learner:
        observation = jnp.zeros((1, *spec.observation.shape), spec.observation.dtype)
        params = Params(network.init(key, observation), distribution.free)
        return Learner(params, optimizer.init(params), jnp.zeros((), jnp.int32))

    def act(params: Params, observation: jax.Array, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        said, value = look(params, observation)
        action = distribution.draw(said, params.free, key)
        return action, {"log_prob": distribution.log_prob(said, params.free, action), "value": value}

    def act_greedily(params: Params, observation: jax.Array, key: jax.Array) -> jax.Array:
        return distribution.mode(look(params, observation)[0])

    def loss(params: Params, data: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        said, value = look(params, data.observation)
        ratio = jnp.exp(distribution.log_prob(said, params.free, data.action) - data.log_prob)
        clipped = jnp.clip(ratio, 1 - settings.clip, 1 + settings.clip)
        policy_loss = -jnp.mean(jnp.minimum(ratio * data.advantage, clipped * data.advantage))
        value_loss = jnp.mean(optax.l2_loss(value, data.target))
        entropy = jnp.mean(distribution.entropy(said, params.free))
        total = policy_loss + settings.value_weight * value_loss - settings.entropy_weight * entropy
        clip_share = jnp.mean(jnp.abs(ratio - 1) > settings.clip)
        return total, {"loss": total, "value_loss": value_loss, "entropy": entropy, "clip_share": clip_share}

    def train_step(learner: Learner, sample: conduit.Sample) -> tuple[Learner, dict[str, jax.Array]]:
        gradient, metrics = jax.grad(loss, has_aux=True)(learner.params, sample.data)
        change, optimizer_state = optimizer.update(gradient, learner.optimizer, learner.params)
        params = cast(Params, optax.apply_updates(learner.params, change))
        return Learner(params, optimizer_state, learner.updates + 1), metrics

    params_of = lambda learner: learner.params  # noqa: E731
    value = lambda params, observation: look(params, observation)[1]  # noqa: E731
    return Algorithm(init, params_of, act, act_greedily, train_step, context=params_of, value=value)


class Hooks(NamedTuple):
    """``ingestion(carry, rollout, params) -> carry, steps`` and ``finalize(steps) -> batch``, leaves ``(T, lanes, ...)``."""

    ingestion: Callable[[Any, conduit.Rollout, Params], tuple[Any, Step]]
    finalize: Callable[[Step], Batch]


def make_hooks(settings: Settings, value: Callable[[Params, jax.Array], jax.Array]) -> Hooks:
    """Return what a rollout goes through: the value of what followed each step, then advantages over the whole iteration."""

    def value_of_next(rollout: conduit.Rollout, params: Params) -> jax.Array:
        """Return the value of what really followed each step: what acting said of it, but where a time limit cut in."""
        known, final = rollout.extras["value"], rollout.final_observation
        following = jnp.concatenate([known[1:], value(params, rollout.bootstrap_observation)[None]])
        of_final = lambda: value(params, final.reshape(-1, *final.shape[2:])).reshape(known.shape)  # noqa: E731
        cut = jax.lax.cond(jnp.any(rollout.truncated), of_final, lambda: jnp.zeros_like(known))
        return jnp.where(rollout.truncated, cut, following)  # behind a termination it is not used

    def ingestion(carry: Any, rollout: conduit.Rollout, params: Params) -> tuple[Any, Step]:
        next_value = value_of_next(rollout, params)
        reward = rollout.reward
        if settings.scale_rewards:
            carry, reward = conduit.scale_rewards(carry, rollout, discount=settings.discount)
        ended, extras = rollout.terminated | rollout.truncated, rollout.extras
        seen, done = rollout.observation, rollout.action
        step = Step(seen, done, extras["log_prob"], extras["value"], reward, next_value, rollout.terminated, ended)
        return carry, step

    def finalize(steps: Step) -> Batch:
        known = (steps.reward, steps.value, steps.next_value, steps.terminated, steps.ended)
        advantage = conduit.generalized_advantages(*known, discount=settings.discount, trace=settings.trace)
        standard = (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-8)
        return Batch(steps.observation, steps.action, steps.log_prob, standard, advantage + steps.value)

    return Hooks(ingestion, finalize)


def make_plane(settings: Settings, value: Callable[[Params, jax.Array], jax.Array]) -> conduit.ExperiencePlane:
    """Return the plane: rollouts in, mini-batches with standardized advantages out, of this iteration only."""
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OnPolicy(num_minibatches=settings.minibatches, num_epochs=settings.epochs),
        placement=settings.placement,
        schedule=settings.schedule,
        seed=settings.seed,
    )
    hooks = make_hooks(settings, value)
    plane.register_ingestion(hooks.ingestion, init_carry=conduit.reward_scale_carry)
    plane.register_finalize(hooks.finalize)
    return plane


def train(
    settings: Settings, observe: Observe = unobserved, report_every: int = 10, keep: Keep = NOTHING_KEPT
) -> Result:
    """Train for ``settings.steps`` environment steps and evaluate the final policy, greedily, with a fresh key."""
    make_algorithm = lambda spec: make_ppo(spec, settings)  # noqa: E731
    plane_of = lambda ppo: make_plane(settings, ppo.value)  # noqa: E731
    return run(settings, make_algorithm, plane_of, observe, report_every, keep)


if __name__ == "__main__":
    result = train(settings_for("cartpole"), observe=lambda progress: print(progress._replace(latency=None)))
    print(f"evaluation return {result.evaluation_returns.mean():.1f} over {len(result.evaluation_returns)} episodes")
