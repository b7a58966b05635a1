"""Behaviour cloning from a data set larger than the memory it may take: a file, the disk tier, the learner.

    python -m conduit_jax.examples.offline
    python -m conduit_jax.examples.offline --data demonstrations.hdf5       # kept, and read again the next time

The task is reaching, seen in pixels (48 KB an observation). Demonstrations are written in Minari's layout, one episode at a
time; from then on all there is is the file. It streams into a plane whose buffer lies on disk behind a small host cache, and
a network learns to do what was shown (Pomerleau 1991). No environment is acted in until the policy is evaluated.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import conduit_jax as conduit
from conduit_jax import envs
from conduit_jax.adapters.minari import MinariEpisodes
from conduit_jax.examples import command_line
from conduit_jax.examples.networks import ActorCritic

ENV = envs.make("reach_128", shaped=False)  # the return is 1 where the goal was reached
BATCH, LENGTH = 64, 32
NETWORK = ActorCritic(5, (128,))  # its first output: the actions' logits
OPTIMIZER = optax.adam(1e-3)


# ------------------------------------------------------------------ the file


def shown(state: Any) -> jax.Array:
    """Return the demonstrator's action: one step along the axis on which the goal is farther away."""
    away = state.goal - state.hand
    axis = jnp.argmax(jnp.abs(away))
    return 1 + 2 * axis + (away[axis] < 0)


@jax.jit
def play(key: jax.Array) -> tuple[jax.Array, jax.Array, envs.TimeStep]:
    """Return what an episode begins with, and its actions and steps up to the time limit, ``(max_steps, ...)``."""

    def step(state: Any, _: None) -> tuple[Any, tuple[jax.Array, envs.TimeStep]]:
        action = shown(state)
        state, made = ENV.step(state, action)
        return state, (action, made)

    state, first = ENV.reset(key)
    return first, *jax.lax.scan(step, state, None, ENV.spec.max_steps)[1]


def write_demonstrations(path: Path, episodes: int, seed: int = 0) -> None:
    """Write ``episodes`` of the demonstrator's in Minari's layout: observations have a row more than the rest."""
    import h5py

    with h5py.File(path, "w") as file:
        for number, key in enumerate(jax.random.split(jax.random.key(seed), episodes)):
            first, action, steps = jax.device_get(play(key))
            length = int(np.argmax(steps.terminated | steps.truncated)) + 1
            group = file.create_group(f"episode_{number}")
            group["observations"] = np.concatenate([first[None], steps.observation[:length]])
            group["actions"] = action[:length].astype(np.int64)
            group["rewards"] = steps.reward[:length].astype(np.float64)
            group["terminations"], group["truncations"] = steps.terminated[:length], steps.truncated[:length]


# ------------------------------------------------------------------ the plane


class Shown(NamedTuple):
    """What is stored of a step: all that behaviour cloning looks at."""

    observation: jax.Array
    action: jax.Array


def ingestion(rollout: conduit.Rollout) -> conduit.Records:
    return conduit.Records(Shown(rollout.observation, rollout.action), rollout.lengths)


def make_plane(data: MinariEpisodes, cache_bytes: int, seed: int = 0) -> conduit.ExperiencePlane:
    """Return a plane on disk that holds every step of ``data``, of which at most ``cache_bytes`` are in memory."""
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=BATCH),
        replay=conduit.ReplayConfig(capacity=data.num_steps),
        placement=conduit.Disk(cache_bytes=cache_bytes),
        seed=seed,
    )
    plane.register_ingestion(ingestion)
    return plane


# ------------------------------------------------------------------ the learner


class Learner(NamedTuple):
    params: Any
    optimizer: Any


def new_learner(key: jax.Array) -> Learner:
    params = NETWORK.init(key, jnp.zeros((1, *ENV.spec.observation.shape), jnp.uint8))
    return Learner(params, OPTIMIZER.init(params))


def loss(params: Any, data: Shown) -> jax.Array:
    logits: Any = NETWORK.apply(params, data.observation)[0]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, data.action))


def update(learner: Learner, data: Shown) -> tuple[Learner, jax.Array]:
    value, gradient = jax.value_and_grad(loss)(learner.params, data)
    change, state = OPTIMIZER.update(gradient, learner.optimizer)
    return Learner(optax.apply_updates(learner.params, change), state), value


def act(params: Any, observation: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.argmax(NETWORK.apply(params, observation)[0], axis=-1)


def reached(params: Any, episodes: int = 50) -> float:
    """Return the share of goals that the policy reaches, in episodes nobody demonstrated."""
    run = jax.jit(lambda params, key: envs.evaluate(ENV, act, params, key, episodes=episodes))
    return float(run(params, jax.random.key(99)).mean())


# ------------------------------------------------------------------ all of it


def train(path: Path, updates: int, cache_bytes: int, seed: int = 0) -> tuple[Learner, float]:
    """Return the learner after ``updates`` batches from the file at ``path``, and the last one's loss."""
    data = MinariEpisodes(path, length=LENGTH)
    learner, value = new_learner(jax.random.key(seed)), jnp.nan
    step = jax.jit(update, donate_argnums=0)
    with make_plane(data, cache_bytes, seed) as plane:
        for rollout in data:
            plane.push(rollout)
        stored = data.num_steps * ENV.spec.observation.size / 1e6
        print(f"{data.counts.episodes} episodes, {data.num_steps:,} steps, {stored:,.0f} MB of observations")
        print(plane.explain())
        for _ in range(updates):
            learner, value = step(learner, plane.pull().data)
    return learner, float(value)


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument(
        "--data", type=Path, help="where the demonstrations are kept; read where they are there already"
    )
    parser.add_argument("--episodes", type=command_line.count, default=400)
    parser.add_argument("--updates", type=command_line.count, default=300)
    parser.add_argument("--cache-mb", type=command_line.count, default=16, help="what of the buffer may be in memory")
    chosen = parser.parse_args()
    if chosen.data and not chosen.data.parent.is_dir():
        parser.error(f"--data: the folder {chosen.data.parent} does not exist")
    with tempfile.TemporaryDirectory() as folder:
        path = chosen.data or Path(folder) / "main_data.hdf5"
        if not path.exists():
            write_demonstrations(path, chosen.episodes)
        learner, value = train(path, chosen.updates, chosen.cache_mb << 20)
    before = reached(new_learner(jax.random.key(0)).params)
    print(
        f"after {chosen.updates} updates (loss {value:.3f}): {reached(learner.params):.0%} of goals, untrained {before:.0%}"
    )


if __name__ == "__main__":
    command_line.run(main)
