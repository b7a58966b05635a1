"""Trees of any leaves: arrays, typed keys, numbers, and objects on the host that say themselves what they are.

Such a tree is restored into an example of the caller's, leaf by leaf, each of the kind and in the place of the one it replaces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.checkpoint.arrays import Reader, Writer
from conduit_jax.checkpoint.folder import damaged
from conduit_jax.checkpoint.structure import structure_as_data, structure_from_data
from conduit_jax.errors import CheckpointError, refuse

PyTree = Any
Data = dict[str, Any]
Structure = Callable[[], Any]

_Number = bool | int | float | np.ndarray | np.generic


def save_tree(writer: Writer, tree: PyTree) -> Data:
    """Write a tree and return its structure (``None`` where it has no form on the disk) and references."""
    return {"structure": structure_as_data(tree), "leaves": [writer.put(leaf) for leaf in jax.tree.leaves(tree)]}


def load_tree(reader: Reader, saved: Data, structure: Structure) -> PyTree:
    """Return a saved tree with leaves in host memory; ``structure()`` is asked where its own was not saved."""
    leaves = [reader.get(one) for one in saved["leaves"]]
    try:
        known = structure() if saved["structure"] is None else structure_from_data(saved["structure"])
        return known.unflatten(leaves)
    except ValueError as error:
        return damaged("structure", str(error), error)


def kept(writer: Writer, tree: PyTree) -> Data:
    """Write a tree of any leaves."""
    return {"spec": spec_of(tree), "leaves": [_leaf_kept(writer, leaf) for leaf in jax.tree.leaves(tree)]}


def _leaf_kept(writer: Writer, leaf: Any) -> Data:
    """Write an array or a number, or what a host object's ``state_dict`` returns."""
    return writer.put(leaf) if isinstance(leaf, jax.Array | _Number) else save_tree(writer, leaf.state_dict())


def spec_of(tree: PyTree) -> dict[str, str]:
    """Return each leaf's dtype and shape by path; ``CheckpointError`` naming a leaf that cannot be saved."""
    return {
        jax.tree_util.keystr(path) or "<root>": _words(path, leaf) for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _words(path: Any, leaf: Any) -> str:
    if isinstance(leaf, jax.Array | _Number):
        dtype = getattr(leaf, "dtype", None)
        return type(leaf).__name__ if dtype is None else f"{dtype}{list(np.shape(leaf))}"
    if not (hasattr(leaf, "state_dict") and hasattr(leaf, "load_state_dict")):
        refuse(
            CheckpointError,
            f"Something cannot be saved: {jax.tree_util.keystr(path) or 'the whole tree'}.",
            got=type(leaf).__name__,
            want="arrays and numbers, or an object with state_dict() -> tree of arrays and load_state_dict(tree)",
        )
    return type(leaf).__name__


def filled(reader: Reader, references: list[Data], example: PyTree) -> PyTree:
    """Return ``example`` with saved leaves, each of the kind and in the place of the one it replaces."""
    leaves, structure = jax.tree.flatten(example)
    return structure.unflatten([_leaf(reader, *both) for both in zip(references, leaves, strict=True)])


def _leaf(reader: Reader, reference: Data, example: Any) -> Any:
    if isinstance(example, jax.Array):
        return jnp.copy(jax.device_put(reader.get(reference), example.sharding))
    if isinstance(example, np.ndarray):
        return reader.get(reference)
    if isinstance(example, _Number):
        return type(example)(reader.get(reference)[()])
    example.load_state_dict(load_tree(reader, reference, lambda: jax.tree.structure(None)))
    return example
