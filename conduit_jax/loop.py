"""``wrap``: a training loop around a plane. The user brings ``train_step`` and ``rollout``; nothing else changes."""

from __future__ import annotations

import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.config import OnPolicy
from conduit_jax.errors import ConduitError, ConfigError, explain, refuse
from conduit_jax.plane import ExperiencePlane
from conduit_jax.schedule.metrics import STAGES, ExposedLatency
from conduit_jax.types import Sample

PyTree = Any

_RUN_AHEAD = 2  # iterations the host may be ahead of the device
_WARM_UP = 2  # iterations with updates before any is timed: they compile
_BLOCKED_EVERY = 64  # one iteration in so many runs stage by stage, to learn what each costs alone


class LoopState(NamedTuple):
    """What ``every`` callbacks are given: the present ``learner``, ``actor``, last ``metrics`` and ``iteration`` (from 1)."""

    learner: PyTree
    actor: PyTree
    metrics: PyTree
    iteration: int


class Loop:
    """See ``wrap``."""

    def __init__(
        self,
        train_step: Callable[..., tuple],
        rollout: Callable[..., tuple],
        policy: Callable[[PyTree], PyTree],
        plane: ExperiencePlane,
        publish_every: int,
    ):
        self.plane, self.iteration, self.updates, self.interrupted = plane, 0, 0, False
        self.trained_iterations, self._updating = 0, 0
        self._stage_s: dict[str, float] = defaultdict(float)
        self._rollout, self._policy, self._publish_every = rollout, policy, publish_every
        self._train_step = jax.jit(train_step, donate_argnums=0)
        self._publish = jax.jit(lambda learner: jax.tree.map(jnp.copy, policy(learner)))
        self._on_policy = isinstance(plane.algorithm, OnPolicy)

    def run(
        self,
        learner: PyTree,
        actor: PyTree,
        iterations: int,
        every: Mapping[int, Callable[[LoopState], object]] | None = None,
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Run ``iterations`` iterations and return ``(learner, actor, metrics)``.

        An iteration is one rollout, its ingestion and ``updates_per_rollout`` updates (none until the replay has
        ``min_size`` items). ``every={n: callback}`` calls back each n iterations with a ``LoopState``. The caller's
        learner stays usable: the loop trains a copy. Ctrl-C ends after the present iteration (``interrupted``).
        """
        learner = own_copy(learner)
        self.plane.consumed_by(learner)
        published, metrics = self._publish(learner), None
        self.plane.policy_version = self.updates
        behind: deque[Any] = deque()
        with _interruptible() as stop:
            for _ in range(iterations):
                start = time.perf_counter()
                blocked = self.iteration % _BLOCKED_EVERY == _BLOCKED_EVERY - 1
                learner, actor, metrics = self._iterate(learner, actor, published, metrics, blocked=blocked)
                if self.iteration % self._publish_every == 0:
                    published = self._publish(learner)
                    self.plane.policy_version = self.updates
                behind.append((actor, metrics))
                if len(behind) > _RUN_AHEAD:
                    jax.block_until_ready(behind.popleft())
                self._enter_spans(time.perf_counter() - start, blocked=blocked)
                self.trained_iterations += 1
                self._call_back(every, LoopState(learner, actor, metrics, self.iteration))
                if stop.is_set():
                    self.interrupted = True
                    break
        return learner, actor, metrics

    def measure(
        self, learner: PyTree, actor: PyTree, *, iterations: int = 50, blocks: int = 8, buffers: int = 8
    ) -> ExposedLatency:
        """Measure exposed latency by ablation on copies of ``learner`` and ``actor``; the plane's replay goes on filling.

        Blocks of the full loop alternate with blocks in which ingestion is left out and ``buffers`` batches made
        beforehand are rotated through. Seconds an iteration, medians over blocks.
        """
        batches = None if self._on_policy else [self.plane.pull() for _ in range(buffers)]
        learner, times = own_copy(learner), {True: [], False: []}
        published = self._publish(learner)
        for block in range(2 * blocks + 2):
            full = block % 2 == 0
            jax.block_until_ready(learner)
            start = time.perf_counter()
            for step in range(iterations):
                if full:
                    learner, actor, _ = self._iterate(learner, actor, published, None, blocked=False)
                else:
                    learner, actor, batches = self._ablated(learner, actor, published, batches, step)
                published = self._publish(learner)
            jax.block_until_ready((learner, actor, published))
            if block >= 2:  # the first pair warms up
                times[full].append((time.perf_counter() - start) / iterations)
        return ExposedLatency(float(np.median(times[True])), float(np.median(times[False])), blocks, iterations)

    def _iterate(
        self, learner: PyTree, actor: PyTree, published: PyTree, metrics: PyTree, *, blocked: bool
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Run one iteration; stage by stage with spans where ``blocked``."""
        span = self._blocked_span if blocked else _unmeasured
        plane, key = self.plane, self.plane.iteration_key(self.iteration)
        with span("rollout") as done:
            actor, rollout = done(self._rollout(actor, published, key))
        with span("ingestion") as done:
            done(plane.push(rollout, context=()))
        self.iteration += 1
        if self._on_policy:
            if not plane.ready():
                return learner, actor, metrics
            batches = plane.epochs()
            while (sample := _next_batch(batches, span)) is not None:
                learner, metrics = self._update(learner, sample, span)
        elif plane.ready():
            for _ in range(plane.algorithm.updates_per_rollout):  # type: ignore[union-attr]
                with span("delivery") as done:
                    sample = done(plane.pull())
                learner, metrics = self._update(learner, sample, span)
        return learner, actor, metrics

    def _update(self, learner: PyTree, sample: Sample, span: Callable[[str], Any]) -> tuple[PyTree, PyTree]:
        with span("update") as done:
            learner, metrics, *priorities = done(_explained(self._train_step, learner, sample))
            if priorities:
                self.plane.update_priorities(sample.info, priorities[0])
        self.updates += 1
        return learner, metrics

    def _ablated(
        self, learner: PyTree, actor: PyTree, published: PyTree, batches: list[Sample] | None, step: int
    ) -> tuple[PyTree, PyTree, Any]:
        """Run one iteration without the experience path."""
        actor, rollout = self._rollout(actor, published, self.plane.iteration_key(self.iteration))
        self.iteration += 1
        if batches is None:  # on-policy: the batches of one iteration, made once
            self.plane.push(rollout)
            batches = list(self.plane.epochs()) if self.plane.ready() else None
        count = len(batches or ()) if self._on_policy else self.plane.algorithm.updates_per_rollout  # type: ignore[union-attr]
        for update in range(count):
            learner, *_ = self._train_step(learner, batches[(step * count + update) % len(batches)])  # type: ignore[index,arg-type]
        return learner, actor, batches

    @contextmanager
    def _blocked_span(self, name: str) -> Any:
        start = time.perf_counter()
        yield jax.block_until_ready
        self._stage_s[name] += time.perf_counter() - start

    def _enter_spans(self, iteration_s: float, *, blocked: bool) -> None:
        """Enter one iteration's times; those before the first updates, and those that compile them, are left out."""
        stages, self._stage_s = self._stage_s, defaultdict(float)
        self._updating += self.updates > 0
        if self._updating <= _WARM_UP:
            return
        if not blocked:
            self.plane.spans.iteration.append(iteration_s)
        elif len(stages) == len(STAGES):
            for name, seconds in stages.items():
                self.plane.spans.stage(name, seconds)

    @staticmethod
    def _call_back(every: Mapping[int, Callable[[LoopState], object]] | None, state: LoopState) -> None:
        for period, callback in (every or {}).items():
            if state.iteration % period == 0:
                callback(state)


def wrap(
    train_step: Callable[..., tuple],
    *,
    rollout: Callable[..., tuple],
    policy: Callable[[PyTree], PyTree],
    plane: ExperiencePlane,
    publish_every: int = 1,
) -> Loop:
    """Return the training loop of a step the user already has.

    Args:
        train_step: ``(learner, sample) -> learner, metrics[, priorities]``, pure; the loop jits it and donates the learner.
        rollout: ``(actor, policy, key) -> actor, rollout``, jitted or not; called as it is.
        policy: ``learner -> parameters`` the actor acts with; it is given a published copy, never donated buffers.
        plane: an ``ExperiencePlane``; built at the first push.
        publish_every: iterations between two publications.
    """
    if publish_every < 1:
        refuse(ConfigError, "publish_every is out of range.", got=publish_every, want="an integer >= 1")
    return Loop(train_step, rollout, policy, plane, publish_every)


def own_copy(learner: PyTree) -> PyTree:
    """Return a copy of ``learner`` in which no two leaves share a buffer: one that may be donated.

    A target network that *is* the online one would otherwise be donated twice ("Attempt to donate the same buffer twice").
    """
    return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(jax.tree.map(jnp.asarray, learner))


def _next_batch(batches: Iterator[Sample], span: Callable[[str], Any]) -> Sample | None:
    with span("delivery") as done:
        return done(next(batches, None))


def _explained(train_step: Callable[..., tuple], learner: PyTree, sample: Sample) -> tuple:
    try:
        result = train_step(learner, sample)
    except ValueError as error:
        if "donate the same buffer twice" not in str(error):
            raise
        message = explain(
            "The learner holds one buffer twice; an update donates it and cannot do so twice.",
            got=_aliases(learner),
            want="a buffer of its own for every leaf",
            fix="jax.tree.map(jnp.copy, ...)",
        )
        raise ConfigError(message) from error
    if type(result) is not tuple or len(result) not in (2, 3):  # a NamedTuple is one value
        refuse(
            ConduitError,
            "train_step returned something else.",
            got=type(result).__name__,
            want="(learner, metrics) or (learner, metrics, priorities)",
        )
    return result


def _aliases(learner: PyTree) -> str:
    """Return the paths of leaves that share a buffer."""
    seen: dict[int, str] = {}
    pairs = []
    for path, leaf in jax.tree.leaves_with_path(learner):
        name = jax.tree_util.keystr(path)
        if isinstance(leaf, jax.Array) and id(leaf) in seen:
            pairs.append(f"{seen[id(leaf)]} and {name}")
        seen.setdefault(id(leaf), name)
    return "; ".join(pairs) or "two of its leaves"


@contextmanager
def _unmeasured(name: str) -> Any:
    yield lambda value: value


@contextmanager
def _interruptible() -> Any:
    """Turn the first Ctrl-C into a flag that is looked at between iterations; a second one interrupts at once."""
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
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


__all__ = ["Loop", "LoopState", "own_copy", "wrap"]
