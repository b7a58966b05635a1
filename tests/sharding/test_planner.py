"""Laws of the planner: the cheapest placement that fits, the paper's own decisions, and a reason for everything else."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit_jax.errors import ConfigError, PlacementError
from conduit_jax.sharding.candidates import best_subsets
from conduit_jax.sharding.links import Link
from conduit_jax.sharding.planner import plan, why_not
from conduit_jax.sharding.plans import Plan
from conduit_jax.sharding.topology import Topology, load_topology, shipped_topologies
from conduit_jax.sharding.transfer import TERMS, predicted_s
from conduit_jax.sharding.workload import Workload

ONE_NODE = [name for name in shipped_topologies() if "nodes" not in name]
MILLION = 10**6


def synthetic(dimension: int, **chosen) -> Workload:
    """The paper's synthetic transitions: observation and next observation of ``dimension`` floats, and three words."""
    return Workload(
        item_bytes=8 * dimension + 12, capacity_items=MILLION, inserted_items=512, sampled_items=512, **chosen
    )


def small(**chosen) -> Topology:
    """A node whose links are easy to reckon with: 1 GB/s to and from pageable, 2 pinned, 10 between devices, 100 within one."""
    speeds = {"pageable->device": 1, "pageable->pinned_host": 4, "pageable->self": 4, "pinned_host->device": 2}
    speeds |= {"device->pageable": 1, "device->pinned_host": 2, "device->device": 10, "device->self": 100}
    links = {name: Link.of_bandwidth(speed * 1e9) for name, speed in speeds.items()}
    host = {"pageable": 4000, "pinned_host": 2000}
    return replace(Topology("small", "a test", (1000,) * 4, host, links), **chosen)


@pytest.mark.parametrize("actors", ["host", "device"])
@pytest.mark.parametrize("dimension", [128, 1000, 2000, 5000, 10_000, 20_000])
def test_the_papers_sweep_leaves_one_device_only_when_it_is_full(dimension: int, actors: str) -> None:
    chosen = plan(load_topology("a100_80gb_x8"), synthetic(dimension, actors=actors)).layout
    assert chosen.name.startswith("single_device" if dimension <= 5000 else "shared:")


@pytest.mark.parametrize("name", ["a100_80gb_x8", "h100_x8"])
def test_sharing_beats_host_memory_by_about_the_ratio_of_bandwidths(name: str) -> None:
    topology = load_topology(name).limited({"device": 10**10})  # no single device holds 48 GB, pinned memory does
    workload = Workload(
        item_bytes=48_000, capacity_items=MILLION, sampled_items=10**5, inserted_items=10**5, actors="device"
    )
    got = plan(topology, workload)
    pinned = next(one for one in got.rejected if one.layout.name == "pinned_host")
    assert got.layout.name.startswith("shared:")
    links = topology.links
    ratio = links["device->device"].bytes_per_s(10**9) / links["pinned_host->device"].bytes_per_s(10**9)
    assert pinned.seconds is not None
    assert 0.8 * ratio < pinned.seconds / got.total_s < 1.6 * ratio


def test_four_shards_on_mi250x_are_ranks_0_2_4_6() -> None:
    everyone = tuple(range(8))
    workload = Workload(item_bytes=50_000, capacity_items=MILLION, sampled_items=8 * 10**5, learners=everyone)
    topology = load_topology("mi250x_x8")
    assert best_subsets(topology, workload)[2] == (0, 2, 4, 6)
    got = plan(topology, workload, only=["shared:4"])
    assert [holder.rank for holder in got.layout.parts[0].holders] == [0, 2, 4, 6]


@pytest.mark.parametrize("actors", ["host", "device"])
@pytest.mark.parametrize("item_bytes", [48_000, 192_000])
@pytest.mark.parametrize("name", shipped_topologies())
def test_a_million_images_stay_on_the_devices_of_one_node(name: str, item_bytes: int, actors: str) -> None:
    got = plan(
        load_topology(name), Workload(item_bytes=item_bytes, capacity_items=MILLION, actors=actors, sampled_items=512)
    )
    assert got.layout.nodes == (0,)
    assert got.layout.name.startswith("single_device" if item_bytes == 48_000 else "shared:")
    assert got.layout.parts[0].holders[0].rank == 0  # the learner's own device is one of them


