"""Read some fields of stored items only: what a window's later steps do not need is not gathered for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.errors import SpecError, refuse
from conduit_jax.replay import records
from conduit_jax.replay.records import RecordLayout
from conduit_jax.replay.storage import Experience, Storage, unpack
from conduit_jax.trees import TreeSpec

Array = jax.Array
PyTree = Any


class Fields(NamedTuple):
    """The ``layout`` of some leaves of an item; ``apart`` numbers those kept apart among all that are."""

    layout: RecordLayout
    apart: tuple[int, ...]


def fields(layout: RecordLayout, select: Callable[[PyTree], PyTree]) -> Fields:
    """Return the fields that ``select(item)`` picks, in its own tree; it may pick leaves but not compute with them."""
    chosen, treedef = jax.tree.flatten(select(numbered(layout.spec)))
    if not all(type(number) is int and 0 <= number < len(layout.spec.leaves) for number in chosen):
        refuse(
            SpecError,
            "A selector of fields must return leaves of the item as they are.",
            got=f"{len(chosen)} leaves, not all of them the item's",
            want='for instance lambda item: item["state"]',
        )
    order = [number for number, segment in enumerate(layout.segments) if segment is None]
    spec = TreeSpec(
        treedef,
        tuple(layout.spec.leaves[number] for number in chosen),
        tuple(layout.spec.paths[number] for number in chosen),
    )
    narrow = RecordLayout(spec, tuple(layout.segments[number] for number in chosen), layout.words)
    return Fields(narrow, tuple(order.index(number) for number in chosen if layout.segments[number] is None))


def numbered(spec: TreeSpec) -> PyTree:
    """Return the item's tree with each leaf's number in its place."""
    return spec.unflatten(range(len(spec.leaves)))


def gather_fields(
    storage: Storage, experience: Experience, slots: Array, select: Callable[[PyTree], PyTree]
) -> tuple[PyTree, Array]:
    """Return ``select(items)`` of ``slots`` int32 ``(*lead)``, leaves ``(*lead, ...)``, and their policy versions."""
    found = fields(experience.layout, select)
    flat = slots.reshape(-1)
    rows = storage.gather(experience.rows, flat)
    apart = tuple(storage.gather(experience.apart[number], flat) for number in found.apart)
    items = unpack(found.layout, rows, apart)
    items, versions = jax.tree.map(
        lambda leaf: leaf.reshape(*slots.shape, *leaf.shape[1:]), (items, records.row_versions(rows))
    )
    return items, versions


def on_bits(function: Callable[..., Array], *trees: PyTree) -> PyTree:
    """Return ``jax.tree.map(function, *trees)`` of a function that only moves values, bit for bit.

    Small floats go through it as integers: XLA on CPU (jax 0.10.2) selects and concatenates them through float32, which
    changes their NaNs.
    """

    def apply(*leaves: Array) -> Array:
        dtype = leaves[0].dtype
        if not records.carries(dtype):
            return function(*leaves)
        moved = function(*(jax.lax.bitcast_convert_type(leaf, records.carrier(dtype)) for leaf in leaves))
        return jax.lax.bitcast_convert_type(moved, dtype)

    return jax.tree.map(apply, *trees)


def select(mask: Array, chosen: PyTree, other: PyTree) -> PyTree:
    """Return ``chosen`` where ``mask`` bool ``(*lead)`` holds, else ``other``, leaves ``(*lead, ...)``, bit for bit."""
    return on_bits(lambda one, two: jnp.where(_widened(mask, one), one, two), chosen, other)


def keep(mask: Array, tree: PyTree) -> PyTree:
    """Return ``tree`` where ``mask`` bool ``(*lead)`` holds, else zeros, leaves ``(*lead, ...)``, bit for bit."""
    return on_bits(lambda leaf: jnp.where(_widened(mask, leaf), leaf, jnp.zeros((), leaf.dtype)), tree)


def _widened(mask: Array, leaf: Array) -> Array:
    return mask.reshape(*mask.shape, *(1,) * (leaf.ndim - mask.ndim))
