"""A training loop as many people have it, and the few lines that put an Experience Data Plane into it; both run.

    python -m conduit_jax.examples.wrap_your_step

The first half is the loop as it was: Q-learning on CartPole with a buffer of its own, a pytree with a write head. The second
half, ``through_the_plane``, keeps ``rollout`` and ``train_step`` to the letter and lets the plane own the buffer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import conduit_jax as conduit
from conduit_jax import envs
from conduit_jax.examples import command_line

LANES, STEPS, BATCH, CAPACITY, UPDATES, DISCOUNT = 16, 8, 128, 65_536, 8, 0.99
ENV = envs.make("cartpole")
OPTIMIZER = optax.adam(1e-3)


# ------------------------------------------------------------------ what was there before


class Learner(NamedTuple):
    """Parameters of a small network, their averaged copy, and the optimizer's state."""

    params: Any
    target: Any
    optimizer: Any
    updates: jax.Array


def values(params: list, observation: jax.Array) -> jax.Array:
    x = observation * jnp.array([0.5, 0.5, 5.0, 0.5])
    for weight, bias in params[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = params[-1]
    return x @ weight + bias


def new_learner(key: jax.Array) -> Learner:
    sizes = [(4, 64), (64, 64), (64, 2)]
    initial = jax.nn.initializers.he_normal()
    params = [(initial(k, size), jnp.zeros(size[1])) for k, size in zip(jax.random.split(key, 3), sizes, strict=True)]
    return Learner(params, params, OPTIMIZER.init(params), jnp.int32(0))


def act(learner: Learner, observation: jax.Array, key: jax.Array) -> jax.Array:
    explore_key, action_key = jax.random.split(key)
    epsilon = jnp.maximum(0.05, 1 - learner.updates / 1000)
    explore = jax.random.uniform(explore_key, observation.shape[:1]) < epsilon
    return jnp.where(explore, jax.random.randint(action_key, explore.shape, 0, 2), greedy(learner, observation, key))


def greedy(learner: Learner, observation: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.argmax(values(learner.params, observation), axis=-1)


FUNCTIONS = envs.make_rollout(ENV, act, LANES, STEPS)
rollout = jax.jit(FUNCTIONS.rollout)


def loss(params: list, target: list, data: conduit.Transition) -> jax.Array:
    rows = jnp.arange(data.action.shape[0])
    best = jnp.argmax(values(params, data.next_observation), axis=-1)
    goal = data.reward + data.discount * values(target, data.next_observation)[rows, best]
    return jnp.mean((values(params, data.observation)[rows, data.action] - jax.lax.stop_gradient(goal)) ** 2)


def update(learner: Learner, data: conduit.Transition) -> tuple[Learner, jax.Array]:
    value, gradient = jax.value_and_grad(loss)(learner.params, learner.target, data)
    change, state = OPTIMIZER.update(gradient, learner.optimizer)
    params = optax.apply_updates(learner.params, change)
    return Learner(params, optax.incremental_update(params, learner.target, 0.02), state, learner.updates + 1), value


def transitions(made: conduit.Rollout) -> conduit.Transition:
    return conduit.one_step_transitions(made, discount=DISCOUNT)


class Buffer(NamedTuple):
    """One's own ring: rows, where the next one goes, how many there are."""

    rows: conduit.Transition
    head: jax.Array
    size: jax.Array


@partial(jax.jit, donate_argnums=0)
def add(buffer: Buffer, made: conduit.Rollout) -> Buffer:
    new = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), transitions(made))
    slots = (buffer.head + jnp.arange(LANES * STEPS)) % CAPACITY
    rows = jax.tree.map(lambda old, fresh: old.at[slots].set(fresh), buffer.rows, new)
    return Buffer(rows, (buffer.head + slots.size) % CAPACITY, jnp.minimum(buffer.size + slots.size, CAPACITY))


@jax.jit
def draw(buffer: Buffer, key: jax.Array) -> conduit.Transition:
    chosen = jax.random.randint(key, (BATCH,), 0, buffer.size)
    return jax.tree.map(lambda leaf: leaf[chosen], buffer.rows)


def by_hand(iterations: int) -> Learner:
    learner, actor = new_learner(jax.random.key(0)), FUNCTIONS.init(jax.random.key(1))
    step, buffer, key = jax.jit(update, donate_argnums=0), None, jax.random.key(2)
    learner = jax.tree.map(jnp.copy, learner)  # target is params: donating one would delete the other
    for _ in range(iterations):
        key, rollout_key, *keys = jax.random.split(key, UPDATES + 2)
        actor, made = rollout(actor, learner, rollout_key)
        if buffer is None:
            item = jax.eval_shape(transitions, made)
            rows = jax.tree.map(lambda leaf: jnp.zeros((CAPACITY, *leaf.shape[2:]), leaf.dtype), item)
            buffer = Buffer(rows, jnp.int32(0), jnp.int32(0))
        buffer = add(buffer, made)
        for one in keys:
            learner, _ = step(learner, draw(buffer, one))
    return learner


# ------------------------------------------------------------------ and with the plane


def train_step(learner: Learner, sample: conduit.Sample) -> tuple[Learner, dict[str, jax.Array]]:
    learner, value = update(learner, sample.data)
    return learner, {"loss": value}


def through_the_plane(iterations: int) -> Learner:
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=BATCH, updates_per_rollout=UPDATES),
        replay=conduit.ReplayConfig(capacity=CAPACITY),
    )
    plane.register_ingestion(transitions)
    loop = conduit.wrap(train_step, rollout=rollout, policy=lambda learner: learner, plane=plane)
    return loop.run(new_learner(jax.random.key(0)), FUNCTIONS.init(jax.random.key(1)), iterations)[0]


class Side(NamedTuple):
    """What one of the two came to."""

    evaluation_return: float
    seconds: float


def measured(training: Callable[[int], Learner], iterations: int) -> Side:
    """Run once short to compile, once timed, and evaluate what came of it."""
    training(3)
    start = time.perf_counter()
    learner = jax.block_until_ready(training(iterations))
    seconds = time.perf_counter() - start
    returns = jax.jit(partial(envs.evaluate, ENV, greedy))(learner, jax.random.key(9))
    return Side(float(returns.mean()), seconds)


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--iterations", type=command_line.count, default=800)
    iterations = parser.parse_args().iterations
    for name, training in (("by hand", by_hand), ("through the plane", through_the_plane)):
        side = measured(training, iterations)
        each = 1e6 * side.seconds / iterations
        print(f"{name:>18}: evaluation return {side.evaluation_return:6.1f}, {each:8,.0f} us an iteration")


if __name__ == "__main__":
    command_line.run(main)
