"""Leaves that may grow, and leaves that may be missing: what a declared change of a tree's shapes comes to.

    conduit.Growth(axes={"observation": {0: 20_000}}, optional=("mask",), fill=0, old_items="pad")

Axes are those of one item, behind ``(T, lanes)`` of the pushed tree. What is not declared is not changed here: it is left
to be refused where trees are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.errors import ConfigError, SpecError, check_choice, check_integer, refuse
from conduit_jax.trees import TreeSpec, leaf_shape, tree_spec
from conduit_jax.types import rollout_lane_axes

Array = jax.Array
PyTree = Any
Axes = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Which leaves of pushed trees may grow or be missing, and what becomes of items stored before.

    ``axes``: by leaf (``"observation"``, ``"observation/image"``), item axis -> largest size. ``optional``: leaves a push
    may lack; a leaf that first comes later is added then. ``fill`` stands where there was nothing: behind the end of an
    axis, and in a missing leaf. ``old_items``: ``"pad"`` keeps items stored before, ``"drop"`` lets them go.
    """

    axes: Mapping[str, Mapping[int, int]] | Axes = ()
    optional: tuple[str, ...] = ()
    fill: float = 0
    old_items: str = "pad"

    def __post_init__(self) -> None:
        sizes = _flat(self.axes)
        for (leaf, axis), size in sizes.items():
            check_integer(f"Growth(axes={{{leaf!r}: ...}}) axis", axis, 0)
            check_integer(f"Growth(axes={{{leaf!r}: {{{axis}: ...}}}})", size, 1)
        if not isinstance(self.optional, tuple) or not all(isinstance(leaf, str) for leaf in self.optional):
            refuse(ConfigError, "Growth(optional=) names leaves.", got=repr(self.optional), want='("mask", ...)')
        if isinstance(self.fill, bool | str) or not np.isscalar(self.fill):
            refuse(ConfigError, "Growth(fill=) is not a number.", got=repr(self.fill), want="one number")
        check_choice("Growth(old_items=)", self.old_items, ("pad", "drop"))
        object.__setattr__(self, "axes", tuple((leaf, axis, size) for (leaf, axis), size in sorted(sizes.items())))

    def largest(self, leaf: str, axis: int) -> int | None:
        """Return how far an item axis of ``leaf`` may grow; ``None`` where it may not."""
        return next((size for name, own, size in _flat_axes(self) if (name, own) == (leaf, axis)), None)


def _flat_axes(growth: Growth) -> Axes:
    return growth.axes  # type: ignore[return-value]  # a tuple since it was made


def _flat(axes: Any) -> dict[tuple[str, int], int]:
    try:
        if isinstance(axes, Mapping):
            return {(leaf, axis): size for leaf, own in axes.items() for axis, size in own.items()}
        return {(leaf, axis): size for leaf, axis, size in axes}
    except (TypeError, ValueError, AttributeError):
        return refuse(
            ConfigError, "Growth(axes=) is not understood.", got=repr(axes), want='{"observation": {0: 20_000}}'
        )


def fitted(tree: PyTree, spec: TreeSpec, growth: Growth) -> tuple[PyTree, TreeSpec]:
    """Return ``tree`` padded and completed to at least ``spec``, and the spec it then has: ``spec``, or a larger one.

    ``SpecError`` where an axis would grow beyond its declared maximum. A difference that was not declared stays.
    """
    tree = _completed(tree, spec, growth)
    entries, structure = jax.tree.flatten_with_path(tree)
    wanted = dict(zip(map(_named, _paths(spec)), spec.leaves, strict=True))
    leaves = []
    for (path, leaf), lane in zip(entries, jax.tree.leaves(rollout_lane_axes(tree)), strict=True):
        name, own = _named(path), tuple(leaf_shape(leaf))
        old = wanted.get(name)
        if old is None or len(old.shape) != len(own) or old.shape == own:
            leaves.append(leaf)
            continue
        pairs = enumerate(zip(own, old.shape, strict=True), start=-1 - lane)
        target = [_grown(name, axis, size, before, growth) for axis, (size, before) in pairs]
        leaves.append(padded(leaf, target, growth.fill))
    tree = jax.tree.unflatten(structure, leaves)
    return tree, tree_spec(tree)


