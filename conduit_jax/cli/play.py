"""``conduit-jax play``: an episode of a trained policy, as a GIF or as letters in the terminal."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from conduit_jax.cli.suggest import SuggestingChoice

_FRAME_S = 0.04


@click.command()
@click.argument("algorithm", type=SuggestingChoice(["dqn", "sac", "ppo"]))
@click.option("--env", required=True, help="The world it was trained in: one in pure JAX, or gymnasium:<id>.")
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
@click.option("--normalize-values", is_flag=True, help="PPO: as it was trained.")
def play(
    algorithm: str,
    env: str,
    checkpoint: Path,
    gif: Path | None,
    seed: int,
    max_steps: int,
    **normalized: bool,
) -> None:
    """Play one episode, greedily, with the policy a checkpoint holds."""
    trained = {name: True for name, given in normalized.items() if given}
    if trained and algorithm != "ppo":
        raise click.UsageError(f"--{next(iter(trained)).replace('_', '-')} is PPO's.")
    if gif is not None and not gif.parent.is_dir():
        raise click.BadParameter(f"the folder {gif.parent} does not exist", param_hint="--gif")
    from conduit_jax.cli.pictures import as_letters, save_gif

    pictures, total = [], 0.0
    console = Console(emoji=False)
    for picture, reward in episode(algorithm, env, checkpoint, seed, max_steps, **trained):
        total += reward
        pictures.append(picture)
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


def episode(algorithm: str, env: str, checkpoint: Path, seed: int, max_steps: int, **trained: Any) -> Iterator[tuple]:
    """Return an iterator over (picture, reward) of every step of one episode, the first with reward 0.

    ``trained`` are settings of the training that the policy depends on, where they are not the preset's. Worlds of Gymnasium
    draw themselves; of others, those in pure JAX that have a picture.
    """
    from conduit_jax.adapters.names import parse_environment_name

    example: Any = importlib.import_module(f"conduit_jax.examples.{algorithm}")
    settings = example.settings_for(env, **trained)
    make = partial(_made, algorithm, example, settings)
    source, name = parse_environment_name(env)
    if source == "gymnasium":
        return _episode_of_gymnasium(name, make, checkpoint, seed, max_steps)
    return _episode_of_a_pure_world(env if source != "jax" else name, make, checkpoint, seed, max_steps)


def _made(algorithm: str, example: Any, settings: Any, spec: Any) -> Any:
    return getattr(example, f"make_{algorithm}")(spec, settings)


def _saved_policy(made: Any, checkpoint: Path) -> Any:
    import jax

    from conduit_jax.resumption import saved_learner

    return made.policy(saved_learner(checkpoint, jax.jit(made.init)(jax.random.key(0))))


def _episode_of_a_pure_world(env: str, make: Callable, checkpoint: Path, seed: int, max_steps: int) -> Iterator[tuple]:
    import jax

    from conduit_jax.adapters.names import make_pure
    from conduit_jax.cli.pictures import painter
    from conduit_jax.examples.worlds import greedy_policy

    paint = painter(env)
    world, made, act = greedy_policy(make_pure(env), make)
    policy, reset_key = _saved_policy(made, checkpoint), jax.random.fold_in(jax.random.key(seed), 1)
    act, step = jax.jit(act), jax.jit(world.step)
    state, observation = jax.jit(world.reset)(reset_key)
    yield paint(jax.device_get(state)), 0.0
    for number in range(max_steps):
        batch = jax.tree.map(lambda leaf: leaf[None], observation)
        action = act(policy, batch, jax.random.fold_in(reset_key, number))[0]
        state, stepped = step(state, action)
        observation = stepped.observation
        yield paint(jax.device_get(state)), float(stepped.reward)
        if bool(stepped.terminated) or bool(stepped.truncated):
            return


def _episode_of_gymnasium(name: str, make: Callable, checkpoint: Path, seed: int, max_steps: int) -> Iterator[tuple]:
    import jax
    import numpy as np

    from conduit_jax.adapters.gymnasium_spaces import environment_spec, read_actions, read_observations
    from conduit_jax.adapters.names import gymnasium_lane

    env = gymnasium_lane(name).make(render_mode="rgb_array")
    shape, dtype = read_observations(name, env.observation_space)
    actions = read_actions(name, env.action_space)
    made = make(environment_spec(shape, dtype, actions, None))
    policy, act, key = _saved_policy(made, checkpoint), jax.jit(made.act_greedily), jax.random.key(seed)
    try:
        observation, _ = env.reset(seed=seed)
        yield np.asarray(env.render()), 0.0
        for number in range(max_steps):
            seen = np.asarray(observation, dtype)[None]
            action = actions.checked(act(policy, seen, jax.random.fold_in(key, number)), 1)
            observation, reward, terminated, truncated, _ = env.step(actions.for_environment(action)[0])
            yield np.asarray(env.render()), float(reward)
            if terminated or truncated:
                return
    finally:
        env.close()
