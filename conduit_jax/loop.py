"""``wrap``: a training loop around a plane. The user brings ``train_step`` and ``rollout``; nothing else changes."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.conductor import Conductor
from conduit_jax.config import DEFAULT_TABLE, OffPolicy, OnPolicy
from conduit_jax.errors import check_integer
from conduit_jax.interrupts import interruptible
from conduit_jax.plane import ExperiencePlane
from conduit_jax.resumption import Checkpoints, Running
from conduit_jax.schedule.fused import Acting
from conduit_jax.schedule.fused_run import Counts
from conduit_jax.schedule.metrics import ExposedLatency
from conduit_jax.schedule.semantics import updates_together
from conduit_jax.schedule.stopwatch import Stopwatch
from conduit_jax.steps import Updates, copy_arrays, own_copy
from conduit_jax.types import Sample

PyTree = Any
Function = Callable[..., Any]

_RUN_AHEAD = 2  # iterations the host may be ahead of the device
_BLOCKED_EVERY = 32  # one in so many runs stage by stage, to learn what each costs alone, and looks for faults
_BLOCKED_AT_FIRST, _FIRST = 8, 128  # more often among the first iterations: a short run has figures too


class LoopState(NamedTuple):
    """The present ``learner``, ``actor``, last ``metrics`` and ``iteration`` (from 1).

    Given to ``every`` callbacks and kept as ``loop.state``. The next update donates ``learner``: a callback that keeps
    it keeps a copy (``jax.tree.map(jnp.copy, state.learner)``).
    """

    learner: PyTree
    actor: PyTree
    metrics: PyTree
    iteration: int


class Published(NamedTuple):
    """Copies made of the learner for others to read: the actor's ``policy`` and the hooks' ``context``."""

    policy: PyTree
    context: PyTree


class Loop:
    """See ``wrap``. ``state`` is what stands after the last whole iteration, also when a later one raised."""

    def __init__(
        self, train_step: Function, rollout: Function, publish: Function, plane: ExperiencePlane, publish_every: int
    ):
        self.plane, self.publish_every = plane, publish_every
        self.iteration, self.updates, self.trained_iterations, self.resumed_at = 0, 0, 0, 0
        self.interrupted, self.state = False, LoopState(None, None, None, 0)
        self._rollout = rollout
        self._publish = jax.jit(lambda learner: jax.tree.map(jnp.copy, publish(learner)))
        self._train = Updates(train_step, on_policy=isinstance(plane.algorithm, OnPolicy))
        self._watch = Stopwatch(plane.spans, plane.recorder)
        acting = Acting(rollout, self._train.one, self._publish, publish_every, plane.loop_key)
        self._conductor = Conductor(plane, acting)

    def run(
        self,
        learner: PyTree,
        actor: PyTree,
        iterations: int,
        every: Mapping[int, Callable[[LoopState], object]] | None = None,
        *,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        resume: bool = False,
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Run ``iterations`` iterations and return ``(learner, actor, metrics)``.

        An iteration is one rollout, its ingestion and ``updates_per_rollout`` updates (none until the replay has
        ``min_size`` items, no more than a limiter or draws that remove allow). ``every={n: callback}`` calls back each n
        iterations with a ``LoopState``. The caller's learner stays usable: the loop trains a copy. Ctrl-C ends after the
        present iteration (``interrupted``). If anything raises, ``state`` still holds the last whole iteration's learner.
        A fused schedule runs many iterations at a time between callbacks and checkpoints; Ctrl-C ends after them, and one
        that fails at run time loses its learner.

        Learner, actor and plane are saved to ``checkpoint_dir`` each ``checkpoint_every`` iterations, at the end and after
        Ctrl-C. With ``resume`` the run goes on where the last one was saved, if one was, up to iteration ``iterations``.
        """
        check_integer("iterations", iterations, 0)
        earlier = self.iteration  # a loop that ran so long in slices is likely to run as long again
        for period in every or {}:
            check_integer("every: a period", period, 1)
        learner, metrics, self.interrupted = own_copy(learner), None, False
        self.plane.consumed_by(learner)
        published, self.plane.policy_version = self._publish(learner), self.updates
        checkpoints = Checkpoints(self, checkpoint_dir, checkpoint_every, resume=resume)
        learner, actor, metrics, published = checkpoints.resumed(Running(learner, actor, metrics, published))
        self._conductor.begin(learner, actor, published)
        if self.plane.mixed is not None:
            self.plane.mixed.warn_unready(DEFAULT_TABLE, lambda name: self.plane.ready(table=name))
        end, behind = iterations if resume else self.iteration + iterations, deque()
        stops = (*(every or {}), *([checkpoint_every] if checkpoint_dir is not None and checkpoint_every else []))
        with interruptible() as stop:
            while self.iteration < end:
                present = (learner, actor, metrics, published)
                count = self._conductor.fusable(self.iteration, end, stops) if metrics is not None else 0
                blocked = not count and self._is_blocked()
                if blocked:  # or the rollout's span would hold what is left of the last iteration's updates
                    jax.block_until_ready((learner, published))
                updates = self.updates
                self._watch.begin(blocked=blocked)
                (learner, actor, metrics, published), fence = self._advance(present, count)
                behind.append(fence)
                while len(behind) > (0 if count else _RUN_AHEAD):  # one program of many iterations is waited for itself
                    self._watch.wait(behind.popleft())
                times = self._watch.end(updating=self.updates > updates, iterations=count or 1)
                self.trained_iterations += count or 1
                self.state = LoopState(learner, actor, metrics, self.iteration)
                if blocked or count:
                    self.plane.check()
                self._conductor.note(
                    self.iteration, count or 1, times, blocked=blocked, left=earlier + end - self.iteration
                )
                _call_back(every, self.state)
                checkpoints.after_iteration(Running(learner, actor, metrics, published))
                if stop.is_set():
                    self.interrupted = True
                    break
            checkpoints.save(Running(learner, actor, metrics, published))
        return learner, actor, metrics

    def _is_blocked(self) -> bool:
        every = _BLOCKED_AT_FIRST if self.iteration < _FIRST else _BLOCKED_EVERY
        return self._conductor.runs_blocked(self.iteration % every == every - 1)

    def _advance(self, present: tuple, count: int) -> tuple[tuple, Any]:
        """Run one iteration, or ``count`` fused ones; return what stands after it and a fence."""
        learner, actor, metrics, published = present
        if count:
            at = Counts(self.iteration, self.updates, self.plane.policy_version)
            learner, progress, at = self._conductor.run_fused(count, present, at)
            self.iteration, self.updates, self.plane.policy_version = at
            return (learner, progress.actor, progress.metrics, progress.published), progress.metrics
        learner, actor, metrics, fence = self._iterate((learner, actor, metrics), published)
        if self.iteration % self.publish_every == 0:
            published, self.plane.policy_version = self._publish(learner), self.updates
        return (learner, actor, metrics, published), fence

    def measure(
        self, learner: PyTree, actor: PyTree, *, iterations: int = 50, blocks: int = 8, buffers: int = 8
    ) -> ExposedLatency:
        """Measure exposed latency by ablation on copies of ``learner`` and of the actor's arrays.

        Blocks of the full loop alternate with blocks in which ingestion is left out and ``buffers`` batches made
        beforehand are rotated through; seconds an iteration, medians over blocks. The plane's replay goes on filling,
        and an actor that is a host object goes on acting: read ``stats()`` before. Ctrl-C ends it early, and so does a
        fused schedule's finding too few items that may be drawn: ``NotReadyError`` where no block was whole by then.
        """
        if self.plane.ready() and self._conductor.may_measure:
            return self._conductor.measure((own_copy(learner), copy_arrays(actor)), self, iterations, blocks)
        self._watch.begin(blocked=False)
        # Batches that are used once, or drawn as a limiter allows, have to be made as they are used.
        once = not isinstance(self.plane.algorithm, OffPolicy) or self.plane.is_limited()
        batches = None if once else [self.plane.pull() for _ in range(buffers)]
        learner, actor = own_copy(learner), copy_arrays(actor)
        times: dict[bool, list[float]] = {True: [], False: []}
        published = self._publish(learner)
        with interruptible() as stop:
            for block in range(2 * blocks + 2):
                full = block % 2 == 0
                jax.block_until_ready(learner)
                start = time.perf_counter()
                for step in range(iterations):
                    if full:
                        learner, actor, _, _ = self._iterate((learner, actor, None), published)
                    else:
                        learner, actor, batches = self._ablated(learner, actor, published, batches, step)
                    published = self._publish(learner)
                jax.block_until_ready((learner, published))
                if block >= 2:  # the first pair warms up
                    times[full].append((time.perf_counter() - start) / iterations)
                if stop.is_set() and times[False]:
                    break
        return ExposedLatency(
            float(np.median(times[True])), float(np.median(times[False])), len(times[False]), iterations
        )

    def _iterate(self, state: tuple[PyTree, PyTree, PyTree], published: Published) -> tuple:
        """Run one iteration, its stages under the stopwatch; return learner, actor, metrics and a fence."""
        learner, actor, metrics = state
        span = self._watch.span
        plane, key = self.plane, self.plane.iteration_key(self.iteration)
        with span("rollout") as done:
            actor, rollout = done(self._rollout(actor, published.policy, key))
        with span("ingestion") as done:
            added = done(plane.push(rollout, context=published.context))
        self.iteration += 1
        for samples in self._batches(published.context):
            learner, metrics = self._update(learner, samples)
        return learner, actor, metrics, (added, metrics)

    @property
    def _together(self) -> int:
        """Batches an iteration updates with in one program: those of one delivery call."""
        running = self.plane.running()
        return 1 if running is None else updates_together(running.schedule, self.plane.algorithm)

    def _batches(self, context: PyTree) -> Iterator[list[Sample]]:
        """Yield this iteration's batches as they were drawn together, each list within a delivery span."""
        if not self.plane.ready():
            return
        algorithm, together = self.plane.algorithm, self._together
        if isinstance(algorithm, OnPolicy):
            batches = self.plane.epochs(context=context)
            deliver, left = lambda count: list(islice(batches, count)), algorithm.num_epochs * algorithm.num_minibatches
        else:
            deliver, left = partial(self.plane.pull_group, context=context), algorithm.updates_per_rollout
        while left:
            if not isinstance(algorithm, OnPolicy) and not self.plane.ready():
                return  # items are used so many times, or come and go: there may be fewer than u batches
            with self._watch.span("delivery") as done:
                samples = done(deliver(min(together, left)))
            left -= len(samples)
            yield samples

    def _update(self, learner: PyTree, samples: list[Sample]) -> tuple[PyTree, PyTree]:
        span = self._watch.span
        with span("update") as done:
            whole = len(samples) == self._together
            learner, metrics, priorities = done(self._train(learner, samples, together=whole))
        for sample, one in zip(samples, priorities, strict=False):  # none where the step gives none
            with span("delivery") as done:  # priorities are the path's, as the ablation has it
                done(self.plane.update_priorities(sample.info, one))
        self.updates += len(samples)
        return learner, metrics

    def _ablated(
        self, learner: PyTree, actor: PyTree, published: Published, batches: list[Sample] | None, step: int
    ) -> tuple[PyTree, PyTree, list[Sample] | None]:
        """Run one iteration without the experience path; on-policy, ``batches`` are one iteration's, made when missing."""
        actor, rollout = self._rollout(actor, published.policy, self.plane.iteration_key(self.iteration))
        self.iteration += 1
        algorithm = self.plane.algorithm
        units = algorithm.units_per_iteration if isinstance(algorithm, OnPolicy) else 1
        if batches is None:
            self.plane.push(rollout, context=published.context)
            batches = list(chain.from_iterable(self._batches(published.context))) or None
        count = len(batches or ()) if isinstance(algorithm, OnPolicy) else algorithm.updates_per_rollout
        due = step % units == units - 1
        ready, together = batches if due and batches else [], self._together
        for first in range(step * count, (step + 1) * count if ready else 0, together):
            samples = [ready[index % len(ready)] for index in range(first, min(first + together, (step + 1) * count))]
            learner, *_ = self._train(learner, samples, together=len(samples) == together)
        return learner, actor, batches


