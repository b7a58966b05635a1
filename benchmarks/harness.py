"""What all benchmarks share: interleaved timing, figures with their spread, and one JSON form.

Every result file has ``about`` (machine and versions), ``rows`` (a case each) and ``summary`` (the figures asked for).
Times are wall seconds a call; CPU seconds of the process stand beside them, because the machine may be shared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Timing(NamedTuple):
    """Seconds a call: ``best`` and ``median`` of the repeats, and ``cpu``, the least CPU time a call took."""

    best: float
    median: float
    cpu: float
    repeats: list[float]

    def shared_by(self, parts: int) -> Timing:
        """Return the times of one of ``parts`` equal parts of a call (a batch of several, say)."""
        return Timing(self.best / parts, self.median / parts, self.cpu / parts, [one / parts for one in self.repeats])


class Ratio(NamedTuple):
    """How many times longer one case takes than another.

    ``of_best`` is the ratio of the two shortest times, ``median`` that of the ratios of neighbouring repeats, and ``low``
    and ``high`` the median's 95 % bootstrap interval. Load from outside adds to both times and draws ``median`` to 1.
    """

    of_best: float
    median: float
    low: float
    high: float


def ratio(slow: Timing, fast: Timing, *, resamples: int = 1000) -> Ratio:
    """Return ``slow / fast`` of two cases that ``interleave`` timed together (or of as many repeats as both have)."""
    count = min(len(slow.repeats), len(fast.repeats))
    pairs = np.divide(slow.repeats[:count], fast.repeats[:count])
    drawn = np.random.default_rng(0).integers(0, len(pairs), (resamples, len(pairs)))
    low, high = np.percentile(np.median(pairs[drawn], axis=1), [2.5, 97.5])
    return Ratio(slow.best / fast.best, float(np.median(pairs)), float(low), float(high))


def calibrate(case: Callable[[int], Any], block_s: float) -> tuple[int, float]:
    """Return how many calls of ``case`` fill about ``block_s``, and the seconds its first call took: compilation, mostly."""
    start = time.perf_counter()
    case(1)
    first = time.perf_counter() - start
    once = np.inf
    for calls in (1, 3, 3):
        start = time.perf_counter()
        case(calls)
        once = min(once, (time.perf_counter() - start) / calls)
    return int(np.clip(block_s / once, 1, 10_000)), first


def interleave(
    cases: Mapping[str, Callable[[int], Any]], *, calls: int | Mapping[str, int], repeats: int
) -> dict[str, Timing]:
    """Time ``case(calls)``, which makes that many calls and waits for them, ``repeats`` times, the cases in turn.

    ``calls`` is a number for all cases or one a case.
    """
    wall: dict[str, list[float]] = {name: [] for name in cases}
    cpu: dict[str, list[float]] = {name: [] for name in cases}
    counts = {name: calls if isinstance(calls, int) else calls[name] for name in cases}
    for name, case in cases.items():
        case(max(1, counts[name] // 10))  # compile and warm up
    for repeat in range(repeats):
        names = list(cases) if repeat % 2 == 0 else list(cases)[::-1]
        for name in names:
            start, start_cpu = time.perf_counter(), time.process_time()
            cases[name](counts[name])
            wall[name].append((time.perf_counter() - start) / counts[name])
            cpu[name].append((time.process_time() - start_cpu) / counts[name])
    return {name: Timing(min(wall[name]), float(np.median(wall[name])), min(cpu[name]), wall[name]) for name in cases}


def about() -> dict[str, Any]:
    """Return what a reader needs to place the figures."""
    import jax
    import jaxlib

    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "backend": jax.default_backend(),
        "devices": len(jax.devices()),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
    }


def arguments(description: str) -> argparse.ArgumentParser:
    """Return the parser of the options every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write rows and summary as JSON")
    parser.add_argument("--quick", action="store_true", help="a smoke run: few repeats, figures mean little")
    return parser


def earlier_rows(path: Path | None) -> list[dict[str, Any]]:
    """Return the rows that the file at ``path`` holds, none where there is no file: a run adds to them, or replaces its own."""
    return [] if path is None or not path.exists() else json.loads(path.read_text())["rows"]


def earlier_summary(path: Path | None) -> dict[str, Any]:
    """Return the summary that the file at ``path`` holds, as ``earlier_rows`` its rows."""
    return {} if path is None or not path.exists() else json.loads(path.read_text())["summary"]


def rows_to_add_to(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of ``--json`` for a run that adds to them, whose own are ``marked``.

    Ends with a usage error where they are of ``--quick`` runs and this one is not, or the other way round: figures over both
    would mean nothing, and a smoke run would take the place of measured ones.
    """
    rows = earlier_rows(options.json)
    if any(row.get("quick", False) != options.quick for row in rows):
        kind = "measured" if options.quick else "--quick"
        parser.error(f"{options.json} holds rows of {kind} runs; give another --json, or delete the file")
    return rows


def marked(row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return ``row`` as a run with ``options`` writes it: ``quick`` stands in those of smoke runs."""
    return row | {"quick": True} if options.quick else row


def report(path: Path | None, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Print the summary and write the JSON file where one was asked for; what is longer than a line stands only there."""
    for name, value in summary.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        if isinstance(value, list) and all(isinstance(note, str) for note in value):
            print(f"{name:>32}:", *(f"\n  - {note}" for note in value))
        elif len(shown) <= 160:
            print(f"{name:>32}  {shown}")
    if path is not None:
        write(path, rows, summary)


def write(path: Path, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Write the JSON file; it is replaced whole, so that a run which is stopped leaves the last one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(path.name + ".part")
    written.write_text(json.dumps({"about": about(), "summary": summary, "rows": rows}, indent=1) + "\n")
    written.replace(path)
