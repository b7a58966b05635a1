"""Where an update's time goes: spans around calls of one algorithm's own objects, in wall time and in CPU time of this thread.

Only attributes of instances are wrapped, alike in all cases; neither RLlib nor the adapter is changed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

PARTS = ("rollout", "path", "update", "sync_weights", "other")


class Probe:
    """Spans of ``algo``: the experience path is the buffer's calls and the making of the learner's batch."""

    def __init__(self, algo: Any):
        self.algo = algo
        self.wall: Counter[str] = Counter()
        self.cpu: Counter[str] = Counter()
        self.steps: list[float] = []
        buffer, group = algo.local_replay_buffer, algo.learner_group
        for name in ("add", "sample", "get_metrics", "update_priorities"):
            if hasattr(buffer, name):
                self._wrap(buffer, name, "path")
        self._wrap(group._learner, "_make_batch_if_necessary", "path")
        self._wrap(group, "update", "learner")
        self._wrap(algo.env_runner_group, "sync_weights", "sync_weights")
        if algo.env_runner_group.num_remote_env_runners():
            self._wrap(algo.env_runner_group, "foreach_env_runner", "rollout")
        else:
            self._wrap(algo.env_runner, "sample", "rollout")
            self._wrap(algo.env_runner, "get_metrics", "rollout")
        self._wrap(algo, "training_step", "total")

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            path = self.wall["path"], self.cpu["path"]
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
                if part == "learner":  # without the batch made inside it
                    wall, cpu = wall - self.wall["path"] + path[0], cpu - self.cpu["path"] + path[1]
                if part == "total":
                    self.steps.append(wall)
                self.wall["update" if part == "learner" else part] += wall
                self.cpu["update" if part == "learner" else part] += cpu

        setattr(owner, name, timed)

    def block(self) -> dict[str, Any]:
        """Run one iteration of the algorithm; return seconds an update by part, ``wall`` and ``cpu``, and all ``steps``."""
        self.wall.clear()
        self.cpu.clear()
        self.steps.clear()
        self.algo.train()
        count = len(self.steps)
        return {
            "wall": _shared(self.wall, count),
            "cpu": _shared(self.cpu, count),
            "steps": list(self.steps),
        }


def _shared(spans: Counter[str], count: int) -> dict[str, float]:
    found = {part: spans[part] / count for part in (*PARTS[:-1], "total")}
    found["other"] = found["total"] - sum(found[part] for part in PARTS[:-1])
    return found
