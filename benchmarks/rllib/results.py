"""Result files that grow: a run of some workloads keeps what the file says of the others, one cut short keeps what it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness import earlier_rows, earlier_summary, write
from benchmarks.rllib import operations
from benchmarks.rllib.summary import summarize


class Results:
    """``rows`` and figures by workload of the file at ``path``, without those of the workloads that are ``measured`` anew."""

    def __init__(self, path: Path | None, measured: list[str]):
        self._path = path
        self.rows = [row for row in earlier_rows(path) if row["workload"] not in measured]
        kept = earlier_summary(path).get("workloads", {})
        self.workloads: dict[str, dict[str, Any]] = {name: kept[name] for name in kept if name not in measured}

    def enter(self, name: str, rows: list[dict[str, Any]], figures: dict[str, Any]) -> None:
        """Add a workload measured, and write the file."""
        self.rows += rows
        self.workloads[name] = figures
        if self._path is not None:
            write(self._path, self.rows, self.summary())

    def summary(self) -> dict[str, Any]:
        """Return the figures over all workloads, and the counting rule."""
        return summarize(self.workloads) | {"counting_rule": operations.__doc__}


__all__ = ["Results"]
