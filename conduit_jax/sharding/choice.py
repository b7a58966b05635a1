"""``placement="auto"``: from the learner's site and one rollout's traffic to a placement on devices, with the plan behind it.

Nothing is measured where nothing has to be: storage that fits the learners' own memory is read over no link, so no other
placement can be faster. Otherwise the planner decides on this machine's profile, or on the topology it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from conduit_jax.errors import ConfigError, PlacementError, check_choice, refuse
from conduit_jax.sharding.candidates import device_layout, pure_candidates
from conduit_jax.sharding.disk import Disk
from conduit_jax.sharding.layout import Layout, LayoutPart
from conduit_jax.sharding.memory import DEVICE, DISK, PINNED_HOST, memory_kinds, tier_memory
from conduit_jax.sharding.mesh import PARTITION_AXIS, single_device_mesh
from conduit_jax.sharding.placement import PAGEABLE, PLACEMENT_NAMES, LearnerSite, Part, Placement, resolve_placement
from conduit_jax.sharding.planner import Plan, Rejected, fitting, plan, why_not
from conduit_jax.sharding.profile_cache import cached_profile
from conduit_jax.sharding.topology import TIERS, Topology
from conduit_jax.sharding.workload import Workload
from conduit_jax.types import Device


@dataclass(frozen=True, kw_only=True)
class AutoPlacement:
    """How ``placement=`` may be chosen: ``"auto"`` with limits.

    Attributes:
        only: candidates to choose from, by name or family (``"pinned_host"``, ``"shared"``, ``"shared:4"``); empty: all.
        limits: at most so many bytes of the buffer a device (``"device"``) or in a host tier (``"pinned_host"``, ``"pageable"``).
        topology: links to decide by, in place of this machine's profile; its devices are this process' in order. Its memory is
            a limit too, on top of what is really free here.
    """

    only: tuple[str, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    topology: Topology | None = None

    def __post_init__(self) -> None:
        if isinstance(self.only, str):
            object.__setattr__(self, "only", (self.only,))
        for tier, size in self.limits.items():
            check_choice("tier", tier, TIERS)
            if not isinstance(size, int) or size < 0:
                refuse(ConfigError, f"limits[{tier!r}] is out of range.", got=repr(size), want="bytes, an integer >= 0")


class Traffic(NamedTuple):
    """What an iteration moves: items of ``item_bytes`` (``leaves``: stored ones by name), inserted from ``actors`` and sampled."""

    item_bytes: int
    capacity_items: int
    inserted_items: int
    sampled_items: int
    actors: str = "host"
    leaves: tuple[tuple[str, int], ...] = ()

    @property
    def stored_bytes(self) -> dict[str, int]:
        """Bytes of the whole buffer by stored leaf; where these are not known, together."""
        leaves = self.leaves or (("item", self.item_bytes),)
        return {leaf: size * self.capacity_items for leaf, size in leaves}


def where_made(rollout: object) -> str:
    """Return which actors a rollout comes from: ``"device"`` where all of its arrays are on an accelerator, else ``"host"``."""
    leaves = jax.tree.leaves(rollout)
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    return "device" if arrays and len(arrays) == len(leaves) else "host"


_measured_alone = partial(cached_profile, alone=True)
_NEAREST = "fits, but is further from the learner than its own memory"

Wanted = str | Placement | Disk | AutoPlacement


def check_wanted(placement: Wanted) -> None:
    """Raise ``ConfigError`` for a ``placement=`` that is none."""
    if not isinstance(placement, Placement | Disk | AutoPlacement):
        check_choice("placement", placement, PLACEMENT_NAMES)


def choose_placement(
    wanted: Wanted,
    site: LearnerSite,
    partitions: int,
    traffic: Traffic,
    measure: Callable[[Sequence[Device]], Topology] = _measured_alone,
    leaving: Mapping[tuple[Device, str], int] | None = None,
) -> tuple[Placement, Plan | None]:
    """Return the placement ``wanted`` stands for, with the plan where it was chosen rather than asked for.

    ``measure`` gives the devices' topology; it is called only where more than one placement has to be weighed, so it waits
    for no other process: what has to be weighed here need not be there. ``leaving``:
    bytes by device and memory kind that are free once the buffer has moved away; a choice counts with them. Raises
    ``PlacementError`` naming the shortfall where nothing fits.
    """
    storage_bytes = traffic.item_bytes * traffic.capacity_items
    if isinstance(wanted, Placement | Disk) or (isinstance(wanted, str) and wanted != "auto"):
        return resolve_placement(wanted, site, partitions, traffic.stored_bytes), None
    request = wanted if isinstance(wanted, AutoPlacement) else AutoPlacement()
    devices = ranked_devices(site)
    workload = _workload(site, devices, partitions, traffic)
    here = _left(memory_only(devices), devices, leaving)
    given = None if request.topology is None else _within(_checked(request.topology, devices), here)
    bare = (given or here).limited(request.limits)
    nearest = _nearest(bare, workload)
    if given is None and not request.only and not why_not(bare, nearest, workload):
        return resolve_placement(DEVICE, site, partitions, 0), _unmeasured(bare, workload, nearest, _NEAREST)
    fits, admits = _within_reach_first(bare, workload, request.only, devices)
    if given is None and len(fits) == 1:
        return realise(fits[0], devices, site, partitions), _unmeasured(bare, workload, fits[0], "")
    weighed = given is None and fits
    topology = _left(measure(devices), devices, leaving).limited(request.limits) if weighed else bare
    try:
        decided = plan(topology, workload, only=request.only, admits=admits)
    except PlacementError:
        on_disk = _last_resort(request, site, partitions, storage_bytes)
        if on_disk is None:
            raise
        return on_disk, None
    if decided.layout.parts == nearest.parts:
        return resolve_placement(DEVICE, site, partitions, 0), decided
    return realise(decided.layout, devices, site, partitions), decided


Admits = Callable[[Layout], str]


def _within_reach_first(
    topology: Topology, workload: Workload, only: Sequence[str], devices: tuple[Device, ...]
) -> tuple[list[Layout], Admits]:
    """Return what fits and why others may not: of what one program reaches where there is any, else of what is scattered too."""
    reached, any_way = (_admits(devices, workload.partitions or 1, scattered=one) for one in (False, True))
    if fits := fitting(topology, workload, only=only, admits=reached):
        return fits, reached
    return fitting(topology, workload, only=only, admits=any_way), any_way


def _checked(topology: Topology, devices: Sequence[Device]) -> Topology:
    if topology.devices * topology.nodes < len(devices):
        got, want = f"{topology.devices} device(s)", f"{len(devices)}, as this process has"
        refuse(ConfigError, f"{topology.name} has too few devices.", got=got, want=want)
    return topology


def _within(given: Topology, here: Topology) -> Topology:
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


def _last_resort(request: AutoPlacement, site: LearnerSite, partitions: int, storage_bytes: int) -> Placement | None:
    """Return the placement on disk, for a buffer that fits nowhere else; ``None`` where the disk has no room either."""
    if request.only or storage_bytes > request.limits.get(DISK, storage_bytes):
        return None
    try:
        return resolve_placement(DISK, site, partitions, storage_bytes)
    except PlacementError:
        return None


def is_automatic(wanted: Wanted) -> bool:
    """Whether the placement is the planner's to choose."""
    return wanted == "auto" or isinstance(wanted, AutoPlacement)


