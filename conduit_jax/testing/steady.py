"""Facts of a steady state: nothing is traced again, and no buffer is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

_TRACED = "/jax/core/compile/jaxpr_trace_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"


class TraceCount:
    """What JAX did so far inside a ``count_traces`` block: ``count`` of functions traced, ``compiled`` of programs compiled."""

    def __init__(self) -> None:
        self.count, self.compiled = 0, 0

    def note(self, event: str, duration_secs: float, **_: str | int) -> None:
        """Take one of JAX's monitoring events."""
        self.count += event == _TRACED
        self.compiled += event == _COMPILED


@contextmanager
def count_traces() -> Iterator[TraceCount]:
    """Count what is traced and compiled by anyone in this process inside the block: 0 in a steady state.

    Eager operations on new shapes compile as well, and are counted.
    """
    counted = TraceCount()
    jax.monitoring.register_event_duration_secs_listener(counted.note)
    try:
        yield counted
    finally:
        jax.monitoring.unregister_event_duration_listener(counted.note)


def live_buffer_bytes() -> int:
    """Return the bytes of all live arrays of this process, over all devices they are addressable on."""
    return sum(array.nbytes for array in jax.live_arrays())
