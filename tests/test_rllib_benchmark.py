"""Laws of the RLlib benchmark's arithmetic: what is counted as an operation, what is hidden, what is held against a floor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.rllib.operations import Operations
from benchmarks.rllib.summary import hidden, of_workload, summarize
from benchmarks.rllib.workloads import WORKLOADS, Cluster
from conduit_jax.adapters.rllib.packing import Packing
from tests.adapters.rllib_world import chunk

pytest.importorskip("torch", reason="torch is not installed (extra: torch)")


def test_an_operation_is_a_function_that_is_given_experience_and_counts_once() -> None:
    found = Operations()
    chunks = [chunk(1, 0, 5), chunk(1, 5, 9)]
    with found.watching():
        packing = Packing(())
        for part in chunks:
            packing.add(part, 0)
    packing.finish()  # not watched
    figures = found.figures(1)
    names = {name.rpartition(":")[2] for name in figures["names"]}
    assert {"Packing.add", "Slab.add", "read"} <= names
    assert "padded" not in names, "it sees numbers alone"
    assert not any("finish" in name for name in names)
    assert figures["operations"] == len(names) == figures["transfer"] + figures["processing"]
    assert figures["calls_an_update"] > figures["operations"]


def block(path: float, forward: float = 0.0, rollout: float = 5.0, total: float = 10.0) -> dict[str, Any]:
    spans = {"rollout": rollout, "path": path, "update": 1.0, "sync_weights": 0.0, "other": 0.0, "total": total}
    spans |= {"value_forward": forward, "path_without_values": path - forward}
    return {"wall": spans, "cpu": spans, "steps": [total]}


def test_what_is_hidden_is_what_the_learner_does_not_wait_for() -> None:
    cases = {
        "stock": [block(3, 2)] * 4,
        "sequential": [block(2.5, 2)] * 4,
        "ahead": [block(0.5, 0.5, rollout=5.5)] * 4,
    }
    found = hidden(cases, cores=2)
    assert found["hidden"]["median"] == pytest.approx(0.75)
    assert found["net"]["median"] == pytest.approx(0.5)
    assert found["bound"] == pytest.approx(1 - 1 / 32)
    assert hidden(cases, cores=1)["bound"] == 0
    remote = {name: [block(0.0)] * 4 for name in cases}  # learners elsewhere: nothing is seen of the pass
    assert "value_forward_hidden" not in of_workload(remote | {"stock": [block(1.0)] * 4}, "ahead", on_policy=True)


def test_a_workload_is_held_against_floors_by_lower_bounds_and_rarer_cases_are_matched_in_time() -> None:
    noise = np.random.default_rng(0)
    cases = {
        "stock": [block(4 + noise.normal(0, 0.1)) for _ in range(12)],
        "sequential": [block(1.0) for _ in range(4)],
        "granularity": [block(0.2, total=6.5) for _ in range(12)],
    }
    found = of_workload(cases, "granularity", on_policy=False)
    assert found["exposed_reduction"]["low"] > 0.94
    assert found["decomposed_cpu"]["sequential"]["median"] == pytest.approx(0.75, abs=0.02)
    summary = summarize({"dqn_cartpole": found})
    assert summary["iteration_reduction_max"] == pytest.approx(0.35)
    assert summary["floors"]["exposed_reduction_min_offpolicy"]["met"]
    noisy = of_workload(
        cases | {"granularity": [block(0.2, total=t) for t in (6, 6, 6, 10) * 3]}, "granularity", on_policy=False
    )
    assert noisy["iteration_of_share"]["low"] < noisy["iteration_of_share"]["median"]
    assert summarize({"noisy": noisy})["iteration_of_share_min"] == noisy["iteration_of_share"]["low"]
    assert "exposed_reduction_ppo_pixels" not in summary["floors"]
    sizes = {
        f"ppo_pixels_{size}": found | {"exposed_reduction": {"low": low}} for size, low in ((128, 0.9), (256, 0.8))
    }
    assert summarize(sizes | {"dqn_cartpole": found})["exposed_reduction_ppo_pixels"] == 0.8, "the worse of the sizes"


def test_the_papers_eight_by_eight_is_three_numbers() -> None:
    pytest.importorskip("ray.rllib", reason="RLlib is not installed (extra: rllib)", exc_type=ImportError)
    config = Cluster(runners=8, learners=8, gpus=8).apply(WORKLOADS["dqn_mountaincar"].make(False))
    assert (config.num_env_runners, config.num_learners, config.num_gpus_per_learner) == (8, 8, 1)
    assert config.total_train_batch_size == 8 * 32
