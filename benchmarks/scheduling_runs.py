"""The loop that ``benchmarks.scheduling`` times: fixed rollout and update beside a real experience path of wide transitions.

*Busy elsewhere*: rollout and update wait without holding a core, as they do that run on an accelerator. *Busy here*: they
burn one core. Either way the path is the plane's own: ingestion into a replay and delivery out of it, on whatever
placement and schedule is asked for. Where nothing overlaps every stage is waited for, as a reactive system does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import conduit_jax as conduit
from conduit_jax.schedule.latency import Costs, fit
from conduit_jax.sharding.mesh import PARTITION_AXIS, single_device_mesh

STEPS, LANES, BATCH = 8, 32, 256  # half the paper's batch: its widest is then a second a configuration here
STORAGE_BYTES = 120e6
STALENESS = 15  # so that two calls of eight batches are allowed


class Stage(NamedTuple):
    """Rollout or update: it takes ``seconds``, elsewhere or here."""

    seconds: float
    here: bool = False

    def run(self) -> float:
        """Spend the time; return how long it really took."""
        start = time.perf_counter()
        if not self.here:
            time.sleep(self.seconds)
        while self.here and time.perf_counter() - start < self.seconds:
            _BURNT @ _BURNT  # releases the interpreter, keeps the core
        return time.perf_counter() - start


_BURNT = np.ones((96, 96), np.float32)


def placements() -> dict[str, Callable[[], conduit.Placement]]:
    """Return where the buffer may live: the learner's device or one of its own, device or pinned host memory."""
    devices = jax.devices()

    def on(name: str, device: Any, kind: str) -> conduit.Placement:
        return conduit.Placement(name, (conduit.Part((device,), kind, 1),), single_device_mesh(device), PARTITION_AXIS)

    return {
        f"{where}, {kind}": lambda where=where, device=device, kind=kind: on(f"{where}, {kind}", device, kind)
        for where, device in (("own device", devices[1]), ("learner's device", devices[0]))
        for kind in ("device", "pinned_host")
    }


