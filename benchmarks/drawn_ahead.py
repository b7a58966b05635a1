"""Off-policy training in one program, many seeds side by side, on batches that are drawn ahead as a schedule draws them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import conduit_jax as conduit
from conduit_jax import envs
from conduit_jax.examples.replayed import make_replay_config
from conduit_jax.examples.worlds import make_pure_world


class Trained(NamedTuple):
    """``returns`` of the final policies' fresh episodes, ``(seeds, episodes)``; ``curve`` of recent ones, ``(seeds, iterations)``."""

    returns: np.ndarray
    curve: np.ndarray


def train(make: Callable, example: Any, settings: Any, seeds: int, staleness: int, first: int = 0) -> Trained:
    """Train with ``staleness + 1`` batches a draw: the last of them is ``staleness`` updates old when it is used.

    Draws go on across iterations, so a batch may lack the newest rollouts, as it does in a plane with that
    ``g_delivery``. ``staleness = 0`` is the pure ``Replay`` used in sequential order.
    """
    world, algorithm = make_pure_world(settings, lambda spec: make(spec, settings))
    program = jax.jit(jax.vmap(_training(settings, algorithm, world, example.make_ingestion(settings), staleness + 1)))
    keys = jax.vmap(jax.random.key)(first + jnp.arange(seeds))
    learner, curve = program(keys)
    evaluate = jax.jit(jax.vmap(lambda learner, key: world.evaluate(algorithm.policy(learner), key)))
    fresh = jax.vmap(lambda key: jax.random.fold_in(key, 0x6576616C))(keys)
    return Trained(np.asarray(evaluate(learner, fresh)), np.asarray(curve))


def _training(settings: Any, algorithm: Any, world: Any, ingestion: Any, ahead: int) -> Callable[[jax.Array], tuple]:
    config = make_replay_config(settings)
    replay = conduit.make_replay(config, batch_size=settings.batch_size, lanes=settings.lanes * world.agents)
    prioritized = isinstance(config.sampler, conduit.Prioritized)

    def collect(state: tuple, key: jax.Array) -> tuple:
        learner, actor, carry, stored = state
        actor, rollout = world.rollout(actor, algorithm.policy(learner), key)
        carry, records = ingestion.hook(carry, rollout)
        stored, _ = replay.add(stored, records.items, records.lengths, records.priorities)
        return learner, actor, carry, stored

    def draw(stored: Any, key: jax.Array) -> tuple[Any, Any]:
        step = lambda control, key: replay.sample(control, stored.storage, key)  # noqa: E731
        control, batches = jax.lax.scan(step, stored.control, jax.random.split(key, ahead))
        return control, batches

    def iteration(state: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
        parts, waiting, number = state
        rollout_key, *keys = jax.random.split(key, settings.updates_per_rollout + 1)
        learner, actor, carry, stored = collect(parts, rollout_key)

        def update(state: tuple, key: jax.Array) -> tuple[tuple, None]:
            learner, control, waiting, number = state
            due = lambda: draw(stored._replace(control=control), key)  # noqa: E731
            control, waiting = jax.lax.cond(number % ahead == 0, due, lambda: (control, waiting))
            sample = jax.tree.map(lambda leaf: leaf[number % ahead], waiting)
            learner, _, priorities = algorithm.train_step(learner, sample)
            if prioritized:
                control, _ = replay.update_priorities(control, sample.info, priorities)
            return (learner, control, waiting, number + 1), None

        state = (learner, stored.control, waiting, number)
        (learner, control, waiting, number), _ = jax.lax.scan(update, state, jnp.stack(keys))
        parts = (learner, actor, carry, stored._replace(control=control))
        return (parts, waiting, number), envs.recent_return(actor.statistics)

    def train(key: jax.Array) -> tuple:
        actor_key, learner_key, fill_key, run_key = jax.random.split(key, 4)
        learner, actor = algorithm.init(learner_key), world.init(actor_key)
        unit = jax.eval_shape(world.rollout, actor, algorithm.policy(learner), key)[1]
        carry = ingestion.init_carry(unit)
        items = jax.eval_shape(ingestion.hook, carry, unit)[1].items
        item = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), items)
        state = (learner, actor, carry, replay.init(item))
        fill = -(-config.limits.min_size // (settings.lanes * world.agents * settings.rollout_length)) + 1
        state, _ = jax.lax.scan(lambda s, k: (collect(s, k), None), state, jax.random.split(fill_key, fill))
        batches = jax.eval_shape(draw, state[-1], key)[1]
        waiting = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), batches)
        keys = jax.random.split(run_key, settings.iterations - fill)
        (parts, _, _), curve = jax.lax.scan(iteration, (state, waiting, jnp.int32(0)), keys)
        return parts[0], curve

    return train
