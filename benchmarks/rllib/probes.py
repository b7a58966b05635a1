"""Where an update's time goes: spans around calls of one algorithm's own objects, in wall time and in CPU time of this thread.

Only attributes of instances are wrapped, alike in all cases; neither RLlib nor the adapter is changed.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

PARTS = ("rollout", "path", "update", "sync_weights", "other")


class Probe:
    """Spans of ``algo``. The experience path is the buffer's calls and the making of the learner's batch or, on policy, of
    its batch and all minibatches; the value function's forward pass in it is told apart."""

    def __init__(self, algo: Any):
        self.algo = algo
        self.wall: Counter[str] = Counter()
        self.cpu: Counter[str] = Counter()
        self.steps: list[float] = []
        self._in_path = False
        buffer, group = algo.local_replay_buffer, algo.learner_group
        learner = group._learner
        if buffer is not None:
            for name in ("add", "sample", "get_metrics", "update_priorities"):
                if hasattr(buffer, name):
                    self._wrap(buffer, name, "path")
            self._wrap(learner, "_make_batch_if_necessary", "path")
        else:
            made = learner._create_iterator_if_necessary
            begin = self._timed(made, "path")
            learner._create_iterator_if_necessary = lambda **given: self._iterate(begin(**given))
            for module in learner.module._rl_modules.values():
                self._wrap(module.unwrapped(), "compute_values", "value_forward")
        self._wrap(group, "update", "update")
        self._wrap(algo.env_runner_group, "sync_weights", "sync_weights")
        if algo.env_runner_group.num_remote_env_runners():
            self._wrap(algo.env_runner_group, "foreach_env_runner", "rollout")
        else:
            self._wrap(algo.env_runner, "sample", "rollout")
            self._wrap(algo.env_runner, "get_metrics", "rollout")
        self._wrap(algo, "training_step", "total")

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        setattr(owner, name, self._timed(getattr(owner, name), part))

    def _iterate(self, minibatches: Any) -> Iterator[Any]:
        following = self._timed(functools.partial(next, iter(minibatches), None), "path")
        while (minibatch := following()) is not None:
            yield minibatch

    def _timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if part == "value_forward" and not self._in_path:  # the update's own
                return call(*args, **kwargs)
            self._in_path = part in ("path", "value_forward")
            path = self.wall["path"], self.cpu["path"]
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
                self._in_path = part == "value_forward"
                if part == "update":  # without the batches made inside it
                    wall, cpu = wall - self.wall["path"] + path[0], cpu - self.cpu["path"] + path[1]
                if part == "total":
                    self.steps.append(wall)
                self.wall[part] += wall
                self.cpu[part] += cpu

        return timed

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
    found = {part: spans[part] / count for part in (*PARTS[:-1], "total", "value_forward")}
    found["other"] = found["total"] - sum(found[part] for part in PARTS[:-1])
    found["path_without_values"] = found["path"] - found["value_forward"]
    return found
