"""What each decision of the plane takes off an iteration: sequential g = 1, + placement, + granularity, + overlap, fused.

Every configuration is the same loop on the same executor, timed in turn with two loops without an experience path (one Python
loop, one program): exposed latency is what a configuration takes beyond the one of its kind. A rung is the best configuration
that its decisions allow, chosen by odd repeats and reported by even ones.

Rollout, update and experience work share this machine's cores, so overlap hides no more than work conservation allows: an
iteration takes at least ``bound = max(without the path, CPU seconds of the sequential loop / cores)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import numpy as np

import conduit_jax as conduit
from benchmarks.end_to_end_races import WARM, OurLoop
from benchmarks.harness import Timing, calibrate, interleave
from benchmarks.scheduling_runs import cores
from conduit_jax.examples import dqn, ppo, sac
from conduit_jax.examples.worlds import make_pure_world
from conduit_jax.schedule.fused import Acting, Progress
from conduit_jax.schedule.fused_run import Counts, ablated, counters_of
from conduit_jax.sharding.mesh import PARTITION_AXIS, single_device_mesh

FIGURES = ("exposed_reduction", "iteration_reduction", "exposed_of_possible", "bound_ms", "decomposition")
RUNGS = ("sequential", "+ placement", "+ granularity", "+ overlap", "fused")
WITHOUT, WITHOUT_FUSED = "without the path", "without the path, fused"
FUSED = conduit.Schedule(fused=64)


class Configuration(NamedTuple):
    """A placement and a schedule, the first rung that allows it, and the case that is the same loop without the path.

    A loop without the path dispatches its updates as the configuration does: as many in a program.
    """

    name: str
    rung: str
    placement: Any
    schedule: conduit.Schedule
    without: str = WITHOUT


@dataclass
class Ladder:
    """One algorithm on one world; ``host``: the rollout is made by the host, and numpy arrays come in."""

    name: str
    example: Any
    make: Callable
    settings: Any
    host: bool = False

    def __post_init__(self) -> None:
        self.world, self.algorithm = make_pure_world(self.settings, lambda spec: self.make(spec, self.settings))
        self._rollout, self._init = jax.jit(self.world.rollout), jax.jit(self.world.init)

    def plane(self, configuration: Configuration) -> conduit.ExperiencePlane:
        """Return the example's plane on that placement and schedule."""
        settings = replace(self.settings, placement=configuration.placement, schedule=configuration.schedule)
        if self.example is ppo:
            return ppo.make_plane(settings, self.algorithm.value)
        return self.example.make_plane(settings)

    def loop(self, configuration: Configuration) -> OurLoop:
        """Return a loop that trains from the same start as every other."""
        actor_key, learner_key = jax.random.split(jax.random.key(self.settings.seed))
        learner, actor = jax.jit(self.algorithm.init)(learner_key), self._init(actor_key)
        rollout = self._on_host if self.host else self._rollout
        return OurLoop(self.algorithm, rollout, self.plane(configuration), learner, actor)

    def _on_host(self, actor: Any, policy: Any, key: jax.Array) -> tuple[Any, conduit.Rollout]:
        actor, rollout = self._rollout(actor, policy, key)
        return actor, jax.tree.map(np.asarray, rollout)


def configurations(ladder: Ladder) -> list[Configuration]:
    """Return what is timed: the buffer in pinned host memory, with the learner, or on a device of its own; then schedules."""
    own = jax.devices()[-1]
    apart = conduit.Placement(
        "own device", (conduit.Part((own,), "device", 1),), single_device_mesh(own), PARTITION_AXIS
    )
    sequential = conduit.Schedule()
    found = [
        Configuration("pinned_host, g=1", "sequential", "pinned_host", sequential),
        Configuration("device, g=1", "+ placement", "device", sequential),
    ]
    if ladder.example is ppo:
        parts = Fraction(1, ladder.settings.minibatches)
        found.append(
            Configuration(
                "device, overlap",
                "+ overlap",
                "device",
                conduit.Schedule(overlap_delivery=True, g_delivery=parts),
                f"{WITHOUT}, one update a program",
            )
        )
    else:
        overlap = {"overlap_ingestion": True, "overlap_delivery": True}
        found += [
            Configuration("device, g=4", "+ granularity", "device", conduit.Schedule(g_delivery=4)),
            Configuration("device, overlap g=2", "+ overlap", "device", conduit.Schedule(**overlap, g_delivery=2)),
            Configuration("own device, overlap g=2", "+ overlap", apart, conduit.Schedule(**overlap, g_delivery=2)),
        ]
        found = [one._replace(without=_grouped(int(one.schedule.g_delivery))) for one in found]
    fused = Configuration("device, fused", "fused", "device", FUSED, WITHOUT_FUSED)
    return found if ladder.host else [*found, fused]


