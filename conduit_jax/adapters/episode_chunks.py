"""Episodes of a data set as rollouts of one fixed shape: lanes are filled with one episode after another.

Formats differ in how an episode is read, a few steps at a time (``Episode.take``). What is made of the steps is the same
for all, and here: no more than one rollout and one open episode a lane is held at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from conduit_jax.errors import SpecError, check_integer, refuse

if TYPE_CHECKING:
    from conduit_jax.types import Rollout

Path = tuple[str, ...]
Leaves = dict[Path, np.ndarray]
Shapes = dict[Path, tuple[tuple[int, ...], np.dtype]]


@dataclass(kw_only=True)
class Counts:
    """What became of a data set so far, or in its last whole reading.

    ``episodes`` and ``steps`` that entered rollouts; ``empty_episodes`` without a step; ``cut_episodes`` that stopped without
    a flag and are truncated there; ``dropped_steps``, truncated ones of which is not known what followed.
    """

    episodes: int = 0
    steps: int = 0
    empty_episodes: int = 0
    cut_episodes: int = 0
    dropped_steps: int = 0


class Piece(NamedTuple):
    """Consecutive steps of one episode, at least one.

    ``steps`` are rows ``(n, ...)`` by path: ``("observation", ...)``, ``("action", ...)``, ``("reward",)``, ``("extras", ...)``;
    ``following`` is the observation behind the last one. The flags are the last step's; no other ended the episode.
    """

    steps: Leaves
    following: Leaves
    terminated: bool
    truncated: bool


class Episode(Protocol):
    """An episode that is being read; ``name`` is what errors call it."""

    name: str

    def take(self, count: int) -> Piece | None:
        """Return the next steps, at most ``count``; ``None`` where there are none."""
        ...


def check_sizes(length: int, lanes: int) -> None:
    """Raise ``ConfigError`` unless both are positive integers."""
    check_integer("length", length, 1)
    check_integer("lanes", lanes, 1)


def check_numbers(path: Path, dtype: np.dtype, name: str) -> None:
    """Raise ``SpecError`` for a leaf that holds anything but numbers: text, objects, references."""
    if dtype.kind not in "biuf":
        fix = "observation_keys=(...) without it" if path[0] == "observation" else "leave it out"
        what = f"{name}: {spelt(path)} does not hold numbers."
        refuse(SpecError, what, got=dtype, want="bool, integers or floats", fix=fix)


def spelt(path: Path) -> str:
    """Return a leaf's path as errors write it."""
    return "/".join(path)


class Rollouts:
    """Iterates over ``Rollout`` chunks ``(length, lanes, ...)`` of ``episodes``; ``counts`` goes along.

    A lane takes the next episode when its own has ended, in the order of lanes: what a lane holds depends on nothing else.
    ``lengths`` says how many leading steps of each lane are real: all of them until the episodes run out.
    """

    def __init__(self, episodes: Iterator[Episode], length: int, lanes: int, counts: Counts):
        self._episodes, self._length, self._counts = episodes, length, counts
        self._open: list[Episode | None] = [None] * lanes
        self._shapes: Shapes | None = None

    def __iter__(self) -> Iterator[Rollout]:
        while True:
            chunk = _Chunk(self._length, len(self._open))
            for lane in range(len(self._open)):
                self._fill(chunk, lane)
            if not chunk.lengths.any():
                break
            yield chunk.rollout()
        if self._shapes is None:
            refuse(SpecError, "The data set has no steps.", got=f"{self._counts.empty_episodes} empty episodes")

    def _fill(self, chunk: _Chunk, lane: int) -> None:
        while chunk.lengths[lane] < self._length:
            episode = self._open[lane] or next(self._episodes, None)
            if episode is None:
                return
            piece = episode.take(self._length - int(chunk.lengths[lane]))
            if piece is None:  # an open episode has more steps: what ends one says so
                self._counts.empty_episodes += 1
                continue
            self._check(piece, episode.name)
            chunk.write(lane, piece)
            ended = piece.terminated or piece.truncated
            self._open[lane] = None if ended else episode
            self._counts.episodes += ended
            self._counts.steps += len(piece.steps["reward",])

    def _check(self, piece: Piece, name: str) -> None:
        """Raise ``SpecError`` naming the leaf that the first piece had not, or had otherwise."""
        shapes: Shapes = {path: (rows.shape[1:], rows.dtype) for path, rows in piece.steps.items()}
        self._shapes = self._shapes or shapes
        for path in sorted(self._shapes.keys() | shapes.keys()):
            wanted, got = self._shapes.get(path), shapes.get(path)
            if wanted != got:
                what = f"{name}: {spelt(path)} is not what it was in the first episode."
                refuse(
                    SpecError, what, got=_described(got), want=_described(wanted), fix="a data set of its own for each"
                )


