"""Item specs: the static description of one stored item, and comparing real trees with it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.errors import SpecError, refuse

PyTree = Any


class LeafSpec(NamedTuple):
    """Shape and dtype of one leaf of one item; hashable."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        """Bytes one item's leaf takes, unpadded."""
        return math.prod(self.shape) * self.dtype.itemsize


class TreeSpec(NamedTuple):
    """A tree's structure and leaves as a hashable value, so that equal specs share one trace."""

    treedef: Any
    leaves: tuple[LeafSpec, ...]
    paths: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The leaves' paths as ``a/b``, whatever containers they lead through."""
        entries = jax.tree.leaves_with_path(self.shapes())
        return tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in entries)

    @property
    def bytes(self) -> int:
        """Bytes one item takes as it stands, without packing or padding."""
        return sum(leaf.bytes for leaf in self.leaves)

    def unflatten(self, leaves: Any) -> PyTree:
        """Put ``leaves`` back into the tree's structure."""
        return jax.tree.unflatten(self.treedef, leaves)

    def shapes(self, *lead: int) -> PyTree:
        """The tree of ``jax.ShapeDtypeStruct`` with leading axes ``lead``."""
        return self.unflatten([jax.ShapeDtypeStruct((*lead, *leaf.shape), leaf.dtype) for leaf in self.leaves])


def tree_spec(tree: PyTree, *, drop: int = 0) -> TreeSpec:
    """Return the spec of ``tree`` without its first ``drop`` axes (``drop=2``: the item of a ``(T, lanes, ...)`` tree).

    Raises ``SpecError`` for a leaf that is no array or has fewer than ``drop`` axes.
    """
    entries, treedef = jax.tree.flatten_with_path(tree)
    paths = tuple(jax.tree_util.keystr(path) or "<root>" for path, _ in entries)
    leaves = []
    for path, (_, leaf) in zip(paths, entries, strict=True):
        shape, dtype = leaf_shape(leaf, path), leaf_dtype(leaf, path)
        if len(shape) < drop:
            refuse(
                SpecError,
                f"Leaf {path} has too few axes.",
                got=f"shape {shape}",
                want=f"at least {drop} leading axes (time, lanes)",
            )
        leaves.append(LeafSpec(tuple(shape[drop:]), dtype))
    return TreeSpec(treedef, tuple(leaves), paths)


def leaf_shape(leaf: Any, path: str = "<leaf>") -> tuple[int, ...]:
    """Return the shape of an array-like leaf; ``SpecError`` for anything else (strings, objects)."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return tuple(leaf.shape)
    if isinstance(leaf, bool | int | float):
        return ()
    return refuse(SpecError, f"Leaf {path} is not an array.", got=type(leaf).__name__, want="a jax or numpy array")


def leaf_dtype(leaf: Any, path: str = "<leaf>") -> np.dtype:
    """Return the dtype JAX will give the leaf (64-bit numpy becomes 32-bit unless x64 is on); ``SpecError`` for one it has not."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        fix = "store jax.random.key_data(key)"
        refuse(SpecError, f"Leaf {path} is a typed PRNG key, which cannot be stored.", got=str(dtype), fix=fix)
    if np.dtype(dtype).kind in "mM" or not (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)):
        want = "booleans, integers or floats"
        refuse(SpecError, f"Leaf {path} is not an array JAX can hold.", got=f"dtype {dtype}", want=want)
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def check_matches(tree: PyTree, wanted: TreeSpec, what: str) -> list[Any]:
    """Return the leaves of ``tree``; ``SpecError`` naming the first leaf whose structure, shape or dtype differs from ``wanted``."""
    leaves, treedef = jax.tree.flatten(tree)
    if treedef == wanted.treedef:
        for leaf, spec in zip(leaves, wanted.leaves, strict=True):
            if getattr(leaf, "shape", None) != spec.shape:
                break
            dtype = getattr(leaf, "dtype", None)
            if dtype != spec.dtype and not _becomes(dtype, spec.dtype):
                break
        else:
            return leaves
    return _explain_mismatch(tree, wanted, what)


def _becomes(dtype: Any, wanted: np.dtype) -> bool:
    """Whether JAX turns arrays of numpy ``dtype`` into ``wanted`` ones (64-bit numbers into 32-bit ones)."""
    return isinstance(dtype, np.dtype) and dtype.kind in "iuf" and jax.dtypes.canonicalize_dtype(dtype) == wanted


def _explain_mismatch(tree: PyTree, wanted: TreeSpec, what: str) -> list[Any]:
    """Find the first difference and raise it, or accept what only looked different (64-bit numpy, Python scalars)."""
    found = tree_spec(tree)
    missing, extra = set(wanted.paths) - set(found.paths), set(found.paths) - set(wanted.paths)
    if missing or extra:
        refuse(
            SpecError,
            f"{what} has another tree than the one the buffer was built for.",
            got=f"unexpected leaves {sorted(extra)}" if extra else f"missing leaves {sorted(missing)}",
            want=f"leaves {list(wanted.paths)}",
            fix="push the same structure as the first time, or build another table for it",
        )
    if found.treedef != wanted.treedef:
        refuse(
            SpecError,
            f"{what} has another tree than the one the buffer was built for.",
            got=found.treedef,
            want=wanted.treedef,
        )
    for path, got, want in zip(found.paths, found.leaves, wanted.leaves, strict=True):
        if got.shape != want.shape:
            refuse(SpecError, f"{what}: leaf {path} has another shape.", got=got.shape, want=want.shape)
        if got.dtype != want.dtype:
            refuse(
                SpecError,
                f"{what}: leaf {path} has another dtype.",
                got=got.dtype,
                want=want.dtype,
                fix=f"cast it where it is made (.astype({want.dtype})): nothing is promoted silently",
            )
    return jax.tree.leaves(tree)
