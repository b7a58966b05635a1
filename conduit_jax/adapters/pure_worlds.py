"""What the worlds of other JAX libraries need to become an ``Environment``: states of fixed dtypes, one array to look at."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.errors import ConfigError, refuse
from conduit_jax.types import PyTree


def settled(tree: PyTree, spec: PyTree) -> PyTree:
    """Return ``tree`` with the dtypes of ``spec``, a tree of the same structure.

    Foreign states hold Python numbers and weak types, which change dtype from a reset to a step: no scan could carry them.
    """
    return jax.tree.map(lambda leaf, like: jax.lax.convert_element_type(leaf, like.dtype), tree, spec)


def spec_of(tree: PyTree) -> PyTree:
    """Return the shapes and dtypes of a tree of ``eval_shape``, weak types made strong."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def check_one_array(name: str, observation: PyTree, fix: str) -> None:
    """Raise ``ConfigError`` unless ``observation`` is one array."""
    if not isinstance(observation, jax.ShapeDtypeStruct):
        got = ", ".join(observation) if isinstance(observation, dict) else type(observation).__name__
        refuse(ConfigError, f"{name} has observations that are not one array.", got=got, want="one array", fix=fix)


def bounds(name: str, low: Any, high: Any, shape: tuple[int, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the bounds of a box of actions, a number a component; ``ConfigError`` where one is missing or infinite."""
    lows, highs = (
        tuple(np.broadcast_to(np.asarray(bound, np.float64), shape).reshape(-1).tolist()) for bound in (low, high)
    )
    if not all(map(math.isfinite, lows + highs)):
        refuse(ConfigError, f"{name} has actions without bounds.", got=f"[{low}, {high}]", want="finite bounds")
    return lows, highs


def one_or_each(values: tuple[float, ...], shape: tuple[int, ...]) -> float | tuple[float, ...]:
    """Return one number where all are equal, else the numbers; only vectors of actions have one a component."""
    if len(set(values)) == 1:
        return values[0]
    if len(shape) == 1:
        return values
    return refuse(ConfigError, "Bounds differ over an array of actions.", got=shape, want="a vector of actions")


def scalar(value: Any, dtype: Any) -> jax.Array:
    """Return ``value`` as a scalar of that dtype; ``(1,)`` and other shapes of one number too."""
    return jnp.asarray(value).astype(dtype).reshape(())
