"""What an item takes in storage, and what the naive layout would take: next observations beside observations, frames stacked."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.errors import ConfigError, refuse
from conduit_jax.replay.neighbour_reads import StoredStep
from conduit_jax.replay.records import RecordLayout, record_layout
from conduit_jax.replay.transition_view import Step, TransitionView, check_step
from conduit_jax.trees import tree_spec

PyTree = Any


class Footprint(NamedTuple):
    """Bytes an item takes in storage: ``leaves`` ``(path, bytes, where)``, ``stored`` in all, and ``naive``.

    ``naive`` keeps each leaf as it stands, observations twice and every frame of a stack. Printing it is a table.
    """

    leaves: tuple[tuple[str, float, str], ...]
    stored: float
    naive: float

    def __str__(self) -> str:
        width = max((len(path) for path, _, _ in self.leaves), default=0)
        rows = [f"  {path:<{width}}  {size:>12,.1f}  {where}" for path, size, where in self.leaves]
        ratio = f" ({self.naive / self.stored:.2f} times as much)" if self.stored else ""
        return "\n".join([f"{self.stored:,.1f} bytes an item; naive layout {self.naive:,.1f}{ratio}", *rows])


def bytes_per_item(item: PyTree, view: TransitionView | None = None, *, capacity: int | None = None) -> float:
    """Return the bytes of storage that an item takes: ``describe(...).stored``."""
    return describe(item, view, capacity=capacity).stored


def describe(item: PyTree, view: TransitionView | None = None, *, capacity: int | None = None) -> Footprint:
    """Return what an item (a tree of arrays or shapes) takes in storage.

    Args:
        item: one item; with a ``view`` one ``Step`` of ``make_transition_view``.
        view: how transitions are made of steps.
        capacity: how many steps are stored; needed where ``view.final_observations`` is given.
    """
    if view is None:
        layout = record_layout(tree_spec(item))
        rows = (*_leaves(layout), _overhead(layout))
        return Footprint(rows, layout.bytes_per_item, layout.spec.bytes)
    step = check_step(item)
    if capacity is None and view.final_observations is not None:
        refuse(ConfigError, "The share of final observations is not known.", want="describe(capacity=)")
    capacity = 2**20 if capacity is None else capacity
    entry: Any = jax.ShapeDtypeStruct((), jnp.int32)
    layout = record_layout(tree_spec(StoredStep(*step[:-1], entry)))
    room = view.final_capacity(capacity, 1)
    beside = record_layout(tree_spec(step.final_observation)).bytes_per_item * room / capacity
    rows = (*_leaves(layout), _overhead(layout), ("final observations", beside, f"beside, {room:,} in all"))
    return Footprint(rows, layout.bytes_per_item + beside, _naive(step, view))


def _naive(item: Step, view: TransitionView) -> int:
    others = tree_spec((item.action, item.reward, item.terminated)).bytes
    return 2 * view.stack * tree_spec(item.observation).bytes + others


def _leaves(layout: RecordLayout) -> tuple[tuple[str, float, str], ...]:
    return tuple(
        (path, leaf.bytes, "apart" if segment is None else "packed")
        for path, leaf, segment in zip(layout.spec.paths, layout.spec.leaves, layout.segments, strict=True)
    )


def _overhead(layout: RecordLayout) -> tuple[str, float, str]:
    return "version and padding", layout.bytes_per_item - layout.spec.bytes, "packed"
