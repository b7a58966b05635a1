"""Runs that add to a result file: what is run anew is replaced, everything else stays."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import equivalence, harness, learning, staleness
from conduit_jax.examples import dqn


def test_a_file_that_is_not_there_holds_no_rows_and_a_report_is_read_back(tmp_path):
    path = tmp_path / "deep" / "rows.json"
    assert harness.earlier_rows(None) == harness.earlier_rows(path) == []
    harness.report(path, [{"seed": 1}], {"figure": 2.0})
    assert harness.earlier_rows(path) == [{"seed": 1}]
    assert json.loads(path.read_text())["summary"] == {"figure": 2.0}
    assert [file.name for file in path.parent.iterdir()] == ["rows.json"], "nothing half-written stays"


def test_quick_rows_and_measured_ones_never_stand_in_one_file(tmp_path, capsys):
    path, parser = tmp_path / "rows.json", harness.arguments("")
    quick, whole = (parser.parse_args(["--json", str(path), *more]) for more in (["--quick"], []))
    for first, then in ((quick, whole), (whole, quick)):
        harness.write(path, [harness.marked({"seed": 1}, first)], {})
        assert [row["seed"] for row in harness.rows_to_add_to(parser, first)] == [1]
        with pytest.raises(SystemExit):
            harness.rows_to_add_to(parser, then)
        assert "give another --json" in capsys.readouterr().err


def test_a_new_run_of_learning_replaces_the_row_of_its_case_and_seed_alone():
    first, second = learning.CASES[0], learning.CASES[1]

    def row(case, seed, figure):
        names = {"algorithm": case.algorithm, "env": case.env, "sampler": case.sampler}
        return {**names, "seed": seed, "figure": figure, "evaluation_return": figure}

    rows = []
    for case, seed, figure in ((second, 0, 480.0), (first, 1, 400.0), (first, 0, 500.0), (first, 1, 490.0)):
        rows = learning.merged(rows, case, row(case, seed, figure))
    assert [(each["env"], each["seed"], each["figure"]) for each in rows] == [
        (first.env, 0, 500.0),
        (first.env, 1, 490.0),
        (second.env, 0, 480.0),
    ]
    summary = learning.summarize(rows)
    assert summary[f"{first.name}_mean"] == pytest.approx(495.0)
    assert summary[f"{first.name}_worst"] == pytest.approx(490.0)


def test_learning_knows_the_rows_it_was_written_with():
    rows = harness.earlier_rows(harness.Path(learning.__file__).parent / "results" / "learning.json")
    assert all(any(learning.belongs(row, case) for case in learning.CASES) for row in rows)


def test_a_row_of_the_sweep_that_is_trained_anew_keeps_its_times():
    def row(sampler, bound, areas, **more):
        return {"sampler": sampler, "max_staleness": bound, "areas": areas, "returns": areas, **more}

    rows = [row("prioritized", 0, [1.0]), row("uniform", 4, [1.0, 1.0], iteration_ms=3.0)]
    for new in (row("uniform", 4, [3.0, 5.0]), row("uniform", 0, [2.0, 2.0])):
        rows = staleness.merged(rows, new)
    assert [(each["sampler"], each["max_staleness"]) for each in rows] == [
        ("uniform", 0),
        ("uniform", 4),
        ("prioritized", 0),
    ]
    assert rows[1]["iteration_ms"] == 3.0
    share, low, high = staleness.against_sequential(rows, "areas")["uniform_4"]
    assert (share, low, high) == pytest.approx((2.0, 1.5, 2.5))


def test_areas_are_means_over_the_same_iterations_wherever_a_curve_begins():
    settings = dqn.settings_for("cartpole", steps=4_000)  # 40 iterations
    curve = np.arange(1.0, 41.0)
    whole, late = curve[None], curve[None, 12:]
    assert equivalence.area(whole, settings) == pytest.approx(np.mean([10, 20, 30, 40]))
    assert equivalence.area(late, settings) == pytest.approx(np.mean([20, 30, 40]))
    late[0, 7] = np.nan  # iteration 20: nobody had finished an episode
    assert equivalence.area(late, settings) == pytest.approx(np.mean([30, 40]))


def test_runs_of_equal_kind_and_seed_are_told_once():
    def row(kind, seed, score):
        return {"case": "dqn_cartpole", "kind": kind, "seed": seed, "area": score, "final": score}

    rows = equivalence.merged([row("direct", 0, 1.0), row("planes", 2_000, 1.0)], [row("direct", 0, 2.0)])
    assert [(each["kind"], each["area"]) for each in rows] == [("direct", 2.0), ("planes", 1.0)]
    assert equivalence.summarize(rows) == {"margin": equivalence.MARGIN}, "one run is no evidence"