def _grouped(updates: int) -> str:
    return WITHOUT if updates == 1 else f"{WITHOUT}, {updates} updates a program"


def without_the_path(loop: OurLoop) -> Callable[[int], None]:
    """Return a case: the same rollouts and updates on batches made beforehand, dispatched by the same loop."""
    inner, plane = loop.loop, loop.loop.plane
    off_policy = isinstance(plane.algorithm, conduit.OffPolicy)
    kept: list[Any] = [loop.learner, loop.actor, [plane.pull() for _ in range(8)] if off_policy else None]

    def run(calls: int) -> None:
        learner, actor, batches = kept
        published = inner._publish(learner)
        for step in range(calls):
            learner, actor, batches = inner._ablated(learner, actor, published, batches, step)
            published = inner._publish(learner)
        jax.block_until_ready((learner, published))
        kept[:] = learner, actor, batches

    return run


def without_the_path_fused(loop: OurLoop, batch: Any) -> Callable[[int], None]:
    """Return the case of the fused program that has no experience path in it."""
    inner = loop.loop
    acting: Acting = inner._conductor._acting
    algorithm = inner.plane.algorithm
    updates = (
        algorithm.updates_per_rollout
        if isinstance(algorithm, conduit.OffPolicy)
        else algorithm.num_epochs * algorithm.num_minibatches
    )
    program, published = ablated(acting, updates, 1), inner._publish(loop.learner)
    shapes = jax.eval_shape(acting.train_step, loop.learner, batch)[1]
    metrics = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    kept: list[Any] = [loop.learner, Progress(loop.actor, published, metrics, counters_of(Counts(0, 0, 0), 0))]

    def run(calls: int) -> None:
        kept[:] = program(np.int32(calls), *kept, batch)
        jax.block_until_ready(kept[0])

    return run


def a_batch(loop: OurLoop) -> Any:
    """Return one batch of the loop's plane."""
    plane, inner = loop.loop.plane, loop.loop
    if isinstance(plane.algorithm, conduit.OffPolicy):
        return plane.pull()
    published = inner._publish(loop.learner)
    loop.actor, rollout = inner._rollout(loop.actor, published.policy, plane.iteration_key(inner.iteration))
    plane.push(rollout, context=published.context)
    return next(iter(plane.epochs(context=published.context)))


