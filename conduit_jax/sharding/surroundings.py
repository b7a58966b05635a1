"""What an automatic placement finds here: this process' devices by rank, and the memory that is free now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np

from conduit_jax.errors import ConfigError, refuse
from conduit_jax.sharding.memory import DEVICE, DISK, PINNED_HOST, tier_memory
from conduit_jax.sharding.placement import PAGEABLE, LearnerSite
from conduit_jax.sharding.topology import Topology
from conduit_jax.types import Device


def ranked_devices(site: LearnerSite) -> tuple[Device, ...]:
    """Return this process' devices of the learner's kind, and any of the learner's beyond them, by rank."""
    own = [device for device in jax.local_devices() if device.platform == site.device.platform]
    learners = list(site.mesh.devices.flat) if site.mesh is not None else [site.device]
    return tuple(sorted({*own, *learners}, key=lambda device: device.id))


def learner_devices(site: LearnerSite) -> list[Device]:
    """Return the device of each share of a batch: one along the data axis, whatever other axes copy it to."""
    if site.mesh is None or site.axis is None:
        return [site.device]
    along = np.moveaxis(site.mesh.devices, site.mesh.axis_names.index(site.axis), 0)
    return [np.ravel(copies)[0] for copies in along]


def memory_only(devices: Sequence[Device]) -> Topology:
    """Return a topology of what ``devices`` and their hosts may hold now, without any link."""
    each, host, together = tier_memory(devices)
    same = "the devices' own memory is pageable host memory on this backend"
    unavailable = {} if PAGEABLE in host else {PAGEABLE: same}
    name = f"{devices[0].device_kind} x {len(devices)}"
    return Topology(name, "memory only", each, host, {}, node_memory_bytes=together, unavailable=unavailable)


def with_leaving(
    topology: Topology, devices: Sequence[Device], leaving: Mapping[tuple[Device, str], int] | None
) -> Topology:
    """Return ``topology`` with what is held there now counted as free."""
    if not leaving:
        return topology
    device = tuple(
        size + leaving.get((own, DEVICE), 0) for own, size in zip(devices, topology.device_memory_bytes, strict=True)
    )
    host = dict(topology.host_memory_bytes)
    for (own, kind), size in leaving.items():
        tier = PINNED_HOST if kind == PINNED_HOST else PAGEABLE
        if tier in host and (kind == PINNED_HOST or own not in devices):
            host[tier] += size
    together = topology.node_memory_bytes
    if together is not None:
        together += sum(leaving.values())
    return replace(topology, device_memory_bytes=device, host_memory_bytes=host, node_memory_bytes=together)


def checked(topology: Topology, devices: Sequence[Device]) -> Topology:
    if topology.devices * topology.nodes < len(devices):
        got, want = f"{topology.devices} device(s)", f"{len(devices)}, as this process has"
        refuse(ConfigError, f"{topology.name} has too few devices.", got=got, want=want)
    return topology


def within_here(given: Topology, here: Topology) -> Topology:
    """Return ``given`` with no more memory than there is ``here``, where the buffer will really be.

    Ranks go round the nodes of ``given``; a host tier that is no memory of its own here is bounded by that of all together.
    """
    free = here.device_memory_bytes
    device = tuple(min((size, *free[rank :: given.devices])) for rank, size in enumerate(given.device_memory_bytes))
    together = here.node_memory_bytes
    bounds = {tier: here.host_memory_bytes.get(tier, together) for tier in given.host_memory_bytes if tier != DISK}
    host = {
        tier: size if (bound := bounds.get(tier)) is None else min(size, bound)
        for tier, size in given.host_memory_bytes.items()
    }
    node = min((size for size in (given.node_memory_bytes, together) if size is not None), default=None)
    return replace(given, device_memory_bytes=device, host_memory_bytes=host, node_memory_bytes=node)
