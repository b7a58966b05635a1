"""Benchmarks are run small, so that they do not rot; their figures are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "figure", "options"),
    [
        ("overhead", "overhead_us", ()),
        pytest.param("exposed", "exposed_share_max", (), marks=pytest.mark.slow),
        pytest.param("scheduling", "fused_speedup", (), marks=pytest.mark.slow),
        pytest.param("end_to_end", "iteration_reduction_sac", ("--only", "sac"), marks=pytest.mark.slow),
        ("replay_peers", "roofline_fraction_sample", ("--peers", "ours", "--workloads", "64x64x3 image")),
        pytest.param(
            "learning", "ppo_cartpole_mean", ("--env", "cartpole", "--algorithm", "ppo"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_quick_run_writes_the_figures_it_promises(tmp_path, module, figure, options):
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", f"benchmarks.{module}", "--quick", "--json", str(path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    written = json.loads(path.read_text())
    assert isinstance(written["summary"][figure], float)
    assert written["rows"]
    assert written["about"]["jax"]
