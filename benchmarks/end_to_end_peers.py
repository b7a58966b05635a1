"""What people run today, written the way they write it: flashbax inside one ``lax.scan``, flashbax in a Python loop, PPO in one scan.

All of them use the networks, losses, optimizers, environments and sizes of our examples; only the path differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flashbax
import jax
import jax.numpy as jnp

import conduit_jax as conduit
from conduit_jax import envs
from conduit_jax.examples import ppo
from conduit_jax.examples.worlds import Algorithm, PureWorld

Train = Callable[[jax.Array], Any]


def flat_buffer(settings: Any, *, sequences: bool) -> Any:
    """Return flashbax's flat buffer of the settings' sizes: pairs of neighbouring steps, one row a lane."""
    return flashbax.make_flat_buffer(
        max_length=settings.capacity,
        min_length=settings.min_size,
        sample_batch_size=settings.batch_size,
        add_sequences=sequences,
        add_batch_size=settings.lanes,
    )


def as_sample(pair: Any, settings: Any) -> conduit.Sample:
    """Return a flat buffer's pairs as the batch our train step takes."""
    first, second = pair.first, pair.second
    discount = settings.discount * (1 - first["done"].astype(jnp.float32))
    data = conduit.Transition(first["observation"], first["action"], first["reward"], discount, second["observation"])
    count = settings.batch_size
    return conduit.Sample(data, None, jnp.ones(count), None, jnp.ones(count, bool))  # type: ignore[arg-type]


def jitted_dqn(settings: Any, algorithm: Algorithm, env: envs.Environment) -> Train:
    """Return ``train(key)`` in the manner of purejaxrl's DQN: step, add and, by a ``cond``, learn, in one scan."""
    lane, buffer = envs.autoreset(env), flat_buffer(settings, sequences=False)

    def learn(learner: Any, stored: Any, key: jax.Array) -> Any:
        return algorithm.train_step(learner, as_sample(buffer.sample(stored, key).experience, settings))[0]

    def step(state: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
        learner, lanes, observation, stored = state
        act_key, sample_key = jax.random.split(key)
        action = algorithm.act(algorithm.policy(learner), observation, act_key).astype(jnp.int32)
        lanes, stepped = jax.vmap(lane.step)(lanes, action)
        done = stepped.terminated
        row = {"observation": observation, "action": action, "reward": stepped.reward, "done": done}
        stored = buffer.add(stored, row)
        learner = jax.lax.cond(
            buffer.can_sample(stored),
            lambda learner: learn(learner, stored, sample_key),
            lambda learner: learner,
            learner,
        )
        return (learner, lanes, stepped.observation, stored), jnp.mean(stepped.reward)

    def train(key: jax.Array) -> Any:
        lanes_key, learner_key, run_key = jax.random.split(key, 3)
        lanes, observation = jax.vmap(lane.reset)(jax.random.split(lanes_key, settings.lanes))
        first = jnp.zeros(env.spec.observation.shape, env.spec.observation.dtype)
        row = {"observation": first, "action": jnp.int32(0), "reward": jnp.float32(0), "done": jnp.bool_(0)}
        state = (algorithm.init(learner_key), lanes, observation, buffer.init(row))
        keys = jax.random.split(run_key, settings.iterations * settings.rollout_length)
        (learner, *_), rewards = jax.lax.scan(step, state, keys)
        return learner, rewards

    return train


class FlashbaxLoop:
    """The usual Python loop: jitted acting, donated ``add``, jitted ``sample``, jitted update with a donated learner."""

    def __init__(self, settings: Any, algorithm: Algorithm, world: PureWorld):
        self.settings, self.buffer = settings, flat_buffer(settings, sequences=True)
        self._act = jax.jit(
            lambda actor, learner, key: world.rollout(actor, algorithm.policy(learner), key), donate_argnums=0
        )
        self._add = jax.jit(self._add_rollout, donate_argnums=0)
        self._sample, self._ready = jax.jit(self.buffer.sample), jax.jit(self.buffer.can_sample)
        self._update = jax.jit(
            lambda learner, pair: algorithm.train_step(learner, as_sample(pair.experience, settings)), donate_argnums=0
        )
        self._split = jax.jit(lambda key: tuple(jax.random.split(key, settings.updates_per_rollout + 2)))
        actor_key, learner_key, self.key = jax.random.split(jax.random.key(settings.seed), 3)
        self.actor, self.learner = jax.jit(world.init)(actor_key), _own(jax.jit(algorithm.init)(learner_key))
        spec = world.spec
        row = {"observation": jnp.zeros(spec.observation.shape), "action": jnp.int32(0), "reward": jnp.float32(0)}
        self.state, self.filled = jax.jit(self.buffer.init)(row | {"done": jnp.bool_(0)}), False

    def _add_rollout(self, state: Any, rollout: conduit.Rollout) -> Any:
        rows = {"observation": rollout.observation, "action": rollout.action, "reward": rollout.reward}
        rows["done"] = rollout.terminated
        return self.buffer.add(state, jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), rows))

    def run(self, iterations: int) -> None:
        """Run that many iterations and wait for them."""
        for _ in range(iterations):
            self.key, act_key, *keys = self._split(self.key)
            self.actor, rollout = self._act(self.actor, self.learner, act_key)
            self.state = self._add(self.state, rollout)
            self.filled = self.filled or bool(self._ready(self.state))
            if self.filled:
                for key in keys:
                    self.learner, *_ = self._update(self.learner, self._sample(self.state, key))
        jax.block_until_ready((self.learner, self.actor))


