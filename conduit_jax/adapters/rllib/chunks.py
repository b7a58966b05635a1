"""RLlib's episode chunks read as arrays, and the layout of a row that fits them. Knows RLlib's episodes by their attributes alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from conduit_jax.adapters.rllib.programs import HEAD_WORDS, Layout, Leaf
from conduit_jax.errors import SpecError, refuse
from conduit_jax.replay.records import SMALL_LEAF_BYTES
from conduit_jax.trees import leaf_dtype

PyTree = Any
Structure = Any


class Chunk(NamedTuple):
    """One chunk of an episode: ``steps`` steps from step ``start`` of episode ``name``.

    ``observations`` leaves ``(steps + 1, ...)``, ``actions`` leaves ``(steps, ...)``, ``rewards`` ``(steps,)``; the flags
    say how the chunk's last step ended the episode, if it did.
    """

    name: str
    start: int
    steps: int
    observations: list[np.ndarray]
    actions: list[np.ndarray]
    rewards: np.ndarray
    terminated: bool
    truncated: bool
    structures: tuple[Structure, Structure]


def read(episode: Any) -> Chunk:
    """Return a ``SingleAgentEpisode`` as a ``Chunk``, without copying what RLlib has stacked already."""
    steps = len(episode)
    observations, seen = _column(episode.observations, steps + 1)
    actions, done = _column(episode.actions, steps)
    rewards = episode.rewards.data[episode.rewards.lookback :]
    return Chunk(
        episode.id_,
        episode.t_started,
        steps,
        observations,
        actions,
        np.asarray(rewards, np.float32),
        bool(episode.is_terminated),
        bool(episode.is_truncated),
        (seen, done),
    )


def _column(buffer: Any, count: int) -> tuple[list[np.ndarray], Structure]:
    """Return the leaves ``(count, ...)`` of one of an episode's columns, its lookback left out, and their structure."""
    data, skipped = buffer.data, buffer.lookback
    if isinstance(data, list):
        items = data[skipped : skipped + count]
        if not items:
            return [], None
        data, skipped = jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *items), 0
    if isinstance(data, np.ndarray):
        return [data[skipped : skipped + count]], None
    leaves, structure = jax.tree.flatten(data)
    return [leaf[skipped : skipped + count] for leaf in leaves], structure


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """Return ``leaves`` as the tree they were read from."""
    return leaves[0] if structure is None else jax.tree.unflatten(structure, leaves)


def layout_of(chunk: Chunk) -> Layout:
    """Lay out rows for observations and actions like those of ``chunk``: small arrays packed, large observations apart.

    Raises ``SpecError`` for what JAX cannot hold.
    """
    start, found = HEAD_WORDS, []
    for what, leaves in (("observation", chunk.observations), ("action", chunk.actions)):
        placed = []
        for number, array in enumerate(leaves):
            leaf = Leaf(array.shape[1:], leaf_dtype(array, f"{what} {number}"), start)
            if leaf.bytes > SMALL_LEAF_BYTES and what == "observation":
                leaf = leaf._replace(start=None)
            else:
                start += leaf.words
            placed.append(leaf)
        found.append(tuple(placed))
    return Layout(found[0], found[1], start)


def check_fits(layout: Layout, chunk: Chunk) -> None:
    """Raise ``SpecError`` where ``chunk`` has other arrays than the replay was laid out for, or integers that would wrap."""
    for what, leaves, wanted in (
        ("observation", chunk.observations, layout.observation),
        ("action", chunk.actions, layout.action),
    ):
        found = [array.shape[1:] for array in leaves]
        if found != [leaf.shape for leaf in wanted]:
            want = [leaf.shape for leaf in wanted]
            refuse(SpecError, f"An {what} has another shape than the replay was made for.", got=found, want=want)
        for array, leaf in zip(leaves, wanted, strict=True):
            if array.dtype != leaf.dtype:
                _check_dtype(what, array, leaf)


def _check_dtype(what: str, array: np.ndarray, leaf: Leaf) -> None:
    if leaf_dtype(array) != leaf.dtype:
        refuse(SpecError, f"An {what} has another dtype than at first.", got=array.dtype, want=leaf.dtype)
    if array.dtype.kind in "iu" and not np.array_equal(array.astype(leaf.dtype), array):
        got, want = f"{array.dtype} from {array.min()} to {array.max()}", f"what {leaf.dtype} can hold"
        refuse(SpecError, f"An {what} holds integers that would wrap.", got=got, want=want)


def record_dtype(layout: Layout) -> np.dtype:
    """Return the numpy record that has a row's words, behind the slot it goes to; ``o0``, ``a0``, … are its packed arrays."""
    names, offsets = ["slot", "next", "flags", "reward"], [0, 4, 8, 12]
    formats: list[Any] = ["<i4", "<i4", "<u4", "<f4"]
    for letter, leaves in (("o", layout.observation), ("a", layout.action)):
        for number, leaf in enumerate(leaves):
            if leaf.start is not None and math.prod(leaf.shape):
                names.append(f"{letter}{number}")
                formats.append((leaf.dtype, leaf.shape))
                offsets.append(4 + 4 * leaf.start)
    wanted = {"names": names, "formats": formats, "offsets": offsets, "itemsize": 4 + 4 * layout.words}
    return np.dtype(wanted)  # type: ignore[call-overload]


__all__ = ["Chunk", "Structure", "check_fits", "layout_of", "read", "record_dtype", "unflatten"]
