"""A profiler's trace as intervals: what copied, what computed, and how much of the one went on during the other."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of ``intervals`` as ascending disjoint ones."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        elif end > start:
            union.append((start, end))
    return union


def length(intervals: Iterable[Interval]) -> float:
    """Return how long ``intervals`` are together, what is covered twice counted once."""
    return sum(end - start for start, end in merged(intervals))


def common(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """Return for how long something of both goes on."""
    first, second = merged(first), merged(second)
    return length(first) + length(second) - length([*first, *second])


def copies_and_kernels(folder: Path) -> tuple[list[Interval], list[Interval]]:
    """Return the host-to-device copies and the kernels of all GPUs in the newest trace under ``folder``, nanoseconds."""
    import jax

    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    copies: list[Interval] = []
    kernels: list[Interval] = []
    for plane in jax.profiler.ProfileData.from_file(str(newest)).planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            for event in line.events:
                name, span = event.name.lower(), (event.start_ns, event.start_ns + event.duration_ns)
                if "memcpyh2d" in name or "memcpy h2d" in name:
                    copies.append(span)
                elif "stream" in line.name.lower() and "memcpy" not in name and "memset" not in name:
                    kernels.append(span)
    return copies, kernels
