"""The loop that ``benchmarks.scheduling`` times: fixed rollout and update beside a real experience path of wide transitions.

*Busy elsewhere*: rollout and update wait without holding a core, as they do that run on an accelerator. *Busy here*: they
do a fixed amount of work on one core. Either way the path is the plane's own: ingestion into a replay and delivery out of
it, on whatever placement and schedule is asked for. Where nothing overlaps every stage is waited for, as a reactive system
does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

import conduit_jax as conduit
from conduit_jax.schedule.latency import CallCost, Costs, fit
from conduit_jax.sharding.mesh import PARTITION_AXIS, single_device_mesh

LANES, BATCH = 32, 512  # a rollout unit is as large as a batch, as the paper's replay ratio of 1 has it
STORAGE_BYTES = 120e6
STALENESS = 15  # so that two calls of eight batches are allowed
PROBES, OVERLAPPED_PROBES = (1, 2, 4, 8), (1, 4)  # granularities the model is told; the rest follow from its fit


class Stage(NamedTuple):
    """Rollout or update: it waits for ``seconds`` elsewhere, or multiplies ``products`` times here."""

    seconds: float
    products: int = 0

    def run(self) -> None:
        """Spend the time."""
        if not self.products:
            time.sleep(self.seconds)
        for _ in range(self.products):
            _BURNT @ _BURNT  # releases the interpreter, keeps the core


_BURNT = np.ones((96, 96), np.float32)


def burning(seconds: float) -> Stage:
    """Return a stage of the work that takes about ``seconds`` on an idle core."""
    best = np.inf
    for _ in range(20):
        start = time.perf_counter()
        Stage(0.0, 20).run()
        best = min(best, (time.perf_counter() - start) / 20)
    return Stage(seconds, max(1, round(seconds / best)))


def capacity(seconds: float) -> float:
    """Return how many cores' work this machine does at present, as all of its cores burn for about ``seconds``; 1 is a core alone.

    Virtual cores may be threads of one real one, and other processes take their share. The products are large: small ones
    would take turns at the interpreter's lock.
    """

    def burn(products: int) -> None:
        for _ in range(products):
            _LARGE @ _LARGE

    def alone_s(products: int) -> float:
        start = time.perf_counter()
        burn(products)
        return time.perf_counter() - start

    products = max(1, round(seconds / min(alone_s(1) for _ in range(3))))
    alone = alone_s(products)
    with ThreadPoolExecutor(cores()) as pool:
        start = time.perf_counter()
        for done in [pool.submit(burn, products) for _ in range(cores())]:
            done.result()
        together = time.perf_counter() - start
    return float(np.clip(cores() * alone / together, 1.0, cores()))


_LARGE = np.ones((384, 384), np.float32)


def placements() -> dict[str, Callable[[], conduit.Placement]]:
    """Return where the buffer may live: the learner's device or one of its own, device or pinned host memory."""
    devices = jax.devices()

    def on(name: str, device: Any, kind: str) -> conduit.Placement:
        return conduit.Placement(name, (conduit.Part((device,), kind, 1),), single_device_mesh(device), PARTITION_AXIS)

    return {
        f"{where}, {kind}": lambda where=where, device=device, kind=kind: on(f"{where}, {kind}", device, kind)
        for where, device in (("learner's device", devices[0]), ("own device", devices[1]))
        for kind in ("device", "pinned_host")
    }


