"""``conduit-jax envs``: the worlds there are, their specs and what a transition of each takes."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from conduit_jax.envs import EnvironmentSpec

# An example that can be typed, the module that has to be there, and the extra that installs it.
SOURCES = (
    ("gymnasium:Pendulum-v1", "gymnasium", "gymnasium"),
    ("gymnasium:ALE/Qbert-v5", "ale_py", "atari"),
    ("gymnax:CartPole-v1", "gymnax", "gymnax"),
    ("brax:inverted_pendulum", "brax", "brax"),
    ("pettingzoo:butterfly/knights_archers_zombies-v11", "pettingzoo", "pettingzoo"),
    ("metaworld:reach-v3", "metaworld", "metaworld"),
)


@click.command("envs")
@click.argument("names", nargs=-1, metavar="[NAME]...")
def environments(names: tuple[str, ...]) -> None:
    """List the pure-JAX worlds with their spec and bytes a transition, and where others come from.

    With NAMEs, as gymnasium:Pendulum-v1 or gymnax:CartPole-v1: those worlds alone.
    """
    from conduit_jax import envs
    from conduit_jax.adapters.names import find_spec

    console = Console(emoji=False)  # brax:ant:spring is a name
    table = Table("environment", "observation", "actions", "time limit", "bytes a transition")
    table.columns[0].no_wrap = True
    for name in names or sorted(envs.ENVIRONMENTS):
        spec = find_spec(name)
        limit = "none" if spec.max_steps is None else str(spec.max_steps)
        table.add_row(name, _shapes(spec.observation), _actions(spec), limit, f"{transition_bytes(spec):,}")
    console.print(table)
    console.print("Bytes: both observations, action, float32 reward and discount, as a transition holds them.")
    if not names:
        console.print("Worlds of other packages, by source:name; `conduit-jax envs NAME` prints the spec of any.")
        console.print(_sources())


def transition_bytes(spec: EnvironmentSpec) -> int:
    """Return the bytes of one ``Transition`` of that environment: both observations, action, reward and discount."""
    import jax

    leaves = jax.tree.leaves((spec.observation, spec.observation, spec.action))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) + 8


def _sources() -> Table:
    table = Table("for example", "here", "installed by")
    table.columns[0].no_wrap = True
    for name, module, extra in SOURCES:
        there = "yes" if importlib.util.find_spec(module) else "no"
        table.add_row(name, there, f"pip install 'conduit_jax\\[{extra}]'")
    return table


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