def at_largest(tree: PyTree, growth: Growth) -> PyTree:
    """Return the shapes of a pushed ``tree`` with every declared axis at its largest."""
    entries, structure = jax.tree.flatten_with_path(tree)
    leaves = []
    for (path, leaf), lane in zip(entries, jax.tree.leaves(rollout_lane_axes(tree)), strict=True):
        shape = list(leaf_shape(leaf))
        for name, axis, size in _flat_axes(growth):
            if name == _named(path):
                shape[lane + 1 + axis] = size
        grows = tuple(shape) != leaf_shape(leaf)
        leaves.append(jax.ShapeDtypeStruct(tuple(shape), leaf.dtype) if grows else leaf)
    return jax.tree.unflatten(structure, leaves)


def only_declared(tree: PyTree, spec: TreeSpec, growth: Growth) -> bool:
    """Whether ``tree``, as ``fitted`` returned it, differs from ``spec`` in declared ways alone."""
    known, found = dict(zip(spec.names, spec.leaves, strict=True)), tree_spec(tree)
    lanes = jax.tree.leaves(rollout_lane_axes(tree))
    for name, leaf, lane in zip(found.names, found.leaves, lanes, strict=True):
        if name not in known:
            if name not in growth.optional:
                return False
            continue
        old = known[name]
        if leaf.dtype != old.dtype or len(leaf.shape) != len(old.shape):
            return False
        pairs = enumerate(zip(leaf.shape, old.shape, strict=True), start=-1 - lane)
        if any(size != before and growth.largest(name, axis) is None for axis, (size, before) in pairs):
            return False
    return set(known) <= set(found.names)


def _grown(name: str, axis: int, size: int, before: int, growth: Growth) -> int:
    largest = growth.largest(name, axis)
    if largest is None or size == before:
        return size
    if size > largest:
        refuse(
            SpecError,
            f"Leaf {name!r} grew beyond its declared maximum.",
            got=f"size {size} of item axis {axis}",
            want=f"at most {largest}",
            fix=f"Growth(axes={{{name!r}: {{{axis}: {size}}}}})",
        )
    return max(size, before)


def padded(leaf: Any, shape: Any, fill: float) -> Any:
    """Return ``leaf`` with ``fill`` behind the end of each axis that is shorter than in ``shape``; numpy stays numpy."""
    room = [(0, max(0, want - have)) for want, have in zip(shape, np.shape(leaf), strict=True)]
    if not any(more for _, more in room):
        return leaf
    return (jnp if isinstance(leaf, jax.Array) else np).pad(leaf, room, constant_values=fill)


def check_fill(spec: TreeSpec, growth: Growth) -> None:
    """Raise ``ConfigError`` for a fill that a growable or optional leaf cannot hold."""
    names = {leaf for leaf, _, _ in _flat_axes(growth)} | set(growth.optional)
    for path, leaf in zip(_paths(spec), spec.leaves, strict=True):
        if _named(path) in names and np.asarray(growth.fill).astype(leaf.dtype).astype(float) != growth.fill:
            got = f"fill={growth.fill} for {leaf.dtype}"
            refuse(ConfigError, f"Leaf {_named(path)!r} cannot hold the fill.", got=got, want="a value of its dtype")


