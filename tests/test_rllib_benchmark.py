"""Laws of the RLlib benchmark's arithmetic: what is counted as an operation, what is hidden, what is held against a floor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.rllib import learning
from benchmarks.rllib.operations import Operations
from benchmarks.rllib.results import Results
from benchmarks.rllib.summary import hidden, matched, of_workload, summarize
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


def turns(blocks: list[dict[str, Any]], every: int = 1) -> list[dict[str, Any]]:
    return [found | {"turn": every * number} for number, found in enumerate(blocks)]


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
    remote = {name: turns([block(0.0)] * 4) for name in cases}  # learners elsewhere: nothing is seen of the pass
    assert "value_forward_hidden" not in of_workload(
        remote | {"stock": turns([block(1.0)] * 4)}, "ahead", on_policy=True
    )


def test_a_workload_is_held_against_floors_by_lower_bounds_and_rarer_cases_are_matched_in_time() -> None:
    noise = np.random.default_rng(0)
    cases = {
        "stock": turns([block(4 + noise.normal(0, 0.1)) for _ in range(11)]),
        "sequential": turns([block(1.0) for _ in range(4)], 3),
        "granularity": turns([block(0.2, total=6.5) for _ in range(11)]),
    }
    assert [one["turn"] for one in matched(cases["stock"], cases["sequential"])[0]] == [0, 3, 6, 9]
    found = of_workload(cases, "granularity", on_policy=False)
    assert found["exposed_reduction"]["low"] > 0.94
    assert found["decomposed_cpu"]["sequential"]["median"] == pytest.approx(0.75, abs=0.02)
    summary = summarize({"dqn_cartpole": found})
    assert summary["iteration_reduction_max"] == pytest.approx(0.35)
    assert summary["floors"]["exposed_reduction_min_offpolicy"]["met"]
    noisy = of_workload(
        cases | {"granularity": turns([block(0.2, total=t) for t in (6, 6, 6, 10) * 3][:11])},
        "granularity",
        on_policy=False,
    )
    assert noisy["iteration_of_share"]["low"] < noisy["iteration_of_share"]["median"]
    assert noisy["iteration_of_share"]["median"] == pytest.approx(1, rel=0.05), "all of the path's share"
    assert summarize({"noisy": noisy})["iteration_of_share_min"] == noisy["iteration_of_share"]["low"]
    assert "exposed_reduction_ppo_pixels" not in summary["floors"]
    sizes = {
        f"ppo_pixels_{size}": found | {"exposed_reduction": {"low": low}} for size, low in ((128, 0.9), (256, 0.8))
    }
    assert summarize(sizes | {"dqn_cartpole": found})["exposed_reduction_ppo_pixels"] == 0.8, "the worse of the sizes"


def test_a_run_of_some_workloads_keeps_what_the_file_says_of_the_others(tmp_path: Path) -> None:
    assert Results(None, ["a"]).rows == []
    path = tmp_path / "found.json"
    content = {"summary": {"workloads": {"a": {"on_policy": False}, "b": {"on_policy": True}}}}
    path.write_text(json.dumps(content | {"rows": [{"workload": "a"}, {"workload": "b"}]}))
    kept = Results(path, ["a"])
    assert kept.rows == [{"workload": "b"}]
    assert kept.workloads == {"b": {"on_policy": True}}


def test_learning_is_resumed_at_the_seeds_the_file_lacks() -> None:
    runs = [("one", 0, False), ("one", 0, True), ("one", 1, True), ("other", 0, True)]
    rows = [{"task": t, "seed": s, "conduit": c} for t, s, c in runs]
    assert [row["task"] for row in learning.kept(rows, ["one"], resume=False)] == ["other"]
    found = [(row["task"], row["seed"]) for row in learning.kept(rows, ["one"], resume=True)]
    assert found == [("one", 0), ("one", 0), ("other", 0)], "half a pair is run again"
    assert learning.kept([], ["one"], resume=True) == []


def test_learning_is_equivalent_where_the_interval_is_within_the_margin_for_negative_returns_too() -> None:
    rows = [
        {
            "task": "one",
            "conduit": kind,
            "seed": seed,
            "returns": [-300.0, -200.0],
            "score": score,
            "seconds": 1.0 + kind,
        }
        for seed in range(10)
        for kind, score in ((False, -250.0 + seed), (True, -252.0 + seed))
    ]
    found = learning.summarize([*rows, {"task": "begun", "conduit": True, "seed": 0}])
    assert list(found["tasks"]) == ["one"], "what has no pair yet is left out"
    assert found["learning_equivalent"]
    assert found["tasks"]["one"]["margin"] == pytest.approx(0.2 * 245.5)
    assert found["tasks"]["one"]["seconds_of_stock"] == 2
    assert (found["tasks"]["one"]["stock_first"], found["tasks"]["one"]["stock_last"]) == (-300, -200)
    worse = [row | {"score": row["score"] - 60 * row["conduit"]} for row in rows]
    assert learning.summarize(worse)["learning_equivalent"] is False
    few = [row for row in rows if row["seed"] < 4]
    assert learning.summarize(few)["learning_equivalent"] is None, "four pairs are too few for an interval"
    several = [*worse, *(row | {"task": "other"} for row in few)]
    assert learning.summarize(several)["learning_equivalent"] is False
    assert learning.summarize([*rows, *(row | {"task": "other"} for row in few)])["learning_equivalent"] is None
    assert learning.summarize([])["learning_equivalent"] is None


def test_the_papers_eight_by_eight_is_three_numbers() -> None:
    pytest.importorskip("ray.rllib", reason="RLlib is not installed (extra: rllib)", exc_type=ImportError)
    config = Cluster(runners=8, learners=8, gpus=8).apply(WORKLOADS["dqn_mountaincar"].make(False))
    assert (config.num_env_runners, config.num_learners, config.num_gpus_per_learner) == (8, 8, 1)
    assert config.total_train_batch_size == 8 * 32
