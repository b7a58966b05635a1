"""The GPU check is run small on the CPU, so that it does not rot; where there is no GPU it says so."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check.timeline import common, length, merged

INTERVALS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda pair: (min(pair), max(pair))))


def run(*options: str, path: Path) -> Any:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--json", str(path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(path.read_text())


def test_without_a_gpu_it_is_skipped_and_says_so(tmp_path: Path) -> None:
    said, written = run(path=tmp_path / "result.json")
    assert "skipped: no GPU" in said
    assert written["summary"] == {"skipped": "no GPU"}


@pytest.mark.parametrize("name", ["in_place", "links", "gathers"])
def test_a_section_gives_rows_and_figures(name: str) -> None:
    result = gpu_check.in_this_process(name, small=True)
    assert result["rows"]
    assert result["summary"]
    json.dumps(result, allow_nan=False)


@pytest.mark.slow
def test_a_small_run_on_the_cpu_answers_every_question(tmp_path: Path) -> None:
    _, written = run("--cpu", path=tmp_path / "result.json")
    summary, rows = written["summary"], written["rows"]
    assert {row["section"] for row in rows} == set(gpu_check.SECTIONS)
    assert not [name for name in summary if "failed" in name]
    assert summary["insert_in_place_device"] is True
    assert summary["insert_in_place_pinned_host"] is True
    assert summary["gather_share_of_link"] > 0
    assert {row["gather"]: row["works"] for row in rows if "gather" in row}["host compute"]
    assert any(name.startswith("link_") for name in summary)
    assert isinstance(summary["exposed_ms_pinned_host_overlap"], float)


def test_a_section_that_dies_or_hangs_costs_its_own_figures_only(monkeypatch: Any) -> None:
    monkeypatch.setattr(gpu_check, "SECTION_S", 0.05)
    assert "longer than" in gpu_check.in_its_own("links", small=True)["summary"]["failed"]
    monkeypatch.setattr(gpu_check, "SECTION_S", 60.0)
    assert "exit code 2" in gpu_check.in_its_own("nonsense", small=True)["summary"]["failed"]


def covered(intervals: list[tuple[int, int]]) -> set[int]:
    return {moment for start, end in intervals for moment in range(start, end)}


@given(INTERVALS, INTERVALS)
def test_intervals_are_counted_once_and_only_where_both_go_on(first: list, second: list) -> None:
    assert length(first) == len(covered(first))
    assert common(first, second) == len(covered(first) & covered(second))
    union = merged(first)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(union))
