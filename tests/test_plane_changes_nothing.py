"""The plane changes when and where, and nothing else: training through it and training by hand end in the same bits.

By hand means a pure ``Replay`` (or, on-policy, plain arrays), sequential code, the keys written out, and a ``jit`` around
each step that the loop compiles by itself. 200 updates, then every leaf of the learner is compared bit by bit.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conduit_jax as conduit
from conduit_jax.examples import dqn, ppo, sac
from conduit_jax.examples.worlds import Algorithm, World, make_world

pytestmark = pytest.mark.slow

UPDATES = 200
LOOP_STREAM, EPOCH_STREAM = 0x6C6F6F70, 0x65706F63


class Keys:
    """The keys a plane of that seed derives, from ``jax.random`` alone."""

    def __init__(self, seed: int):
        root = jax.random.key(seed, impl="threefry2x32")
        self._loop = jax.random.fold_in(root, LOOP_STREAM)
        self.table = jax.random.fold_in(root, zlib.crc32(b"experience"))
        self._fold = jax.jit(jax.random.fold_in)

    def iteration(self, number: int) -> jax.Array:
        return self._fold(self._loop, np.uint32(number))

    def draw(self, number: int) -> jax.Array:
        return self._fold(self._fold(self.table, np.uint32(number)), np.uint32(0))  # of the only partition


def own(learner: Any) -> Any:
    return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(learner)


def through_the_plane(
    algorithm: Algorithm, world: World, plane: conduit.ExperiencePlane, learner: Any, iterations: int
) -> Any:
    loop = conduit.wrap(
        algorithm.train_step, rollout=world.rollout, policy=algorithm.policy, plane=plane, context=algorithm.context
    )
    learner, _, _ = loop.run(learner, world.actor, iterations)
    assert loop.updates == UPDATES
    return learner


def off_policy_by_hand(algorithm: Algorithm, world: World, settings: Any, hook: Any, learner: Any) -> tuple:
    """Rollout, hook and insert, then draws, updates and priorities, one after the other."""
    sampler = conduit.Prioritized() if settings.sampler == "prioritized" else conduit.Uniform()
    config = conduit.ReplayConfig(capacity=settings.capacity, min_size=settings.min_size, sampler=sampler)
    replay = conduit.make_replay(config, batch_size=settings.batch_size, lanes=settings.lanes)
    keys, actor, learner = Keys(settings.seed), world.actor, own(learner)
    publish, step = jax.jit(algorithm.policy), jax.jit(algorithm.train_step)
    init_carry, ingestion = hook

    @jax.jit
    def ingest(state: Any, carry: Any, rollout: conduit.Rollout, version: jax.Array) -> tuple:
        carry, records = ingestion(carry, rollout)
        state, _ = replay.add(state, records.items, records.lengths, records.priorities, version)
        return state, carry

    sample, update_priorities = jax.jit(replay.sample), jax.jit(replay.update_priorities)
    state, carry, iterations, updates, draws = None, None, 0, 0, 0
    while updates < UPDATES:
        actor, rollout = world.rollout(actor, publish(learner), keys.iteration(iterations))
        if state is None:
            carry = init_carry(rollout)
            item = jax.tree.map(lambda leaf: leaf[0, 0], ingestion(carry, rollout)[1].items)
            state = replay.init(item)
        state, carry = ingest(state, carry, rollout, np.uint32(updates))
        iterations += 1
        for _ in range(settings.updates_per_rollout if replay.can_sample(state.control, settings.batch_size) else 0):
            control, batch = sample(state.control, state.storage, keys.draw(draws))
            learner, _, priorities = step(learner, batch)
            control, _ = update_priorities(control, batch.info, priorities)
            state = state._replace(control=control)
            updates, draws = updates + 1, draws + 1
    return learner, iterations


def on_policy_by_hand(algorithm: Algorithm, world: World, settings: ppo.Settings, hooks: Any, learner: Any) -> tuple:
    """Rollout, both hooks, then every epoch's permutation cut into mini-batches."""
    keys, actor, learner = Keys(settings.seed), world.actor, own(learner)
    init_carry, ingestion, finalize = hooks
    publish, step = jax.jit(algorithm.policy), jax.jit(algorithm.train_step)
    ingest, finish = jax.jit(ingestion), jax.jit(finalize)
    items = settings.lanes * settings.rollout_length
    size = items // settings.minibatches
    order_of = jax.jit(lambda key: jax.random.permutation(key, jnp.arange(items, dtype=jnp.int32)))
    take = jax.jit(lambda data, index: jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[index], data))
    carry, iterations, updates = None, 0, 0
    while updates < UPDATES:
        params = publish(learner)
        actor, rollout = world.rollout(actor, params, keys.iteration(iterations))
        carry, records = ingest(init_carry(rollout) if carry is None else carry, rollout, params)
        data = finish(records)
        for epoch in range(settings.epochs):
            of_iteration = jax.random.fold_in(keys.table, iterations)
            order = order_of(jax.random.fold_in(of_iteration, epoch + EPOCH_STREAM))
            for number in range(settings.minibatches):
                batch = take(data, order[number * size : (number + 1) * size])
                learner, _ = step(learner, _sample(batch, size))
                updates += 1
        iterations += 1
    return learner, iterations


