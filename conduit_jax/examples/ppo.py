"""PPO on an Experience Data Plane, in one file, read top to bottom.

    conduit-jax train ppo --env cartpole
    python -m conduit_jax.examples.ppo            # the same with the defaults below

Proximal policy optimization (Schulman et al. 2017) with generalized advantage estimation (Schulman et al. 2016), for
discrete or continuous actions, vectors or uint8 images. The path is the plane's: an ingestion hook that scales rewards by
the running spread of their returns and adds the value of what followed (and, where asked for, keeps statistics of
observations and of value targets), a finalize hook that runs the GAE recursion over
a whole iteration, mini-batches by epochs. The policy that is evaluated is the most probable action of the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

import conduit_jax as conduit
from conduit_jax import envs
from conduit_jax.errors import ConfigError, refuse
from conduit_jax.examples.distributions import categorical, gaussian
from conduit_jax.examples.networks import ActorCritic
from conduit_jax.examples.normalized import Statistics, ValueUnit, as_seen, value_unit
from conduit_jax.examples.running import NOTHING_KEPT, Keep, Observe, Result, show, show_progress, unobserved
from conduit_jax.examples.running import train as run
from conduit_jax.examples.worlds import Algorithm, with_preset


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is made of: an iteration is ``lanes * rollout_length`` environment steps, seen ``epochs`` times.

    Vector observations enter the networks times ``observation_scale``. ``scale_rewards`` divides rewards by the running
    standard deviation of discounted returns; what is reported is never scaled. ``normalize_observations`` centres and scales
    vectors by running statistics instead of ``observation_scale``; ``normalize_values`` has the network say values in units of
    the running mean and spread of what it is taught, so that rewards may have any size.
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
    normalize_observations: bool = False
    normalize_values: bool = False
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
    return with_preset(Settings(env=env), PRESETS, **chosen)


class Params(NamedTuple):
    """The network's parameters, and the distribution's free ones."""

    network: Any
    free: jax.Array


class Policy(NamedTuple):
    """What actors and hooks are given; ``statistics`` are those before this iteration."""

    params: Params
    statistics: Statistics


class Learner(NamedTuple):
    """Everything an update changes; the newest ``statistics`` come with the batches."""

    params: Params
    optimizer: Any
    updates: jax.Array
    statistics: Statistics = Statistics()


class Step(NamedTuple):
    """What is stored of a step: ``value`` and ``next_value`` are estimates of the policy that acted, ``observation`` as it saw it."""

    observation: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    next_value: jax.Array
    terminated: jax.Array
    ended: jax.Array
    unit: ValueUnit | None
    statistics: Statistics


class Batch(NamedTuple):
    """What the learner takes: advantages are standardized over the iteration, ``target`` is what the network should say."""

    observation: jax.Array
    action: jax.Array
    log_prob: jax.Array
    advantage: jax.Array
    target: jax.Array
    statistics: Statistics = Statistics()  # the same in every row


def make_ppo(spec: envs.EnvironmentSpec, settings: Settings) -> Algorithm:
    """Return PPO for observations and actions of ``spec``; ``ConfigError`` where images are to be normalized."""
    normalized, scale = settings.normalize_observations, settings.observation_scale
    if normalized and spec.observation.dtype == jnp.uint8:
        fix = "leave normalize_observations out: images are divided by 255"
        refuse(ConfigError, "Images are not normalized.", got=spec.observation, want="vectors", fix=fix)
    count = spec.num_actions
    distribution = gaussian(*envs.continuous_actions(spec, "PPO")) if count is None else categorical(count)
    network = ActorCritic(distribution.outputs, settings.hidden)
    learning_rate = optax.linear_schedule(settings.learning_rate, 0.0, settings.updates)
    optimizer = optax.chain(optax.clip_by_global_norm(settings.gradient_clip), optax.adam(learning_rate, eps=1e-5))

    def look(params: Params, observation: jax.Array) -> tuple[jax.Array, jax.Array]:
        if scale and not normalized:
            observation = observation * jnp.asarray(scale, jnp.float32)
        return cast(tuple[jax.Array, jax.Array], network.apply(params.network, observation))

    def init(key: jax.Array) -> Learner:
        observation = jnp.zeros((1, *spec.observation.shape), spec.observation.dtype)
        params = Params(network.init(key, observation), distribution.free)
        of_values = conduit.observation_statistics(jnp.float32(0)) if settings.normalize_values else None
        statistics = Statistics(conduit.observation_statistics(spec.observation) if normalized else None, of_values)
        return Learner(params, optimizer.init(params), jnp.zeros((), jnp.int32), statistics)

    def act(policy: Policy, observation: jax.Array, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        said, value = look(policy.params, as_seen(policy.statistics, observation))
        action, free = distribution.draw(said, policy.params.free, key), policy.params.free
        return action, {"log_prob": distribution.log_prob(said, free, action), "value": in_rewards(policy, value)}

    def in_rewards(policy: Policy, value: jax.Array) -> jax.Array:
        unit = value_unit(policy.statistics)
        return value if unit is None else unit.mean + unit.spread * value

    def value(policy: Policy, observation: jax.Array) -> jax.Array:
        return in_rewards(policy, look(policy.params, as_seen(policy.statistics, observation))[1])

    def act_greedily(policy: Policy, observation: jax.Array, key: jax.Array) -> jax.Array:
        return distribution.mode(look(policy.params, as_seen(policy.statistics, observation))[0])

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
        statistics = jax.tree.map(lambda leaf: leaf[0], sample.data.statistics)
        return Learner(params, optimizer_state, learner.updates + 1, statistics), metrics

    policy_of = lambda learner: Policy(learner.params, learner.statistics)  # noqa: E731
    return Algorithm(init, policy_of, act, act_greedily, train_step, context=policy_of, value=value)


class Carry(NamedTuple):
    """What ingestion remembers from one rollout to the next."""

    rewards: conduit.RewardScale
    statistics: Statistics


class Hooks(NamedTuple):
    """``ingestion(carry, rollout, policy) -> carry, steps`` and ``finalize(steps) -> batch``, leaves ``(T, lanes, ...)``."""

    init_carry: Callable[[conduit.Rollout], Carry]
    ingestion: Callable[[Carry, conduit.Rollout, Policy], tuple[Carry, Step]]
    finalize: Callable[[Step], Batch]


def make_hooks(settings: Settings, value: Callable[[Policy, jax.Array], jax.Array]) -> Hooks:
    """Return what a rollout goes through: the value of what followed each step, then advantages over the whole iteration."""

    def init_carry(rollout: conduit.Rollout) -> Carry:
        seen = conduit.observation_statistics_carry(rollout) if settings.normalize_observations else None
        targets = conduit.observation_statistics(jnp.float32(0)) if settings.normalize_values else None
        return Carry(conduit.reward_scale_carry(rollout), Statistics(seen, targets))

    def value_of_next(rollout: conduit.Rollout, policy: Policy) -> jax.Array:
        """Return the value of what really followed each step: what acting said of it, but where a time limit cut in."""
        known, final = rollout.extras["value"], rollout.final_observation
        following = jnp.concatenate([known[1:], value(policy, rollout.bootstrap_observation)[None]])
        of_final = lambda: value(policy, final.reshape(-1, *final.shape[2:])).reshape(known.shape)  # noqa: E731
        cut = jax.lax.cond(jnp.any(rollout.truncated), of_final, lambda: jnp.zeros_like(known))
        return jnp.where(rollout.truncated, cut, following)  # behind a termination it is not used

    def ingestion(carry: Carry, rollout: conduit.Rollout, policy: Policy) -> tuple[Carry, Step]:
        next_value = value_of_next(rollout, policy)
        reward, (rewards, (seen, targets)), extras = rollout.reward, carry, rollout.extras
        if settings.scale_rewards:
            rewards, reward = conduit.scale_rewards(rewards, rollout, discount=settings.discount)
        ended = rollout.terminated | rollout.truncated
        known = (extras["value"], reward, next_value, rollout.terminated, ended)
        # What is counted now serves the next iteration's policy: this one's acted, and is taught, by what was before.
        if seen is not None:
            seen = conduit.update_observation_statistics(seen, rollout)
        if targets is not None:
            taught = advantages(*known) + extras["value"]
            targets = conduit.update_observation_statistics(targets, rollout._replace(observation=taught))
        unit, statistics = value_unit(policy.statistics), Statistics(seen, targets)
        unit, every_row = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (*reward.shape, *leaf.shape)), (unit, statistics)
        )
        observation = as_seen(policy.statistics, rollout.observation)
        steps = Step(observation, rollout.action, extras["log_prob"], *known, unit, every_row)
        return Carry(rewards, statistics), steps

    def advantages(value: jax.Array, reward: jax.Array, *following: jax.Array) -> jax.Array:
        decay = {"discount": settings.discount, "trace": settings.trace}
        return conduit.generalized_advantages(reward, value, *following, **decay)

    def finalize(steps: Step) -> Batch:
        advantage = advantages(steps.value, steps.reward, steps.next_value, steps.terminated, steps.ended)
        standard = (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-8)
        target = advantage + steps.value
        if steps.unit is not None:
            target = (target - steps.unit.mean) / steps.unit.spread
        newest = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[-1:], leaf.shape), steps.statistics)
        return Batch(steps.observation, steps.action, steps.log_prob, standard, target, newest)

    return Hooks(init_carry, ingestion, finalize)


def make_plane(settings: Settings, value: Callable[[Policy, jax.Array], jax.Array]) -> conduit.ExperiencePlane:
    """Return the plane: rollouts in, mini-batches with standardized advantages out, of this iteration only."""
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OnPolicy(num_minibatches=settings.minibatches, num_epochs=settings.epochs),
        placement=settings.placement,
        schedule=settings.schedule,
        seed=settings.seed,
    )
    hooks = make_hooks(settings, value)
    plane.register_ingestion(hooks.ingestion, init_carry=hooks.init_carry)
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
    show(train(settings_for("cartpole"), observe=show_progress))
