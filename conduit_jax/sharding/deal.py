"""Which device of a new placement takes which block of partitions, so that a move ends soonest.

A placement on a mesh of its own may list its devices in any order: what is delivered depends on partitions, not on where they
are. The transfer plan over whole blocks says which device each block goes to; blocks that may stay, do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from jax.sharding import Mesh

from conduit_jax.sharding.mesh import PARTITION_AXIS
from conduit_jax.sharding.placement import Placement
from conduit_jax.sharding.transport import transfer_plan
from conduit_jax.types import Device

Rate = Callable[[Device, Device], float]


def alike(source: Device, target: Device) -> float:
    """The rate of links that are all the same: nothing has to travel within a device."""
    return math.inf if source == target else 1.0


def dealt(present: Placement, target: Placement, rate: Rate = alike) -> Placement:
    """Return ``target`` with its devices in the order in which a move from ``present`` ends soonest.

    As it is where the order is not free (the learner's mesh, a host tier) or a block would be put together from several
    devices. ``rate`` is bytes a second between two devices.

    Source: paper, eq. (3), over blocks of partitions.
    """
    old, new = present.part, target.part
    ours = all(
        one.mesh.axis_names == (PARTITION_AXIS,) and not one.far and len(one.parts) == 1 for one in (present, target)
    )
    held, block = old.partitions // len(old.devices), new.partitions // len(new.devices)
    if not ours or len(new.devices) == 1 or held % block:
        return target
    supply = [held // block] * len(old.devices)
    rates = [[rate(source, device) for device in new.devices] for source in old.devices]
    takers: dict[int, list[Device]] = {source: [] for source in range(len(old.devices))}
    for source, taker, count in transfer_plan(supply, [1] * len(new.devices), rates).flows:
        takers[source] += [new.devices[taker]] * count
    devices = tuple(device for source in takers for device in takers[source])
    mesh = Mesh(np.array(devices), (PARTITION_AXIS,), axis_types=target.mesh.axis_types)
    return replace(target, parts=(replace(new, devices=devices),), mesh=mesh)
