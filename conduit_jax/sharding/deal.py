"""Which device of a new placement takes which block of partitions, so that a move ends soonest.

A placement on a mesh of its own may list its devices in any order: what is delivered depends on partitions, not on where they
are. The transfer plan over whole blocks says which device each block goes to; what may stay, does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from jax.sharding import Mesh

from conduit_jax.sharding.mesh import PARTITION_AXIS
from conduit_jax.sharding.placement import Placement
from conduit_jax.sharding.topology import DEVICE, Topology
from conduit_jax.sharding.transport import transfer_plan
from conduit_jax.types import Device

Rate = Callable[[Device, Device], float]
_RATED_AT_BYTES = 16 << 20  # a piece


def alike(source: Device, target: Device) -> float:
    """The rate of links that are all the same: nothing has to travel within a device."""
    return math.inf if source == target else 1.0


def rates_of(topology: Topology, ranks: dict[Device, int]) -> Rate:
    """Return the rates ``topology`` has between devices of these ``ranks``; those it does not know are all the same."""

    def rate(source: Device, target: Device) -> float:
        if source == target:
            return math.inf
        ends = [topology.endpoint(DEVICE, ranks[one]) for one in (source, target) if one in ranks]
        if len(ends) < 2 or not topology.has_link(*ends):
            return 1.0
        return topology.link(*ends).bytes_per_s(_RATED_AT_BYTES)

    return rate


def dealt(present: Placement, target: Placement, rate: Rate = alike) -> Placement:
    """Return ``target`` with its devices in the order in which a move from ``present`` ends soonest.

    As it is where the order is not free: the learner's mesh, a host tier, several parts. ``rate`` is bytes a second between
    two devices.

    Source: paper, eq. (3): the supply is blocks of partitions, the demand one block a device, and an edge of the program
    takes as long as the slowest of the real ones on which a block's partitions come together.
    """
    old, new = present.part, target.part
    ours = all(
        one.mesh.axis_names == (PARTITION_AXIS,) and not one.far and len(one.parts) == 1 for one in (present, target)
    )
    count = len(new.devices)
    if not ours or count == 1 or old.partitions % len(old.devices) or new.partitions % count:
        return target
    owners = np.repeat(np.arange(len(old.devices)), old.partitions // len(old.devices))
    blocks = [np.bincount(block, minlength=len(old.devices)) for block in owners.reshape(count, -1)]
    seconds = [[_longest(block, old.devices, device, rate) for device in new.devices] for block in blocks]
    rates = [[math.inf if one == 0 else 1 / one for one in row] for row in seconds]
    taken = {flow.source: flow.target for flow in transfer_plan([1] * count, [1] * count, rates).flows}
    best, given = ([seconds[number][order[number]] for number in range(count)] for order in (taken, range(count)))
    if (max(given), sum(given)) <= (max(best), sum(best)):
        return target
    devices = tuple(new.devices[taken[number]] for number in range(count))
    mesh = Mesh(np.array(devices), (PARTITION_AXIS,), axis_types=target.mesh.axis_types)
    return replace(target, parts=(replace(new, devices=devices),), mesh=mesh)


def _longest(block: np.ndarray, sources: tuple[Device, ...], target: Device, rate: Rate) -> float:
    """Return the seconds, in partitions, until all of a block is at ``target``: its parts come at once, one a source."""
    return max(int(rows) / rate(source, target) for rows, source in zip(block, sources, strict=True) if rows)
