"""Laws of dealing: blocks that may stay do, slow links are avoided, and nothing else about a placement changes."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from conduit_jax.sharding.deal import dealt
from conduit_jax.sharding.mesh import PARTITION_AXIS
from conduit_jax.sharding.placement import LearnerSite, Part, Placement, resolve_placement


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
        (over(0, 1), over(0, 1, 2, 3), [0, 2, 1, 3]),
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

    assert ranks_of(dealt(over(0, 1), over(0, 1, 2, 3), rate)) == [0, 3, 1, 2]


def test_an_order_that_is_not_free_stays_as_it_is() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    learners = resolve_placement("device", LearnerSite(jax.devices()[0], mesh, "data"), 8, 0)
    for present, target in ((over(0, 1), learners), (over(0, 1), over(5)), (over(0, 1, 2, 3), over(4, 5))):
        assert dealt(present, target) is target
