"""Laws of the clock of what a thread wants: it goes on while the thread computes or stands in line, and stands while it waits."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from conduit_jax.schedule import clocks
from conduit_jax.schedule.clocks import wanted_s


def test_standing_in_line_for_a_core_is_wanting_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = tmp_path / "schedstat"
    monkeypatch.setattr(clocks, "_STATISTICS", str(statistics))
    monkeypatch.setattr(clocks.time, "thread_time", lambda: 2.0)
    monkeypatch.setattr(clocks, "_own", clocks._Own())
    assert wanted_s() == 2.0  # a system that does not tell of lines
    statistics.write_text("5000000 3000000000 17\n")
    monkeypatch.setattr(clocks, "_own", clocks._Own())
    assert wanted_s() == 5.0
    statistics.write_text("5000000 4000000000 19\n")
    assert wanted_s() == 6.0
    statistics.write_text("")
    assert wanted_s() == 2.0


def test_each_thread_has_its_own_and_leaves_no_file_open() -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0

    told: list[float] = []
    wanted_s()
    before = open_files()
    for _ in range(20):
        thread = threading.Thread(target=lambda: told.append(wanted_s()))
        thread.start()
        thread.join()
    assert open_files() <= before
    assert all(0 <= one < wanted_s() + 1 for one in told)


def test_it_stands_while_the_thread_sleeps_and_never_goes_back() -> None:
    times = [wanted_s()]
    for _ in range(5):
        time.sleep(0.01)
        times.append(wanted_s())
    assert times == sorted(times)
    assert times[-1] - times[0] < 0.05 * len(times)