def _sample(data: Any, size: int) -> conduit.Sample:
    return conduit.Sample(data, None, jnp.ones(size), None, jnp.ones(size, bool))  # type: ignore[arg-type]


def hooks_of(plane: conduit.ExperiencePlane) -> Any:
    """The functions that were registered, as the plane has them."""
    return plane._hooks.of("experience")


def assert_equal_bits(ours: Any, by_hand: Any) -> None:
    for (path, left), right in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(by_hand), strict=True):
        if jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes(), jax.tree_util.keystr(path)


CASES = {
    "dqn_uniform": (dqn, dqn.make_dqn, "cartpole", {"sampler": "uniform"}),
    "dqn_prioritized": (dqn, dqn.make_dqn, "cartpole", {"sampler": "prioritized", "updates_per_rollout": 8}),
    "sac": (sac, sac.make_sac, "pendulum", {"updates_per_rollout": 8}),
}


@pytest.mark.parametrize("name", [pytest.param("dqn_uniform", marks=pytest.mark.slow), "dqn_prioritized", "sac"])
def test_off_policy_learners_end_in_the_same_bits(name):
    example, make, env, chosen = CASES[name]
    settings = example.settings_for(
        env, seed=3, schedule="sequential", batch_size=32, capacity=400, min_size=100, hidden=(32,), **chosen
    )
    world, algorithm = make_world(settings, lambda spec: make(spec, settings), jax.random.key(0))
    learner, plane = jax.jit(algorithm.init)(jax.random.key(1)), example.make_plane(settings)
    hook = hooks_of(plane).ingestion
    direct = (hook.init_carry, lambda carry, rollout: hook.function(carry, rollout, ()))
    by_hand, iterations = off_policy_by_hand(algorithm, world, settings, direct, learner)
    assert iterations * settings.lanes * settings.rollout_length > settings.capacity, "the ring wraps"
    ours = through_the_plane(algorithm, world, plane, learner, iterations)
    assert_equal_bits(ours, by_hand)
    assert not np.array_equal(jax.tree.leaves(ours)[0], jax.tree.leaves(learner)[0])


def test_ppo_ends_in_the_same_bits():
    settings = ppo.settings_for("cartpole", seed=3, lanes=4, rollout_length=16, minibatches=4, epochs=2, hidden=(32,))
    world, algorithm = make_world(settings, lambda spec: ppo.make_ppo(spec, settings), jax.random.key(0))
    learner, plane = jax.jit(algorithm.init)(jax.random.key(1)), ppo.make_plane(settings, algorithm.value)
    hooks = hooks_of(plane)

    def ingestion(carry: Any, rollout: conduit.Rollout, params: Any) -> tuple:
        carry, records = hooks.ingestion.function(carry, rollout, params)
        return carry, records.items

    direct = (hooks.ingestion.init_carry, ingestion, lambda records: hooks.finalize.function(records, ()))
    by_hand, iterations = on_policy_by_hand(algorithm, world, settings, direct, learner)
    assert iterations == UPDATES // 8
    ours = through_the_plane(algorithm, world, plane, learner, iterations)
    assert_equal_bits(ours, by_hand)
