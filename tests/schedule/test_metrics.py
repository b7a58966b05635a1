"""Laws of the latency report: what is exposed and what is hidden add up, and missing measurements read as missing."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit_jax.schedule.metrics import PATH_STAGES, STAGES, ExposedLatency, LatencyReport, Percentiles, Spans

SECONDS = st.floats(1e-6, 1e-1)


def report_of(iteration: float, exposed: ExposedLatency | None = None, **stages: float) -> LatencyReport:
    by_stage = {name: Percentiles(stages[name], stages[name], 1) for name in STAGES}
    return LatencyReport(Percentiles(iteration, iteration, 1), by_stage, exposed)


@given(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)
def test_exposed_and_hidden_add_up_to_the_path_and_neither_is_negative(
    iteration: float, rollout: float, ingestion: float, delivery: float, update: float
) -> None:
    report = report_of(iteration, rollout=rollout, ingestion=ingestion, delivery=delivery, update=update)
    assert report.path_s == pytest.approx(ingestion + delivery)
    assert 0 <= report.exposed_by_spans_s <= report.path_s
    assert report.hidden_s + report.exposed_s == pytest.approx(report.path_s)


def test_a_fully_exposed_path_and_a_fully_hidden_one_are_told_apart() -> None:
    stages = {"rollout": 3.0, "ingestion": 1.0, "delivery": 2.0, "update": 4.0}
    assert report_of(10.0, **stages).exposed_s == pytest.approx(3.0)
    assert report_of(7.0, **stages).exposed_s == 0
    assert report_of(8.5, **stages).exposed_s == pytest.approx(1.5)
    assert report_of(8.5, **stages).hidden_s == pytest.approx(1.5)


def test_the_ablation_is_believed_over_the_spans_and_disagreement_is_told() -> None:
    stages = {"rollout": 3.0, "ingestion": 1.0, "delivery": 2.0, "update": 4.0}
    assert report_of(10.0, ExposedLatency(10.0, 8.0, 8, 50), **stages).exposed_s == pytest.approx(2.0)
    assert not report_of(10.0, ExposedLatency(10.0, 8.0, 8, 50), **stages).agrees()
    assert report_of(10.0, ExposedLatency(10.0, 7.1, 8, 50), **stages).agrees()


def test_fifty_microseconds_of_disagreement_are_no_disagreement() -> None:
    stages = dict.fromkeys(STAGES, 1e-5)
    assert report_of(3.9e-5, ExposedLatency(5e-5, 8e-5, 8, 50), **stages).agrees()
    assert not report_of(3.9e-5, ExposedLatency(2e-4, 1e-4, 8, 50), **stages).agrees()


def test_a_negative_ablation_hides_no_more_than_the_path() -> None:
    report = report_of(1.0, ExposedLatency(0.9, 1.0, 8, 50), rollout=0.5, ingestion=0.1, delivery=0.1, update=0.3)
    assert report.exposed_s == pytest.approx(-0.1)
    assert report.hidden_s == pytest.approx(report.path_s)


def test_nothing_measured_reads_as_not_a_number_and_never_as_zero() -> None:
    report = Spans().summary()
    assert report.iteration_s.count == 0
    assert math.isnan(report.iteration_s.p50)
    assert math.isnan(report.path_s)
    assert math.isnan(report.exposed_s)


@given(st.lists(SECONDS, min_size=1, max_size=50))
def test_percentiles_are_those_of_what_was_entered(values: list[float]) -> None:
    spans = Spans()
    spans.iteration.extend(values)
    for value in values:
        spans.stage("update", value)
    summary = spans.summary()
    for percentiles in (summary.iteration_s, summary.stages_s["update"]):
        assert percentiles.count == len(values)
        assert percentiles.p50 == pytest.approx(float(np.percentile(values, 50)))
        assert percentiles.p99 == pytest.approx(float(np.percentile(values, 99)))


def test_spans_are_bounded_and_keep_the_latest() -> None:
    spans = Spans()
    for number in range(10_000):
        spans.iteration.append(float(number))
        spans.stage("rollout", float(number))
    assert len(spans.iteration) == len(spans.stages["rollout"]) == 4096
    assert spans.iteration[-1] == 9_999


def test_the_report_is_plain_data_for_json() -> None:
    exposed = ExposedLatency(2.0, 1.5, 8, 50)
    data = json.loads(json.dumps(report_of(2.0, exposed, **dict.fromkeys(STAGES, 0.5)).as_dict()))
    assert data["exposed_s"] == 0.5
    assert data["ablation"] == {"full_s": 2.0, "ablated_s": 1.5, "blocks": 8}
    assert set(data["stages_s"]) == set(STAGES) > set(PATH_STAGES)