class World:
    """A plane filled with transitions of ``width`` numbers, and units that an actor made beforehand."""

    def __init__(self, width: int, placement: conduit.Placement, *, unit_steps: int = STEPS, batch: int = BATCH):
        unit = unit_steps * LANES
        capacity = int(max(8 * unit, 2 * batch, min(100_000, STORAGE_BYTES // (8 * width))))
        self.plane = conduit.ExperiencePlane(
            algorithm=conduit.OffPolicy(batch_size=batch, max_staleness=STALENESS),
            replay=conduit.ReplayConfig(capacity=capacity // unit * unit),
            placement=placement,
            schedule="sequential",
        )
        self.plane.register_delivery(lambda data: {**data, "observation": data["observation"] * 0.5})
        home = placement.part.devices[0]
        self.units = [jax.device_put(_unit(width, unit_steps, number), home) for number in range(4)]
        self._turn = 0
        for _ in range(4):
            self.push()
        self.pipeline: Any = self.plane.running()
        self.wait()

    def push(self) -> None:
        """Push the next unit."""
        self._turn += 1
        self.plane.push(self.units[self._turn % len(self.units)])

    def wait(self) -> None:
        """Wait for everything the buffer was told to do."""
        jax.block_until_ready(self.pipeline.state.control)

    def schedule(self, overlap: bool, g: int) -> None:
        """Run a schedule from here on, with nothing of the last one under way."""
        self.pipeline.reschedule(conduit.Schedule())
        while self.pipeline.undelivered:
            self.plane.pull()
        self.pipeline.reschedule(
            conduit.Schedule(overlap_ingestion=overlap, overlap_delivery=overlap, g_ingestion=g, g_delivery=g)
        )
        self.wait()


def _unit(width: int, steps: int, seed: int) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(seed)
    wide = draws.random((2, steps, LANES, width), np.float32)
    flat = draws.random((steps, LANES), np.float32)
    return {"observation": wide[0], "next_observation": wide[1], "reward": flat, "discount": flat}


class Times(NamedTuple):
    """Seconds an iteration: all of it, what rollout and update took of it, and CPU seconds of the process."""

    iteration_s: float
    stages_s: float
    cpu_s: float

    @property
    def exposed_s(self) -> float:
        """What the path adds."""
        return self.iteration_s - self.stages_s


def iterate(world: World, rollout: Stage, update: Stage, iterations: int, *, overlap: bool) -> Times:
    """Time ``iterations`` of rollout, push, pull and update."""
    stages, start, cpu = 0.0, time.perf_counter(), time.process_time()
    for _ in range(iterations):
        stages += rollout.run()
        world.push()
        if not overlap:
            world.wait()
        jax.block_until_ready(world.plane.pull().data)
        stages += update.run()
    world.wait()
    total = time.perf_counter() - start
    return Times(total / iterations, stages / iterations, (time.process_time() - cpu) / iterations)


def path_costs(world: World, repeats: int = 5) -> tuple[Costs, float]:
    """Return the path's costs from waited calls at g of 1, 2 and 4, and the sequential path's seconds at g = 1.

    What overlapping costs (T_sync) is what the calls take to return; rollout and update are entered later.
    """
    ingestion, delivery, syncs = {}, {}, []
    for g in (1, 2, 4):
        world.schedule(False, g)
        into, out = [], []
        for turn in range(repeats + 1):
            start = time.perf_counter()
            for _ in range(g):
                world.push()
            returned = time.perf_counter()
            world.wait()
            waited = time.perf_counter()
            samples = [world.plane.pull().data for _ in range(g)]
            drawn = time.perf_counter()
            jax.block_until_ready(samples)
            end = time.perf_counter()
            if turn:  # the first compiles
                into.append(waited - start)
                out.append(end - waited)
                syncs.append(((returned - start) / g, (drawn - waited) / g, g))
        ingestion[g], delivery[g] = float(np.median(into)), float(np.median(out))
    sync = [float(np.median([one[side] for one in syncs if one[2] == 1])) for side in (0, 1)]
    costs = Costs(0.0, 0.0, fit(ingestion), fit(delivery), *sync)
    return costs, ingestion[1] + delivery[1]


def request_loop(width: int, iterations: int, rollout: Stage, update: Stage, *, serialised: bool) -> Times:
    """Time a request-driven replay in host memory: rows are gathered by the client when asked for, copied, then sent.

    ``serialised`` adds what a service in another process does (Reverb); without it the buffer is shared memory (GEAR).
    """
    rows = int(min(100_000, STORAGE_BYTES // (8 * width)))
    table = np.zeros((rows, 2 * width + 2), np.float32)
    unit = np.random.default_rng(0).random((STEPS * LANES, 2 * width + 2), np.float32)
    draws, head, stages, start, cpu = np.random.default_rng(1), 0, 0.0, time.perf_counter(), time.process_time()
    for _ in range(iterations):
        stages += rollout.run()
        written = np.frombuffer(unit.tobytes(), np.float32).reshape(unit.shape) if serialised else unit
        table[(head + np.arange(len(unit))) % rows] = written
        head = (head + len(unit)) % rows
        batch = table[draws.integers(0, rows, BATCH)]
        if serialised:
            batch = np.frombuffer(batch.tobytes(), np.float32).reshape(batch.shape)
        sent = jax.device_put(batch)
        jax.block_until_ready(sent)
        stages += update.run()
    total = time.perf_counter() - start
    return Times(total / iterations, stages / iterations, (time.process_time() - cpu) / iterations)


def cores() -> int:
    """Return the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fused_loop(schedule: str, updates: int) -> conduit.Loop:
    """Return a loop of a small network in JAX alone."""

    def rollout(actor: jax.Array, policy: jax.Array, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        x = jax.random.normal(key, (5, 20, 8)) + actor
        return jnp.tanh(x).mean(), {"x": x, "y": jnp.tanh(x @ policy)[..., 0]}

    def step(learner: jax.Array, sample: Any) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(sample.data["x"] @ w)[:, 0] - 0.5) ** 2))(
            learner
        )
        return learner - 0.01 * gradient, loss

    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=128, updates_per_rollout=updates),
        replay=conduit.ReplayConfig(capacity=20_000, min_size=100),
        schedule=schedule,
    )
    return conduit.wrap(step, rollout=jax.jit(rollout), policy=lambda learner: learner, plane=plane)
