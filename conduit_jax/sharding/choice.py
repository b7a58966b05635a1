"""``placement="auto"``: from the learner's site and one rollout's traffic to a placement on devices, with the plan behind it.

Nothing is measured where nothing has to be: storage that fits the learners' own memory is read over no link, so no other
placement can be faster. Otherwise the planner decides on this machine's profile, or on the topology it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import jax

from conduit_jax.errors import ConfigError, PlacementError, check_choice, refuse
from conduit_jax.sharding.candidates import device_layout, pure_candidates
from conduit_jax.sharding.disk import Disk
from conduit_jax.sharding.layout import Layout
from conduit_jax.sharding.memory import DEVICE, DISK, PINNED_HOST, memory_kinds
from conduit_jax.sharding.mesh import processes_of
from conduit_jax.sharding.placement import PLACEMENT_NAMES, LearnerSite, Placement, resolve_placement
from conduit_jax.sharding.planner import fitting, plan, why_not
from conduit_jax.sharding.plans import Plan, Rejected
from conduit_jax.sharding.profile_cache import cached_profile
from conduit_jax.sharding.realise import realise
from conduit_jax.sharding.surroundings import (
    checked,
    learner_devices,
    memory_only,
    ranked_devices,
    with_leaving,
    within_here,
)
from conduit_jax.sharding.topology import TIERS, Topology
from conduit_jax.sharding.workload import Traffic, Workload
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


@dataclass(frozen=True)
class Ground:
    """What an automatic choice stands on, whatever the item's size: what was asked for, where, and the memory there is.

    ``memory`` is what is free, within the limits asked for, with links where they were given; ``measured`` has measured ones.
    """

    request: AutoPlacement
    site: LearnerSite
    partitions: int
    devices: tuple[Device, ...]
    memory: Topology
    measure: Callable[[Sequence[Device]], Topology]

    @cached_property
    def measured(self) -> Topology:
        """The same memory with this machine's links, measured when first asked for; ``ConfigError`` over several processes."""
        if len(over := processes_of(self.devices)) > 1:
            want, fix = (
                "a choice all of them come to",
                "placement='device' or 'pinned_host', or AutoPlacement(topology=...)",
            )
            refuse(
                ConfigError,
                "Links are weighed by each process alone.",
                got=f"{len(over)} processes",
                want=want,
                fix=fix,
            )
        found = self.measure(self.devices).limited(self.request.limits)
        free = self.memory
        host = {tier: free.host_memory_bytes.get(tier, size) for tier, size in found.host_memory_bytes.items()}
        device, together = free.device_memory_bytes, free.node_memory_bytes
        return replace(found, device_memory_bytes=device, host_memory_bytes=host, node_memory_bytes=together)

    def nearest(self, workload: Workload) -> Layout:
        """Return the layout on the learners' own devices: beside each of them where draws are local, else on the first."""
        if workload.local_read_fraction == 1.0:
            return device_layout(self.memory, workload.learners, workload, f"shared:{len(workload.learners)}")
        return device_layout(self.memory, workload.learners[:1], workload, "single_device")

    def workload(self, traffic: Traffic) -> Workload:
        """Return what a placement has to serve."""
        learners = learner_devices(self.site)
        parallel = len(learners) > 1 and self.partitions % len(learners) == 0
        return Workload(
            item_bytes=traffic.item_bytes,
            capacity_items=traffic.capacity_items,
            inserted_items=traffic.inserted_items,
            sampled_items=traffic.sampled_items,
            actors=traffic.actors,
            learners=tuple(self.devices.index(device) for device in learners),
            local_read_fraction=1.0 if parallel else None,
            local_write_fraction=1.0 if parallel else None,
            partitions=self.partitions,
            leaves=dict(traffic.leaves),
        )

    def laid_out(self, layout: Layout, workload: Workload) -> Placement:
        """Return ``layout`` as a placement on the devices; on the learners' mesh where it is nearest to them."""
        if layout.parts == self.nearest(workload).parts:
            return resolve_placement(DEVICE, self.site, self.partitions, 0)
        return realise(layout, self.devices, self.site, self.partitions)


