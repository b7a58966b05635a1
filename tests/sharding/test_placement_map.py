"""Laws of the placement map: at every size it says what the planner would, from few plans made ahead."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import conduit_jax as conduit
from conduit_jax.sharding.ahead import turning_sizes
from conduit_jax.sharding.links import Link
from conduit_jax.sharding.placement_map import placement_map
from conduit_jax.sharding.planner import plan
from conduit_jax.sharding.topology import Topology
from conduit_jax.sharding.workload import Workload

LINKS = ("pageable->device", "pageable->pinned_host", "pageable->self", "pinned_host->device", "device->pageable")
LINKS += ("device->pinned_host", "device->device", "device->self", "device:gather", "pinned_host:gather")
PAIRS = ("device:0->device:2", "device:2->device:0", "device:1->device:0", "device:3->device:1")


@st.composite
def links(draw: st.DrawFn) -> Link:
    """A table of up to three points, as a profile has them: no bandwidth plus latency."""
    points = sorted(draw(st.sets(st.integers(1, 4000), min_size=1, max_size=3)))
    steps = draw(st.lists(st.integers(1, 50), min_size=len(points), max_size=len(points)))
    seconds = tuple(1e-6 * sum(steps[: number + 1]) for number in range(len(points)))
    return Link(tuple(points), seconds, latency_s=draw(st.sampled_from([0.0, 1e-6, 1e-5])))


def _slower(link: Link) -> Link:
    """The table of a link all of whose kind move: the larger the message, the more it is slowed."""
    seconds = tuple(own * (2 + number) for number, own in enumerate(link.seconds))
    return Link(link.bytes, seconds, latency_s=link.latency_s)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    names = LINKS + (PAIRS if draw(st.booleans()) else ())
    memory = st.integers(0, 4000)
    even, nodes = draw(st.booleans()), draw(st.sampled_from([1, 1, 2, 3]))
    device = (draw(memory),) * 4 if even else draw(st.tuples(memory, memory, memory, memory))
    host = {"pageable": draw(memory), "pinned_host": draw(memory)} | ({"disk": 9000} if draw(st.booleans()) else {})
    found = {name: draw(links()) for name in names}
    if "disk" in host:
        found |= {name: draw(links()) for name in ("pageable->disk", "device->disk", "disk->device")}
    return Topology(
        "drawn",
        "a test",
        device,
        host,
        found,
        network=draw(links()) if nodes > 1 else None,
        nodes=nodes,
        node_memory_bytes=draw(st.sampled_from([None, 3000, 9000])),
        contention={"device->device": draw(st.sampled_from([1.0, 3.0, _slower(found["device->device"])]))},
    )


workloads = st.builds(
    Workload,
    item_bytes=st.integers(1, 10),
    capacity_items=st.integers(1, 100),
    inserted_items=st.integers(0, 50),
    sampled_items=st.integers(0, 500),
    actors=st.sampled_from(["host", "device"]),
    learners=st.sampled_from([(0,), (2,), (0, 1, 2, 3)]),
    local_read_fraction=st.sampled_from([None, 0.0, 0.5, 1.0]),
    partitions=st.sampled_from([None, 1, 4, 8]),
)


@given(topologies(), workloads, st.integers(0, 300), st.data())
def test_the_map_says_what_the_planner_would_at_every_size(
    topology: Topology, workload: Workload, more: int, data: st.DataObject
) -> None:
    def planned(item_bytes: int):
        return plan(topology, workload.with_item_bytes(item_bytes)).layout

    first, largest = workload.item_bytes, workload.item_bytes + more
    found = placement_map(planned, turning_sizes(topology, workload, largest))
    for asked in {first, largest, *data.draw(st.lists(st.integers(first, largest), max_size=30))}:
        try:
            wanted = planned(asked)
        except conduit.PlacementError:
            wanted = None
        assert found(asked) == wanted, asked
