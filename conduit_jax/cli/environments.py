"""``conduit-jax envs``: the pure-JAX worlds, their specs and what a transition of each takes."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table


@click.command("envs")
def environments() -> None:
    """List the pure-JAX environments with their spec and bytes a transition."""
    from conduit_jax import envs

    table = Table("environment", "observation", "actions", "time limit", "bytes a transition")
    for name in sorted(envs.ENVIRONMENTS):
        spec = envs.make(name).spec
        observation = f"{spec.observation.dtype}{list(spec.observation.shape)}"
        size = 2 * spec.observation.size * spec.observation.dtype.itemsize + 12
        table.add_row(name, observation, f"{spec.num_actions} discrete", str(spec.max_steps), f"{size:,}")
    Console().print(table)
    Console().print(
        "Any Gymnasium environment with discrete actions: gymnasium:<id>, for instance gymnasium:CartPole-v1"
    )
