"""Runs a plane's pipeline and a loop's functions as fused programs: what is handed over, and when it may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.config import OffPolicy, OnPolicy
from conduit_jax.schedule.fused import Acting, Progress, fuse_iterations, fuse_replay
from conduit_jax.schedule.iteration import IterationPipeline
from conduit_jax.schedule.pipeline import ReplayPipeline

PyTree = Any


class Counts(NamedTuple):
    """Where a loop stands: iterations (one a rollout), updates, and the version of the published policy."""

    iteration: int
    updates: int
    version: int


def why_not(pipeline: ReplayPipeline | IterationPipeline) -> str:
    """Return what keeps ``pipeline`` from ever running fused, or ``""``."""
    why = "the buffer is elsewhere than the learner, a hook runs on the host, or batches are of several tables"
    return "" if pipeline.one_site else why


class FusedRun:
    """The fused program of one loop and pipeline; compiled at its first ``run``."""

    def __init__(self, pipeline: ReplayPipeline | IterationPipeline, algorithm: OffPolicy | OnPolicy, acting: Acting):
        self._pipeline, self._publish_every, self._programs = pipeline, acting.publish_every, pipeline.programs
        if isinstance(pipeline, IterationPipeline):
            assert isinstance(algorithm, OnPolicy)
            self._program = fuse_iterations(pipeline, algorithm, acting)
            self.units = algorithm.units_per_iteration
            self.updates = algorithm.num_epochs * algorithm.num_minibatches
        else:
            assert isinstance(algorithm, OffPolicy)
            self._program = fuse_replay(pipeline, algorithm, acting)
            self.units, self.updates = 1, algorithm.updates_per_rollout

    def serves(self, pipeline: ReplayPipeline | IterationPipeline) -> bool:
        """Whether this is the program of ``pipeline`` as it is now: a buffer that moved has others."""
        return pipeline is self._pipeline and pipeline.programs == self._programs

    def ready(self) -> bool:
        """Whether the next iteration may be fused: it will train, and nothing of another schedule is under way."""
        pipeline = self._pipeline
        if isinstance(pipeline, IterationPipeline):
            return not pipeline.pushed_in_iteration
        return pipeline.ready() and not pipeline.undelivered and not pipeline.waiting_units

    def most(self, wanted: int) -> int:
        """Return how many of ``wanted`` iterations may run as one program: none of them finds too little to draw from."""
        sure = self._pipeline.sure_units() if isinstance(self._pipeline, ReplayPipeline) else None
        return (wanted if sure is None else min(wanted, sure)) // self.units * self.units

    def run(
        self, count: int, learner: PyTree, actor: PyTree, published: Any, metrics: PyTree, at: Counts
    ) -> tuple[PyTree, Progress, Counts]:
        """Run ``count`` iterations (a multiple of ``units``) and return learner, progress and where the loop stands.

        Donates ``learner`` and the pipeline's arrays; a program that fails at run time has lost both.
        """
        groups, pipeline = count // self.units, self._pipeline
        replayed = isinstance(pipeline, ReplayPipeline)
        number = pipeline.ledger.drawn_batches if replayed else pipeline.iteration
        progress = Progress(actor, published, metrics, counters_of(at, number))
        learner, store, progress = self._program(groups, learner, pipeline.store, progress)
        if isinstance(pipeline, ReplayPipeline):
            pipeline.resume(store, groups, groups * self.updates, prioritized=pipeline.programs.keeps_priorities)
        else:
            pipeline.resume(store, groups)
        return learner, progress, self._after(count, at)

    def _after(self, count: int, at: Counts) -> Counts:
        """Return where the loop stands ``count`` iterations on: published versions are numbers of updates."""
        iteration = at.iteration + count
        last = iteration // self._publish_every * self._publish_every
        published = at.updates + (last - at.iteration) // self.units * self.updates
        version = published if last > at.iteration else at.version
        return Counts(iteration, at.updates + count // self.units * self.updates, version)


def counters_of(at: Counts, number: int) -> Any:
    """Return the device's counters for where a loop stands and the number of the next draw or iteration."""
    return tuple(np.uint32(value & 0xFFFFFFFF) for value in (at.iteration, at.updates, number, at.version))


def ablated(acting: Acting, updates: int, units: int) -> Callable[..., tuple]:
    """Return ``(count, learner, progress, sample) -> (learner, progress)``: the fused loop without the experience path."""

    def iterate(index: jax.Array, state: tuple) -> tuple:
        learner, progress, sample = state
        for _ in range(units):
            key = jax.random.fold_in(acting.key, progress.counters[0])
            actor, rollout = jax.lax.optimization_barrier(acting.rollout(progress.actor, progress.published[0], key))
            # the rollout is kept alive: nothing else would ask for it
            sample = jax.lax.optimization_barrier((sample, rollout))[0]
            iteration, *others = progress.counters
            progress = progress._replace(actor=actor, counters=(iteration + jnp.uint32(1), *others))

        def learn(_: jax.Array, inner: tuple) -> tuple:
            learner, _metrics = inner
            return acting.train_step(learner, jax.lax.optimization_barrier((sample, index))[0])[:2]

        learner, metrics = jax.lax.fori_loop(0, updates, learn, (learner, progress.metrics))
        return learner, progress._replace(published=acting.publish(learner), metrics=metrics), sample

    def run(count: jax.Array, learner: PyTree, progress: Progress, sample: Any) -> tuple:
        return jax.lax.fori_loop(0, count, iterate, (learner, progress, sample))[:2]

    return jax.jit(run, donate_argnums=1)
