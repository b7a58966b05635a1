"""Laws of the steady state: nothing is traced again, no buffer stays behind, however long a plane runs."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conduit_jax as conduit
from conduit_jax.testing import count_traces, live_buffer_bytes


def alive() -> tuple[int, int]:
    gc.collect()
    return len(jax.live_arrays()), live_buffer_bytes()


@pytest.mark.parametrize(
    ("schedule", "host", "iterations"),
    [("sequential", False, 10_000), ("overlap", True, 3_000)],
    ids=["device", "host"],
)
def test_thousands_of_iterations_trace_nothing_and_leave_no_buffer_behind(
    schedule: str, host: bool, iterations: int
) -> None:
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=8),
        replay=conduit.ReplayConfig(capacity=64, sampler=conduit.Prioritized()),
        placement="device",
        schedule=schedule,
    )
    rollout: dict[str, Any] = {"x": np.ones((2, 4), np.float32)} if host else {"x": jnp.ones((2, 4))}
    priorities = np.ones(8, np.float32) if host else jnp.ones(8)

    def iterate(count: int) -> None:
        for _ in range(count):
            plane.push(rollout)
            sample = plane.pull()
            plane.update_priorities(sample.info, priorities)
        plane.flush()

    iterate(20)
    before = alive()
    with count_traces() as traces:
        iterate(iterations)
    assert (traces.count, traces.compiled) == (0, 0)
    assert alive() == before
    assert plane.stats().tables["experience"].delivered_batches == iterations + 20


def test_statistics_and_explanations_leave_nothing_behind_either() -> None:
    plane = conduit.ExperiencePlane(algorithm=conduit.OffPolicy(batch_size=8), replay=conduit.ReplayConfig(capacity=64))
    plane.push({"x": jnp.ones((2, 4))})
    plane.stats()
    before = alive()
    for _ in range(50):
        plane.stats()
        plane.explain()
        plane.ready()
    assert alive() == before
