"""``conduit-jax plan`` as a person meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "conduit_jax"]
SWEEP = ("plan", "--topology", "a100_80gb_x8", "--item", "80012", "--capacity", "1M")


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    everything = {**os.environ, **environment}
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=120, env=everything)


def test_the_plan_is_a_table_with_every_candidate():
    done = run(*SWEEP)
    assert done.returncode == 0, done.stderr
    for words in ("a100_80gb_x8: shared:2", "lacks 12,000,000 bytes on device:0", "times the time", "disk"):
        assert words in done.stdout


def test_the_plan_as_json_has_placement_terms_memory_and_reasons():
    done = run(*SWEEP, "--json", "--actors", "device", "--samples", "2K", "--limit", "device=41G")
    data = json.loads(done.stdout)
    assert data["placement"]["name"] == "shared:2"
    assert data["workload"]["sampled_items"] == 2000
    assert data["memory"]["device:0"]["limit_bytes"] == 41 * 10**9
    assert all(one["reason"] for one in data["rejected"])


def test_planning_does_not_import_jax():
    code = (
        "import sys; from conduit_jax.cli import command; "
        f"command({list(SWEEP)!r}, standalone_mode=False); assert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_shipped_topologies_are_listed():
    done = run("plan", "--list")
    assert done.returncode == 0
    assert "mi250x_x8_128_nodes" in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--only", "pinned_host"), "capacity=858,864"),
        (("--only", "mixed"), "plan --leaf NAME=BYTES"),
        (("--only", "pined_host"), "did you mean 'pinned_host'"),
        (("--topology", "a100"), "a100_80gb_x8"),
        (("--topology", "absent.json"), "no such file"),
        (("--item", "48X"), "48K"),
        (("--item", "0"), "'0'"),
        (("--capacity", "1.5"), "whole number"),
        (("--actors", "hosts"), "'host'"),
        (("--learners", "0;1"), "--learners"),
        (("--learners", "8"), "no such device"),
        (("--learners", "3-1"), "--learners"),
        (("--local-read-fraction", "2"), "--local-read-fraction"),
        (("--limit", "device"), "TIER=BYTES"),
        (("--limit", "devise=1G"), "did you mean 'device'"),
        (("--limit", "device=1G", "--limit", "device=2G"), "twice"),
        (("--grow", "80011"), "do not grow to less"),
        (("--grow", "observation=100K"), "48K"),
        (("--leaf", "image"), "NAME=BYTES"),
        (("--leaf", "image=80K"), "do not add up"),
        (("--leaf", "image=40K", "--leaf", "image=40012"), "twice"),
    ],
)
def test_a_wrong_word_exits_with_2_and_says_what_would_do(words, says):
    done = run(*SWEEP, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_where_growing_items_would_live_is_a_line_a_range():
    done = run(*SWEEP, "--grow", "3M")
    assert done.returncode == 0, done.stderr
    assert "as items grow" in done.stdout
    assert "nothing fits" not in done.stdout  # the disk takes the rest
    rows = json.loads(run(*SWEEP, "--grow", "3M", "--limit", "disk=0", "--json").stdout)["map"]
    assert rows[0]["first_bytes"] == 80_012
    assert rows[-1] == {"first_bytes": rows[-2]["last_bytes"] + 1, "last_bytes": 3_000_000, "placement": None}
    names = [row["placement"] for row in rows[:-1]]
    assert names[0].startswith("shared:")
    assert names[-1] == "pageable"


def test_leaves_are_split_over_memories_where_no_memory_holds_all_of_them():
    leaves = ("--leaf", "image=80K", "--leaf", "small=12", "--limit", "pinned_host=64005M", "--limit", "pageable=0")
    done = run("plan", *SWEEP[1:3], "--capacity", "800K", *leaves, "--limit", "device=50M", "--json")
    data = json.loads(done.stdout or "{}")
    assert done.returncode == 0, done.stderr
    assert data["workload"]["item_bytes"] == 80_012
    tiers = {leaf: part["tier"] for part in parts_of(data) for leaf in part["leaves"]}
    assert tiers == {"image": "pinned_host", "small": "device"}


def parts_of(data):
    """Return the tier and the leaves of each part of a plan."""
    return [{"tier": part["tier"], "leaves": part["leaves"]} for part in data["placement"]["parts"]]


def test_how_large_an_item_is_has_to_be_said():
    done = run("plan", *SWEEP[1:3], "--capacity", "1M")
    assert done.returncode == 2
    assert "--leaf NAME=BYTES" in done.stderr


def test_the_machine_is_profiled_once_and_its_profile_can_be_planned_with(tmp_path):
    one = {"CONDUIT_JAX_CACHE_DIR": str(tmp_path), "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    done = run("profile", **one)
    assert done.returncode == 0, done.stderr
    assert "pinned_host->device" in done.stdout
    (kept,) = tmp_path.iterdir()
    before = kept.read_text()
    as_json = run("profile", "--json", **one)
    assert json.loads(as_json.stdout)["links"] == json.loads(before)["links"]
    assert kept.read_text() == before
    for topology in (str(kept), "here"):
        planned = run("plan", "--topology", topology, "--item", "1K", "--capacity", "10K", **one)
        assert "single_device" in planned.stdout, planned.stderr
