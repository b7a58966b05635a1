"""What XLA on CPU does in turns, one after the other, and every other backend at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import custom_vmap

PyTree = Any


def in_turns(turns: Callable[..., PyTree], at_once: Callable[..., PyTree], *operands: PyTree) -> PyTree:
    """Return ``turns(*operands)`` on CPU and ``at_once(*operands)`` elsewhere, which must be the same.

    Under ``vmap`` it is ``at_once`` on CPU too: a batched loop makes scatters of slices, or copies its arrays where it ends
    apart. Derivatives are those of ``at_once``: nothing is differentiated backwards through a loop, and a ``custom_vmap``
    under ``jax.grad`` (jax 0.10.2) ends in "Linearization failed to produce known values for all output primals".
    """

    @custom_vmap
    def run(*operands: PyTree) -> PyTree:
        return jax.lax.platform_dependent(*operands, cpu=turns, default=at_once)

    @run.def_vmap
    def _(size: int, batched: list[Any], *operands: PyTree) -> tuple[PyTree, PyTree]:
        axes = jax.tree.map(lambda one: 0 if one else None, batched)
        found = jax.vmap(at_once, axes, axis_size=size)(*operands)
        return found, jax.tree.map(lambda _: True, found)

    differentiable = jax.custom_jvp(run)

    @differentiable.defjvp
    def _(operands: PyTree, tangents: PyTree) -> tuple[PyTree, PyTree]:
        return differentiable(*operands), jax.jvp(at_once, operands, tangents)[1]

    return differentiable(*operands)