def check_leaves(spec: TreeSpec, growth: Growth) -> None:
    """Raise ``ConfigError`` for a declared axis that the first push does not have."""
    lanes = jax.tree.leaves(rollout_lane_axes(spec.shapes()))
    items = {
        _named(path): leaf.shape[lane + 1 :] for path, leaf, lane in zip(_paths(spec), spec.leaves, lanes, strict=True)
    }
    for leaf, axis, size in _flat_axes(growth):
        if leaf not in items and leaf in growth.optional:
            continue
        check_choice("leaf in Growth(axes=)", leaf, items)
        if axis >= len(items[leaf]) or items[leaf][axis] > size:
            refuse(
                ConfigError,
                f"Leaf {leaf!r} cannot grow as declared.",
                got=f"axis {axis} up to {size}, item shape {items[leaf]}",
                want="an axis of the item, no larger yet than its maximum",
            )
    check_fill(spec, growth)


def pad_items(tree: PyTree, old: TreeSpec, new: TreeSpec, fill: float) -> PyTree:
    """Return items ``(n, ...)`` of ``old`` as items of ``new``: leaves go by their path, what is new is ``fill``."""
    leaves = dict(zip(old.paths, jax.tree.leaves(tree), strict=True))
    count = jax.tree.leaves(tree)[0].shape[0]

    def item(path: str, want: Any) -> Array:
        if path not in leaves:
            return jnp.full((count, *want.shape), fill, want.dtype)
        return padded(leaves[path], (count, *want.shape), fill)

    return new.unflatten([item(path, want) for path, want in zip(new.paths, new.leaves, strict=True)])


def check_grows(old: TreeSpec, new: TreeSpec) -> None:
    """Raise ``SpecError`` unless every leaf of ``old`` is one of ``new``, of the same dtype and no larger."""
    there = dict(zip(new.paths, new.leaves, strict=True))
    for path, leaf in zip(old.paths, old.leaves, strict=True):
        after = there.get(path)
        fits = after is not None and after.dtype == leaf.dtype and len(after.shape) == len(leaf.shape)
        if after is None or not fits or any(size > more for size, more in zip(leaf.shape, after.shape, strict=True)):
            refuse(
                SpecError,
                f"Stored items cannot become the new ones: leaf {path}.",
                got=after,
                want=f"{leaf.dtype}{list(leaf.shape)} or larger",
                fix='Growth(old_items="drop"), or a hook whose leaves only grow',
            )


def _completed(tree: PyTree, spec: TreeSpec, growth: Growth) -> PyTree:
    """Return ``tree`` with every optional leaf of ``spec`` that it lacks, filled."""
    if not growth.optional:
        return tree
    present = {_named(path) for path, _ in jax.tree.leaves_with_path(tree)}
    for path, leaf in zip(_paths(spec), spec.leaves, strict=True):
        if _named(path) in growth.optional and _named(path) not in present:
            tree = _with_leaf(tree, path, np.full(leaf.shape, growth.fill, leaf.dtype))
    return tree


def _with_leaf(tree: PyTree, path: tuple[Any, ...], leaf: Any) -> PyTree:
    """Return ``tree`` with ``leaf`` at ``path``, through dicts and NamedTuples."""
    if not path:
        return leaf
    key = path[0]
    if isinstance(key, jax.tree_util.DictKey) and isinstance(tree, dict):
        return {**tree, key.key: _with_leaf(tree.get(key.key, {}), path[1:], leaf)}
    if isinstance(key, jax.tree_util.GetAttrKey) and hasattr(tree, "_replace"):
        return tree._replace(**{key.name: _with_leaf(getattr(tree, key.name), path[1:], leaf)})
    return refuse(
        SpecError,
        f"Leaf {_named(path)!r} is missing where it cannot be put.",
        got=type(tree).__name__,
        want="a dict or a NamedTuple",
    )


def _paths(spec: TreeSpec) -> list[tuple[Any, ...]]:
    return [path for path, _ in jax.tree.leaves_with_path(spec.shapes())]


def _named(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


__all__ = ["Growth", "at_largest", "check_grows", "check_leaves", "fitted", "only_declared", "pad_items", "padded"]
