"""dm-reverb, in an interpreter of its own (``--reverb-python``): it needs TensorFlow and an older numpy.

Blocks are timed here like everyone's, so a block carries one message over a pipe; the other process's CPU time is not
counted. Its driver draws with a prefetching data set, as Reverb's users do.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.replay_peers.workloads import BATCH, Workload

DRIVER = Path(__file__).with_name("reverb_driver.py")


class Reverb:
    """A table of single-step items, drawn from over a local connection; its calls take how many to make."""

    name = "dm-reverb"
    prioritized = False
    python: ClassVar[str] = ""  # set from the command line

    def __init__(self, workload: Workload) -> None:
        self.process = subprocess.Popen(
            [self.python, str(DRIVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        fields = {name: [list(shape), dtype.name] for name, (shape, dtype) in workload.fields.items()}
        self._ask(fields=fields, capacity=workload.capacity, batch=BATCH, prioritized=self.prioritized)

    def _ask(self, calls: int | None = None, **request: Any) -> None:
        """Send one request and wait until it is done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = request if calls is None else {**request, "calls": calls}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        if not self.process.stdout.readline():
            raise RuntimeError(f"the reverb driver ended with code {self.process.wait()}")

    def add(self, rows: int) -> Callable[[int], Any]:
        return partial(self._ask, do="add", count=rows)

    def sample(self, batches: int) -> Callable[[int], Any]:
        return partial(self._ask, do="sample", count=batches)

    def close(self) -> None:
        """End the other process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


class ReverbPrioritized(Reverb):
    """The same with draws by priority."""

    name = "dm-reverb prioritized"
    prioritized = True

    def sample_and_update(self, batches: int) -> Callable[[int], Any]:
        return partial(self._ask, do="sample_and_update", count=batches)


UNIFORM, PRIORITIZED = (Reverb,), (ReverbPrioritized,)
