"""A timeline of what the host did: spans on named tracks, bounded, and the Chrome/Perfetto JSON they are written as.

Stages that run asynchronously are dispatched: their spans on the host are short, and what the device still has to do shows
as a wait. So are transfers, but for those of host arrays, whose copying shows whole. Iterations run stage by stage, once in
so many, show each stage's whole time (``blocked``). For the device's own timeline use ``jax.profiler.trace``.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

TRACKS = ("rollout", "ingestion", "transfer", "delivery", "update", "dispatch", "wait", "host hooks")
_KEPT = 50_000


class Event(NamedTuple):
    """``name`` ran from ``start_s`` to ``end_s`` (``time.perf_counter``) on ``track``."""

    track: str
    name: str
    start_s: float
    end_s: float
    arguments: dict[str, Any] | None = None


class Recorder:
    """Takes spans from any thread; keeps the latest ``kept``."""

    def __init__(self, kept: int = _KEPT):
        self.events: deque[Event] = deque(maxlen=kept)
        self.stalls_s: dict[str, float] = {}
        self.dropped = 0
        self._kept = kept

    def add(self, event: Event) -> None:
        """Enter a span that has ended."""
        self.dropped += len(self.events) == self._kept
        self.events.append(event)

    def wait(self, cause: str) -> Wait:
        """Return a context in which the caller waits for ``cause``: entered as a stall."""
        return Wait(self, cause)

    def timed(self, track: str, name: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return ``function``, of one argument, whose calls are entered as spans."""

        def call(value: Any) -> Any:
            start = time.perf_counter()
            result = function(value)
            self.add(Event(track, name, start, time.perf_counter()))
            return result

        return call

    def write(self, path: str | Path) -> int:
        """Write the spans as JSON that https://ui.perfetto.dev opens; return how many there are."""
        events = list(self.events)
        begin = min((event.start_s for event in events), default=0.0)
        names = [*TRACKS, *sorted({event.track for event in events} - set(TRACKS))]
        written: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}}
            for number, name in enumerate(names, 1)
        ]
        written.append({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "conduit_jax"}})
        for event in events:
            start, length = (event.start_s - begin) * 1e6, (event.end_s - event.start_s) * 1e6
            place = {"ph": "X", "pid": 1, "tid": 1 + names.index(event.track), "ts": start, "dur": length}
            written.append({**place, "name": event.name, "args": event.arguments or {}})
        Path(path).write_text(json.dumps({"traceEvents": written, "displayTimeUnit": "ms"}))
        return len(events)


class Wait:
    """See ``Recorder.wait``."""

    __slots__ = ("_cause", "_recorder", "_start")

    def __init__(self, recorder: Recorder, cause: str):
        self._recorder, self._cause, self._start = recorder, cause, 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        end = time.perf_counter()
        stalls = self._recorder.stalls_s
        stalls[self._cause] = stalls.get(self._cause, 0.0) + end - self._start
        self._recorder.add(Event("wait", self._cause, self._start, end))
