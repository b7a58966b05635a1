"""What the calling thread wants of the machine's cores: a clock that stands still while it waits for something else."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

_STATISTICS = "/proc/thread-self/schedstat"  # of Linux: ns on a core, ns in line for one, turns


def wanted_s() -> float:
    """Return the seconds in which this thread had a core or stood in line for one, as far as the system tells of lines.

    A thread that others keep from its core wants it no less, and does not wait for anything it could leave work to meanwhile.
    """
    return time.thread_time() + _own.line.stood_s()


class _Line:
    """How long a thread stood in line for a core: its file is kept open, and tells of the thread that opened it."""

    def __init__(self) -> None:
        self._file = -1
        with suppress(OSError):
            self._file = os.open(_STATISTICS, os.O_RDONLY | os.O_CLOEXEC)

    def stood_s(self) -> float:
        if self._file < 0:
            return 0.0
        try:
            return int(os.pread(self._file, 64, 0).split()[1]) * 1e-9
        except (OSError, IndexError, ValueError):
            return 0.0

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


class _Own(threading.local):
    def __init__(self) -> None:
        self.line = _Line()


_own = _Own()
