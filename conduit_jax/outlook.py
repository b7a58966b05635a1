"""What a table does when its items grow, decided ahead: its placement map, kept and looked up (paper, section 5.3, Algorithm 2).

The map is computed when the table is built, over the sizes its growable axes can reach, with the memory and the links of
then. A table that grows looks its next placement up. Where something the map was computed from has changed, it is computed
anew, before anything pauses; why is kept, and ``plane.explain()`` tells it.
"""

from __future__ import annotations

from typing import NamedTuple

from conduit_jax.blueprint import Blueprint, draw_up
from conduit_jax.errors import ConduitError
from conduit_jax.growth import at_largest
from conduit_jax.sharding.ahead import splits_alone, turning_sizes
from conduit_jax.sharding.choice import (
    Ground,
    Wanted,
    admits_on,
    choose_on,
    decide,
    has_to_weigh,
    is_automatic,
    stand_on,
)
from conduit_jax.sharding.layout import Layout
from conduit_jax.sharding.placement import Placement
from conduit_jax.sharding.placement_map import PlacementMap, placement_map
from conduit_jax.sharding.planner import why_not
from conduit_jax.sharding.plans import Plan
from conduit_jax.sharding.topology import Topology
from conduit_jax.sharding.transfer import predicted_s
from conduit_jax.sharding.workload import Traffic
from conduit_jax.types import Device

Leaving = dict[tuple[Device, str], int]
_MORE = 1.125  # times the memory there was: less than that is what a machine's free memory does by itself
_KEPT = 16
_IN_NO_ONE = "no one memory holds it: planned when it is reached"