def wrap(
    train_step: Function,
    *,
    rollout: Function,
    policy: Callable[[PyTree], PyTree],
    plane: ExperiencePlane,
    context: Callable[[PyTree], PyTree] | None = None,
    publish_every: int = 1,
) -> Loop:
    """Return the training loop of a step the user already has.

    Args:
        train_step: ``(learner, sample) -> learner, metrics[, priorities]``, pure; the loop jits it and donates the learner.
        rollout: ``(actor, policy, key) -> actor, rollout``, jitted or not; called as it is.
        policy: ``learner -> parameters`` the actor acts with; it is given a published copy, never donated buffers.
        plane: an ``ExperiencePlane``; built at the first push.
        context: ``learner -> context`` for the hooks (parameters for bootstraps, coefficients), published like ``policy``.
        publish_every: iterations between two publications.
    """
    check_integer("publish_every", publish_every, 1)

    def publish(learner: PyTree) -> Published:
        return Published(policy(learner), () if context is None else context(learner))

    return Loop(train_step, rollout, publish, plane, publish_every)


def _call_back(every: Mapping[int, Callable[[LoopState], object]] | None, state: LoopState) -> None:
    for period, callback in (every or {}).items():
        if state.iteration % period == 0:
            callback(state)


__all__ = ["Loop", "LoopState", "copy_arrays", "own_copy", "wrap"]
