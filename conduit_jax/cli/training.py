"""``conduit-jax train``: run a shipped example, watch it, and keep what it came to as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from conduit_jax.cli.display import LiveDisplay, latency_table
from conduit_jax.cli.keeping import keeping_options, kept
from conduit_jax.cli.plots import check_plot, draw_curves
from conduit_jax.cli.seeds import train_seeds
from conduit_jax.cli.suggest import SuggestingChoice

# Kept as words, so that --help and a typing error answer without importing JAX; a test holds them to the package.
PLACEMENTS = ("auto", "device", "single_device", "pinned_host", "pageable", "disk")
SCHEDULES = ("auto", "sequential", "overlap", "fused")
_OUTPUT = click.Path(dir_okay=False, path_type=Path)


@click.group()
def train() -> None:
    """Train one of the shipped algorithms and report where the time went."""


def _shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add what every algorithm can be told; what it does not say is the example's preset."""
    options = (
        click.option("--steps", type=click.IntRange(min=1), help="Environment steps.  [default: the preset's]"),
        click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True),
        click.option("--placement", type=SuggestingChoice(PLACEMENTS), default="auto", show_default=True),
        click.option("--schedule", type=SuggestingChoice(SCHEDULES), default="auto", show_default=True),
        click.option("--json", "json_path", type=_OUTPUT, help="Write the result as JSON."),
        click.option("--quiet", is_flag=True, help="Print only the result."),
        click.option("--plot", type=_OUTPUT, help="Write the learning curve as PNG (needs matplotlib)."),
        click.option(
            "--seeds",
            type=click.IntRange(min=1),
            help="Train so many seeds in one program, where all is JAX: no plane.",
        ),
    )
    command = keeping_options(command)
    for option in reversed(options):
        command = option(command)
    return command


def _replay_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add what off-policy algorithms can be told."""
    command = click.option("--capacity", type=click.IntRange(min=1), help="Items the replay holds.")(command)
    samplers = SuggestingChoice(["uniform", "prioritized"])
    return click.option("--sampler", type=samplers, help="How the replay is sampled.")(command)


def _env_option(default: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    words = "A world of `conduit-jax envs`: by name, or source:name as gymnasium:<id>."
    return click.option("--env", default=default, show_default=True, help=words)


@train.command()
@_env_option("cartpole")
@_replay_options
@_shared_options
def dqn(**chosen: Any) -> None:
    """Deep Q-learning, double and n-step, uniform or prioritized; discrete actions."""
    from conduit_jax.examples import dqn as example

    _run("dqn", example, **chosen)


@train.command()
@_env_option("pendulum")
@_replay_options
@_shared_options
def sac(**chosen: Any) -> None:
    """Soft actor-critic with automatic temperature; continuous actions."""
    from conduit_jax.examples import sac as example

    _run("sac", example, **chosen)


@train.command()
@_env_option("cartpole")
@click.option(
    "--normalize-observations", is_flag=True, default=None, help="Centre and scale vectors by running statistics."
)
@click.option("--normalize-values", is_flag=True, default=None, help="Count values in units of their running spread.")
@_shared_options
def ppo(**chosen: Any) -> None:
    """Proximal policy optimization, on-policy; discrete or continuous actions."""
    from conduit_jax.examples import ppo as example

    _run("ppo", example, **chosen)


def _run(
    name: str,
    example: Any,
    *,
    json_path: Path | None,
    plot: Path | None,
    quiet: bool,
    seeds: int | None,
    **chosen: Any,
) -> None:
    """Train as ``example`` does, show it, and write down what it came to."""
    if json_path is not None and not json_path.parent.is_dir():
        raise click.BadParameter(f"the folder {json_path.parent} does not exist", param_hint="--json")
    check_plot(plot)
    console = Console(emoji=False)
    with kept(chosen) as keep:
        settings = example.settings_for(**chosen)
        if seeds is not None:
            if keep.checkpoint_dir or keep.sinks:
                raise click.UsageError("--seeds trains without a plane: it keeps no checkpoints and no metrics files.")
            train_seeds(name, example, settings, seeds, (json_path, plot))
            return
        with LiveDisplay(console, f"{name} {settings.env}", quiet=quiet) as display:
            result = example.train(settings, observe=display.update, keep=keep)
    report = replace(result.stats.latency, exposed=result.exposed)
    if not quiet:
        console.print(result.explanation, highlight=False, markup=False, soft_wrap=True)
        console.print(latency_table(report))
    console.print(_summary(result), highlight=False, soft_wrap=True)
    if json_path is not None:
        json_path.write_text(json.dumps(_finite(_as_data(settings, result, report)), indent=1, allow_nan=False) + "\n")
    if plot is not None:
        draw_curves(plot, f"{name}, {settings.env}", [result.curve])
    if result.interrupted:
        raise SystemExit(130)


def _summary(result: Any) -> str:
    returns, stopped = result.evaluation_returns, " (stopped by Ctrl-C)" if result.interrupted else ""
    speed = (result.env_steps - result.resumed_steps) / result.train_s
    stopped += f", resumed at {result.resumed_steps:,}" if result.resumed_steps else ""
    return (
        f"evaluation return {returns.mean():.1f} (min {returns.min():.1f}, {len(returns)} episodes, final policy, fresh key)"
        f" after {result.env_steps:,} steps and {result.updates:,} updates in {result.train_s:.1f} s ({speed:,.0f} steps/s){stopped}"
    )


def _as_data(settings: Any, result: Any, report: Any) -> dict[str, Any]:
    return {
        "settings": asdict(settings),
        "curve": [{"env_steps": steps, "recent_return": value} for steps, value in result.curve],
        "evaluation_return": float(result.evaluation_returns.mean()),
        "evaluation_returns": [float(value) for value in result.evaluation_returns],
        "env_steps": result.env_steps,
        "updates": result.updates,
        "train_s": result.train_s,
        "interrupted": result.interrupted,
        "plane": {**result.stats.as_dict(), "latency": report.as_dict()},
        "explain": result.explanation.splitlines(),
    }


def _finite(value: Any) -> Any:
    """Return ``value`` with every NaN as None: JSON has no word for it."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