class Outlook(NamedTuple):
    """The placement map ``found`` of a table, ``None`` where it could not be computed, and what it was computed from.

    ``notes`` tell why it was computed, and what was looked up since.
    """

    ground: Ground
    traffic: Traffic
    found: PlacementMap | None
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the map and its history as text."""
        found = [] if self.found is None else [f"  {line}" for line in self.found.lines(_IN_NO_ONE)]
        return ["  as items grow", *found, *(f"    {note}" for note in self.notes)]

    def reasons(self, plan: Plan) -> Plan:
        """Return ``plan`` with all that was not taken: one that was looked up has weighed nothing else yet."""
        if plan.rejected or self.found is None:
            return plan
        traffic = self.traffic._replace(item_bytes=plan.workload.item_bytes, leaves=())
        try:
            return decide(self.ground, traffic)
        except ConduitError:
            return plan


def look_ahead(blueprint: Blueprint, wanted: Wanted, why: str, leaving: Leaving | None = None) -> Outlook | None:
    """Return the outlook of a table of ``blueprint``; ``None`` where its leaves do not grow or its placement is asked for.

    ``leaving``: bytes by device and memory kind that the table holds now, which count as free.
    """
    growth = blueprint.config.growth
    if growth is None or not growth.axes or not is_automatic(wanted):
        return None
    ground, traffic = stand_on(wanted, blueprint.site, blueprint.partitions, leaving=leaving), blueprint.traffic
    shapes = at_largest(blueprint.rollout, growth)
    try:
        grown = draw_up(
            blueprint.config, blueprint.algorithm, blueprint.hooks, shapes, blueprint.context, blueprint.site
        )
        largest = max(traffic.item_bytes, grown.traffic.item_bytes)
        leaves = max(traffic.leaves, grown.traffic.leaves, key=len)
        found = placements_ahead(ground, traffic._replace(leaves=leaves), largest)
    except ConduitError as error:  # a hook that does not take the largest items, say
        return Outlook(ground, traffic, None, (f"no map could be computed {why}: {str(error).splitlines()[0]}",))
    return Outlook(ground, traffic, found, (f"map computed {why}",))


def look_up(
    outlook: Outlook, blueprint: Blueprint, wanted: Wanted, leaving: Leaving
) -> tuple[Placement, Plan | None, Outlook]:
    """Return where a table that has become ``blueprint`` is to live, the plan, and the outlook from there.

    Raises ``PlacementError`` where nothing holds it.
    """
    traffic = blueprint.traffic
    ground = stand_on(wanted, blueprint.site, blueprint.partitions, leaving=leaving)
    if why := _changed(outlook, ground, traffic):
        anew = look_ahead(blueprint, wanted, f"anew: {why}", leaving)
        outlook = outlook if anew is None else anew._replace(notes=(*outlook.notes, *anew.notes))
    layout = outlook.found(traffic.item_bytes) if outlook.found is not None else None
    if layout is None:
        why = _IN_NO_ONE if outlook.found is not None else "there is no map: planned"
        return *choose_on(ground, traffic), _noted(outlook, f"{traffic.item_bytes:,} bytes: {why}")
    placement = outlook.ground.laid_out(layout, ground.workload(traffic))
    plan = _plan_of(_links(outlook.ground), ground, layout, traffic)
    return placement, plan, _noted(outlook, f"{traffic.item_bytes:,} bytes: looked up, {layout.name}")


def placements_ahead(ground: Ground, traffic: Traffic, largest: int) -> PlacementMap:
    """Return the map of what ``decide`` takes for items as large as ``traffic``'s up to ``largest`` bytes.

    ``None`` where nothing fits, and where several leaves might be split: that depends on how each of them grows. Links are
    measured only where some size has placements to be weighed.
    """
    splits, traffic = len(traffic.leaves) > 1, traffic._replace(leaves=())
    workload, only = ground.workload(traffic), ground.request.only
    if splits_alone(only):
        return PlacementMap((traffic.item_bytes,), (None,), largest)
    admits = admits_on(ground.devices, ground.partitions, scattered=True)

    def sweep(topology: Topology) -> list[int]:
        return turning_sizes(topology, workload, largest, only=only, admits=admits, besides=(ground.nearest(workload),))

    def at(item_bytes: int) -> Traffic:
        return traffic._replace(item_bytes=item_bytes)

    sizes = sweep(ground.memory)
    if ground.request.topology is None and any(has_to_weigh(ground, at(size)) for size in sizes):
        sizes = sweep(ground.measured)

    def layout_of(item_bytes: int) -> Layout | None:
        found = decide(ground, at(item_bytes)).layout
        return None if splits and found.scattered else found  # one program that reaches split leaves comes before that

    return placement_map(layout_of, sizes)


def _changed(outlook: Outlook, now: Ground, traffic: Traffic) -> str:
    """Return what of that the map was computed from has changed so that it may not hold for ``traffic``; empty: nothing has."""
    then, before = outlook.ground, outlook.traffic
    if then.request != now.request:
        return "another placement was asked for"
    for name in ("capacity_items", "inserted_items", "sampled_items", "actors"):
        if (old := getattr(before, name)) != (new := getattr(traffic, name)):
            return f"{name} {old} became {new}"
    found = outlook.found
    if found is None:
        return ""
    if not found.starts[0] <= traffic.item_bytes <= found.largest:
        return f"items of {traffic.item_bytes:,} bytes were not foreseen"
    layout, workload = found(traffic.item_bytes), now.workload(traffic)
    if layout is None:
        return ""
    if short := why_not(now.memory, layout, workload):
        return f"{layout.name} {short} now"
    is_nearest = layout.parts == now.nearest(workload).parts and not now.request.only and now.request.topology is None
    return "" if is_nearest or not _has_more(now.memory, then.memory) else "there is more memory now"


def _has_more(now: Topology, then: Topology) -> bool:
    """Whether some memory is so much larger than it was that another placement may fit."""
    pairs = [*zip(now.device_memory_bytes, then.device_memory_bytes, strict=True)]
    pairs += [(size, then.host_memory_bytes.get(tier, 0)) for tier, size in now.host_memory_bytes.items()]
    if now.node_memory_bytes is not None and then.node_memory_bytes is not None:
        pairs.append((now.node_memory_bytes, then.node_memory_bytes))
    return any(new > _MORE * old for new, old in pairs)


def _links(ground: Ground) -> Topology:
    """Return the topology with the links that were measured, if any were."""
    return ground.measured if "measured" in vars(ground) else ground.memory


def _plan_of(links: Topology, ground: Ground, layout: Layout, traffic: Traffic) -> Plan:
    """Return the plan of a layout that nothing was weighed against now."""
    workload = ground.workload(traffic)
    memory = {
        where: (size, ground.memory.memory_bytes(where)) for where, size in layout.bytes_by_endpoint(workload).items()
    }
    seconds = predicted_s(links, layout, workload) if links.links else {}
    return Plan(links, workload, layout, seconds, memory, ())


def _noted(outlook: Outlook, note: str) -> Outlook:
    return outlook._replace(notes=(*outlook.notes, note)[-_KEPT:])


__all__ = ["Outlook", "look_ahead", "look_up", "placements_ahead"]
