"""A whole training run as one program, many seeds side by side: the pure ``Replay`` inside ``lax.scan``, under ``vmap``.

    conduit-jax train dqn --seeds 8
    python -m conduit_jax.examples.fused --seeds 8

Where environment, algorithm and replay are all JAX, nothing has to come back to Python between iterations. There is no
plane here: the functions it is made of are used directly, with the algorithms of ``dqn.py``, ``sac.py`` and ``ppo.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

import conduit_jax as conduit
from conduit_jax import envs
from conduit_jax.examples import command_line, dqn, ppo, sac
from conduit_jax.examples.replayed import check_trains, make_replay_config
from conduit_jax.examples.worlds import Algorithm, Ingestion, PureWorld, make_pure_world


class Trained(NamedTuple):
    """What one seed's run came to: its ``learner``, the ``loss`` and the mean ``recent_return`` of every iteration."""

    learner: Any
    loss: jax.Array
    recent_return: jax.Array


class Fused(NamedTuple):
    """What all seeds came to; the first axis of ``returns`` (of the evaluation) and ``curve`` is the seed."""

    returns: np.ndarray
    curve: np.ndarray
    learner: Any
    env_steps: int
    compile_s: float
    train_s: float


Parts = tuple[conduit.ReplayConfig, Ingestion]


def one_seed_at_a_time(init: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    """Return ``init``, which ``vmap`` makes a loop of.

    Orthogonal parameters are drawn by a QR decomposition. One of several matrices waits, on a CPU of two cores, for the threads
    that wait for it: the program never ends (jaxlib 0.10.2, ``ParallelBatchMap`` in ``QrFactorization``).
    """
    return jax.custom_batching.sequential_vmap(init)


def off_policy(settings: Any, algorithm: Algorithm, world: PureWorld, parts: Parts) -> Callable[[jax.Array], Trained]:
    """Return ``train(key)``: collect until the replay is ready, then one rollout and its updates an iteration."""
    init = one_seed_at_a_time(algorithm.init)
    config, (init_carry, ingestion) = parts
    replay = conduit.make_replay(config, batch_size=settings.batch_size, lanes=settings.lanes * world.agents)

    def collect(state: tuple, key: jax.Array) -> tuple:
        learner, actor, carry, stored = state
        actor, rollout = world.rollout(actor, algorithm.policy(learner), key)
        carry, records = ingestion(carry, rollout)
        stored, _ = replay.add(stored, records.items, records.lengths, records.priorities)
        return learner, actor, carry, stored

    def update(state: tuple, key: jax.Array, storage: Any) -> tuple[tuple, jax.Array]:
        learner, control = state
        control, sample = replay.sample(control, storage, key)  # reads the storage, which only `add` writes
        learner, metrics, priorities = algorithm.train_step(learner, sample)
        if isinstance(config.sampler, conduit.Prioritized):
            control, _ = replay.update_priorities(control, sample.info, priorities)
        return (learner, control), metrics["loss"]

    def iteration(state: tuple, key: jax.Array) -> tuple[tuple, tuple[jax.Array, jax.Array]]:
        rollout_key, *keys = jax.random.split(key, settings.updates_per_rollout + 1)
        learner, actor, carry, stored = collect(state, rollout_key)
        step = partial(update, storage=stored.storage)
        (learner, control), losses = jax.lax.scan(step, (learner, stored.control), jnp.stack(keys))
        state = (learner, actor, carry, stored._replace(control=control))
        return state, (losses[-1], envs.recent_return(actor.statistics))

    def train(key: jax.Array) -> Trained:
        actor_key, learner_key, fill_key, run_key = jax.random.split(key, 4)
        learner, actor = init(learner_key), world.init(actor_key)
        unit = jax.eval_shape(world.rollout, actor, algorithm.policy(learner), key)[1]
        carry = init_carry(unit)
        item = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), _items(ingestion, carry, unit)
        )
        # What n-step windows hold back comes on top; a fixed number of iterations needs no branch, and none under vmap.
        held_back = 0 if not hasattr(carry, "missing") else (settings.n_step - 1) * settings.lanes * world.agents
        fill = check_trains(settings, world.agents, held_back)
        state = (learner, actor, carry, replay.init(item))
        state, _ = jax.lax.scan(lambda s, k: (collect(s, k), None), state, jax.random.split(fill_key, fill - 1))
        keys = jax.random.split(run_key, settings.iterations - fill + 1)
        (learner, *_), (loss, recent) = jax.lax.scan(iteration, state, keys)
        return Trained(learner, loss, recent)

    return train


def _items(ingestion: Callable[..., Any], carry: Any, unit: Any) -> Any:
    return jax.eval_shape(ingestion, carry, unit)[1].items


