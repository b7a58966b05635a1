"""One run of an example from its first step to the evaluation of its final policy."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import conduit_jax as conduit
from conduit_jax.examples.worlds import MakeAlgorithm, MakePlane, RunSettings, make_world


class Progress(NamedTuple):
    """What an observer is shown while training goes on."""

    iteration: int
    iterations: int
    env_steps: int
    steps_per_s: float
    recent_return: float
    loss: float
    latency: Any
    draw_staleness: int


class Result(NamedTuple):
    """What a run came to; ``curve`` holds (environment steps, recent return) as training went on, and at its end."""

    evaluation_returns: np.ndarray
    learner: Any
    policy: Any
    stats: Any
    explanation: str
    env_steps: int
    updates: int
    train_s: float
    interrupted: bool
    exposed: Any
    curve: list[tuple[int, float]]
    resumed_steps: int = 0


class Keep(NamedTuple):
    """What a run leaves behind: checkpoints, from which one may ``resume``, and its figures in ``sinks`` (``conduit.CsvSink``)."""

    checkpoint_dir: Path | None = None
    checkpoint_every: int | None = None
    resume: bool = False
    sinks: tuple[Any, ...] = ()


NOTHING_KEPT = Keep()
Observe = Callable[[Progress], None]


def unobserved(progress: Progress) -> None:
    """Look away."""


def show_progress(progress: Progress) -> None:
    """Print all but the latency."""
    print(progress._replace(latency=None))


def show(result: Result) -> None:
    """Print what a run came to."""
    returns = result.evaluation_returns
    print(f"evaluation return {returns.mean():.1f} over {len(returns)} episodes")


def train(
    settings: RunSettings,
    make_algorithm: MakeAlgorithm,
    make_plane: MakePlane,
    observe: Observe = unobserved,
    report_every: int = 50,
    keep: Keep = NOTHING_KEPT,
) -> Result:
    """Train for ``settings.iterations`` iterations and evaluate the final policy, greedily, with a fresh key."""
    world_key, learner_key, evaluation_key = jax.random.split(jax.random.key(settings.seed), 3)
    world, algorithm = make_world(settings, make_algorithm, world_key)
    plane = make_plane(algorithm)
    loop = conduit.wrap(
        algorithm.train_step,
        rollout=world.rollout,
        policy=algorithm.policy,
        plane=plane,
        context=algorithm.context,
    )
    learner = jax.jit(algorithm.init)(learner_key)
    start, curve = time.perf_counter(), []
    record, unit = conduit.recording(plane, *keep.sinks), settings.lanes * settings.rollout_length

    def report(state: conduit.LoopState) -> None:
        steps, stats = state.iteration * unit, plane.stats()
        recent = world.recent_return(state.actor)
        if keep.sinks:
            seen = {"env_steps": steps, "recent_return": recent}
            record(state._replace(metrics=seen | (state.metrics or {})))
        staleness = max((table for entry in stats.tables.values() for table in entry.staleness), default=0)
        loss = float(state.metrics["loss"]) if state.metrics is not None else float("nan")
        rate = (steps - loop.resumed_at * unit) / (time.perf_counter() - start)
        curve.append((steps, recent))
        observe(Progress(state.iteration, settings.iterations, steps, rate, recent, loss, stats.latency, staleness))

    try:
        with conduit.interruptible() as stop:  # one Ctrl-C ends training, and what is known by then is still reported
            learner, actor, _ = loop.run(
                learner,
                world.actor,
                settings.iterations,
                every={report_every: report},
                checkpoint_dir=keep.checkpoint_dir,
                checkpoint_every=keep.checkpoint_every,
                resume=keep.resume,
            )
            jax.block_until_ready(learner)
            if loop.trained_iterations and loop.iteration % report_every:  # the last iteration is part of the curve
                report(loop.state)
            train_s, stats, explanation = time.perf_counter() - start, plane.stats(), plane.explain()
            policy = jax.tree.map(jnp.copy, algorithm.policy(learner))
            returns = world.evaluate(policy, evaluation_key)
            block = min(50, loop.trained_iterations // 10)  # iterations, so that a short run stays short
            measurable = plane.ready() and block and not stop.is_set()
            updates = loop.updates
            exposed = loop.measure(learner, actor, iterations=block) if measurable else None
            steps, resumed = loop.trained_iterations * unit, loop.resumed_at * unit
        plane.close()
    finally:
        world.close()
    interrupted = loop.interrupted
    return Result(
        returns, learner, policy, stats, explanation, steps, updates, train_s, interrupted, exposed, curve, resumed
    )
