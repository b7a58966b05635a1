"""Laws of the timeline and of the two lanes: what Perfetto opens, stalls by cause, and spans that explain an iteration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conduit_jax as conduit
from conduit_jax.schedule.metrics import PATH_STAGES, STAGES, Lanes
from conduit_jax.schedule.trace import TRACKS, Event, Recorder
from conduit_jax.sharding.mesh import PARTITION_AXIS, single_device_mesh

SECONDS = st.floats(1e-6, 1e-2)


def test_a_timeline_has_named_tracks_and_spans_where_they_were(tmp_path: Path) -> None:
    recorder = Recorder(kept=3)
    for number in range(5):
        recorder.add(Event("update", f"update {number}", 1.0 + number, 1.5 + number, {"batch": number}))
    with recorder.wait("queue"):
        pass
    assert recorder.write(tmp_path / "trace.json") == 3
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(names.values()) == list(TRACKS)
    spans = [event for event in events if event["ph"] == "X"]
    assert [(names[span["tid"]], span["name"]) for span in spans[:2]] == [
        ("update", "update 3"),
        ("update", "update 4"),
    ]
    assert (spans[0]["ts"], spans[0]["dur"], spans[1]["ts"]) == (0.0, 500_000.0, 1_000_000.0)
    assert names[spans[2]["tid"]] == "wait"
    assert recorder.dropped == 3
    assert recorder.stalls_s["queue"] > 0


def test_a_loop_leaves_a_timeline_of_its_stages(tmp_path: Path) -> None:
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=8), replay=conduit.ReplayConfig(capacity=64), schedule="overlap"
    )
    rollout = jax.jit(lambda actor, policy, key: (actor, {"x": jax.random.normal(key, (2, 8))}))
    loop = conduit.wrap(
        lambda learner, sample: (learner + 1, sample.data["x"].mean()),
        rollout=rollout, policy=lambda learner: learner, plane=plane,
    )  # fmt: skip
    loop.run(jnp.int32(0), jnp.int32(0), iterations=40)
    assert plane.trace(tmp_path / "trace.json") > 150
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    seen = [names[event["tid"]] for event in events if event["ph"] == "X"]
    assert set(seen) - {"dispatch"} == {"rollout", "ingestion", "delivery", "update", "wait"}  # left where it pays
    assert seen.count("update") == 40
    latency = plane.stats().as_dict()["latency"]
    assert set(latency["lanes"]["host_s"]) == set(STAGES)


def test_transfers_to_the_buffer_and_to_the_learner_have_a_track_of_their_own(tmp_path: Path) -> None:
    own = jax.devices()[1]
    placement = conduit.Placement(
        "own", (conduit.Part((own,), "device", 1),), single_device_mesh(own), PARTITION_AXIS
    )  # fmt: skip
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=4),
        replay=conduit.ReplayConfig(capacity=16),
        placement=placement,
        schedule="sequential",
    )
    unit = {"x": np.ones((2, 4), np.float32)}
    at_home = jax.device_put(unit, own)
    for rollout in (unit, unit, at_home):
        plane.push(rollout)
    plane.pull()
    plane.migrate("device")
    plane.migrate(placement)
    plane.pull()
    plane.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    track = 1 + TRACKS.index("transfer")
    names = [event["name"] for event in events if event["ph"] == "X" and event["tid"] == track]
    assert names.count("unit to the buffer") == 2
    assert names.count("batches to the learner") == 2


def lanes(host: dict[str, float], device: dict[str, float], waited: float = 0.0) -> Lanes:
    return Lanes(host, device, waited)


def test_waits_of_stages_run_one_by_one_are_not_taken_for_computation() -> None:
    """A device-bound loop: 1 + 4 + 4 + 8 ms of device work, dispatched in 1 ms; without the path 9 ms remain."""
    device = {"rollout": 1e-3, "ingestion": 4e-3, "delivery": 4e-3, "update": 8e-3}
    bound = lanes(dict.fromkeys(STAGES, 2.5e-4), device, waited=16e-3)
    assert bound.exposed_s(17e-3) == pytest.approx(8e-3)


def test_a_path_that_is_only_dispatched_shows_in_a_host_bound_loop() -> None:
    host = {"rollout": 1e-3, "ingestion": 2e-4, "delivery": 3e-4, "update": 2e-3}
    assert lanes(host, dict.fromkeys(STAGES, 0.0)).exposed_s(4e-3) == pytest.approx(5e-4)


def test_a_call_that_is_no_stage_and_waits_for_the_device_is_not_taken_for_the_hosts_own_work() -> None:
    """Publishing waits for updates of 8 ms: 9 of 17 ms pass outside of all stages, of which the host works 0.1."""
    device = {"rollout": 1e-3, "ingestion": 4e-3, "delivery": 4e-3, "update": 8e-3}
    host = dict.fromkeys(STAGES, 2e-3)
    assert Lanes(host, device, 0.0).exposed_s(17e-3) == pytest.approx(4e-3), "unknown: it might be work"
    assert Lanes(host, device, 0.0, 1e-4).exposed_s(17e-3) == pytest.approx(8e-3)
    assert Lanes(host, device, 0.0, 1e-4).exposed_s(34e-3) == pytest.approx(16e-3), "all of it slowed alike"


@given(st.tuples(*[SECONDS] * 4), st.tuples(*[SECONDS] * 4), SECONDS)
def test_what_is_exposed_is_never_more_than_what_the_path_occupies(host: Any, device: Any, other: float) -> None:
    own = lanes(dict(zip(STAGES, host, strict=True)), dict(zip(STAGES, device, strict=True)))
    iteration = own.iteration_s(other)
    waited = iteration - other - sum(host)
    exposed = Lanes(own.host_s, own.device_s, waited).exposed_s(iteration)
    path = sum(own.host_s[name] + own.device_s[name] for name in PATH_STAGES)
    assert -1e-12 <= exposed <= path + 1e-12
