"""Parts of an item by path, ``"observation.desired_goal"``: names of dict keys or fields, and numbers of a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from conduit_jax.errors import ConfigError, SpecError, refuse

Array = jax.Array
PyTree = Any


def check_paths(name: str, value: object) -> None:
    """Raise ``ConfigError`` unless ``value`` is a tuple of at least one path."""
    if not isinstance(value, tuple) or not value or not all(isinstance(path, str) for path in value):
        refuse(ConfigError, f"{name} names nothing.", got=repr(value), want='a tuple of paths, such as ("terminated",)')


def get(tree: PyTree, path: str) -> PyTree:
    """Return the part of ``tree`` at ``path``; ``SpecError`` with the names there are where it leads nowhere."""
    for name in path.split("."):
        tree = _child(tree, name, path)
    return tree


def put(tree: PyTree, path: str, value: PyTree) -> PyTree:
    """Return ``tree`` with ``value`` at ``path``; what is not on the way is shared with ``tree``."""
    name, _, rest = path.partition(".")
    child, kind = _child(tree, name, path), type(tree)
    value = put(child, rest, value) if rest else value
    if isinstance(tree, Mapping):
        return kind({**tree, name: value})
    if hasattr(tree, "_replace"):
        return tree._replace(**{name: value})
    position = int(name)
    return kind(value if number == position else entry for number, entry in enumerate(tree))


def any_of(tree: PyTree, flags: tuple[str, ...]) -> Array:
    """Return whether any of the bools at the paths ``flags`` is True; ``SpecError`` where one is of another dtype."""
    found = [get(tree, path) for path in flags]
    for path, flag in zip(flags, found, strict=True):
        if getattr(flag, "dtype", None) != jnp.bool_:
            got = getattr(flag, "dtype", type(flag).__name__)
            refuse(SpecError, f"{path!r} does not say whether an episode ended.", got=got, want="a bool a step")
    return reduce(jnp.logical_or, found)


def _child(tree: PyTree, name: str, path: str) -> PyTree:
    names = _names(tree)
    if name not in names:
        refuse(SpecError, f"The item has no {path!r}.", got=repr(name), want=f"one of {', '.join(names) or 'nothing'}")
    if isinstance(tree, Mapping):
        return tree[name]
    return getattr(tree, name) if hasattr(tree, "_fields") else tree[int(name)]


def _names(tree: PyTree) -> list[str]:
    """Return what a path may say next: nothing below an array."""
    if isinstance(tree, Mapping):
        return list(tree)
    if hasattr(tree, "_fields"):
        return list(tree._fields)
    return [str(number) for number in range(len(tree))] if isinstance(tree, list | tuple) else []
