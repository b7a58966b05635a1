"""Minari's HDF5 data sets as experience: episodes in a file, read in pieces, as rollouts that go into ``plane.push``.

    data = MinariEpisodes("~/.minari/datasets/D4RL/pen/human-v2", length=256)
    for rollout in data:
        plane.push(rollout)

Nothing of Minari is imported: a file is read with ``h5py`` (extra ``hdf5``). A group ``episode_N`` holds ``observations`` with
a row more than ``actions``, ``rewards``, ``terminations`` and ``truncations``; dict spaces are groups in groups.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np

from conduit_jax.adapters.episode_chunks import Counts, Path, Piece, Rollouts, check_numbers, check_sizes, spelt
from conduit_jax.errors import ConfigError, SpecError, ValueRefusedError, refuse

if TYPE_CHECKING:
    from conduit_jax.types import Rollout

__all__ = ["MinariEpisodes"]

_FILE = "main_data.hdf5"
_FLAGS = ("terminations", "truncations")


class MinariEpisodes:
    """The episodes of a Minari data set as ``Rollout``s ``(length, lanes, ...)``, in the order of their numbers.

    Dtypes are the file's; a plane narrows 64 bits as JAX does. An episode that stops without a flag is truncated there. With
    several lanes, leave a replay room for an episode a lane: lanes are as long as their episodes happen to be.

    Attributes:
        path: the HDF5 file.
        num_episodes, num_steps: of the whole file; its steps are a capacity that holds it, where ``lanes`` is 1.
        counts: what became of them in the last reading (``Counts``).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        length: int,
        lanes: int = 1,
        observation_keys: Sequence[str] | None = None,
    ):
        """Open the data set and count what it holds; nothing is read yet.

        Args:
            path: the file, or the data set's folder.
            length: steps of a lane in one rollout.
            lanes: episodes that are read side by side.
            observation_keys: of observations that are a dict, the keys to keep (all unless given).

        Raises:
            ConfigError: ``length`` or ``lanes`` out of range, no such file, no HDF5 file, ``h5py`` missing.
            SpecError: the file holds no episodes, or one lacks its rewards.
        """
        check_sizes(length, lanes)
        self.path, self._length, self._lanes = _located(path), length, lanes
        self._keys = None if observation_keys is None else tuple(observation_keys)
        self.counts = Counts()
        with _opened(self.path) as file:
            self._names = _episode_names(file, self.path)
            self.num_steps = sum(_dataset(file[name], "rewards").shape[0] for name in self._names)
        self.num_episodes = len(self._names)

    def __iter__(self) -> Iterator[Rollout]:
        """Yield the whole data set; it may be read again.

        Raises:
            SpecError: an episode lacks a leaf, has one of another shape or dtype than the first, or of another length.
            ValueRefusedError: a flag in the middle of an episode. ConfigError: a part of the file is damaged.
        """
        self.counts = Counts()
        with _opened(self.path) as file:
            episodes = (_Episode(file[name], self._keys, self.counts) for name in self._names)
            yield from Rollouts(episodes, self._length, self._lanes, self.counts)


