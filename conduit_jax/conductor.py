"""Between a loop and its plane: which iterations run fused, when the schedule changes, and what measuring that takes."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from conduit_jax.config import BoundedLag
from conduit_jax.errors import ConduitError, ConfigError, HookError, NotReadyError, refuse
from conduit_jax.plane import ExperiencePlane
from conduit_jax.schedule import tuning
from conduit_jax.schedule.fused import Acting, Progress, check_traceable
from conduit_jax.schedule.fused_run import Counts, FusedRun, ablated, counters_of, why_not
from conduit_jax.schedule.history import Change
from conduit_jax.schedule.iteration import IterationPipeline
from conduit_jax.schedule.metrics import ExposedLatency
from conduit_jax.schedule.pipeline import ReplayPipeline
from conduit_jax.schedule.profile import contention_between, devices_of, measure_wake
from conduit_jax.schedule.semantics import Schedule

PyTree = Any


class Conductor:
    """One loop's. The loop asks before an iteration what to run, and tells afterwards what it took."""

    def __init__(self, plane: ExperiencePlane, acting: Acting):
        self._plane, self._acting = plane, acting
        self._tuner: tuning.Tuner | None = None
        self._run: FusedRun | None = None
        self._shapes: tuple[PyTree, PyTree] = (None, None)
        self._devices: set[Any] = set()

    @property
    def _pipeline(self) -> ReplayPipeline | IterationPipeline | None:
        return self._plane.running()

    @property
    def fused(self) -> bool:
        """Whether the present schedule is a fused one."""
        return self._pipeline is not None and self._pipeline.schedule.fused > 0

    @property
    def may_measure(self) -> bool:
        """Whether ``measure`` has anything to run: the schedule is fused, and there is no doubt about the next iteration."""
        if not self.fused:
            return False
        run = self._fused_run(self._pipeline)
        return run.most(run.units) > 0

    def runs_blocked(self, usual: bool) -> bool:
        """Return whether the next iteration is to be run stage by stage: as ``usual``, unless a profile wants it otherwise."""
        return usual if self._tuner is None else self._tuner.runs_blocked(usual)

    def begin(self, learner: PyTree, actor: PyTree, published: Any) -> None:
        """Take what a run starts from; ``HookError`` where a fused schedule was asked for and the rollout cannot be traced."""
        acting, policy = (jax.tree.map(_shape_of, tree) for tree in (actor, published[0]))
        self._shapes, self._devices = (acting, policy), devices_of(learner)
        wanted = [self._plane.history.wanted, *(change.schedule for change in self._plane.history.pinned)]
        if any(one == "fused" or (isinstance(one, Schedule) and one.fused) for one in wanted):
            check_traceable(self._acting.rollout, acting, policy, self._acting.key)
        if not self._plane.spans.wake_s:
            self._plane.spans.wake_s = measure_wake(
                min(devices_of(learner), key=lambda device: device.id, default=None)
            )

    def fusable(self, iteration: int, end: int, periods: tuple[int, ...]) -> int:
        """Return how many iterations to run as one program now, 0: run one as it is."""
        pipeline = self._pipeline
        if pipeline is None or not pipeline.schedule.fused:
            return 0
        run = self._fused_run(pipeline)
        if not run.ready():
            return 0
        bounds = [pipeline.schedule.fused, end - iteration, *(period - iteration % period for period in periods)]
        pinned = self._plane.history.until_next(iteration)
        return run.most(min(bounds if pinned is None else [*bounds, pinned]))

    def run_fused(self, count: int, present: tuple, at: Counts) -> tuple[PyTree, Progress, Counts]:
        """Run ``count`` iterations from ``present``: (learner, actor, metrics, published)."""
        learner, actor, metrics, published = present
        assert self._pipeline is not None
        self._plane.spans.fused = True
        return self._fused_run(self._pipeline).run(count, learner, actor, published, metrics, at)

    def note(
        self, iteration: int, count: int, times: tuple[float, dict[str, float]] | None, *, blocked: bool, left: int
    ) -> None:
        """Enter what ``count`` iterations took, with ``left`` to come, and change the schedule where it is time."""
        history = self._plane.history
        if (due := history.due(iteration)) is not None:
            self._plane.reschedule(due)
        if times is None or not history.automatic or self._pipeline is None:
            return
        if self._tuner is None:
            if left < tuning.WORTH:
                return
            self._tuner = self._new_tuner(self._pipeline)
        seconds, stages = times
        change = self._tuner.note(count, None if blocked else seconds, stages, left)
        history.decision = self._tuner.decision
        if change is not None and change.schedule != self._pipeline.schedule:
            self._plane.reschedule(Change(iteration, change.schedule, change.reason))

    def measure(self, state: tuple[PyTree, PyTree], loop: Any, iterations: int, blocks: int) -> ExposedLatency:
        """Return the exposed latency of the fused program: against one without the path, in alternating blocks.

        There are fewer blocks where items come to be too few; ``NotReadyError`` where not one was whole.
        """
        pipeline = self._pipeline
        assert pipeline is not None
        run = self._fused_run(pipeline)
        learner, actor = state
        published = self._acting.publish(learner)
        iterations = max(run.units, iterations // run.units * run.units)
        sample = self._one_sample(loop, actor, published)
        without = ablated(self._acting, run.updates, run.units)
        at = Counts(loop.iteration, loop.updates, self._plane.policy_version)
        metrics = jax.eval_shape(self._acting.train_step, learner, sample)[1]
        metrics = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), metrics)
        progress = Progress(actor, published, metrics, counters_of(at, 0))
        times: dict[bool, list[float]] = {True: [], False: []}
        for block in range(2 * blocks + 2):
            full = block % 2 == 0
            jax.block_until_ready(learner)
            start = time.perf_counter()
            if full:
                learner, progress, at, left = _run_sure(run, iterations, learner, progress, at)
                loop.iteration, loop.updates = at.iteration, at.updates
                if left:  # a block that is cut short is not counted, and none comes after it
                    break
            else:
                learner, progress = without(np.int32(iterations // run.units), learner, progress, sample)
            jax.block_until_ready((learner, progress))
            if block >= 2:  # the first pair compiles
                times[full].append((time.perf_counter() - start) / iterations)
        if not times[False]:
            refuse(
                NotReadyError,
                "Nothing could be measured: too little may be drawn behind what the rollouts bring.",
                got=f"{pipeline.sure_units()} units that may go in" if isinstance(pipeline, ReplayPipeline) else None,
                want=f"{2 * iterations}: one block to warm up and one that counts",
                fix="fewer iterations=, a larger table, or a schedule that is not fused",
            )
        return ExposedLatency(
            float(np.median(times[True])), float(np.median(times[False])), len(times[False]), iterations
        )

    def _one_sample(self, loop: Any, actor: PyTree, published: Any) -> Any:
        if isinstance(self._pipeline, ReplayPipeline):
            return self._plane.pull(context=published[1])
        for _ in range(self._fused_run(self._pipeline).units):
            actor, rollout = self._acting.rollout(actor, published[0], self._plane.iteration_key(loop.iteration))
            self._plane.push(rollout, context=published[1])
            loop.iteration += 1
        return next(iter(self._plane.epochs(context=published[1])))

    def _fused_run(self, pipeline: Any) -> FusedRun:
        if self._run is None or not self._run.serves(pipeline):
            if reason := why_not(pipeline):
                fix = "placement='device', a learner on that device, or schedule='auto'"
                refuse(ConfigError, "This plane cannot run fused.", got=reason, want="everything on one site", fix=fix)
            self._run = FusedRun(pipeline, self._plane.algorithm, self._acting)  # type: ignore[arg-type]
        return self._run

    def _new_tuner(self, pipeline: ReplayPipeline | IterationPipeline) -> tuning.Tuner:
        shared = contention_between(self._devices, set(pipeline.mesh.devices.flat))
        return tuning.Tuner(
            self._plane.algorithm,
            pipeline.schedule,
            fusable=self._fusable(pipeline),
            contention=shared,
            sync_s=self._plane.spans.wake_s,
            elsewhere=lambda: pipeline.waited_s if isinstance(pipeline, ReplayPipeline) else 0.0,
        )

    def _fusable(self, pipeline: ReplayPipeline | IterationPipeline) -> bool:
        """Whether fusing may be tried unasked: all is on one site, and the rollout is a jitted function of arrays."""
        if (
            isinstance(self._plane.algorithm, BoundedLag)
            or why_not(pipeline)
            or not hasattr(self._acting.rollout, "lower")
        ):
            return False
        try:
            check_traceable(self._acting.rollout, *self._shapes, self._acting.key)
        except (ConduitError, HookError):
            return False
        return True


def _run_sure(
    run: FusedRun, iterations: int, learner: PyTree, progress: Progress, at: Counts
) -> tuple[PyTree, Progress, Counts, int]:
    """Run ``iterations`` while there is no doubt that each finds enough to draw; return how many are left too."""
    left = iterations
    while left and (count := run.most(left)):
        learner, progress, at = run.run(count, learner, progress.actor, progress.published, progress.metrics, at)
        left -= count
    return learner, progress, at, left


def _shape_of(leaf: Any) -> Any:
    """Return the shape of an array, and anything else (a host actor) as it is."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf
