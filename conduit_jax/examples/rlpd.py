"""Online learning with demonstrations: two tables in one plane, and half of every batch from each (Ball et al. 2023, RLPD).

    python -m conduit_jax.examples.rlpd

SAC on Pendulum. The demonstrations are a controller's that pumps energy into the rod and holds it upright; they are pushed
once and stay. ``conduit.wrap`` trains from one table, so this loop is written by hand: push, pull from both, update.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import conduit_jax as conduit
from conduit_jax import envs
from conduit_jax.examples import command_line, sac
from conduit_jax.examples.replayed import check_trains
from conduit_jax.examples.worlds import make_pure_world

ONLINE, DEMONSTRATIONS = "online", "demonstrations"


def controller(parameters: Any, observation: jax.Array, key: jax.Array) -> jax.Array:
    """Return a torque that swings Pendulum up: towards the energy of standing upright, and a spring near it."""
    cosine, sine, velocity = observation[:, 0], observation[:, 1], observation[:, 2]
    energy = velocity**2 / 6 + 5 * cosine  # of a rod of mass and length 1, where g is 10; 5 when it stands still
    pump = jnp.sign(velocity) * jnp.sign(5 - energy) * 2
    hold = -10 * sine - 2 * velocity
    return jnp.clip(jnp.where(cosine > 0.9, hold, pump), -2, 2)[:, None]


def make_plane(settings: sac.Settings, demonstrated: int) -> conduit.ExperiencePlane:
    """Return the plane: each table gives half a batch; the demonstrations' is as large as they are."""
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=settings.batch_size // 2),
        replay={
            ONLINE: conduit.ReplayConfig(capacity=settings.capacity, min_size=settings.min_size),
            DEMONSTRATIONS: conduit.ReplayConfig(capacity=demonstrated),
        },
        seed=settings.seed,
    )
    ingestion = sac.make_ingestion(settings)
    plane.register_ingestion(ingestion.hook, init_carry=ingestion.init_carry)
    return plane


def joined(online: conduit.Sample, demonstrated: conduit.Sample) -> conduit.Sample:
    """Return both halves as one batch."""
    parts = jax.tree.map(lambda *halves: jnp.concatenate(halves), (online.data, online.weights), _pair(demonstrated))
    return online._replace(data=parts[0], weights=parts[1])


def _pair(sample: conduit.Sample) -> tuple[Any, jax.Array]:
    return sample.data, sample.weights


def train(settings: sac.Settings, demonstrated: int = 5_000) -> np.ndarray:
    """Train for ``settings.steps`` environment steps and return the returns of an evaluation, float32 ``(episodes,)``.

    ``ConfigError`` where so few steps never fill the replay: nothing would be learned.
    """
    check_trains(settings)
    world, algorithm = make_pure_world(settings, lambda spec: sac.make_sac(spec, settings))
    actor_key, learner_key, show_key, evaluation_key = jax.random.split(jax.random.key(settings.seed), 4)
    plane = make_plane(settings, demonstrated)
    _demonstrate(plane, demonstrated, show_key)

    rollout, publish = (
        jax.jit(world.rollout),
        jax.jit(lambda learner: jax.tree.map(jnp.copy, algorithm.policy(learner))),
    )
    step = jax.jit(lambda learner, *halves: algorithm.train_step(learner, joined(*halves)), donate_argnums=0)
    actor = jax.jit(world.init)(actor_key)
    learner = jax.tree.map(jnp.copy, algorithm.init(learner_key))  # the target is the critics: a buffer for each
    for number in range(settings.iterations):
        actor, made = rollout(actor, publish(learner), plane.iteration_key(number))
        plane.push(made, table=ONLINE)
        for _ in range(settings.updates_per_rollout if plane.ready(table=ONLINE) else 0):
            learner, *_ = step(learner, plane.pull(table=ONLINE), plane.pull(table=DEMONSTRATIONS))
    plane.close()
    return np.asarray(jax.jit(world.evaluate)(algorithm.policy(learner), evaluation_key))


def _demonstrate(plane: conduit.ExperiencePlane, count: int, key: jax.Array, lanes: int = 5) -> None:
    """Push ``count`` of the controller's transitions."""
    functions = envs.make_rollout(envs.make("pendulum"), controller, lanes, count // lanes)
    _, made = jax.jit(functions.rollout)(jax.jit(functions.init)(key), None, key)
    plane.push(made, table=DEMONSTRATIONS)


def controllers_return(episodes: int = 20) -> float:
    """Return what the demonstrations themselves are worth."""
    run = jax.jit(lambda key: envs.evaluate(envs.make("pendulum"), controller, None, key, episodes=episodes))
    return float(run(jax.random.key(7)).mean())


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--steps", type=command_line.count, default=4_000)
    steps = parser.parse_args().steps
    settings = sac.settings_for("pendulum", steps=steps)
    check_trains(settings)
    print(f"the controller that demonstrates: {controllers_return():.0f}")
    print(f"SAC after {steps:,} steps with its demonstrations: {train(settings).mean():.0f}")
    alone = sac.train(replace(settings, schedule="sequential"))
    print(f"SAC after {steps:,} steps without: {alone.evaluation_returns.mean():.0f}")


if __name__ == "__main__":
    command_line.run(main)