class _Episode:
    """One group of the file, checked as a whole before its first step is taken."""

    def __init__(self, group: Any, keys: tuple[str, ...] | None, counts: Counts):
        self.name, self._counts, self._at = group.name.removeprefix("/"), counts, 0
        observations = _member(group, "observations")
        if keys is not None:
            observations = {key: _member(observations, key) for key in keys}
        self._seen = dict(_leaves(observations, ("observation",)))
        self._rows = dict(_leaves(_member(group, "actions"), ("action",)))
        self._rows["reward",] = _dataset(group, "rewards")
        self._steps = self._rows["reward",].shape[0]
        if len(self._rows["reward",].shape) != 1:
            got = f"shape {self._rows['reward',].shape}"
            refuse(SpecError, f"{self.name}: rewards are not one number a step.", got=got, want="one axis, over steps")
        for leaves, extra in ((self._seen, 1), (self._rows, 0)):
            for path, rows in leaves.items():
                self._check_rows(path, rows, self._steps + extra)
        self._flags = [self._read_flag(_dataset(group, name), name) for name in _FLAGS]

    def take(self, count: int) -> Piece | None:
        start, stop = self._at, min(self._at + count, self._steps)
        if start == stop:
            return None
        self._at = stop
        steps = {path: self._read(path, rows, start, stop) for path, rows in self._rows.items()}
        following = {}
        for path, rows in self._seen.items():
            read = self._read(path, rows, start, stop + 1)  # once, with what followed
            steps[path], following[path] = read[:-1], read[-1]
        terminated, truncated = self._flags if stop == self._steps else (False, False)
        if stop == self._steps and not (terminated or truncated):
            self._counts.cut_episodes += 1
            truncated = True
        return Piece(steps, following, terminated, truncated)

    def _read(self, path: Path, rows: Any, start: int, stop: int) -> np.ndarray:
        try:
            return rows[start:stop]
        except OSError as error:  # a chunk that was damaged, or is compressed in a way that h5py does not know
            got = str(error)
        what = f"{self.name}: {spelt(path)} cannot be read from step {start} on."
        refuse(ConfigError, what, got=got, fix="fetch or write the file again")

    def _check_rows(self, path: Path, rows: Any, wanted: int) -> None:
        if rows.shape[:1] != (wanted,):
            what = f"{self.name}: {_PLURAL.get(path[0], path[0])} has another number of rows ({spelt(path)})."
            got = rows.shape[0] if rows.shape else "one number"
            refuse(SpecError, what, got=got, want=f"{wanted}, for {self._steps} rewards")
        check_numbers(path, rows.dtype, self.name)

    def _read_flag(self, rows: Any, name: str) -> bool:
        """Return the flag of the last step."""
        self._check_rows((name,), rows, self._steps)
        if rows.dtype.kind == "f":
            refuse(SpecError, f"{self.name}: {name} are not flags.", got=rows.dtype, want="bool, or integers")
        set_at = np.flatnonzero(rows[:])
        if len(set_at) and set_at[0] != self._steps - 1:
            what = f"{self.name} goes on after its end."
            got, want = f"{name} at step {set_at[0]}", f"at step {self._steps - 1}, the last, or nowhere"
            refuse(ValueRefusedError, what, got=got, want=want, fix="write it as two episodes")
        return len(set_at) > 0


_PLURAL = {"observation": "observations", "action": "actions", "reward": "rewards"}


def _leaves(node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the data sets at and below ``node``, by path."""
    if hasattr(node, "items"):
        for key, below in node.items():
            yield from _leaves(below, (*path, key))
    else:
        yield path, node


def _member(group: Any, name: str) -> Any:
    if not hasattr(group, "keys") or name not in group:
        within = getattr(group, "name", "").removeprefix("/")
        got = ", ".join(group.keys()) if hasattr(group, "keys") else "one array"
        refuse(SpecError, f"{within} lacks what an episode has.", got=got or "nothing", want=name)
    return group[name]


def _dataset(group: Any, name: str) -> Any:
    found = _member(group, name)
    if not getattr(found, "shape", ()):
        what = f"{group.name.removeprefix('/')}: {name} is not an array over steps."
        refuse(SpecError, what, got=type(found).__name__, want="a data set with a row a step")
    return found


def _episode_names(file: Any, path: FilePath) -> list[str]:
    names = [name for name in file if name.startswith("episode_") and name.removeprefix("episode_").isdecimal()]
    if not names:
        got = ", ".join(list(file)[:5]) or "an empty file"
        fix = "a file in Minari's layout; download with minari, or write groups episode_0, episode_1, ..."
        refuse(SpecError, f"{path} holds no episodes.", got=got, want="groups episode_N", fix=fix)
    return sorted(names, key=lambda name: int(name.removeprefix("episode_")))


def _located(path: str | os.PathLike[str]) -> FilePath:
    """Return the file of a data set given by it or by its folder."""
    given = FilePath(path).expanduser()
    if not given.is_dir():
        return given
    for found in (given / "data" / _FILE, given / _FILE):
        if found.is_file():
            return found
    fix = "a data set that Minari wrote with data_format='hdf5'"
    return refuse(ConfigError, f"{given} is not a Minari data set in HDF5.", want=f"data/{_FILE} in it", fix=fix)


def _opened(path: FilePath) -> Any:
    """Return the open file, to be used in ``with``."""
    try:
        import h5py
    except ImportError:
        refuse(ConfigError, "h5py is not installed.", fix="pip install 'conduit_jax[hdf5]'")
    if not path.is_file():
        refuse(ConfigError, f"There is no file {path}.", want=f"a Minari data set's folder, or its {_FILE}")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        refuse(ConfigError, f"{path} is not an HDF5 file, or a damaged one.", got=error, want="a file h5py can open")
