"""``conduit-jax train ... --seeds K``: many seeds side by side in one program, where all is JAX."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from conduit_jax.cli.plots import draw_curves


def train_seeds(name: str, example: Any, settings: Any, seeds: int, outputs: tuple[Path | None, Path | None]) -> None:
    """Train ``seeds`` seeds from ``settings.seed`` on, print what each came to, and write ``outputs``: JSON and plot."""
    from conduit_jax.examples import fused

    console = Console(emoji=False)
    console.print(f"{name} {settings.env}: compiling {seeds} seeds into one program", highlight=False)
    result = fused.train(example, settings, seeds)
    table = Table("seed", "evaluation return", "min", title=f"{name} {settings.env}, final policies, fresh keys")
    for number, returns in enumerate(result.returns):
        table.add_row(str(settings.seed + number), f"{returns.mean():.1f}", f"{returns.min():.1f}")
    console.print(table)
    rate = seeds * result.env_steps / result.train_s
    console.print(
        f"mean {result.returns.mean():.1f} over {seeds} seeds; {seeds} x {result.env_steps:,} steps in"
        f" {result.train_s:.1f} s ({rate:,.0f} steps/s), compiled in {result.compile_s:.1f} s",
        highlight=False,
        soft_wrap=True,
    )
    json_path, plot = outputs
    if json_path is not None:
        data = {
            "settings": asdict(settings),
            "seeds": seeds,
            "evaluation_return": float(result.returns.mean()),
            "evaluation_returns": result.returns.tolist(),
            "env_steps": result.env_steps,
            "train_s": result.train_s,
            "compile_s": result.compile_s,
        }
        json_path.write_text(json.dumps(data, indent=1) + "\n")
    if plot is not None:
        draw_curves(plot, f"{name}, {settings.env}", _curves(result))


def _curves(result: Any, points: int = 300) -> list[list[tuple[float, float]]]:
    """Return at most so many (environment steps, recent return) a seed, evenly over the run."""
    count = result.curve.shape[1]
    chosen = range(count - 1, -1, -max(1, count // points))[::-1]
    return [
        [(result.env_steps * (number + 1) / count, float(row[number])) for number in chosen] for row in result.curve
    ]
