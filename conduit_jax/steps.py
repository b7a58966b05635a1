"""The user's learner and ``train_step`` as a loop takes them: copied before they are donated, checked before they are run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from conduit_jax.errors import ConduitError, ConfigError, explain, refuse
from conduit_jax.types import Sample

PyTree = Any
Function = Callable[..., Any]


def own_copy(learner: PyTree) -> PyTree:
    """Return a copy of ``learner`` in which no two leaves share a buffer: one that may be donated.

    A target network that *is* the online one would otherwise be donated twice ("Attempt to donate the same buffer twice").
    """
    return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(jax.tree.map(jnp.asarray, learner))


def copy_arrays(tree: PyTree) -> PyTree:
    """Return ``tree`` with every JAX array copied and everything else (a host actor) as it is."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def check_step(result: Any, *, on_policy: bool) -> None:
    """Refuse, before anything is donated, a step that returns something else than the loop can take."""
    if type(result) is not tuple or len(result) not in (2, 3):  # a NamedTuple is one value
        want = "(learner, metrics) or (learner, metrics, priorities)"
        refuse(ConduitError, "train_step returned something else.", got=type(result).__name__, want=want)
    if on_policy and len(result) == 3:
        refuse(ConduitError, "On-policy experience has no priorities.", got="3 values", want="(learner, metrics)")


def explained(train_step: Function, learner: PyTree, sample: Sample) -> tuple:
    """Return ``train_step(learner, sample)``; ``ConfigError`` naming the leaves where one buffer would be donated twice."""
    try:
        return train_step(learner, sample)
    except ValueError as error:
        if "donate the same buffer twice" not in str(error):
            raise
        message = explain(
            "The learner holds one buffer twice; an update donates it and cannot do so twice.",
            got=_aliases(learner),
            want="a buffer of its own for every leaf",
            fix="jax.tree.map(jnp.copy, ...)",
        )
        raise ConfigError(message) from error


def _aliases(learner: PyTree) -> str:
    """Return the paths of leaves that share a buffer."""
    seen: dict[int, str] = {}
    pairs = []
    for path, leaf in jax.tree.leaves_with_path(learner):
        name = jax.tree_util.keystr(path)
        if isinstance(leaf, jax.Array) and id(leaf) in seen:
            pairs.append(f"{seen[id(leaf)]} and {name}")
        seen.setdefault(id(leaf), name)
    return "; ".join(pairs) or "two of its leaves"
