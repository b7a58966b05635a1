"""From a layout on a topology to a placement on this process' devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from conduit_jax.sharding.layout import Layout, LayoutPart
from conduit_jax.sharding.memory import DEVICE, PINNED_HOST
from conduit_jax.sharding.mesh import PARTITION_AXIS, single_device_mesh
from conduit_jax.sharding.placement import PAGEABLE, LearnerSite, Part, Placement, resolve_placement
from conduit_jax.sharding.surroundings import learner_devices
from conduit_jax.types import Device


def realise(layout: Layout, devices: Sequence[Device], site: LearnerSite, partitions: int) -> Placement:
    """Return ``layout`` on ``devices``: on the learners' mesh where a mixture has all of their devices, else on a mesh of its own.

    Pinned leaves of a mixture are in the host memory of the devices that have its others. Where the parts are not alike, or
    pageable host memory has one, they are scattered, and the learner's (first) device is their home.
    """
    if len(layout.parts) == 1 and layout.parts[0].tier != DEVICE:
        tier = layout.parts[0].tier
        return resolve_placement(PINNED_HOST if tier == PINNED_HOST else PAGEABLE, site, partitions, 0)
    near = next((part for part in layout.parts if part.tier == DEVICE), None)
    chosen = tuple(devices[holder.rank] for holder in near.holders) if near else (site.device,)
    if near is None or layout.scattered:
        parts = tuple(_part(part, devices, site, partitions) for part in layout.parts)
        return Placement(layout.name, parts, single_device_mesh(site.device), PARTITION_AXIS)
    if len(layout.parts) > 1 and len(chosen) > 1 and chosen == tuple(learner_devices(site)):
        base = resolve_placement(DEVICE, site, partitions, 0)
    else:
        mesh = Mesh(np.array(chosen), (PARTITION_AXIS,), axis_types=(AxisType.Auto,))
        base = Placement(layout.name, (Part(chosen, DEVICE, partitions),), mesh, PARTITION_AXIS)
    parts = tuple(Part(base.part.devices, part.tier, partitions, part.leaves) for part in layout.parts)
    return replace(base, name=layout.name, parts=parts)


def _part(part: LayoutPart, devices: Sequence[Device], site: LearnerSite, partitions: int) -> Part:
    """Return a part of a scattered layout on devices; pageable memory is that of the CPU backend."""
    if part.tier == DEVICE:
        chosen = tuple(devices[holder.rank] for holder in part.holders)
        return Part(chosen, DEVICE, partitions, part.leaves, part.partitions)
    device = site.device if part.tier == PINNED_HOST else jax.devices("cpu")[0]
    return Part((device,), PINNED_HOST if part.tier == PINNED_HOST else DEVICE, partitions, part.leaves)
