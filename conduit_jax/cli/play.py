"""``conduit-jax play``: an episode of a trained policy, as a GIF or as letters in the terminal."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from conduit_jax.cli.suggest import SuggestingChoice

_FRAME_S = 0.04


@click.command()
@click.argument("algorithm", type=SuggestingChoice(["dqn", "sac", "ppo"]))
@click.option("--env", required=True, help="A world of `conduit-jax envs`: the one it was trained in.")
@click.option(
    "--checkpoint",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The folder that training was told to keep checkpoints in.",
)
@click.option(
    "--gif", type=click.Path(dir_okay=False, path_type=Path), help="Write an animation instead of showing it."
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Of the episode.")
@click.option("--max-steps", type=click.IntRange(min=1), default=500, show_default=True)
@click.option("--normalize-observations", is_flag=True, help="PPO: as it was trained.")
def play(
    algorithm: str,
    env: str,
    checkpoint: Path,
    gif: Path | None,
    seed: int,
    max_steps: int,
    normalize_observations: bool,
) -> None:
    """Play one episode, greedily, with the policy a checkpoint holds."""
    if normalize_observations and algorithm != "ppo":
        raise click.UsageError("--normalize-observations is PPO's.")
    from conduit_jax.cli.pictures import as_letters, painter, save_gif

    paint = painter(env.removeprefix("jax:"))
    pictures, total = [], 0.0
    console = Console()
    trained = {"normalize_observations": True} if normalize_observations else {}
    for state, reward in episode(algorithm, env, checkpoint, seed, max_steps, **trained):
        total += reward
        pictures.append(paint(state))
        if gif is None and console.is_terminal:
            console.clear()
            console.print(as_letters(pictures[-1]), highlight=False, markup=False)
            time.sleep(_FRAME_S)
    if gif is not None:
        save_gif(gif, pictures)
        console.print(f"{gif}: {len(pictures)} pictures", highlight=False)
    elif not console.is_terminal:
        console.print(as_letters(pictures[-1]), highlight=False, markup=False)
    console.print(f"return {total:.1f} in {len(pictures) - 1} steps", highlight=False)


def episode(algorithm: str, env: str, checkpoint: Path, seed: int, max_steps: int, **trained: Any) -> Any:
    """Yield (state, reward) of every step of one episode, the first with reward 0; states are on the host.

    ``trained`` are settings of the training that the policy depends on, where they are not the preset's.
    """
    import jax

    from conduit_jax.adapters.names import make_pure
    from conduit_jax.examples.worlds import greedy_policy
    from conduit_jax.resumption import saved_learner

    example: Any = importlib.import_module(f"conduit_jax.examples.{algorithm}")
    settings = example.settings_for(env, **trained)
    world, made, act = greedy_policy(make_pure(env), lambda spec: getattr(example, f"make_{algorithm}")(spec, settings))
    learner = saved_learner(checkpoint, jax.jit(made.init)(jax.random.key(0)))
    policy, reset_key = made.policy(learner), jax.random.fold_in(jax.random.key(seed), 1)
    act, step = jax.jit(act), jax.jit(world.step)
    state, observation = jax.jit(world.reset)(reset_key)
    yield jax.device_get(state), 0.0
    for number in range(max_steps):
        batch = jax.tree.map(lambda leaf: leaf[None], observation)
        action = act(policy, batch, jax.random.fold_in(reset_key, number))[0]
        state, stepped = step(state, action)
        observation = stepped.observation
        yield jax.device_get(state), float(stepped.reward)
        if bool(stepped.terminated) or bool(stepped.truncated):
            return
