"""Where the figures of a run may go: CSV, JSON lines, TensorBoard. A sink takes numbers by name; nothing else knows of it.

    with conduit.CsvSink("run.csv") as csv, conduit.TensorBoardSink("logs") as board:
        loop.run(learner, actor, 10_000, every={50: conduit.recording(plane, csv, board)})

A file that is there already is gone on with (a resumed run): rows of the iterations to come again are taken out.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

import jax
import numpy as np

from conduit_jax.errors import ConfigError, refuse

PathLike = str | os.PathLike[str]

STEP = "iteration"


class Sink(Protocol):
    """Takes the figures of iteration ``step``, which grows from call to call."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Keep ``values``."""

    def close(self) -> None:
        """Write what is still to be written."""


def recording(plane: Any, *sinks: Sink) -> Callable[[Any], None]:
    """Return an ``every`` callback that gives loop metrics and ``plane.stats()`` to ``sinks``: a sync point each time.

    Names are ``metrics/loss``, ``tables/experience/live_items``, ``latency/exposed_s``: numbers alone, arrays of one
    number among them.
    """

    def record(state: Any) -> None:
        values = {**named_numbers(state.metrics, "metrics"), **named_numbers(plane.stats().as_dict())}
        for sink in sinks:
            sink.write(state.iteration, values)

    return record


def named_numbers(tree: Any, prefix: str = "") -> dict[str, float]:
    """Return the numbers in ``tree`` by their path, joined by ``/``; what is no single number is left out."""
    values: dict[str, float] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = "/".join([prefix] * bool(prefix) + [_word(key) for key in path])
        if isinstance(leaf, bool | int | float) or (hasattr(leaf, "dtype") and np.size(leaf) == 1):
            values[name or "value"] = float(np.asarray(leaf).reshape(()))
    return values


def _word(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))


class _FileSink:
    """A text file that grows by a row a call."""

    def __init__(self, path: PathLike):
        self._path = Path(path)
        self._file: TextIO | None = None
        if not self._path.parent.is_dir():
            refuse(ConfigError, "The folder of a metrics file does not exist.", got=self._path.parent)

    def _begin(self, lines: Iterable[str]) -> TextIO:
        """Return the file with ``lines`` (read from it, perhaps) as its content, open for more."""
        self.close()
        beside = self._path.with_name(f"{self._path.name}.part")
        with beside.open("w", newline="") as file:
            file.writelines(lines)
        beside.replace(self._path)
        self._file = opened = self._path.open("a", newline="")
        return opened

    def close(self) -> None:
        """Close the file; a later ``write`` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class CsvSink(_FileSink):
    """Rows of comma-separated values with a header; a figure that appears later adds a column. NaN is an empty cell."""

    def __init__(self, path: PathLike):
        super().__init__(path)
        self._columns: list[str] = [STEP]

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row."""
        row = {STEP: step, **{name: "" if math.isnan(value) else repr(value) for name, value in values.items()}}
        file = self._file
        if file is None or not row.keys() <= set(self._columns):
            file = self._begin(self._kept(step, row))
        csv.DictWriter(file, self._columns, restval="").writerow(row)
        file.flush()

    def _kept(self, step: int, row: Mapping[str, Any]) -> Iterator[str]:
        """Yield the file's lines with columns for ``row`` too, without rows of ``step`` and later ones."""
        text = io.StringIO(newline="")
        with self._path.open(newline="") if self._path.exists() else io.StringIO() as file:
            reader = csv.DictReader(whole_lines(file))
            self._columns = list(dict.fromkeys([*(reader.fieldnames or [STEP]), *row]))
            writer = csv.DictWriter(text, self._columns, restval="", extrasaction="ignore")
            writer.writeheader()
            for old in reader:
                if str(old[STEP]).isdigit() and int(old[STEP]) < step:
                    writer.writerow(old)
                yield text.getvalue()
                text.seek(0)
                text.truncate()
        yield text.getvalue()


class JsonLinesSink(_FileSink):
    """One JSON object a line; NaN and infinity are null."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line."""
        file = self._file or self._begin(self._kept(step))
        data = {name: value if math.isfinite(value) else None for name, value in values.items()}
        file.write(json.dumps({STEP: step, **data}, allow_nan=False) + "\n")
        file.flush()

    def _kept(self, step: int) -> Iterator[str]:
        with self._path.open() if self._path.exists() else io.StringIO() as file:
            yield from (line for line in whole_lines(file) if json.loads(line)[STEP] < step)


def whole_lines(file: Iterable[str]) -> Iterator[str]:
    """Yield the lines that end; a killed process may leave one that does not."""
    return (line for line in file if line.endswith("\n"))


class TensorBoardSink:
    """Scalars for TensorBoard in ``folder``, written by tensorboardX (extra ``tensorboard``)."""

    def __init__(self, folder: PathLike):
        self._folder, self._writer = os.fspath(folder), None
        try:
            self._module: Any = importlib.import_module("tensorboardX")
        except ModuleNotFoundError as error:
            message = "TensorBoard files need tensorboardX: pip install 'conduit_jax[tensorboard]' (or tensorboardX)"
            raise ConfigError(message) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the scalars; numbers that are not finite are left out."""
        if self._writer is None:
            self._writer = self._module.SummaryWriter(self._folder, purge_step=step)
        for name, value in values.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()


__all__ = ["CsvSink", "JsonLinesSink", "Sink", "TensorBoardSink", "named_numbers", "recording"]
