"""Laws of topologies: links interpolate what was measured, JSON brings everything back, nonsense is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit_jax.errors import ConfigError
from conduit_jax.sharding.links import Link
from conduit_jax.sharding.topology import Endpoint, Topology, load_topology, shipped_topologies


@st.composite
def tables(draw):
    sizes = sorted(draw(st.sets(st.integers(1, 10**9), min_size=1, max_size=6)))
    times = draw(st.lists(st.floats(1e-6, 10), min_size=len(sizes), max_size=len(sizes)))
    fresh = draw(st.one_of(st.just([]), st.lists(st.floats(1e-6, 10), min_size=len(sizes), max_size=len(sizes))))
    return Link(tuple(sizes), tuple(times), tuple(fresh), latency_s=draw(st.floats(0, 1e-3)))


@given(tables(), st.integers(0, 2 * 10**9))
def test_a_link_goes_through_its_points_and_stays_between_them(link: Link, size: int) -> None:
    for measured, seconds in zip(link.bytes, link.seconds, strict=True):
        assert link.transfer_s(measured) == pytest.approx(seconds)
    assert link.transfer_s(0) == 0
    got = link.transfer_s(size)
    if 0 < size <= link.bytes[-1]:
        assert min(link.latency_s, *link.seconds) <= got * (1 + 1e-9)
        assert got <= max(link.latency_s, *link.seconds) * (1 + 1e-9)
    elif size:
        assert got >= link.seconds[-1] * (1 - 1e-9)


@given(tables())
def test_links_come_back_from_json(link: Link) -> None:
    assert Link.from_dict(json.loads(json.dumps(link.as_dict()))) == link


def test_bandwidth_and_latency_make_a_link() -> None:
    link = Link.from_dict({"bytes_per_s": 1e9, "latency_s": 1e-3})
    assert link.transfer_s(10**6) == pytest.approx(2e-3)
    assert link.transfer_s(10**10) == pytest.approx(10 + 1e-3)


@pytest.mark.parametrize("name", shipped_topologies())
def test_shipped_topologies_say_where_they_come_from_and_come_back(name: str, tmp_path) -> None:
    topology = load_topology(name)
    assert topology.name == name
    assert topology.source
    topology.save(tmp_path / "copy.json")
    assert load_topology(tmp_path / "copy.json") == topology


def test_the_systems_of_the_paper_are_shipped() -> None:
    kinds = ("mi250x_x8", "a100_80gb_x8", "h100_x8")
    assert set(shipped_topologies()) >= {kind + more for kind in kinds for more in ("", "_2_nodes", "_128_nodes")}


def test_links_are_found_from_the_particular_to_the_general() -> None:
    topology = load_topology("mi250x_x8_2_nodes")
    device = [topology.endpoint("device", rank) for rank in range(16)]
    assert topology.link(device[0], device[1]).seconds == (0.053,)
    assert topology.link(device[8], device[9]).seconds == (0.053,)
    assert topology.link(device[0], device[9]) is topology.network
    assert topology.link(Endpoint("pinned_host", 1), device[9]) is topology.links["pinned_host->device"]
    with pytest.raises(ConfigError, match="no such link"):
        topology.link(Endpoint("disk"), device[0])


def test_limits_only_lower() -> None:
    topology = load_topology("h100_x8")
    limited = topology.limited({"device": 10, "pageable": 1 << 60})
    assert limited.device_memory_bytes == (10,) * 8
    assert limited.host_memory_bytes == topology.host_memory_bytes
    with pytest.raises(ConfigError, match="did you mean 'device'"):
        topology.limited({"devices": 10})
    with pytest.raises(ConfigError, match="limits"):
        topology.limited({"device": -1})


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"bytes": [1, 2], "seconds": [1]},
        {"bytes": [2, 1], "seconds": [1, 1]},
        {"bytes": [], "seconds": []},
        {"bytes": [1], "seconds": [0]},
        {"bytes": [1], "seconds": [float("nan")]},
        {"bytes": [1], "seconds": [1], "color": "red"},
        {"bytes_per_s": 0},
        {"bytes_per_s": -1.0},
        [1],
    ],
)
def test_a_link_that_cannot_be_is_refused(data) -> None:
    with pytest.raises(ConfigError):
        Link.from_dict(data)


def test_files_that_hold_no_topology_are_refused_by_name(tmp_path) -> None:
    good = load_topology("h100_x8").as_dict()
    for content, says in (
        ("not json", "no JSON"),
        ("[]", "No topology"),
        (json.dumps({**good, "color": 1}), "color"),
        (json.dumps({**good, "device_memory_bytes": []}), "devices"),
        (json.dumps({**good, "device_memory_bytes": 3}), "No topology"),
        (json.dumps({**good, "links": [1]}), "No topology"),
        (json.dumps({**good, "nodes": 2}), "network"),
        (json.dumps({**good, "contention": {"device->device": "twice"}}), "No topology"),
        (json.dumps({**good, "contention": {"device->device": -3}}), "finite number"),
        (json.dumps({**good, "host_memory_bytes": {"pined_host": 1}}), "pinned_host"),
    ):
        path = tmp_path / "topology.json"
        path.write_text(content)
        with pytest.raises(ConfigError, match=says):
            load_topology(path)
    with pytest.raises(ConfigError, match="did you mean 'h100_x8'"):
        load_topology("h100_8x")
    with pytest.raises(ConfigError, match="no such file"):
        load_topology(tmp_path / "absent.json")
    assert isinstance(load_topology("h100_x8"), Topology)
