"""Which schedule was run from which iteration on, and why: recorded, told, and pinned to repeat a run bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from conduit_jax.config import Algorithm
from conduit_jax.errors import ConfigError, refuse
from conduit_jax.schedule.metrics import LatencyReport
from conduit_jax.schedule.optimizer import Decision
from conduit_jax.schedule.semantics import Schedule, check_feasible, resolve_schedule


class Change(NamedTuple):
    """From ``iteration`` on ``schedule`` was run, for ``reason``."""

    iteration: int
    schedule: Schedule
    reason: str = ""

    def __str__(self) -> str:
        return f"from iteration {self.iteration}: {self.schedule} ({self.reason})"


class History:
    """The changes of one plane. ``wanted`` is a schedule's name, a ``Schedule``, or another plane's changes to repeat."""

    def __init__(self, wanted: str | Schedule | Sequence[tuple], algorithm: Algorithm):
        self.changes: list[Change] = []
        self.decision: Decision | None = None
        self.pinned: tuple[Change, ...] = ()
        if not isinstance(wanted, str | Schedule):
            self.pinned = _pinned(wanted, algorithm)
            wanted = self.pinned[0].schedule
        self.wanted: str | Schedule = wanted
        resolve_schedule(wanted, algorithm, own_device=False)  # refuses what the algorithm does not allow

    @property
    def automatic(self) -> bool:
        """Whether measured times may change the schedule."""
        return self.wanted == "auto" and not self.pinned

    def due(self, iteration: int) -> Change | None:
        """Return the pinned change of ``iteration``, if there is one that was not made yet."""
        behind = [change for change in self.pinned[1:] if change.iteration <= iteration]
        return behind[-1] if len(behind) > len(self.changes) - 1 and self.changes else None

    def until_next(self, iteration: int) -> int | None:
        """Return how many iterations there are before the next pinned change; ``None`` where there is none."""
        ahead = [change.iteration - iteration for change in self.pinned if change.iteration > iteration]
        return min(ahead, default=None)

    def begin(self, schedule: Schedule) -> None:
        """Record the schedule a table was built with, the first."""
        if not self.changes:
            self.enter(Change(0, schedule, "chosen when built" if self.automatic else "asked for"))

    def enter(self, change: Change) -> None:
        """Record a change that is made now."""
        self.changes.append(change)

    def as_text(self, latency: LatencyReport) -> list[str]:
        """Return the changes after the first, what was predicted, and what is measured, as lines."""
        lines = [f"    {change}" for change in self.changes[1:]]
        if self.decision is not None:
            lines += [f"    {line}" for line in str(self.decision).splitlines()]
        if latency.iteration_s.count:
            seconds, exposed = latency.iteration_s.p50, latency.exposed_s
            told = "" if exposed != exposed else f", of which {exposed * 1e6:,.0f} us are exposed experience path"
            lines.append(f"    measured: {seconds * 1e6:,.0f} us an iteration (median){told}")
        return lines


def _pinned(wanted: Any, algorithm: Algorithm) -> tuple[Change, ...]:
    """Return given changes as values; ``ConfigError`` unless they start at iteration 0, ascend and are allowed."""
    try:
        changes = tuple(Change(*entry) for entry in wanted)
        good = changes[0].iteration == 0 and all(isinstance(change.schedule, Schedule) for change in changes)
        good = good and all(one.iteration <= two.iteration for one, two in itertools.pairwise(changes))
    except (TypeError, IndexError):
        changes, good = (), False
    if not good:
        refuse(
            ConfigError,
            "This is no schedule.",
            got=repr(wanted)[:200],
            want="a name, a Schedule, or changes [(0, Schedule), (iteration, Schedule), ...] as plane.stats().schedule_history",
        )
    for change in changes:
        check_feasible(change.schedule, algorithm)
    return changes
