"""Times the stages of a loop's iterations: what their calls take to return and, run blocked, to end."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax

from conduit_jax.schedule.metrics import STAGES, Spans
from conduit_jax.schedule.trace import Event, Recorder

WARM_UP = 2  # iterations with updates before any is timed: they compile


class Stopwatch:
    """One loop's; ``spans`` take the times, ``recorder`` the timeline."""

    def __init__(self, spans: Spans, recorder: Recorder):
        self._spans, self._recorder = spans, recorder
        self._seconds: dict[str, float] = defaultdict(float)
        self._calls: dict[str, int] = defaultdict(int)
        self._blocked, self._updating, self._start, self._waited = False, 0, 0.0, 0.0

    def begin(self, *, blocked: bool) -> None:
        """Start an iteration."""
        self._blocked = blocked
        self._seconds.clear()
        self._calls.clear()
        self._waited, self._start = 0.0, time.perf_counter()

    def span(self, name: str) -> Span:
        """Return a context for one call of a stage: it gives the function its result is handed through."""
        return Span(self, name)

    def wait(self, fence: Any) -> None:
        """Wait for the device, as the end of an iteration does."""
        start = time.perf_counter()
        with self._recorder.wait("device"):
            jax.block_until_ready(fence)
        self._waited += time.perf_counter() - start

    def end(self, *, updating: bool, iterations: int = 1) -> tuple[float, dict[str, float]] | None:
        """End an iteration; return its seconds and its stages', less their waits, unless it is one of the first, which compile."""
        seconds, stages = (time.perf_counter() - self._start) / iterations, dict(self._seconds)
        self._updating += updating
        if self._updating <= WARM_UP:
            return None
        spans, complete = self._spans, len(stages) == len(STAGES)
        if self._blocked:
            for name in STAGES if complete else ():
                spans.stage(name, stages[name])
            if complete:
                spans.besides.append(max(0.0, seconds - sum(stages.values())))
        else:
            spans.iteration.append(seconds)
            if complete:
                spans.calls = dict(self._calls)
                spans.waited.append(self._waited)
                for name in STAGES:
                    spans.dispatched[name].append(stages[name])
        wake = self._spans.wake_s if self._blocked else 0.0
        return seconds, {name: max(0.0, value - wake * self._calls[name]) for name, value in stages.items()}

    def enter(self, name: str, start: float) -> None:
        """Enter a span that ends now."""
        end = time.perf_counter()
        self._seconds[name] += end - start
        self._calls[name] += 1
        self._recorder.add(Event(name, f"{name} (blocked)" if self._blocked else name, start, end))

    @property
    def done(self) -> Callable[[Any], Any]:
        """What a result is handed through: waited for where stages run blocked."""
        return jax.block_until_ready if self._blocked else _as_it_is


class Span:
    """See ``Stopwatch.span``."""

    __slots__ = ("_name", "_start", "_watch")

    def __init__(self, watch: Stopwatch, name: str):
        self._watch, self._name, self._start = watch, name, 0.0

    def __enter__(self) -> Callable[[Any], Any]:
        self._start = time.perf_counter()
        return self._watch.done

    def __exit__(self, *_: object) -> None:
        self._watch.enter(self._name, self._start)


def _as_it_is(value: Any) -> Any:
    return value
