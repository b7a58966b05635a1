"""On-policy chunks packed as they arrive: observations one behind the other, steps that refer to their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from conduit_jax.adapters.dlpack import Handovers, leaf_to_torch
from conduit_jax.adapters.rllib import chunks
from conduit_jax.adapters.rllib.chunks import Chunk
from conduit_jax.errors import SpecError, refuse
from conduit_jax.sharding.staging import aligned_empty
from conduit_jax.trees import leaf_dtype

_PIECE_BYTES = 16 << 20
_FORWARD_BYTES = 1 << 20


class Packed(NamedTuple):
    """A module's iteration: ``observations`` ``(rows, ...)``, and for each of ``steps`` steps its ``row`` and the one ``after``.

    ``columns`` has what the loss reads of a step, ``rewards``, ``going`` (the step did not end in a terminal state) and
    ``joined`` (the next step continues it) what advantages are made of, ``values`` float32 the value function's of each row;
    all padded to few sizes. ``used`` rows are real.
    """

    observations: tuple[np.ndarray, ...]
    columns: dict[str, tuple[np.ndarray, ...]]
    row: np.ndarray
    after: np.ndarray
    rewards: np.ndarray
    going: np.ndarray
    joined: np.ndarray
    values: np.ndarray
    steps: int
    used: int
    structures: tuple[Any, Any]


class _Part(NamedTuple):
    """A chunk taken in: its ``steps`` from ``begin``, their ``row`` s and the ones ``after``, and the episode it is a part of."""

    key: Any
    begin: int
    steps: int
    row: np.ndarray
    after: np.ndarray
    terminated: bool


class Slab:
    """Arrays one behind the other in memory that JAX and torch take as it is; grows where more come than ``expected``."""

    def __init__(self, first: np.ndarray, expected: int, what: str):
        self.what, self.shape, self.dtype = what, first.shape[1:], leaf_dtype(first, what)
        self._item = self.dtype.itemsize * int(np.prod(self.shape))
        self.whole, self.used = self._make(max(expected, len(first))), 0

    def _make(self, count: int) -> np.ndarray:
        return aligned_empty((padded(count, self._item), *self.shape), self.dtype)

    def add(self, part: np.ndarray) -> None:
        """Copy ``part`` behind the others; ``SpecError`` for another shape than the first's."""
        if part.shape[1:] != self.shape:
            refuse(SpecError, f"An {self.what} has another shape than the first.", got=part.shape[1:], want=self.shape)
        end = self.used + len(part)
        if end > len(self.whole):
            grown = self._make(max(end, 2 * len(self.whole)))
            grown[: self.used] = self.whole[: self.used]
            self.whole = grown
        self.whole[self.used : end] = part
        self.used = end

    def ordered(self, order: np.ndarray | None) -> np.ndarray:
        """Return all of it, in ``order`` where one is given; zeros behind."""
        if order is not None:
            self.whole[: self.used] = self.whole[: self.used][order]
        self.whole[self.used :] = 0
        return self.whole