def memory_only(devices: Sequence[Device]) -> Topology:
    """Return a topology of what ``devices`` and their hosts may hold now, without any link."""
    each, host, together = tier_memory(devices)
    same = "the devices' own memory is pageable host memory on this backend"
    unavailable = {} if PAGEABLE in host else {PAGEABLE: same}
    name = f"{devices[0].device_kind} x {len(devices)}"
    return Topology(name, "memory only", each, host, {}, node_memory_bytes=together, unavailable=unavailable)


def _left(topology: Topology, devices: Sequence[Device], leaving: Mapping[tuple[Device, str], int] | None) -> Topology:
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
    if len(layout.parts) > 1 and len(chosen) > 1 and chosen == tuple(_learners(site)):
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


def ranked_devices(site: LearnerSite) -> tuple[Device, ...]:
    """Return this process' devices of the learner's kind, and any of the learner's beyond them, by rank."""
    own = [device for device in jax.local_devices() if device.platform == site.device.platform]
    learners = list(site.mesh.devices.flat) if site.mesh is not None else [site.device]
    return tuple(sorted({*own, *learners}, key=lambda device: device.id))


def _learners(site: LearnerSite) -> list[Device]:
    """Return the device of each share of a batch: one along the data axis, whatever other axes copy it to."""
    if site.mesh is None or site.axis is None:
        return [site.device]
    along = np.moveaxis(site.mesh.devices, site.mesh.axis_names.index(site.axis), 0)
    return [np.ravel(copies)[0] for copies in along]


