"""Laws of metric sinks: what was given is what is in the file, after a resumption too, and no iteration is in it twice."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conduit_jax as conduit
from conduit_jax.sinks import named_numbers

NUMBERS = st.floats(allow_infinity=False) | st.integers(-5, 5).map(float)
ROWS = st.lists(st.dictionaries(st.sampled_from(["loss", "a/b", 'odd,"name"', "x"]), NUMBERS), min_size=1, max_size=6)


def read_csv(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: float(cell) for name, cell in row.items() if cell != ""} for row in rows]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def as_read(step: int, values: dict[str, float], *, nulls: bool) -> dict[str, Any]:
    finite = {name: value for name, value in values.items() if not math.isnan(value)}
    missing = {name: None for name in values if name not in finite} if nulls else {}
    return {"iteration": step, **finite, **missing}


@settings(max_examples=25)
@given(first=ROWS, second=ROWS, again_from=st.integers(1, 6), cut_short=st.booleans())
@pytest.mark.parametrize(
    ("sink", "read", "nulls"), [(conduit.CsvSink, read_csv, False), (conduit.JsonLinesSink, read_jsonl, True)]
)
def test_rows_come_back_and_a_resumed_run_replaces_its_own(
    tmp_path_factory: Any,
    sink: Any,
    read: Any,
    nulls: bool,
    first: list,
    second: list,
    again_from: int,
    cut_short: bool,
) -> None:
    path, want = tmp_path_factory.mktemp("sink") / "run", []
    with sink(path) as opened:
        for step, values in enumerate(first, start=1):
            opened.write(step, values)
            want.append((step, values))
    if cut_short:  # by a killed process
        with path.open("a") as file:
            file.write('{"iter' if nulls else "9")
    with sink(path) as opened:
        for step, values in enumerate(second, start=again_from):
            opened.write(step, values)
    want = [row for row in want if row[0] < again_from] + list(enumerate(second, start=again_from))
    assert read(path) == [as_read(step, values, nulls=nulls) for step, values in want]
    assert [entry.name for entry in path.parent.iterdir()] == ["run"]


def test_numbers_are_named_by_their_path() -> None:
    tree = {
        "loss": jnp.float32(2),
        "nested": [1, {"x": np.zeros((1, 1))}],
        "many": np.zeros(3),
        "word": "no",
        "none": None,
    }
    assert named_numbers(tree, "metrics") == {"metrics/loss": 2, "metrics/nested/0": 1, "metrics/nested/1/x": 0}


def small_loop() -> tuple[conduit.Loop, conduit.ExperiencePlane]:
    plane = conduit.ExperiencePlane(algorithm=conduit.OffPolicy(batch_size=8), replay=conduit.ReplayConfig(capacity=64))
    loop = conduit.wrap(
        lambda learner, sample: (learner + 1, {"loss": sample.data["x"].mean()}),
        rollout=lambda actor, policy, key: (actor, {"x": jnp.ones((4, 8)) * policy}),
        policy=lambda learner: learner,
        plane=plane,
    )
    return loop, plane


def test_a_loop_records_its_metrics_and_the_planes_statistics(tmp_path: Path) -> None:
    loop, plane = small_loop()
    with conduit.CsvSink(tmp_path / "a.csv") as one, conduit.JsonLinesSink(tmp_path / "a.jsonl") as two:
        loop.run(jnp.float32(0), 0, 6, every={2: conduit.recording(plane, one, two)})
    rows, lines = read_csv(tmp_path / "a.csv"), read_jsonl(tmp_path / "a.jsonl")
    for row, line, iteration in zip(rows, lines, (2, 4, 6), strict=True):
        assert row["iteration"] == line["iteration"] == iteration
        assert row["tables/experience/pushed_units"] == line["tables/experience/pushed_units"] == iteration
        assert row["metrics/loss"] == line["metrics/loss"]
        assert row["deterministic"] == 1
    assert {name for name in lines[0] if name.startswith("latency/")}


def test_tensorboard_gets_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed (extra: tensorboard)")
    from tensorboardX.event_file_writer import EventsWriter  # noqa: F401
    from tensorboardX.proto import event_pb2

    with conduit.TensorBoardSink(tmp_path) as board:
        board.write(1, {"metrics/loss": 0.5, "bad": math.nan})
        board.write(2, {"metrics/loss": 0.25})
    (path,) = tmp_path.iterdir()
    found, raw = [], path.read_bytes()
    while raw:  # a record: length, its checksum, an event, its checksum
        size = int.from_bytes(raw[:8], "little")
        event = event_pb2.Event.FromString(raw[12 : 12 + size])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        raw = raw[16 + size :]
    assert found == [(1, "metrics/loss", 0.5), (2, "metrics/loss", 0.25)]


def test_without_tensorboardx_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(conduit.ConfigError, match="tensorboardX"):
        conduit.TensorBoardSink(tmp_path)


def test_a_missing_folder_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(conduit.ConfigError, match="does not exist"):
        conduit.CsvSink(tmp_path / "nowhere" / "a.csv")
