"""A DQN loop on pixels: exposed latency sequential and scheduled, and whether copies to the device overlap the update."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import conduit_jax as conduit
from benchmarks.gpu_check.sizes import Sizes
from benchmarks.gpu_check.timeline import common, copies_and_kernels, length
from conduit_jax.examples.dqn import QNetwork

LANES, STEPS, ACTIONS = 16, 8, 6
CASES = [(placement, schedule) for placement in ("device", "pinned_host") for schedule in ("sequential", "overlap")]


class Learner(NamedTuple):
    params: Any
    target: Any
    optimizer: Any


def make_loop(placement: str, schedule: str, sizes: Sizes) -> tuple[conduit.Loop, Learner]:
    """Return the loop of one placement and schedule, and its learner."""
    network, optimizer = QNetwork(ACTIONS, (sizes.width,)), optax.adam(1e-4)

    def rollout(actor: jax.Array, policy: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        image, action, reward = jax.random.split(key, 3)
        frames = jax.random.bits(image, (STEPS + 1, LANES, *sizes.image), jnp.uint8)
        best = jnp.argmax(network.apply(policy, frames[0]), -1)
        chosen = (jax.random.randint(action, (STEPS, LANES), 0, ACTIONS) + best) % ACTIONS
        items = conduit.Transition(
            observation=frames[:-1],
            action=chosen,
            reward=jax.random.normal(reward, (STEPS, LANES)),
            discount=jnp.full((STEPS, LANES), 0.99),
            next_observation=frames[1:],
        )
        return actor + 1, items

    def loss(params: Any, target: Any, sample: conduit.Sample) -> tuple[jax.Array, jax.Array]:
        data, rows = sample.data, jnp.arange(sizes.batch)
        values, following = network.apply(params, data.observation), network.apply(target, data.next_observation)
        goal = data.reward + data.discount * jnp.max(following, axis=-1)
        error = values[rows, data.action] - jax.lax.stop_gradient(goal)
        return jnp.mean(sample.weights * error**2), jnp.abs(error)

    def train_step(learner: Learner, sample: conduit.Sample) -> tuple[Learner, Any, jax.Array]:
        (value, error), gradient = jax.value_and_grad(loss, has_aux=True)(learner.params, learner.target, sample)
        change, state = optimizer.update(gradient, learner.optimizer, learner.params)
        params = optax.apply_updates(learner.params, change)
        return Learner(params, optax.incremental_update(params, learner.target, 0.01), state), {"loss": value}, error

    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=sizes.batch, updates_per_rollout=2),
        replay=conduit.ReplayConfig(capacity=sizes.capacity, sampler=conduit.Prioritized()),
        placement=placement,
        schedule=schedule,
    )
    params = network.init(jax.random.key(0), jnp.zeros((1, *sizes.image), jnp.uint8))
    loop = conduit.wrap(train_step, rollout=jax.jit(rollout), policy=lambda learner: learner.params, plane=plane)
    return loop, Learner(params, params, optimizer.init(params))


def case(placement: str, schedule: str, sizes: Sizes) -> dict[str, Any]:
    """Return the figures of one loop."""
    loop, learner = make_loop(placement, schedule, sizes)
    learner, actor, _ = loop.run(learner, jnp.int32(0), sizes.iterations)
    exposed = loop.measure(learner, actor, iterations=max(2, sizes.iterations // 6), blocks=sizes.blocks)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(loop.run(learner, actor, 10)[0])
        copies, kernels = copies_and_kernels(Path(folder))
    loop.plane.close()
    share = common(copies, kernels) / length(copies) if copies else None
    return {
        "placement": placement,
        "schedule": schedule,
        "iteration_ms": exposed.full_s * 1e3,
        "exposed_ms": exposed.exposed_s * 1e3,
        "copies_ms": length(copies) / 1e6,
        "kernels_ms": length(kernels) / 1e6,
        "copies_during_kernels": share,
    }


def run(sizes: Sizes) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a row a loop; the summary compares the schedules in pinned host memory, where copies have to cross."""
    rows = [case(placement, schedule, sizes) for placement, schedule in CASES[-sizes.loops :]]
    by = {(row["placement"], row["schedule"]): row for row in rows}
    summary = {f"exposed_ms_{'_'.join(names)}": row["exposed_ms"] for names, row in by.items()}
    return rows, {**summary, "copies_during_kernels": by["pinned_host", "overlap"]["copies_during_kernels"]}