def _workload(site: LearnerSite, devices: tuple[Device, ...], partitions: int, traffic: Traffic) -> Workload:
    learners = _learners(site)
    parallel = len(learners) > 1 and partitions % len(learners) == 0
    return Workload(
        item_bytes=traffic.item_bytes,
        capacity_items=traffic.capacity_items,
        inserted_items=traffic.inserted_items,
        sampled_items=traffic.sampled_items,
        actors=traffic.actors,
        learners=tuple(devices.index(device) for device in learners),
        local_read_fraction=1.0 if parallel else None,
        local_write_fraction=1.0 if parallel else None,
        partitions=partitions,
        leaves=dict(traffic.leaves),
    )


def _nearest(topology: Topology, workload: Workload) -> Layout:
    """Return the placement on the learners' own devices: beside each of them where draws are local, else on the first."""
    if workload.local_read_fraction == 1.0:
        return device_layout(topology, workload.learners, workload, f"shared:{len(workload.learners)}")
    return device_layout(topology, workload.learners[:1], workload, "single_device")


def _unmeasured(topology: Topology, workload: Workload, taken: Layout, why_others_not: str) -> Plan:
    """Return the plan that takes a placement no other has to be weighed against, so that no link had to be measured."""
    rejected = [
        Rejected(layout, why_not(topology, layout, workload) or why_others_not or "is not among those to choose from")
        for layout in pure_candidates(topology, workload)
        if layout.parts != taken.parts
    ]
    held = taken.bytes_by_endpoint(workload)
    memory = {where: (size, topology.memory_bytes(where)) for where, size in held.items()}
    return Plan(topology, workload, taken, {}, memory, tuple(rejected))


def _admits(devices: tuple[Device, ...], partitions: int, *, scattered: bool) -> Admits:
    """Return what says why a layout cannot be laid out on these devices; empty where it can."""
    kinds = memory_kinds(devices[0])

    def reason(layout: Layout) -> str:
        tiers = [part.tier for part in layout.parts]
        if PINNED_HOST in tiers and PINNED_HOST not in kinds:
            return f"{devices[0]} has no such memory"
        if DISK in tiers:
            return "a plane does not choose the disk by itself yet"
        holders = [holder for part in layout.parts for holder in part.holders]
        if any(holder.tier == DEVICE and holder.rank >= len(devices) for holder in holders):
            return "this process has no such devices"
        if any(sum(part.partitions) != partitions for part in layout.parts):
            return f"{partitions} partition(s) cannot be dealt over it"
        if layout.scattered and not scattered:
            uneven = any(len(set(part.partitions)) > 1 for part in layout.parts)
            why = f"{partitions} partition(s) do not divide evenly over it"
            return why if uneven else "no one program reaches all of its parts"
        return ""

    return reason


__all__ = [
    "AutoPlacement",
    "Traffic",
    "check_wanted",
    "choose_placement",
    "is_automatic",
    "memory_only",
    "ranked_devices",
    "realise",
    "where_made",
]
