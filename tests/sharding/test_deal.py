"""Laws of dealing: blocks that may stay do, slow links are avoided, and nothing else about a placement changes."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from conduit_jax.sharding.deal import dealt, rates_of
from conduit_jax.sharding.links import Link
from conduit_jax.sharding.mesh import PARTITION_AXIS
from conduit_jax.sharding.placement import LearnerSite, Part, Placement, resolve_placement
from conduit_jax.sharding.surroundings import memory_only


def over(*ranks: int, partitions: int = 8) -> Placement:
    devices = tuple(jax.devices()[rank] for rank in ranks)
    mesh = Mesh(np.array(devices), (PARTITION_AXIS,), axis_types=(AxisType.Auto,))
    return Placement(f"shared:{len(ranks)}", (Part(devices, "device", partitions),), mesh, PARTITION_AXIS)


def ranks_of(placement: Placement) -> list[int]:
    assert [device.id for device in placement.mesh.devices.flat] == [device.id for device in placement.part.devices]
    return [device.id for device in placement.part.devices]


@pytest.mark.parametrize(
    ("present", "target", "want"),
    [
        (over(0), over(0, 1), [0, 1]),
        (over(0, 1), over(0, 1, 2, 3), None),
        (over(2, 5), over(0, 2, 5, 7), None),
        (over(0, 2, 1, 3), over(0, 1, 2, 3), [0, 2, 1, 3]),
    ],
)
def test_blocks_that_may_stay_do(present: Placement, target: Placement, want: list[int] | None) -> None:
    found = dealt(present, target)
    assert sorted(ranks_of(found)) == sorted(ranks_of(target))
    held = {device: number for number, device in enumerate(ranks_of(present))}
    block = len(ranks_of(target)) // len(ranks_of(present))
    stay = [device for at, device in enumerate(ranks_of(found)) if held.get(device) == at // block]
    assert len(stay) == len(set(ranks_of(present)) & set(ranks_of(target)))
    assert want is None or ranks_of(found) == want


def test_a_slow_link_is_used_for_nothing_that_another_can_carry() -> None:
    def rate(source: jax.Device, target: jax.Device) -> float:
        return math.inf if source == target else 0.1 if (source.id, target.id) in {(0, 2), (1, 3)} else 1.0

    assert avoids_slow_links(dealt(over(0, 1), over(0, 1, 2, 3), rate))


def avoids_slow_links(found: Placement) -> bool:
    """Two blocks stay, the one that leaves 0 goes to 3, that of 1 to 2."""
    order = ranks_of(found)
    return {0, 3} == set(order[:2]) and {1, 2} == set(order[2:])


def test_an_order_that_is_not_free_stays_as_it_is() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    learners = resolve_placement("device", LearnerSite(jax.devices()[0], mesh, "data"), 8, 0)
    for present, target in ((over(0, 1), learners), (over(0, 1), over(5)), (learners, over(4, 5))):
        assert dealt(present, target) is target


def makespan(present: Placement, target: Placement) -> int:
    """Partitions on the fullest edge between two devices."""
    owner = {number: device for device, own in spans(present).items() for number in own}
    edges: dict[tuple[int, int], int] = {}
    for device, own in spans(target).items():
        for number in own:
            if owner[number] != device:
                edges[owner[number], device] = edges.get((owner[number], device), 0) + 1
    return max(edges.values(), default=0)


def spans(placement: Placement) -> dict[int, range]:
    each = placement.part.partitions // len(ranks_of(placement))
    return {device: range(at * each, (at + 1) * each) for at, device in enumerate(ranks_of(placement))}


@pytest.mark.parametrize(
    ("present", "target"),
    [
        (over(0, 1, partitions=24), over(0, 1, 2, partitions=24)),
        (over(0, 1, 2, partitions=24), over(0, 1, 2, 3, partitions=24)),
        (over(0, 1, 2, 3), over(0, 1)),
        (over(3, 1, partitions=12), over(0, 1, 2, partitions=12)),
        (over(2, 0, 1, partitions=12), over(0, 1, partitions=12)),
    ],
    ids=str,
)
def test_no_other_order_ends_sooner(present: Placement, target: Placement) -> None:
    found = dealt(present, target)
    orders = [over(*order, partitions=target.part.partitions) for order in permutations(ranks_of(target))]
    assert makespan(present, found) == min(makespan(present, one) for one in orders)


def test_rates_are_those_of_the_links_where_they_are_known() -> None:
    slow = {name: Link.of_bandwidth(5e9) for name in ("device:0->device:2", "device:1->device:3")}
    links = {**slow, "device->device": Link.of_bandwidth(50e9)}
    devices = jax.devices()
    topology = replace(memory_only(devices), links=links)
    rate = rates_of(topology, {device: rank for rank, device in enumerate(devices[:6])})
    assert rate(devices[0], devices[0]) == math.inf
    assert rate(devices[0], devices[2]) == pytest.approx(5e9)
    assert rate(devices[2], devices[0]) == pytest.approx(50e9)
    assert rate(devices[2], devices[7]) == 1.0
    assert avoids_slow_links(dealt(over(0, 1), over(0, 1, 2, 3), rate))
