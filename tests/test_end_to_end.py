"""What the races and ladders make of their times: which peer counts, what is possible, what misses a floor."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import end_to_end
from benchmarks.end_to_end import FLOORS, RACES, kept, missed
from benchmarks.end_to_end_ladder import FUSED, WITHOUT, WITHOUT_FUSED, Configuration, figures
from benchmarks.end_to_end_races import Race, Side, interquartile_mean, run_race
from benchmarks.harness import Timing
from conduit_jax import Schedule


def side(seconds: float, returns: tuple[float, ...], spent: list[float]) -> Side:
    return Side(lambda calls: spent.append(calls * seconds), lambda: np.array(returns))


@pytest.mark.parametrize(
    ("ours", "theirs", "counted"),
    [((460.0,), (470.0, 20.0), "slow"), ((460.0,), (455.0,), "fast"), ((10.0,), (500.0,), None)],
)
def test_a_race_counts_only_where_both_sides_reach_the_return(monkeypatch, ours, theirs, counted):
    clock: list[float] = []
    monkeypatch.setattr("time.perf_counter", lambda: sum(clock))
    peers = {"fast": side(0.2, theirs, clock), "slow": side(0.3, (500.0,), clock)}
    race = Race("race", 450.0, side(0.1, ours, clock), peers)
    rows, summary = run_race(race, repeats=4, block_s=1.0, judge=True)
    expected = {"fast": 2.0, "slow": 3.0, None: None}[counted]
    assert summary["race"] == (expected if expected is None else pytest.approx(expected))
    assert summary.get("race_peer") == counted
    assert len(rows) == 2
    assert [row["peer"] for row in rows if row["judged"]] == (
        list(race.peers)[:1] if counted == "fast" else list(race.peers)
    )
    short = {row["peer"]: row["missed_the_return"] for row in rows if row["missed_the_return"]}
    assert summary.get("race_not_counted", {}) == short


FOUND = [
    Configuration("host", "sequential", "pinned_host", Schedule()),
    Configuration("near", "+ placement", "device", Schedule()),
    Configuration("one", "fused", "device", FUSED, WITHOUT_FUSED),
]


def timed(cpu: float, **milliseconds: float) -> dict[str, Timing]:
    names = {"without": WITHOUT, "without_fused": WITHOUT_FUSED}
    wobble = 1 + 0.001 * np.arange(8)
    return {
        names.get(name, name): Timing(one, one, cpu * 1e-3, list(one * 1e-3 * wobble))
        for name, one in milliseconds.items()
    }


def test_a_ladder_tells_what_each_decision_took_off_and_how_much_was_possible(monkeypatch):
    monkeypatch.setattr("benchmarks.end_to_end_ladder.cores", lambda: 2)
    times = timed(14.0, host=10.0, near=9.0, one=5.5, without=4.0, without_fused=4.0)
    summary = figures("x", FOUND, times)
    assert summary["exposed_reduction_x"] == pytest.approx(1 - 1.5 / 6)
    assert summary["iteration_reduction_x"] == pytest.approx(0.45)
    assert summary["bound_ms_x"] == pytest.approx(7.0, rel=0.01)  # 14 ms of work on two cores
    assert summary["exposed_of_possible_x"] == pytest.approx(4.5 / 3, rel=0.01)
    assert list(summary["decomposition_x"]) == ["sequential", "+ placement", "fused"]
    assert summary["decomposition_x"]["+ placement"]["configuration"] == "near"


def test_what_is_possible_is_undefined_where_it_is_next_to_nothing():
    summary = figures("x", FOUND, timed(0.0, host=4.1, near=4.1, one=4.1, without=4.0, without_fused=4.0))
    assert summary["exposed_of_possible_x"] is None
    assert "less than 5 %" in summary["exposed_of_possible_x_why"]


def test_floors_are_held_on_the_lower_bound_and_a_race_without_a_figure_misses_its_own():
    assert missed({"host_vs_sb3": 1.4, "host_vs_sb3_low": 1.31}) == []
    assert len(missed({"host_vs_sb3": 1.4, "host_vs_sb3_low": 1.29, "host_vs_sbx": None})) == 2
    assert FLOORS["fused_vs_jitted_dqn"] == (1.0, 1.2)


def test_a_part_that_is_run_anew_replaces_what_the_file_says_of_it_and_of_nothing_else():
    of_ppo = {
        f"{figure}_ppo{end}": 1.0 for figure in ("exposed_reduction", "bound_ms") for end in ("", "_low", "_high")
    }
    of_pixels = {name.replace("_ppo", "_ppo_pixels"): 2.0 for name in of_ppo}
    races = {f"{name}{end}": 3.0 for name in RACES for end in ("", "_low", "_peer", "_not_counted")}
    summary = {
        **of_ppo,
        **of_pixels,
        **races,
        "missing": {"host_vs_sbx": "no sbx"},
        "parts": {"ppo": {"quick": False}, "host_vs_sbx": {"quick": True}},
    }
    left = kept(summary, "ppo")
    missing, parts = {"host_vs_sbx": "no sbx"}, {"host_vs_sbx": {"quick": True}}
    assert left == {**of_pixels, **races, "missing": missing, "parts": parts}
    left = kept(summary, "loop_vs_flashbax_loop")
    assert set(summary) - set(left) == {f"loop_vs_flashbax_loop{end}" for end in ("", "_low", "_peer", "_not_counted")}
    assert kept(summary, "host_vs_sbx")["missing"] == {}
    assert kept({}, "ppo") == {"missing": {}, "parts": {}}


def test_a_quick_part_beside_one_that_was_judged_says_so(monkeypatch, tmp_path):
    path = tmp_path / "found.json"
    monkeypatch.setattr(end_to_end, "run_part", lambda name, quick: ([{"race": name}], {name: 1.0}))
    for name, quick in (("host_vs_sb3", []), ("host_vs_sbx", ["--quick"])):
        monkeypatch.setattr("sys.argv", ["end_to_end", "--json", str(path), "--only", name, *quick])
        end_to_end.main()
    parts = json.loads(path.read_text())["summary"]["parts"]
    assert {name: told["quick"] for name, told in parts.items()} == {"host_vs_sb3": False, "host_vs_sbx": True}


def test_one_seed_of_four_that_fails_does_not_decide():
    assert interquartile_mean(np.array([500.0, 20.0, 490.0, 480.0])) == 485.0
    assert interquartile_mean(np.array([400.0, 20.0, 490.0])) == pytest.approx(910 / 3)
    assert interquartile_mean(np.array([7.0])) == 7.0
