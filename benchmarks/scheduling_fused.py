"""What fusing is worth: loops that are JAX throughout, sequential and as one program of many iterations."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import conduit_jax as conduit
from benchmarks.scheduling_runs import BATCH, LANES, STORAGE_BYTES, placements


def small_loop(schedule: str, updates: int) -> conduit.Loop:
    """Return a loop of a small network."""

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


def fused_speedup(iterations: int) -> list[dict[str, Any]]:
    """Time the small loop, sequential and fused, with 1 and 8 updates an iteration."""
    rows = []
    for updates in (1, 8):
        row: dict[str, Any] = {"figure": "fused", "updates": updates}
        for schedule in ("sequential", "fused"):
            loop = small_loop(schedule, updates)
            learner, actor, _ = loop.run(jnp.ones((8, 1)), jnp.float32(0), iterations=128)
            best = np.inf
            for _ in range(3):
                start = time.perf_counter()
                learner, actor, _ = loop.run(learner, actor, iterations=iterations)
                jax.block_until_ready(learner)
                best = min(best, (time.perf_counter() - start) / iterations)
            row[f"{schedule}_us"] = best * 1e6
        row["speedup"] = row["sequential_us"] / row["fused_us"]
        rows.append(row)
    return rows


def fused_path_ms(width: int, iterations: int, blocks: int) -> float:
    """Return what the path of ``width`` numbers a transition adds to an iteration of one fused program, by ablation.

    Rollout makes a unit and update reads a batch; in one program nothing is dispatched between them, and nothing overlaps.
    """
    steps = BATCH // LANES

    def rollout(actor: jax.Array, policy: jax.Array, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        wide = jnp.full((steps, LANES, width), actor)
        flat = jnp.full((steps, LANES), policy)
        return actor + 1, {"observation": wide, "next_observation": wide + 1, "reward": flat, "discount": flat}

    def step(learner: jax.Array, sample: Any) -> tuple[jax.Array, jax.Array]:
        total = sum(leaf.sum() for leaf in jax.tree.leaves(sample.data))
        return learner + 1e-9 * total, total

    capacity = int(min(100_000, STORAGE_BYTES // (8 * width))) // BATCH * BATCH
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=BATCH),
        replay=conduit.ReplayConfig(capacity=capacity),
        placement=placements()["learner's device, device"](),
        schedule="fused",
    )
    plane.register_delivery(lambda data: {**data, "observation": data["observation"] * 0.5})
    loop = conduit.wrap(step, rollout=jax.jit(rollout), policy=lambda learner: learner, plane=plane)
    learner, actor, _ = loop.run(jnp.float32(0), jnp.float32(0), iterations=8)
    return loop.measure(learner, actor, iterations=iterations, blocks=blocks).exposed_s * 1e3