def stand_on(
    wanted: Wanted,
    site: LearnerSite,
    partitions: int,
    measure: Callable[[Sequence[Device]], Topology] = _measured_alone,
    leaving: Mapping[tuple[Device, str], int] | None = None,
) -> Ground:
    """Return what a choice of ``wanted``, which is automatic, stands on now; measures no link yet."""
    request = wanted if isinstance(wanted, AutoPlacement) else AutoPlacement()
    devices = ranked_devices(site)
    memory = with_leaving(memory_only(devices), devices, leaving)
    if request.topology is not None:
        memory = within_here(checked(request.topology, devices), memory)
    return Ground(request, site, partitions, devices, memory.limited(request.limits), measure)


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
    if not is_automatic(wanted):
        return resolve_placement(wanted, site, partitions, traffic.stored_bytes), None  # type: ignore[arg-type]
    return choose_on(stand_on(wanted, site, partitions, measure, leaving), traffic)


def choose_on(ground: Ground, traffic: Traffic) -> tuple[Placement, Plan | None]:
    """Return the placement that is chosen on ``ground``; without a plan where only the disk is left."""
    try:
        decided = decide(ground, traffic)
    except PlacementError:
        on_disk = _last_resort(ground, traffic.item_bytes * traffic.capacity_items)
        if on_disk is None:
            raise
        return on_disk, None
    return ground.laid_out(decided.layout, decided.workload), decided


def decide(ground: Ground, traffic: Traffic) -> Plan:
    """Return the plan of an automatic placement in memory; ``PlacementError`` where nothing fits."""
    workload, given = ground.workload(traffic), ground.request.topology is not None
    nearest = ground.nearest(workload)
    if _needs_no_weighing(ground, workload):
        return _unmeasured(ground.memory, workload, nearest, _NEAREST)
    only = ground.request.only
    fits, admits = _within_reach_first(ground.memory, workload, only, ground.devices)
    if not given and len(fits) == 1:
        return _unmeasured(ground.memory, workload, fits[0], "")
    topology = ground.measured if fits and not given else ground.memory
    return plan(topology, workload, only=only, admits=admits)


def has_to_weigh(ground: Ground, traffic: Traffic) -> bool:
    """Whether ``decide`` would compare placements by their links."""
    workload = ground.workload(traffic)
    if _needs_no_weighing(ground, workload):
        return False
    fits, _ = _within_reach_first(ground.memory, workload, ground.request.only, ground.devices)
    return len(fits) > 1


def _needs_no_weighing(ground: Ground, workload: Workload) -> bool:
    """Whether the learners' own memory holds it and nothing was said that could speak for another."""
    if ground.request.topology is not None or ground.request.only:
        return False
    return not why_not(ground.memory, ground.nearest(workload), workload)


Admits = Callable[[Layout], str]


def _within_reach_first(
    topology: Topology, workload: Workload, only: Sequence[str], devices: tuple[Device, ...]
) -> tuple[list[Layout], Admits]:
    """Return what fits and why others may not: of what one program reaches where there is any, else of what is scattered too."""
    reached, any_way = (admits_on(devices, workload.partitions or 1, scattered=one) for one in (False, True))
    if fits := fitting(topology, workload, only=only, admits=reached):
        return fits, reached
    return fitting(topology, workload, only=only, admits=any_way), any_way


def _last_resort(ground: Ground, storage_bytes: int) -> Placement | None:
    """Return the placement on disk, for a buffer that fits nowhere else; ``None`` where the disk has no room either."""
    request = ground.request
    if request.only or storage_bytes > request.limits.get(DISK, storage_bytes):
        return None
    try:
        return resolve_placement(DISK, ground.site, ground.partitions, storage_bytes)
    except PlacementError:
        return None


def is_automatic(wanted: Wanted) -> bool:
    """Whether the placement is the planner's to choose."""
    return wanted == "auto" or isinstance(wanted, AutoPlacement)


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


def admits_on(devices: tuple[Device, ...], partitions: int, *, scattered: bool) -> Admits:
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
        if len({holder.node for holder in holders if holder.tier != DEVICE}) > 1:
            return "this process is on one host"
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
    "Ground",
    "admits_on",
    "check_wanted",
    "choose_on",
    "choose_placement",
    "decide",
    "has_to_weigh",
    "is_automatic",
    "stand_on",
    "where_made",
]
