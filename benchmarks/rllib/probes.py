"""Where an update's time goes: spans around calls of one algorithm's own objects, in wall time and in CPU time of this thread.

Only attributes of instances are wrapped, alike in all cases; neither RLlib nor the adapter is changed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.rllib.operations import Operations

PARTS = ("rollout", "path", "update", "sync_weights", "other")


class Probe:
    """Spans of ``algo``. The experience path is the buffer's calls and the making of the learner's batch or, on policy, of
    its batch and all minibatches; the value function's forward pass in it is told apart.

    With remote learners the making of batches happens there, and only the buffer's calls are in the path.
    """

    def __init__(self, algo: Any):
        self.algo = algo
        self.wall: Counter[str] = Counter()
        self.cpu: Counter[str] = Counter()
        self.steps: list[float] = []
        self.operations: Operations | None = None
        self.trial_left = 0
        self._in_path, self._syncing, self._thread = False, False, 0
        buffer, group = algo.local_replay_buffer, algo.learner_group
        if buffer is not None:
            for name in ("add", "sample", "get_metrics", "update_priorities"):
                if hasattr(buffer, name):
                    self._wrap(buffer, name, "path")
        if group.is_local:
            (found,) = group.foreach_learner(lambda learner: learner)
            self._wrap_learner(found.get(), on_policy=buffer is None)
        self._wrap(group, "update", "update")
        self._wrap(algo.env_runner_group, "sync_weights", "sync_weights")
        if algo.env_runner_group.num_remote_env_runners():
            for name in ("foreach_env_runner", "fetch_ready_async_reqs"):
                self._wrap(algo.env_runner_group, name, "rollout")
        else:
            self._wrap(algo.env_runner, "sample", "rollout")
            self._wrap(algo.env_runner, "get_metrics", "rollout")
        self._wrap(algo, "training_step", "total")

    def _wrap_learner(self, learner: Any, *, on_policy: bool) -> None:
        if not on_policy:
            self._wrap(learner, "_make_batch_if_necessary", "path")
            return
        begin = self._timed(learner._create_iterator_if_necessary, "path")
        learner._create_iterator_if_necessary = lambda **given: self._iterate(begin(**given))
        for name in ("begin_stream", "stream"):
            if hasattr(learner, name):
                self._wrap(learner, name, "path")
        for module in learner.module._rl_modules.values():
            self._wrap(module.unwrapped(), "compute_values", "value_forward")

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        setattr(owner, name, self._timed(getattr(owner, name), part))

    def _iterate(self, minibatches: Any) -> Iterator[Any]:
        following = self._timed(functools.partial(next, iter(minibatches), None), "path")
        while (minibatch := following()) is not None:
            yield minibatch

    def _timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:  # of the adapter's own: not this thread's time
                return call(*args, **kwargs)
            if part == "value_forward" and not self._in_path:  # the update's own
                return call(*args, **kwargs)
            if part == "rollout" and self._syncing:  # weights are sent by the same call
                return call(*args, **kwargs)
            self._syncing = part == "sync_weights"
            self._in_path = part in ("path", "value_forward")
            path = self.wall["path"], self.cpu["path"]
            watched = self.operations.watching() if self.operations and part == "path" else contextlib.nullcontext()
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                with watched:
                    return call(*args, **kwargs)
            finally:
                wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
                self._in_path, self._syncing = part == "value_forward", False
                if part in ("update", "rollout"):  # without the batches made inside it
                    wall, cpu = wall - self.wall["path"] + path[0], cpu - self.cpu["path"] + path[1]
                if part == "total":
                    self.steps.append(wall)
                self.wall[part] += wall
                self.cpu[part] += cpu

        return timed

    def block(self) -> dict[str, Any]:
        """Run one iteration of the algorithm; return seconds an update by part, ``wall`` and ``cpu``, and all ``steps``.

        The value function's pass is ``value_forward``, or what the learner waited for it where it ran on another thread. What
        was begun and not needed yet is waited for, as part of the path: it may not run beside another case's block.
        """
        self.wall.clear()
        self.cpu.clear()
        self.steps.clear()
        self._thread = threading.get_ident()
        results = self.algo.train()
        self.trial_left = results.get("conduit", {}).get("trial_left", 0)
        self._drain()
        count = len(self.steps)
        return {
            "wall": _shared(self.wall, count, results.get("conduit", {}).get("value_wait_s", 0.0)),
            "cpu": _shared(self.cpu, count),
            "steps": list(self.steps),
        }

    def _drain(self) -> None:
        begin = time.perf_counter()
        for table in getattr(self.algo.local_replay_buffer, "_tables", {}).values():
            if table.layout is not None:
                table.state.highest.block_until_ready()
        waited = time.perf_counter() - begin
        self.wall["path"] += waited
        self.wall["total"] += waited

    def count_operations(self) -> dict[str, Any]:
        """Run one iteration slowly; return the operations on its path."""
        self.operations = Operations()
        count = len(self.block()["steps"])
        found, self.operations = self.operations.figures(count), None
        return found


def _shared(spans: Counter[str], count: int, waited: float = 0.0) -> dict[str, float]:
    found = {part: spans[part] / count for part in (*PARTS[:-1], "total", "value_forward")}
    found["value_forward"] = max(found["value_forward"], waited / count)
    found["other"] = found["total"] - sum(found[part] for part in PARTS[:-1])
    found["path_without_values"] = found["path"] - found["value_forward"]
    return found
