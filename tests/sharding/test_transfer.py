"""Laws of predicted seconds that the planner's own tests do not hold."""

from __future__ import annotations

import pytest

from conduit_jax.sharding.layout import Layout, LayoutPart
from conduit_jax.sharding.links import Link
from conduit_jax.sharding.topology import Topology
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