class World:
    """A plane filled with transitions of ``width`` numbers, and units that an actor made beforehand."""

    def __init__(self, width: int, placement: conduit.Placement, *, batch: int = BATCH):
        capacity = int(max(8 * batch, min(100_000, STORAGE_BYTES // (8 * width))))
        self.plane = conduit.ExperiencePlane(
            algorithm=conduit.OffPolicy(batch_size=batch, max_staleness=STALENESS),
            replay=conduit.ReplayConfig(capacity=capacity // batch * batch),
            placement=placement,
            schedule="sequential",
        )
        self.plane.register_delivery(lambda data: {**data, "observation": data["observation"] * 0.5})
        home = placement.part.devices[0]
        self.units = [jax.device_put(_unit(width, batch // LANES, number), home) for number in range(2)]
        self._turn = 0
        for _ in range(4):
            self.push()
        self.pipeline: Any = self.plane.running()
        self.overlap, self.g = False, 1
        self.wait()

    def push(self) -> None:
        """Push the next unit."""
        self._turn += 1
        self.plane.push(self.units[self._turn % len(self.units)])

    def wait(self) -> None:
        """Wait for everything the buffer was told to do."""
        jax.block_until_ready(self.pipeline.state.control)

    def schedule(self, overlap: bool, g: int) -> None:
        """Run a schedule from here on, in its steady state and with nothing of it or of the last one under way."""
        self.pipeline.reschedule(conduit.Schedule())
        while self.pipeline.undelivered:
            self.plane.pull()
        self.overlap, self.g = overlap, g
        self.pipeline.reschedule(schedule_of(overlap, g))
        for _ in range(g if overlap else 0):  # the first pull draws twice, which is no part of the iterations to come
            jax.block_until_ready(self.plane.pull().data)
            self.push()
        self.wait()


def schedule_of(overlap: bool, g: int) -> conduit.Schedule:
    """Return the schedule that treats both legs alike, as the paper's manual ones do."""
    return conduit.Schedule(overlap_ingestion=overlap, overlap_delivery=overlap, g_ingestion=g, g_delivery=g)


def _unit(width: int, steps: int, seed: int) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(seed)
    wide = draws.random((2, steps, LANES, width), np.float32)
    flat = draws.random((steps, LANES), np.float32)
    return {"observation": wide[0], "next_observation": wide[1], "reward": flat, "discount": flat}


class Times(NamedTuple):
    """Seconds an iteration: all of it, in ``push`` (and the wait for it), in ``pull``, waiting for the batch, and of CPU."""

    iteration_s: float
    push_s: float
    pull_s: float
    waited_s: float
    cpu_s: float


def iterate(world: World, rollout: Stage, update: Stage, iterations: int) -> Times:
    """Time ``iterations`` of pull, update, rollout and push: whole rounds of the schedule, all of whose work has ended."""
    spans = np.zeros(3)
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(iterations):
        pulling = time.perf_counter()
        data = world.plane.pull().data
        pulled = time.perf_counter()
        jax.block_until_ready(data)
        there = time.perf_counter()
        update.run()
        rollout.run()
        pushing = time.perf_counter()
        world.push()
        if not world.overlap:
            world.wait()
        spans += (time.perf_counter() - pushing, pulled - pulling, there - pulled)
    world.wait()
    total = time.perf_counter() - start
    return Times(total / iterations, *(spans / iterations), (time.process_time() - cpu) / iterations)


def ablate(rollout: Stage, update: Stage, iterations: int) -> float:
    """Return the seconds an iteration of rollout and update alone takes."""
    start = time.perf_counter()
    for _ in range(iterations):
        update.run()
        rollout.run()
    return (time.perf_counter() - start) / iterations


def rounds(path_s: float, block_s: float) -> int:
    """Return how many iterations of about twice the path fill ``block_s``: a multiple of every granularity."""
    return int(np.clip(block_s / (2 * path_s), 8, 64)) // 8 * 8


def stages_for(worlds: Iterable[World], ratio: float = 1.0) -> tuple[Stage, Stage, float]:
    """Return rollout and update, 0.4 and 0.6 of the sequential path times ``ratio``, and that path: the worlds' median.

    It is measured between stages of its own length, as iterations run it: after a wait all caches are cold.
    """
    path, rollout, update = 0.0, Stage(0.0), Stage(0.0)
    for _ in range(3):
        found = []
        for world in worlds:
            world.schedule(False, 1)
            iterate(world, Stage(0.0), Stage(0.0), 2)  # compiles
            times = [iterate(world, rollout, update, 4) for _ in range(3)]
            found.append(np.median([one.push_s + one.pull_s + one.waited_s for one in times]))
        path = float(np.median(found))
        rollout, update = Stage(0.4 * ratio * path), Stage(0.6 * ratio * path)
    return rollout, update, path


def profile(world: World, rollout: Stage, update: Stage, iterations: int, repeats: int) -> Costs:
    """Return what the model is told: calls of both legs at a few granularities, run as iterations run them.

    T(g) is taken from sequential iterations, T_sync from overlapped ones: what ``push`` and ``pull`` keep the host for; and so is
    what the stages take longer there than alone. All that any schedule runs is compiled afterwards.
    """
    runs: dict[tuple[bool, int], list[Times]] = {}
    for g in PROBES:
        world.schedule(False, g)
        iterate(world, Stage(0.0), Stage(0.0), g)  # compiles all that any schedule runs
    alone = []
    for _ in range(repeats):
        alone.append(ablate(rollout, update, iterations))
        for overlap, granularities in ((False, PROBES), (True, OVERLAPPED_PROBES)):
            for g in granularities:
                world.schedule(overlap, g)
                runs.setdefault((overlap, g), []).append(iterate(world, rollout, update, iterations))
    mid = {key: Times(*np.median(np.asarray(times), axis=0)) for key, times in runs.items()}
    return Costs(
        rollout.seconds,
        CallCost(0.0, update.seconds),
        fit({g: g * mid[False, g].push_s for g in PROBES}),
        fit({g: g * (mid[False, g].pull_s + mid[False, g].waited_s) for g in PROBES}),
        fit({g: g * mid[True, g].push_s for g in OVERLAPPED_PROBES}),
        fit({g: g * mid[True, g].pull_s for g in OVERLAPPED_PROBES}),
        one_queue=True,
        stretch=fit({g: g * longer_s(mid[True, g], float(np.median(alone))) for g in OVERLAPPED_PROBES}),
    )


def longer_s(times: Times, alone_s: float) -> float:
    """Return what rollout and update took longer than ``alone_s``, at least a microsecond: what is neither call nor waiting."""
    return max(times.iteration_s - times.push_s - times.pull_s - times.waited_s - alone_s, 1e-6)


def request_loop(width: int, batch: int, iterations: int, *, serialised: bool) -> float:
    """Return the seconds of the path of a request-driven replay in host memory, an iteration: its median.

    Rows are gathered by the client when asked for, copied, then sent. ``serialised`` adds what a service in another
    process does (Reverb); without it the buffer is shared memory (GEAR). Nothing of it overlaps anything.
    """
    rows = int(max(8 * batch, min(100_000, STORAGE_BYTES // (8 * width))))
    table = np.zeros((rows, 2 * width + 2), np.float32)
    unit = np.random.default_rng(0).random((batch, 2 * width + 2), np.float32)
    draws, head, times = np.random.default_rng(1), 0, []
    for _ in range(iterations + 2):
        start = time.perf_counter()
        written = np.frombuffer(unit.tobytes(), np.float32).reshape(unit.shape) if serialised else unit
        table[(head + np.arange(len(unit))) % rows] = written
        head = (head + len(unit)) % rows
        drawn = table[draws.integers(0, rows, batch)]
        if serialised:
            drawn = np.frombuffer(drawn.tobytes(), np.float32).reshape(drawn.shape)
        jax.block_until_ready(jax.device_put(drawn))
        times.append(time.perf_counter() - start)
    return float(np.median(times[2:]))


def cores() -> int:
    """Return the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
