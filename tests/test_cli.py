"""The command line as a person meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

COMMAND = [sys.executable, "-m", "conduit_jax"]


def run(*words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    wide = os.environ | {"COLUMNS": "160"}
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=timeout, env=wide)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("trian",), "'train'"),
        (("train", "dqm"), "'dqn'"),
        (("train", "dqn", "--placment", "auto"), "'--placement'"),
        (("train", "dqn", "--sampler", "prioritised"), "'prioritized'"),
        (("train", "dqn", "--env", "cartpol"), "'cartpole'"),
        (("train", "dqn", "--env", "pendulum"), "discrete actions"),
        (("train", "sac", "--env", "cartpole"), "continuous actions"),
        (("train", "ppo", "--sampler", "uniform"), "--sampler"),
        (("train", "dqn", "--env", "gymnasium:CartPol-v1"), "CartPole"),
        (("train", "dqn", "--steps", "many"), "--steps"),
        (("train", "dqn", "--seed", "99999999999999999999"), "--seed"),
        (("train", "dqn", "--json", "no/such/folder/x.json"), "no/such/folder"),
        (("train", "dqn", "--capacity", "3"), "capacity=3"),
        (("train", "dqn", "--plot", "no/such/folder/x.png"), "no/such/folder"),
        (("train", "dqn", "--seeds", "2", "--env", "gymnasium:CartPole-v1"), "pure JAX"),
        (("train", "dqn", "--seeds", "2", "--checkpoint-dir", "somewhere"), "no checkpoints"),
    ],
)
def test_a_wrong_word_exits_with_2_and_names_the_right_one(words, says):
    done = run(*words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_help_answers_without_importing_jax():
    code = (
        "import sys; from conduit_jax.cli import command; "
        "command(['train', 'dqn', '--help'], standalone_mode=False); assert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--sampler" in done.stdout


def test_the_words_of_the_command_line_are_those_of_the_package():
    from conduit_jax.cli import training
    from conduit_jax.schedule.semantics import SCHEDULE_NAMES
    from conduit_jax.sharding.placement import PLACEMENT_NAMES

    assert set(training.PLACEMENTS) == set(PLACEMENT_NAMES)
    assert set(training.SCHEDULES) == set(SCHEDULE_NAMES)


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("gymnasium:Pendulum-v1", ["float32[3]", "float32[1] in [-2.0, 2.0]", "200", "36"]),
        ("pettingzoo:classic/rps-v2", ["int32[]", "3 discrete", "none", "20"]),
    ],
)
def test_envs_prints_the_spec_of_a_world_of_another_package(name, cells):
    done = run("envs", name)
    assert done.returncode == 0, done.stderr
    row = [cell.strip() for cell in next(line for line in done.stdout.splitlines() if name in line).split("│")]
    assert row[2:6] == cells


def test_envs_prints_every_world_with_its_spec_and_bytes():
    from conduit_jax.envs import ENVIRONMENTS

    done = run("envs")
    assert done.returncode == 0, done.stderr
    lines = [[cell.strip() for cell in line.split("│")] for line in done.stdout.splitlines()]
    rows = {row[1]: row[2:] for row in lines if len(row) > 5}
    assert set(rows) == set(ENVIRONMENTS)
    assert rows["cartpole"][:4] == ["float32[4]", "2 discrete", "500", "44"]
    assert rows["reach_128"][:4] == ["uint8[128, 128, 3]", "5 discrete", "30", f"{2 * 48 * 1024 + 12:,}"]
    assert [word in done.stdout for word in ("gymnax:CartPole-v1", "conduit_jax[metaworld]")] == [True, True]
    assert rows["pendulum"][:4] == ["float32[3]", "float32[1] in [-2.0, 2.0]", "200", "36"]


def test_a_short_run_prints_plain_lines_and_the_table_and_writes_json(tmp_path):
    path = tmp_path / "run.json"
    done = run("train", "dqn", "--steps", "6400", "--sampler", "prioritized", "--json", str(path))
    assert done.returncode == 0, done.stderr
    for word in (
        "rollout",
        "ingestion",
        "delivery",
        "update",
        "exposed (by ablation)",
        "evaluation return",
        "placement",
    ):
        assert word in done.stdout
    assert "\x1b[" not in done.stdout
    written = json.loads(path.read_text())
    assert len(written["evaluation_returns"]) == 20
    assert written["evaluation_return"] == pytest.approx(sum(written["evaluation_returns"]) / 20, rel=1e-5)
    assert written["settings"]["sampler"] == "prioritized"
    assert set(written["plane"]["latency"]["stages_s"]) == {"rollout", "ingestion", "delivery", "update"}
    assert written["plane"]["latency"]["ablation"]["full_s"] > 0


@pytest.mark.slow
def test_seeds_are_trained_side_by_side_and_plotted(tmp_path):
    path, plot = tmp_path / "run.json", tmp_path / "curve.png"
    words = ("--env", "cartpole", "--steps", "2048", "--seeds", "3", "--json", str(path), "--plot", str(plot))
    done = run("train", "ppo", *words)
    assert done.returncode == 0, done.stderr
    written = json.loads(path.read_text())
    assert [len(returns) for returns in written["evaluation_returns"]] == [20, 20, 20]
    assert len({tuple(returns) for returns in written["evaluation_returns"]}) == 3
    assert f"mean {written['evaluation_return']:.1f} over 3 seeds" in done.stdout
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_curve_is_drawn_without_the_points_nobody_finished_an_episode_for(tmp_path):
    from conduit_jax.cli.plots import draw_curves

    plot = tmp_path / "curve.png"
    draw_curves(plot, "one", [[(10.0, float("nan")), (20.0, 3.0), (30.0, 4.0)]])
    draw_curves(tmp_path / "none.png", "none", [[]])
    assert plot.stat().st_size > (tmp_path / "none.png").stat().st_size > 1000


def test_ctrl_c_ends_with_the_table_and_leaves_nothing_running(tmp_path):
    path = tmp_path / "run.json"
    command = [*COMMAND, "train", "dqn", "--steps", "100000000", "--json", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert "compiling" in process.stdout.readline()
        assert process.stdout.readline().startswith("iteration")
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopped by Ctrl-C" in out
    assert "Where an iteration goes" in out
    assert "Traceback" not in err
    assert json.loads(path.read_text())["interrupted"] is True


@pytest.mark.slow
def test_equal_seeds_give_equal_results_in_every_placement():
    from conduit_jax.examples import dqn

    runs = [
        dqn.settings_for("cartpole", steps=2560, seed=3, placement=name) for name in ("device", "device", "pinned_host")
    ]
    first, *others = [dqn.train(settings).evaluation_returns.tolist() for settings in runs]
    assert others == [first, first]


@pytest.mark.slow
def test_a_killed_run_is_resumed_by_the_same_command_and_ends_as_if_it_had_not_been(tmp_path):
    def words(name):
        kept = ("--checkpoint-dir", str(tmp_path / name), "--checkpoint-every", "5", "--resume")
        figures = ("--csv", str(tmp_path / f"{name}.csv"), "--json", str(tmp_path / f"{name}.json"))
        return (
            "train",
            "dqn",
            "--steps",
            "12000",
            "--sampler",
            "prioritized",
            "--schedule",
            "overlap",
            *kept,
            *figures,
        )

    whole = run(*words("whole"), timeout=240)
    assert whole.returncode == 0, whole.stderr
    killed = subprocess.Popen([*COMMAND, *words("killed")], stdout=subprocess.DEVNULL)
    manifest = tmp_path / "killed" / "conduit.json"
    for _ in range(1200):
        time.sleep(0.05)
        if manifest.exists():
            break
    killed.kill()
    killed.wait()
    assert not (tmp_path / "killed.json").exists()
    resumed = run(*words("killed"), timeout=240)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed at" in resumed.stdout
    ends = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "killed")]
    for figure in ("evaluation_returns", "updates", "env_steps"):
        assert ends[0][figure] == ends[1][figure]
    figures = [(tmp_path / f"{name}.csv").read_text().splitlines() for name in ("whole", "killed")]
    assert [line.split(",")[0] for line in figures[0]] == [line.split(",")[0] for line in figures[1]]


def test_resuming_without_a_folder_is_a_wrong_word():
    done = run("train", "dqn", "--resume")
    assert done.returncode == 2
    assert "--checkpoint-dir" in done.stderr
