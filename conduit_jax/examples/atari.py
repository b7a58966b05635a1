"""DQN in an Atari game: every frame is stored once, and stacked when a transition is sampled.

    python -m conduit_jax.examples.atari --steps 4000      # needs the extra atari

A transition of four frames on either side would hold 56 KB; stored once it is a frame of 7 KB, and n-step returns are summed
as it is drawn. The replay is the pure one (`make_transition_view`), jitted here by hand: see dqn.py for a loop with a plane.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import conduit_jax as conduit
from conduit_jax.adapters.atari import STACK, atari_lane
from conduit_jax.adapters.gymnasium import GymnasiumActor
from conduit_jax.examples import command_line, dqn
from conduit_jax.examples.worlds import Algorithm


class Outcome(NamedTuple):
    """What a run came to."""

    recent_return: float
    updates: int
    stored_frames: int
    loss: float


def make_replay(settings: dqn.Settings) -> conduit.Replay:
    """Return a replay of single frames whose samples are n-step transitions over stacks of four."""
    view = conduit.TransitionView(discount=settings.discount, n=settings.n_step, stack=STACK)
    config = conduit.ReplayConfig(capacity=settings.capacity, min_size=settings.min_size)
    return conduit.make_transition_view(config, view, batch_size=settings.batch_size, lanes=settings.lanes)


def train(settings: dqn.Settings, actor: GymnasiumActor) -> Outcome:
    """Train for ``settings.steps`` steps of ``actor``, which stacks frames for the policy and hands out single ones."""
    replay, algorithm = make_replay(settings), dqn.make_dqn(actor.spec, settings)
    add = jax.jit(lambda state, steps: replay.add(state, steps)[0], donate_argnums=0)
    update = jax.jit(partial(_update, replay, algorithm, settings.updates_per_rollout), donate_argnums=(0, 1))
    act = jax.jit(algorithm.act)
    learner = jax.jit(algorithm.init)(jax.random.key(settings.seed))
    learner = jax.tree.map(
        jnp.copy, learner
    )  # parameters and their target are one buffer at first, which cannot be given twice
    state, loss, updates, key = None, jnp.zeros(()), 0, jax.random.key(settings.seed + 1)
    for _ in range(settings.iterations):
        key, rollout_key, sample_key = jax.random.split(key, 3)
        policy, numbers = algorithm.begin(algorithm.policy(learner), rollout_key), iter(range(settings.rollout_length))
        rollout = actor.rollout(
            lambda seen: np.asarray(act(policy, seen, jax.random.fold_in(rollout_key, next(numbers))))  # noqa: B023
        )
        steps = conduit.steps_of(rollout._replace(reward=np.sign(rollout.reward)))  # as Mnih et al. (2015) train
        if state is None:
            one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), steps)
            state = jax.jit(partial(replay.init, one))()
        state = add(state, steps)
        if replay.can_sample(state.control, settings.batch_size):
            learner, control, loss = update(learner, state.control, state.storage, sample_key)
            state, updates = state._replace(control=control), updates + settings.updates_per_rollout
    statistics = actor.statistics
    recent = float(np.sum(statistics.last_return) / max(1, np.sum(statistics.episodes > 0)))
    return Outcome(
        recent,
        updates,
        min(settings.iterations * settings.lanes * settings.rollout_length, settings.capacity),
        float(loss),
    )


def _update(
    replay: conduit.Replay, algorithm: Algorithm, count: int, learner: Any, control: Any, storage: Any, key: jax.Array
) -> tuple[Any, Any, jax.Array]:
    """Return learner and control after ``count`` updates, each on a batch of its own."""

    def step(carry: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
        learner, control = carry
        control, sample = replay.sample(control, storage, key)
        learner, metrics, _ = algorithm.train_step(learner, sample)
        return (learner, control), metrics["loss"]

    (learner, control), losses = jax.lax.scan(step, (learner, control), jax.random.split(key, count))
    return learner, control, losses[-1]


def main() -> None:
    parser = command_line.parser("DQN in an Atari game, each frame stored once")
    parser.add_argument("--game", default="ALE/Qbert-v5")
    parser.add_argument("--steps", type=command_line.count, default=4_000)
    options = parser.parse_args()
    # Rewards are their signs here, so their scale is that of no game.
    chosen: dict[str, Any] = dqn.ATARI | dict(capacity=100_000, reward_scale=1.0, updates_per_rollout=4)
    settings = dqn.Settings(env=options.game, steps=options.steps, **chosen)
    with GymnasiumActor(
        options.game, settings.lanes, settings.rollout_length, lane=atari_lane(options.game), stack=STACK
    ) as actor:
        start = time.perf_counter()
        outcome = train(settings, actor)
        frame = int(np.prod(actor.observation_shape))
    print(
        f"{settings.steps:,} steps, {outcome.updates} updates in {time.perf_counter() - start:.1f} s; loss {outcome.loss:.4f}"
    )
    print(f"return of recent episodes {outcome.recent_return:.1f}")
    print(
        f"{outcome.stored_frames:,} frames stored once: {outcome.stored_frames * frame / 1e6:.0f} MB; in transitions of "
        f"{2 * STACK} frames they would take {outcome.stored_frames * frame * 2 * STACK / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    command_line.run(main)
