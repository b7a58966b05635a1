"""Laws of predicted seconds that the planner's own tests do not hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conduit_jax.sharding.layout import Layout, LayoutPart
from conduit_jax.sharding.links import Link
from conduit_jax.sharding.topology import Endpoint, Topology, load_topology
from conduit_jax.sharding.transfer import predicted_s
from conduit_jax.sharding.workload import Workload


def test_rows_of_a_scattered_buffer_pass_through_the_first_learner() -> None:
    """Three uneven holders: rows go from the host to the home, from there to the holders, and back to both learners by the home."""
    speeds = {"pageable->device": 1e9, "device->device": 2e9, "device->self": 1e12}
    topology = Topology(
        name="made up",
        source="a test",
        device_memory_bytes=(10**9,) * 4,
        host_memory_bytes={},
        links={name: Link.of_bandwidth(speed) for name, speed in speeds.items()},
        launch_s=(1.0, 2.0, 3.0, 4.0),
    )
    load = Workload(
        item_bytes=1000, capacity_items=800, inserted_items=100, sampled_items=200, learners=(0, 1), partitions=8
    )
    holders = tuple(topology.endpoint("device", rank) for rank in (1, 2, 3))
    even = Layout("even", (LayoutPart(holders[:2], (4, 4)),))
    uneven = Layout("uneven", (LayoutPart(holders, (3, 3, 2)),))
    assert not even.scattered
    assert uneven.scattered
    seconds = predicted_s(topology, uneven, load)
    assert predicted_s(topology, even, load)["detour_s"] == 0
    assert seconds["launch_s"] == 3.0 + 1.0
    assert seconds["insert_s"] == pytest.approx(100_000 / 2e9)
    assert seconds["sample_s"] == pytest.approx(200_000 / 2e9)
    assert seconds["detour_s"] == pytest.approx(100_000 / 1e9 + 100_000 / 2e9)


@pytest.mark.parametrize("tier", ["pageable", "pinned_host"])
def test_what_another_nodes_host_holds_goes_over_its_pcie_link_too(tier: str) -> None:
    """A node's own host: one hop. Another's: to a device there, over the network, and back the same way for inserts of the host."""
    topology = load_topology("h100_x8_2_nodes")
    load = Workload(item_bytes=1000, capacity_items=10**6, inserted_items=10**4, sampled_items=4 * 10**4)
    own, other = (
        predicted_s(topology, Layout("", (LayoutPart((Endpoint(tier, node),), (1,)),)), load) for node in (0, 1)
    )
    network = topology.network
    assert network is not None
    sampled, inserted = 4 * 10**7, 10**7
    out, into, up = (topology.links[name] for name in (f"{tier}->device", f"device->{tier}", "pageable->device"))
    assert own["sample_s"] == pytest.approx(out.transfer_s(sampled))
    assert other["sample_s"] == pytest.approx(out.transfer_s(sampled) + network.transfer_s(sampled))
    hops = up.transfer_s(inserted) + into.transfer_s(inserted)
    assert other["insert_s"] == pytest.approx(hops + network.transfer_s(inserted))


def test_devices_of_two_nodes_are_as_far_apart_as_the_network_says() -> None:
    topology = load_topology("h100_x8_2_nodes")
    load = Workload(item_bytes=1000, capacity_items=10**6, inserted_items=0, sampled_items=4 * 10**4)
    far = Layout("", (LayoutPart((topology.endpoint("device", 8),), (1,)),))
    assert topology.network is not None
    assert predicted_s(topology, far, load)["sample_s"] == pytest.approx(topology.network.transfer_s(4 * 10**7))


def test_contention_is_that_of_the_messages_size() -> None:
    """A table: small messages are slowed three times, large ones hardly."""
    alone = Link((1000, 10**6), (1e-3, 1e-2))
    links = {name: alone for name in ("pageable->device", "pageable->self", "pageable->pinned_host")}
    topology = Topology("made up", "a test", (10**9,) * 4, {"pageable": 10**12}, links)
    slow = replace(topology, contention={"pageable->device": Link((1000, 10**6), (3e-3, 1.1e-2))})
    host = Layout("", (LayoutPart((Endpoint("pageable"),), (1,)),))
    for items, extra in ((4, 2e-3), (4000, 1e-3)):
        load = Workload(
            item_bytes=1000, capacity_items=10, inserted_items=0, sampled_items=items, learners=(0, 1, 2, 3)
        )
        assert predicted_s(topology, host, load)["contention_s"] == 0
        assert predicted_s(slow, host, load)["contention_s"] == pytest.approx(extra)
    assert Topology.from_dict(slow.as_dict()) == slow