class Packing:
    """Takes ``SingleAgentEpisode`` chunks of one module; ``extras`` names outputs of the module to take along.

    ``expected`` is about how many steps will come. Chunks of an episode that follow each other under the same ``group`` are
    joined, as though they had not been cut.
    """

    def __init__(self, extras: Sequence[str], expected: int = 0):
        self._extras, self._expected = extras, expected
        self._expected_rows = (
            expected + expected // 8
        )  # so that episodes of 8 steps and more need one size, and one program
        self._observations: list[Slab] = []
        self._columns: dict[str, list[Slab]] = {}
        self._parts: list[_Part | None] = []
        self._open: dict[Any, tuple[int, int]] = {}
        self._values: list[np.ndarray] = []
        self._handovers = Handovers()
        self.steps = self.used = 0

    def add(self, episode: Any, group: Any) -> tuple[int, int]:
        """Take a chunk in; return where its new rows begin and end. ``SpecError`` where it lacks an extra."""
        chunk = chunks.read(episode)
        if not chunk.steps:
            self._parts.append(None)
            return self.used, self.used
        if not self._observations:
            self._begin(chunk, episode)
        key, begin = (group, chunk.name), self.used
        row, time = self._open.get(key, (-1, -1))
        joined = time == chunk.start
        for slab, leaf in zip(self._observations, chunk.observations, strict=True):
            slab.add(leaf[joined:])
        self.used += chunk.steps + 1 - joined
        rows = np.arange(begin - joined, begin - joined + chunk.steps + 1, dtype=np.int32)
        if joined:
            rows[0] = row
        for name, leaves in self._leaves(chunk, episode):
            for slab, leaf in zip(self._columns[name], leaves, strict=True):
                slab.add(leaf)
        self._parts.append(_Part(key, self.steps, chunk.steps, rows[:-1], rows[1:], chunk.terminated))
        self._open[key] = int(rows[-1]), chunk.start + chunk.steps
        self.steps += chunk.steps
        return begin, self.used

    def _begin(self, chunk: Chunk, episode: Any) -> None:
        self.structures = chunk.structures
        self._observations = [
            Slab(leaf, self._expected_rows, f"observation {n}") for n, leaf in enumerate(chunk.observations)
        ]
        self._columns = {
            name: [Slab(leaf, self._expected, name) for leaf in leaves] for name, leaves in self._leaves(chunk, episode)
        }

    def _leaves(self, chunk: Chunk, episode: Any) -> Iterator[tuple[str, list[np.ndarray]]]:
        yield "action", chunk.actions
        yield "reward", [chunk.rewards]
        for name in self._extras:
            found = episode.extra_model_outputs.get(name)
            if found is None:
                got, want = ", ".join(sorted(episode.extra_model_outputs)), name
                refuse(SpecError, "The env runner's module does not tell what the loss reads.", got=got, want=want)
            yield name, [np.asarray(found.data[found.lookback :][: chunk.steps])]

    def tensors(self, begin: int, end: int) -> Iterator[Any]:
        """Yield observations of these rows as tensors, without a copy, in pieces that stay in a cache when cast."""
        rows = max(1, _FORWARD_BYTES // max(1, sum(slab.whole[:1].nbytes for slab in self._observations)))
        for at in range(begin, end, rows):
            parts = [
                leaf_to_torch(slab.whole[at : min(at + rows, end)], None, self._handovers)
                for slab in self._observations
            ]
            yield chunks.unflatten(self.structures[0], parts)

    def value(self, values: np.ndarray) -> None:
        """Add the value function's ``values`` of the next rows, float32 ``(n,)``."""
        self._values.append(values)

    def finish(self, order: Sequence[int] | None = None) -> Packed | None:
        """Return all of it, chunks in ``order`` (by the number of their ``add``) and chunks of an episode together.

        ``None`` where there are no steps.
        """
        episodes: dict[Any, list[_Part]] = {}
        for number in range(len(self._parts)) if order is None else order:
            part = self._parts[number]
            if part is not None:
                episodes.setdefault(part.key, []).append(part)
        if not episodes:
            return None
        parts = [part for of_episode in episodes.values() for part in of_episode]
        sequence = np.concatenate([np.arange(part.begin, part.begin + part.steps) for part in parts])
        moved = None if (sequence[1:] > sequence[:-1]).all() else sequence
        columns = {name: tuple(slab.ordered(moved) for slab in slabs) for name, slabs in self._columns.items()}
        size = len(columns["reward"][0])
        row, after = (_filled([getattr(part, name) for part in parts], size, np.int32) for name in ("row", "after"))
        going, joined = np.zeros(size, np.float32), np.zeros(size, np.float32)
        going[: self.steps], at = 1, 0
        for part in parts:
            end = at + part.steps
            going[end - 1] = not part.terminated
            joined[at:end] = 1
            at = end
        joined[: self.steps - 1] *= after[: self.steps - 1] == row[1 : self.steps]
        joined[self.steps - 1] = 0
        (rewards,) = columns.pop("reward")
        columns["actions"] = columns.pop("action")
        values = _filled(self._values, padded(max(self.used, self._expected_rows), 4), np.float32)
        seen = tuple(slab.whole for slab in self._observations)
        return Packed(seen, columns, row, after, rewards, going, joined, values, self.steps, self.used, self.structures)


def _filled(parts: list[np.ndarray], size: int, dtype: Any) -> np.ndarray:
    whole, at = np.zeros(size, dtype), 0
    for part in parts:
        whole[at : at + len(part)] = part
        at += len(part)
    return whole


def padded(count: int, item_bytes: int) -> int:
    """Round up so that few shapes are compiled, by at most ``_PIECE_BYTES``."""
    piece = 1 << max(5, min(10, (_PIECE_BYTES // max(item_bytes, 1)).bit_length() - 1))
    return -(-count // piece) * piece


__all__ = ["Packed", "Packing", "Slab", "padded"]