@pytest.mark.parametrize("name", ["a100_80gb_x8_2_nodes", "h100_x8_128_nodes", "mi250x_x8_2_nodes"])
def test_another_node_is_used_only_when_the_memory_of_one_is_exceeded(name: str) -> None:
    topology = load_topology(name)
    most = 8 * (min(topology.device_memory_bytes) // 48_000)
    for capacity, nodes in ((most, 1), (most + 8, 2)):
        workload = Workload(item_bytes=48_000, capacity_items=capacity, sampled_items=512, inserted_items=8)
        assert len(plan(topology, workload, only=["device"]).layout.nodes) == nodes


@pytest.mark.parametrize("partitions", [None, 1, 3, 16])
@pytest.mark.parametrize("actors", ["host", "device"])
@pytest.mark.parametrize("name", ["a100_80gb_x8_2_nodes", "h100_x8_2_nodes", "mi250x_x8_2_nodes"])
def test_no_traffic_makes_another_node_worth_its_while(name: str, actors: str, partitions: int | None) -> None:
    traffic = {"inserted_items": 512, "sampled_items": 512, "actors": actors, "partitions": partitions}
    got = plan(load_topology(name), Workload(item_bytes=48_000, capacity_items=MILLION, **traffic))
    assert got.layout.nodes == (0,)
    beyond = {one.reason for one in got.rejected if len(one.layout.nodes) > 1 and one.seconds is None}
    assert beyond == (
        {"another node is used only where the memory of one does not hold it"} if partitions != 1 else set()
    )


def test_learners_on_several_nodes_may_have_their_shards_beside_them() -> None:
    topology = load_topology("a100_80gb_x8_2_nodes")
    traffic = {"inserted_items": 512, "sampled_items": 512, "actors": "device"}
    local = {"learners": tuple(range(16)), "local_read_fraction": 1.0, "local_write_fraction": 1.0, "partitions": 16}
    got = plan(topology, Workload(item_bytes=48_000, capacity_items=MILLION, **traffic, **local))
    assert got.layout.name == "shared:8@2_nodes"


def test_a_hundred_and_twenty_eight_nodes_are_balanced() -> None:
    everyone = tuple(range(1024))
    workload = Workload(
        item_bytes=192_000,
        capacity_items=100 * MILLION,
        sampled_items=32_768,
        learners=everyone,
        local_read_fraction=1.0,
    )
    got = plan(load_topology("mi250x_x8_128_nodes"), workload, only=["device"])
    counts = {holder.node: 0 for holder in got.layout.parts[0].holders}
    for holder in got.layout.parts[0].holders:
        counts[holder.node] += 1
    assert len(set(counts.values())) == 1
    assert len(got.layout.nodes) > 32


workloads = st.builds(
    Workload,
    item_bytes=st.integers(1, 40),
    capacity_items=st.integers(1, 400),
    inserted_items=st.integers(0, 50),
    sampled_items=st.integers(0, 500),
    actors=st.sampled_from(["host", "device"]),
    learners=st.sampled_from([(0,), (2,), (0, 1, 2, 3)]),
    local_read_fraction=st.sampled_from([None, 0.0, 0.5, 1.0]),
    partitions=st.sampled_from([None, 1, 4, 8]),
)
sizes = st.integers(0, 5000)


def planned_or_none(topology: Topology, workload: Workload, only=()) -> Plan | None:
    try:
        return plan(topology, workload, only=only)
    except PlacementError:
        return None


@given(workloads, st.tuples(sizes, sizes, sizes, sizes), sizes, sizes)
def test_the_plan_is_the_least_of_what_fits_and_everything_else_has_a_reason(
    workload, devices, pinned, pageable
) -> None:
    topology = small(device_memory_bytes=devices, host_memory_bytes={"pinned_host": pinned, "pageable": pageable})
    if sum(devices) + pinned + pageable < workload.storage_bytes:
        with pytest.raises(PlacementError, match="lacks"):
            plan(topology, workload)
        return
    got = planned_or_none(topology, workload)
    if got is None:
        assert max(*devices, pinned, pageable) < workload.storage_bytes  # else one tier would do
        return
    assert not why_not(topology, got.layout, workload)
    for where, size in got.layout.bytes_by_endpoint(workload).items():
        assert size <= topology.memory_bytes(where)
    for one in got.rejected:
        assert one.reason
        if one.seconds is not None:
            assert one.seconds >= got.total_s * (1 - 1e-9)
        assert (one.seconds is None) == bool(why_not(topology, one.layout, workload))
    assert sum(sum(part.partitions) for part in got.layout.parts) >= 1
    if workload.partitions:
        assert sum(got.layout.parts[0].partitions) == workload.partitions


@given(workloads.filter(lambda load: load.local_read_fraction is None), st.integers(2, 4))
def test_times_of_a_leg_add_over_the_holders_by_their_shares(workload: Workload, count: int) -> None:
    topology = small()
    got = planned_or_none(topology, replace(workload, partitions=None), only=[f"shared:{count}"])
    if got is None or got.layout.name.endswith("uneven"):
        return
    seconds = predicted_s(topology, got.layout, got.workload)
    each = workload.sampled_items * workload.item_bytes / len(workload.learners)
    ranks = [holder.rank for holder in got.layout.parts[0].holders]
    by_hand = [
        sum(each / count / (100e9 if rank == learner else 10e9) for rank in ranks) for learner in workload.learners
    ]
    assert seconds["sample_s"] == pytest.approx(sum(by_hand) / len(by_hand))
    assert set(seconds) == set(TERMS)


def test_the_replay_ratio_decides_which_leg_counts() -> None:
    topology = small(device_memory_bytes=(10,) * 4)
    links = dict(topology.links) | {"pageable->pinned_host": Link.of_bandwidth(1e8)}
    topology = replace(topology, links=links)
    often = Workload(item_bytes=10, capacity_items=100, inserted_items=1, sampled_items=100)
    rarely = replace(often, inserted_items=100, sampled_items=1)
    assert plan(topology, often).layout.name == "pinned_host"
    assert plan(topology, rarely).layout.name == "pageable"


def test_local_draws_cost_the_links_nothing() -> None:
    everyone = (0, 1, 2, 3)
    workload = Workload(
        item_bytes=10, capacity_items=100, sampled_items=400, learners=everyone, local_read_fraction=1.0
    )
    got = plan(small(), workload, only=["shared:4"])
    assert got.seconds["sample_s"] == pytest.approx(1000 / 100e9)


def test_contention_is_charged_to_those_that_move_at_once() -> None:
    contended = small(contention={"device->device": 12.0, "pinned_host->device": 4.0})
    alone = Workload(item_bytes=10, capacity_items=100, sampled_items=400)
    together = replace(alone, learners=(0, 1, 2, 3))
    assert plan(contended, alone, only=["pinned_host"]).seconds["contention_s"] == 0
    pinned = plan(contended, together, only=["pinned_host"]).seconds
    assert pinned["contention_s"] == pytest.approx(3 * pinned["sample_s"])


def test_leaves_are_split_over_tiers_only_when_no_pure_tier_fits() -> None:
    topology = small(device_memory_bytes=(1000,) * 2, host_memory_bytes={"pinned_host": 3000})
    leaves = {"image": 29, "reward": 6}
    fits = Workload(item_bytes=35, capacity_items=80, leaves=leaves, partitions=1)
    assert not plan(topology, fits).layout.name.startswith("mixed")
    mixed = plan(topology, replace(fits, capacity_items=100))
    by_tier = {part.tier: part.leaves for part in mixed.layout.parts}
    assert by_tier == {"device": ("reward",), "pinned_host": ("image",)}
    assert sum(size for size, _ in mixed.memory.values()) == 3500


def test_partitions_are_dealt_unevenly_where_even_shares_do_not_fit() -> None:
    topology = small(device_memory_bytes=(200, 1000), host_memory_bytes={})
    got = plan(topology, Workload(item_bytes=10, capacity_items=110, partitions=11))
    assert got.layout.name == "shared:2:uneven"
    assert got.layout.parts[0].partitions == (2, 9)


def test_the_disk_is_taken_only_when_nothing_else_fits() -> None:
    links = dict(small().links) | {"pageable->disk": Link.of_bandwidth(1e12), "disk->device": Link.of_bandwidth(1e12)}
    topology = small(links=links, host_memory_bytes={"pageable": 2000, "disk": 10**6})
    fits = Workload(item_bytes=10, capacity_items=200)
    got = plan(topology, fits)
    assert got.layout.name != "disk"
    assert any(one.layout.name == "disk" and "nothing else" in one.reason for one in got.rejected)
    assert plan(topology, replace(fits, capacity_items=1000)).layout.name == "disk"


def test_a_pinned_candidate_that_does_not_fit_says_what_would() -> None:
    with pytest.raises(PlacementError) as raised:
        plan(small(), Workload(item_bytes=10, capacity_items=250), only=["pinned_host"])
    for words in ("pinned_host was asked for", "lacks 500 bytes", "capacity=200", "500 bytes more of pinned_host"):
        assert words in str(raised.value)
    fitting = plan(small(), Workload(item_bytes=10, capacity_items=200), only=["pinned_host"])
    assert [one.layout.name for one in fitting.rejected] == []


def test_a_tier_that_the_probe_found_broken_is_refused_with_its_reason() -> None:
    topology = small(unavailable={"pinned_host": "gather raised INTERNAL"})
    got = plan(topology, Workload(item_bytes=10, capacity_items=10))
    assert next(one for one in got.rejected if one.layout.name == "pinned_host").reason.endswith("INTERNAL")


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({"item_bytes": 0}, "item_bytes"),
        ({"sampled_items": -1}, "sampled_items"),
        ({"actors": "hosts"}, "did you mean 'host'"),
        ({"local_read_fraction": 1.5}, "local_read_fraction"),
        ({"learners": ()}, "Learners"),
        ({"learners": (0, 0)}, "each once"),
        ({"leaves": {"a": 3}}, "add up"),
        ({"partitions": 0}, "partitions"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(chosen, says) -> None:
    with pytest.raises(ConfigError, match=says):
        Workload(**({"item_bytes": 4, "capacity_items": 4} | chosen))


def test_names_and_ranks_that_are_not_there_are_refused() -> None:
    workload = Workload(item_bytes=10, capacity_items=10)
    with pytest.raises(ConfigError, match="did you mean 'pinned_host'"):
        plan(small(), workload, only=["pined_host"])
    with pytest.raises(ConfigError, match="No candidate"):
        plan(small(), workload, only=["shared:9"])
    with pytest.raises(ConfigError, match="no such device"):
        plan(small(), replace(workload, learners=(4,)))


def test_a_plan_prints_every_candidate_and_goes_into_json() -> None:
    got = plan(load_topology("a100_80gb_x8"), synthetic(10_000))
    text = str(got)
    for one in got.rejected:
        assert one.layout.name in text
    for words in ("80.0 GB", "shared:2", "times the time", "lacks 12,000,000 bytes on device:0"):
        assert words in text
    data = json.loads(json.dumps(got.as_dict()))
    assert data["placement"]["name"] == "shared:2"
    assert data["total_s"] == pytest.approx(sum(data["seconds"].values()))


def test_subsets_grow_by_the_least_mean_time() -> None:
    topology = load_topology("mi250x_x8")
    workload = Workload(item_bytes=10**6, capacity_items=1, sampled_items=8000, learners=tuple(range(8)))
    times = json.loads(json.dumps({name: link.seconds[0] for name, link in topology.links.items() if ":" in name}))
    for subset in best_subsets(topology, workload):

        def mean(ranks):
            return sum(times[f"device:{i}->device:{j}"] for i in ranks for j in range(8)) / len(ranks)

        assert mean(subset) == pytest.approx(min(map(mean, itertools.combinations(range(8), len(subset)))))