def _own(tree: Any) -> Any:
    return jax.jit(lambda leaves: jax.tree.map(jnp.copy, leaves))(tree)


def jitted_ppo(settings: ppo.Settings, algorithm: Algorithm, env: envs.Environment) -> Train:
    """Return ``train(key)`` in the manner of purejaxrl's PPO: rollout, reverse scan, epochs of permuted mini-batches, one scan.

    As there, a time limit is a termination and the value of the next step is that of acting.
    """
    lane = envs.autoreset(env)
    items = settings.lanes * settings.rollout_length
    size = items // settings.minibatches

    def act(state: tuple, key: jax.Array, params: Any) -> tuple[tuple, dict[str, jax.Array]]:
        lanes, observation = state
        action, extras = algorithm.act(params, observation, key)
        action = action.astype(jnp.int32)
        lanes, stepped = jax.vmap(lane.step)(lanes, action)
        row = {"observation": observation, "action": action, "reward": stepped.reward, **extras}
        row["done"] = stepped.terminated | stepped.truncated
        return (lanes, stepped.observation), row

    def iteration(state: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
        learner, lanes, observation, scale = state
        params = algorithm.policy(learner)
        act_key, *epoch_keys = jax.random.split(key, settings.epochs + 1)
        keys = jax.random.split(act_key, settings.rollout_length)
        (lanes, observation), rows = jax.lax.scan(lambda s, k: act(s, k, params), (lanes, observation), keys)
        last = algorithm.act(params, observation, act_key)[1]["value"]
        scale, reward = _scaled(scale, rows, settings)
        batch = _advantages(rows, reward, last, settings)
        flat = jax.tree.map(lambda leaf: leaf.reshape(items, *leaf.shape[2:]), batch)

        def epoch(learner: Any, key: jax.Array) -> tuple[Any, jax.Array]:
            shuffled = jax.tree.map(lambda leaf: leaf[jax.random.permutation(key, items)], flat)
            split = jax.tree.map(lambda leaf: leaf.reshape(settings.minibatches, size, *leaf.shape[1:]), shuffled)
            return jax.lax.scan(update, learner, split)

        learner, losses = jax.lax.scan(epoch, learner, jnp.stack(epoch_keys))
        return (learner, lanes, observation, scale), losses[-1, -1]

    def update(learner: Any, data: ppo.Batch) -> tuple[Any, jax.Array]:
        sample = conduit.Sample(data, None, jnp.ones(size), None, jnp.ones(size, bool))  # type: ignore[arg-type]
        learner, metrics = algorithm.train_step(learner, sample)
        return learner, metrics["loss"]

    def train(key: jax.Array) -> Any:
        lanes_key, learner_key, run_key = jax.random.split(key, 3)
        lanes, observation = jax.vmap(lane.reset)(jax.random.split(lanes_key, settings.lanes))
        scale = (jnp.zeros(settings.lanes), jnp.float32(1e-4), jnp.float32(0), jnp.float32(1))
        state = (algorithm.init(learner_key), lanes, observation, scale)
        (learner, *_), losses = jax.lax.scan(iteration, state, jax.random.split(run_key, settings.iterations))
        return learner, losses

    return train


def _scaled(scale: tuple, rows: dict[str, jax.Array], settings: ppo.Settings) -> tuple[tuple, jax.Array]:
    """Return rewards over the running spread of returns, as purejaxrl's NormalizeVecReward does, a rollout at a time."""
    running, count, mean, variance = scale

    def step(running: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        running = settings.discount * running + row[0]
        return running * (1 - row[1]), running

    running, returns = jax.lax.scan(step, running, (rows["reward"], rows["done"].astype(jnp.float32)))
    size, difference = returns.size, jnp.mean(returns) - mean
    total = count + size
    squares = variance * count + jnp.var(returns) * size + difference**2 * count * size / total
    scale = (running, total, mean + difference * size / total, squares / total)
    return scale, rows["reward"] / jnp.sqrt(squares / total + 1e-8)


def _advantages(rows: dict[str, jax.Array], reward: jax.Array, last: jax.Array, settings: ppo.Settings) -> ppo.Batch:
    def back(carry: tuple, row: tuple) -> tuple[tuple, jax.Array]:
        advantage, following = carry
        done, value, reward = row
        delta = reward + settings.discount * following * (1 - done) - value
        advantage = delta + settings.discount * settings.trace * (1 - done) * advantage
        return (advantage, value), advantage

    done = rows["done"].astype(jnp.float32)
    start = (jnp.zeros_like(last), last)
    advantage = jax.lax.scan(back, start, (done, rows["value"], reward), reverse=True)[1]
    standard = (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-8)
    return ppo.Batch(rows["observation"], rows["action"], rows["log_prob"], standard, advantage + rows["value"])