class _Chunk:
    """One rollout while it is written; allocated for the leaves of the first piece."""

    def __init__(self, length: int, lanes: int):
        self._length, self._lanes = length, lanes
        self.lengths = np.zeros(lanes, np.int32)
        self._terminated, self._truncated = np.zeros((length, lanes), bool), np.zeros((length, lanes), bool)
        self._rows: Leaves = {}
        self._final: Leaves = {}
        self._bootstrap: Leaves = {}

    def write(self, lane: int, piece: Piece) -> None:
        if not self._rows:
            self._allocate(piece)
        start, stop = int(self.lengths[lane]), int(self.lengths[lane]) + len(piece.steps["reward",])
        for path, rows in piece.steps.items():
            self._rows[path][start:stop, lane] = rows
        for path, row in piece.following.items():
            self._bootstrap[path][lane] = row
            if piece.terminated or piece.truncated:
                self._final[path][stop - 1, lane] = row
        self._terminated[stop - 1, lane], self._truncated[stop - 1, lane] = piece.terminated, piece.truncated
        self.lengths[lane] = stop

    def rollout(self) -> Rollout:
        from conduit_jax.types import Rollout

        fields: dict[str, Any] = {
            "terminated": self._terminated,
            "truncated": self._truncated,
            "lengths": self.lengths,
            **_nested(self._rows),
            **{f"final_{name}": tree for name, tree in _nested(self._final).items()},
            **{f"bootstrap_{name}": tree for name, tree in _nested(self._bootstrap).items()},
        }
        return Rollout(**fields)

    def _allocate(self, piece: Piece) -> None:
        # Zeros, not empty: equal data sets are to give equal bytes, and pages that nobody touches cost nothing.
        def zeros(lead: tuple[int, ...], rows: np.ndarray) -> np.ndarray:
            return np.zeros((*lead, *rows.shape[1:]), rows.dtype)

        lead = (self._length, self._lanes)
        self._rows = {path: zeros(lead, rows) for path, rows in piece.steps.items()}
        self._final = {path: zeros(lead, piece.steps[path]) for path in piece.following}
        self._bootstrap = {path: zeros(lead[1:], piece.steps[path]) for path in piece.following}


def _nested(leaves: Leaves) -> dict[str, Any]:
    """Return leaves by path as dicts in dicts; a dict of ``_index_0``, ``_index_1``, ... is a tuple (Minari's spelling)."""
    tree: dict[str, Any] = {}
    for name in dict.fromkeys(path[0] for path in leaves):
        below = {path[1:]: leaf for path, leaf in leaves.items() if path[0] == name}
        tree[name] = below[()] if () in below else _nested(below)
    names = [f"_index_{number}" for number in range(len(tree))]
    return tuple(tree[name] for name in names) if tree.keys() == set(names) else tree  # type: ignore[return-value]


def _described(shape: tuple[tuple[int, ...], np.dtype] | None) -> str:
    return "nothing" if shape is None else f"{shape[1]}, shape {shape[0]} a step"
