"""Ctrl-C as a flag: looked at between iterations, so that nothing is cut off between donating a buffer and keeping its successor."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_active: list[threading.Event] = []


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into the event that is yielded; a second one raises ``KeyboardInterrupt`` at once.

    Nested uses share the outermost event, so a program that trains and then evaluates handles both in one place. Outside
    the main thread, where Python takes no signals, the event is never set.
    """
    if _active:
        yield _active[-1]
        return
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)

    def note(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    signal.signal(signal.SIGINT, note)
    _active.append(stop)
    try:
        yield stop
    finally:
        _active.pop()
        signal.signal(signal.SIGINT, before)