def on_policy(settings: ppo.Settings, algorithm: Algorithm, world: PureWorld) -> Callable[[jax.Array], Trained]:
    """Return ``train(key)`` of PPO: a rollout, both hooks, then epochs of permuted mini-batches an iteration."""
    init = one_seed_at_a_time(algorithm.init)
    hooks = ppo.make_hooks(settings, cast(Callable[[Any, jax.Array], jax.Array], algorithm.value))
    lanes = settings.lanes * world.agents
    items = lanes * settings.rollout_length
    size = items // settings.minibatches

    def update(learner: Any, data: ppo.Batch) -> tuple[Any, jax.Array]:
        ones = jnp.ones((size,), jnp.float32)
        sample = conduit.Sample(data, None, ones, None, jnp.ones((size,), bool))  # type: ignore[arg-type]
        learner, metrics = algorithm.train_step(learner, sample)
        return learner, metrics["loss"]

    def iteration(state: tuple, key: jax.Array) -> tuple[tuple, tuple[jax.Array, jax.Array]]:
        learner, actor, carry = state
        rollout_key, *epoch_keys = jax.random.split(key, settings.epochs + 1)
        params = algorithm.policy(learner)
        actor, rollout = world.rollout(actor, params, rollout_key)
        carry, steps = hooks.ingestion(carry, rollout, params)
        flat = jax.tree.map(lambda leaf: leaf.reshape(items, *leaf.shape[2:]), hooks.finalize(steps))

        def epoch(learner: Any, key: jax.Array) -> tuple[Any, jax.Array]:
            order = jax.random.permutation(key, items).reshape(settings.minibatches, size)
            return jax.lax.scan(lambda l, index: update(l, jax.tree.map(lambda x: x[index], flat)), learner, order)  # noqa: E741

        learner, losses = jax.lax.scan(epoch, learner, jnp.stack(epoch_keys))
        return (learner, actor, carry), (losses[-1, -1], envs.recent_return(actor.statistics))

    def train(key: jax.Array) -> Trained:
        actor_key, learner_key, run_key = jax.random.split(key, 3)
        learner, actor = init(learner_key), world.init(actor_key)
        carry = hooks.init_carry(jax.eval_shape(world.rollout, actor, algorithm.policy(learner), key)[1])
        keys = jax.random.split(run_key, settings.iterations)
        (learner, *_), (loss, recent) = jax.lax.scan(iteration, (learner, actor, carry), keys)
        return Trained(learner, loss, recent)

    return train


def make_training(example: Any, settings: Any) -> tuple[Callable[[jax.Array], Trained], PureWorld, Algorithm]:
    """Return ``train(key)`` of that example's algorithm in the pure-JAX world it names, with world and algorithm."""
    make: Any = {dqn: dqn.make_dqn, sac: sac.make_sac, ppo: ppo.make_ppo}[example]
    world, algorithm = make_pure_world(settings, lambda spec: make(spec, settings))
    if example is ppo:
        return on_policy(settings, algorithm, world), world, algorithm
    parts = (make_replay_config(settings), example.make_ingestion(settings))
    return off_policy(settings, algorithm, world, parts), world, algorithm


def train(example: Any, settings: Any, seeds: int) -> Fused:
    """Train ``seeds`` seeds from ``settings.seed`` on, in one program, and evaluate each final policy with a fresh key."""
    training, world, algorithm = make_training(example, settings)
    keys = jax.vmap(jax.random.key)(settings.seed + jnp.arange(seeds))
    start = time.perf_counter()
    program = jax.jit(jax.vmap(training)).lower(keys).compile()
    compiled = time.perf_counter()
    trained = jax.block_until_ready(program(keys))
    done = time.perf_counter()
    evaluate = jax.jit(jax.vmap(lambda learner, key: world.evaluate(algorithm.policy(learner), key)))
    fresh = jax.vmap(lambda key: jax.random.fold_in(key, 0x6576616C))(keys)
    returns = np.asarray(evaluate(trained.learner, fresh))
    steps = settings.iterations * settings.lanes * settings.rollout_length
    return Fused(returns, np.asarray(trained.recent_return), trained.learner, steps, compiled - start, done - compiled)


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--seeds", type=command_line.count, default=4)
    parser.add_argument("--steps", type=command_line.count)
    options = parser.parse_args()
    result = train(dqn, dqn.settings_for("cartpole", steps=options.steps), options.seeds)
    for seed, returns in enumerate(result.returns):
        print(f"seed {seed}: evaluation return {returns.mean():.1f}")
    rate = options.seeds * result.env_steps / result.train_s
    print(f"{options.seeds} seeds x {result.env_steps:,} steps in {result.train_s:.1f} s ({rate:,.0f} steps/s)")


if __name__ == "__main__":
    command_line.run(main)
