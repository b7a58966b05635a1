"""``conduit-jax envs``: the pure-JAX worlds, their specs and what a transition of each takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from conduit_jax.envs import EnvironmentSpec


@click.command("envs")
def environments() -> None:
    """List the pure-JAX environments with their spec and bytes a transition."""
    from conduit_jax import envs

    table = Table("environment", "observation", "actions", "time limit", "bytes a transition")
    table.columns[0].no_wrap = True
    for name in sorted(envs.ENVIRONMENTS):
        spec = envs.make(name).spec
        limit = "none" if spec.max_steps is None else str(spec.max_steps)
        table.add_row(name, _shapes(spec.observation), _actions(spec), limit, f"{transition_bytes(spec):,}")
    Console().print(table)
    Console().print("Bytes: both observations, action, float32 reward and discount, as a transition holds them.")
    Console().print(
        "Any Gymnasium environment with discrete or bounded continuous actions: gymnasium:<id>, as gymnasium:Pendulum-v1"
    )


def transition_bytes(spec: EnvironmentSpec) -> int:
    """Return the bytes of one ``Transition`` of that environment: both observations, action, reward and discount."""
    import jax

    leaves = jax.tree.leaves((spec.observation, spec.observation, spec.action))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) + 8


def _shapes(tree: Any) -> str:
    """Return the tree of arrays in words: ``float32[4]``, and where it is a dict what each key has."""
    if isinstance(tree, dict):
        kinds = {_shapes(leaf) for leaf in tree.values()}
        return f"{', '.join(tree)}: {' or '.join(sorted(kinds))}"
    return f"{tree.dtype}{list(tree.shape)}"


def _actions(spec: EnvironmentSpec) -> str:
    if spec.num_actions is not None:
        each = f" for each of {len(spec.action)}" if isinstance(spec.action, dict) else ""
        return f"{spec.num_actions} discrete{each}"
    return f"{_shapes(spec.action)} in [{spec.action_low}, {spec.action_high}]"
