"""Online learning with demonstrations: two tables in one plane, and half of every batch from each (Ball et al. 2023, RLPD).

    python -m conduit_jax.examples.rlpd

SAC on Pendulum. The demonstrations are a controller's that pumps energy into the rod and holds it upright; they are pushed
once and stay. Nothing else differs from SAC alone: the plane draws from a ``Mixture`` instead of from one table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

import conduit_jax as conduit
from conduit_jax import envs
from conduit_jax.examples import command_line, running, sac
from conduit_jax.examples.replayed import check_trains

ONLINE, DEMONSTRATIONS = "experience", "demonstrations"  # a loop pushes to the table of this name


def controller(parameters: Any, observation: jax.Array, key: jax.Array) -> jax.Array:
    """Return a torque that swings Pendulum up: towards the energy of standing upright, and a spring near it."""
    cosine, sine, velocity = observation[:, 0], observation[:, 1], observation[:, 2]
    energy = velocity**2 / 6 + 5 * cosine  # of a rod of mass and length 1, where g is 10; 5 when it stands still
    pump = jnp.sign(velocity) * jnp.sign(5 - energy) * 2
    hold = -10 * sine - 2 * velocity
    return jnp.clip(jnp.where(cosine > 0.9, hold, pump), -2, 2)[:, None]


def make_plane(settings: sac.Settings, demonstrated: int) -> conduit.ExperiencePlane:
    """Return the plane, with its demonstrations: each table gives half a batch, theirs is as large as they are."""
    online = conduit.ReplayConfig(capacity=settings.capacity, min_size=settings.min_size)
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(
            batch_size=settings.batch_size,
            updates_per_rollout=settings.updates_per_rollout,
            max_staleness=settings.max_staleness,
        ),
        replay=conduit.Mixture(
            tables={ONLINE: online, DEMONSTRATIONS: conduit.ReplayConfig(capacity=demonstrated)},
            proportions={ONLINE: 1, DEMONSTRATIONS: 1},
        ),
        schedule=settings.schedule,
        seed=settings.seed,
    )
    ingestion = sac.make_ingestion(settings)
    plane.register_ingestion(ingestion.hook, init_carry=ingestion.init_carry)
    _demonstrate(plane, demonstrated, jax.random.key(settings.seed))
    return plane


def train(settings: sac.Settings, demonstrated: int = 5_000) -> running.Result:
    """Train for ``settings.steps`` environment steps and evaluate the final policy.

    ``ConfigError`` where so few steps never fill the replay: nothing would be learned.
    """
    check_trains(settings)
    make_algorithm = lambda spec: sac.make_sac(spec, settings)  # noqa: E731
    return running.train(settings, make_algorithm, lambda _: make_plane(settings, demonstrated))


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
    settings = replace(sac.settings_for("pendulum", steps=steps), schedule="sequential")
    check_trains(settings)
    print(f"the controller that demonstrates: {controllers_return():.0f}")
    print(f"SAC after {steps:,} steps with its demonstrations: {train(settings).evaluation_returns.mean():.0f}")
    alone = sac.train(settings)
    print(f"SAC after {steps:,} steps without: {alone.evaluation_returns.mean():.0f}")


if __name__ == "__main__":
    command_line.run(main)
