"""Tree structures and settings as plain data: what is read back is compared or rebuilt, never executed.

Dicts with string or integer keys, lists, tuples, ``None`` and this package's own NamedTuples have a form on the disk.
Trees of other nodes (a user's own NamedTuple) do not: they are rebuilt from an example of the caller's.
"""

from __future__ import annotations

import dataclasses
import warnings
from fractions import Fraction
from functools import partial
from typing import Any

import jax

from conduit_jax import types
from conduit_jax.checkpoint.functions import are_functions, comparable, function_as_data
from conduit_jax.packed import Packed
from conduit_jax.replay.episode_batches import PackedEpisodes
from conduit_jax.replay.transition_view import Step
from conduit_jax.replay.window_reads import RecurrentWindow

PyTree = Any
Json = Any

_OURS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (types.Transition, types.Trajectory, types.Rollout, Step, RecurrentWindow, PackedEpisodes)
}
_PACKED: dict[str, type[Packed]] = {kind.__name__: kind for kind in (types.SampleInfo, types.AddInfo)}


class _Opaque(Exception):
    """A node that has no form on the disk."""


def structure_as_data(tree: PyTree) -> Json | None:
    """Return the structure of ``tree``, or ``None`` where one of its nodes has no form on the disk."""
    leaves, treedef = jax.tree.flatten(tree)
    try:
        return _as_data(treedef.unflatten([_LEAF] * len(leaves)))
    except _Opaque:
        return None


def structure_from_data(data: Json) -> Any:
    """Return the tree definition ``data`` speaks of; ``ValueError`` for anything else."""
    return jax.tree.structure(_from_data(data))


class _Leaf:
    pass


_LEAF = _Leaf()


def _as_data(node: Any) -> Json:
    if node is _LEAF:
        return "*"
    if node is None:
        return "none"
    if type(node) in (list, tuple):
        return [type(node).__name__, [_as_data(child) for child in node]]
    if type(node) is dict and all(type(key) in (str, int) for key in node):
        return ["dict", [[key, _as_data(child)] for key, child in node.items()]]
    if isinstance(node, Packed) and type(node).__name__ in _PACKED:
        return [type(node).__name__, [list(node.present), _as_data(node.words)]]
    if isinstance(node, types.Sample):
        return ["Sample", [_as_data(child) for child in node.tree_flatten()[0]]]
    if _OURS.get(type(node).__name__) is type(node):
        return [type(node).__name__, [_as_data(child) for child in node]]
    raise _Opaque


def _from_data(data: Json) -> Any:
    if data in ("*", "none"):
        return _LEAF if data == "*" else None
    kind, children = data
    if kind == "dict":
        return {key: _from_data(child) for key, child in children}
    if kind in _PACKED:
        present, words = children
        return _PACKED[kind].of_words(_from_data(words), tuple(present))
    values = [_from_data(child) for child in children]
    if kind == "Sample":
        return types.Sample.tree_unflatten((), values)
    if kind in ("list", "tuple"):
        return values if kind == "list" else tuple(values)
    if kind not in _OURS:
        raise ValueError(f"unknown node {kind!r}")
    return _OURS[kind](*values)


def settings_as_data(value: Any) -> Json:
    """Return a configuration value as plain data: dataclasses by field, functions by name and by what they do, the rest as it is."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: settings_as_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"": type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        return [settings_as_data(item) for item in value]
    if isinstance(value, dict):
        return {str(key): settings_as_data(item) for key, item in value.items()}
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, partial):
        return ["partial", *(settings_as_data(part) for part in (value.func, value.args, value.keywords))]
    if callable(value):
        return function_as_data(value)
    return str(value) if isinstance(value, Fraction) else repr(value)


def differences(saved: Json, here: Json, name: str = "") -> list[str]:
    """Return one line a setting that differs: ``name: saved ..., here ...``.

    Of functions of one name that cannot be compared a ``UserWarning`` says so.
    """
    if are_functions(saved, here):
        return _function_differences(saved, here, name)
    if isinstance(saved, list) and isinstance(here, list) and len(saved) == len(here):
        pairs = enumerate(zip(saved, here, strict=True))
        return [line for number, pair in pairs for line in differences(*pair, f"{name}[{number}]")]
    if isinstance(saved, dict) and isinstance(here, dict):
        lines = []
        for key in sorted({*saved, *here}):
            joint = "." if name and key and key[0] not in ".[" else ""  # the path of a leaf brings its own
            inner = f"{name}{joint}{key}"
            if key in saved and key in here:
                lines += differences(saved[key], here[key], inner)
            else:
                lines.append(f"{inner}: saved {saved.get(key, 'nothing')!r}, here {here.get(key, 'nothing')!r}")
        return lines
    return [] if saved == here else [f"{name}: saved {_words(saved)}, here {_words(here)}"]


def _function_differences(saved: Json, here: Json, name: str) -> list[str]:
    if saved["name"] != here["name"]:
        return [f"{name}: saved {saved['name']}, here {here['name']}"]
    if not comparable(saved, here):
        what = f"{name}: whether {here['name']} is the function that was saved cannot be told: it was saved by "
        warnings.warn(f"{what}{saved['python']}, here is {here['python']}", stacklevel=2)
        return []
    other = f"{name}: saved {saved['name']}, here another function of that name"
    return [] if saved["code"] == here["code"] else [f"{other} (code {saved['code']}, here {here['code']})"]


def told(lines: list[str], most: int = 6) -> str:
    """Return what differs as the ``got`` of an error: a line each, the rest as their number."""
    left_out = len(lines) - most
    return "\n        ".join([*lines[:most], f"and {left_out} more"] if left_out > 1 else lines)


def _words(value: Json) -> str:
    if isinstance(value, dict) and "" in value:
        inside = ", ".join(f"{key}={_words(item)}" for key, item in value.items() if key)
        return f"{value['']}({inside})"
    return repr(value)
