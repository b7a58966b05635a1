"""Several threads that push into one plane: in turns, which repeats, or as they come, which is logged."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from conduit_jax.errors import BackpressureError, ConfigError, check_at_least, check_choice, check_integer, refuse
from conduit_jax.schedule.trace import Recorder

_LOGGED = 65_536


class Producers:
    """``count`` producers of one plane; ``push`` is the plane's. See ``ExperiencePlane.producers``."""

    def __init__(self, push: Callable[..., Any], count: int, order: str, deadline_s: float, recorder: Recorder):
        check_integer("producers: count", count, 1)
        check_choice("producers: order", order, ("round_robin", "arrival"))
        check_at_least("producers: deadline_s", deadline_s, 0.0)
        self.count, self.order, self.deadline_s = count, order, deadline_s
        self.log: deque[int] = deque(maxlen=_LOGGED)
        self._push, self._recorder = push, recorder
        self._turn = 0
        self._gone: set[int] = set()
        self._changed = threading.Condition()

    def push(self, producer: int, rollout: Any, **options: Any) -> Any:
        """Push as ``plane.push`` does, as producer ``producer`` of ``range(count)``; in turns, wait for the others' first.

        Raises ``BackpressureError`` naming the producer whose turn it is when it did not push within ``deadline_s``, and
        where a rate limiter kept the unit out for as long.
        """
        if not 0 <= producer < self.count:
            refuse(ConfigError, "There is no such producer.", got=producer, want=f"0 to {self.count - 1}")
        with self._changed:
            if self.order == "round_robin" and self._turn != producer:
                with self._recorder.wait(f"turn of producer {self._turn}"):
                    came = self._changed.wait_for(lambda: self._turn == producer, self.deadline_s)
                if not came:
                    refuse(
                        BackpressureError,
                        f"Producer {producer} waited for its turn in vain.",
                        got=f"producer {self._turn} did not push for {self.deadline_s} s",
                        fix=f"producers.leave({self._turn}) when it has ended, or order='arrival'",
                    )
            result = self._push(rollout, **({"deadline_s": self.deadline_s} | options))
            self.log.append(producer)
            self._next()
            return result

    def leave(self, producer: int) -> None:
        """Take ``producer`` out of the turns: it has ended."""
        with self._changed:
            self._gone.add(producer)
            if self._turn == producer:
                self._next()

    def _next(self) -> None:
        for _ in range(self.count):
            self._turn = (self._turn + 1) % self.count
            if self._turn not in self._gone:
                break
        self._changed.notify_all()
