"""Keep XLA from fusing across the stages of one program, so that each rounds as it does when it is a program of its own.

``optimization_barrier`` does so on accelerators. XLA:CPU (jax 0.10.2) removes barriers before it fuses, and a multiply and
an add fused over the border of two stages round once instead of twice: there a stage becomes the branch of a conditional
whose predicate the compiler cannot know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
PyTree = Any


def isolated(on: Array | None, function: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
    """Return ``function(*arguments)``, computed apart. ``on`` is a bool that is True, for the CPU; ``None`` elsewhere."""
    if on is None:
        return jax.lax.optimization_barrier(function(*jax.lax.optimization_barrier(arguments)))
    kinds: list[Any] = []

    def raw(*values: PyTree) -> PyTree:
        """Return the result with its keys as plain words: a branch that is never taken could not make keys up."""
        leaves, structure = jax.tree.flatten(function(*values))
        kinds[:] = [jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in leaves]
        leaves = [jax.random.key_data(leaf) if _is_key(leaf) else jnp.asarray(leaf) for leaf in leaves]
        return structure.unflatten(leaves)

    shapes = jax.eval_shape(raw, *arguments)

    def never(*_: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    leaves, structure = jax.tree.flatten(jax.lax.cond(on, raw, never, *arguments))
    return structure.unflatten(
        [
            leaf if kind is None else jax.random.wrap_key_data(leaf, impl=kind)
            for leaf, kind in zip(leaves, kinds, strict=True)
        ]
    )


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