def climb(ladder: Ladder, *, repeats: int, block_s: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Time every configuration in turn; return their rows and the figures."""
    found = configurations(ladder)
    loops = {one.name: ladder.loop(one) for one in found}
    cases: dict[str, Callable[[int], Any]] = {name: loop.run for name, loop in loops.items()}
    spares = {one.without: ladder.loop(one) for one in found if one.placement == "device" and not one.schedule.fused}
    for loop in (*loops.values(), *spares.values()):
        loop.run(8 if ladder.host else WARM)
    batch = None if ladder.host else a_batch(ladder.loop(found[1]) if ladder.example is ppo else spares[WITHOUT])
    cases |= {name: without_the_path(spare) for name, spare in spares.items()}
    if not ladder.host:
        fresh = ladder.loop(found[1])
        cases[WITHOUT_FUSED] = without_the_path_fused(fresh, batch)
    calls = {name: calibrate(case, block_s)[0] for name, case in cases.items()}
    times = interleave(cases, calls=calls, repeats=repeats)
    rows = [
        {
            "ladder": ladder.name,
            "configuration": name,
            "rung": next((one.rung for one in found if one.name == name), None),
            "iteration_s": time.repeats,
            "cpu_s": time.cpu,
        }
        for name, time in times.items()
    ]
    return rows, figures(ladder.name, found, times)


def figures(name: str, found: list[Configuration], times: dict[str, Timing]) -> dict[str, Any]:
    """Return reductions of exposed latency and of the iteration, and the share of what is possible, with 95 % intervals."""
    repeats = {case: np.asarray(time.repeats) for case, time in times.items()}
    odd, even = slice(1, None, 2), slice(0, None, 2)
    chosen = _rungs(found, {case: values[odd] for case, values in repeats.items()})
    base, best = chosen["sequential"], list(chosen.values())[-1]
    without = {one.name: one.without for one in found}
    busy = times[base].cpu / cores()
    count = len(repeats[base][even])
    drawn = np.random.default_rng(0).integers(0, count, (1000, count))

    def median(case: str, index: Any = slice(None)) -> Any:
        return np.median(repeats[case][even][index], axis=-1)

    def exposed(case: str, index: Any = slice(None)) -> Any:
        return median(case, index) - median(without[case], index)

    def reductions(index: Any) -> tuple[Any, Any, Any]:
        before, after = exposed(base, index), np.maximum(0, exposed(best, index))
        possible = before - np.maximum(0, busy - median(WITHOUT, index))
        return 1 - after / before, 1 - median(best, index) / median(base, index), (before - after) / possible

    middle, spread = reductions(slice(None)), [np.percentile(one, [2.5, 97.5]) for one in reductions(drawn)]
    summary: dict[str, Any] = {}
    for figure, value, (low, high) in zip(FIGURES[:3], middle, spread, strict=True):
        summary |= {f"{figure}_{name}": float(value), f"{figure}_{name}_low": float(low)}
        summary[f"{figure}_{name}_high"] = float(high)
    bound = max(float(median(WITHOUT)), busy)
    summary[f"bound_ms_{name}"] = bound * 1e3
    if median(base) - bound < 0.05 * median(base):
        undefined = f"less than 5 % of an iteration ({median(base) * 1e3:.3f} ms) is possible"
        summary |= {f"exposed_of_possible_{name}{end}": None for end in ("", "_low", "_high")}
        summary[f"exposed_of_possible_{name}_why"] = undefined
    summary[f"decomposition_{name}"] = {
        rung: {
            "configuration": case,
            "iteration_ms": float(median(case)) * 1e3,
            "exposed_ms": float(exposed(case)) * 1e3,
        }
        for rung, case in chosen.items()
    }
    return summary


def _rungs(found: list[Configuration], times: dict[str, np.ndarray]) -> dict[str, str]:
    """Return the fastest configuration that each rung allows, rungs that allow nothing new left out."""
    chosen = {}
    for height, rung in enumerate(RUNGS):
        if not any(one.rung == rung for one in found):
            continue
        allowed = [one.name for one in found if RUNGS.index(one.rung) <= height]
        chosen[rung] = found[0].name if not height else min(allowed, key=lambda case: float(np.median(times[case])))
    return chosen


def ladders() -> dict[str, Callable[[], Ladder]]:
    """Return the cases: every algorithm in JAX alone, and PPO on pixels that come from the host."""
    pixels = dict(lanes=8, rollout_length=16, minibatches=4, epochs=2)
    return {
        "dqn": lambda: Ladder("dqn", dqn, dqn.make_dqn, dqn.settings_for("mountain_car")),
        "sac": lambda: Ladder("sac", sac, sac.make_sac, sac.settings_for("pendulum")),
        "ppo": lambda: Ladder("ppo", ppo, ppo.make_ppo, ppo.settings_for("cartpole")),
        "ppo_pixels": lambda: Ladder(
            "ppo_pixels", ppo, ppo.make_ppo, ppo.settings_for("reach_128", **pixels), host=True
        ),
    }


__all__ = ["Ladder", "climb", "ladders"]
