"""The placement decision: ``arg min_p T(p)`` subject to ``C_buf * x <= Mem(p)`` (paper, eq. 1 and Algorithm 1), with its reasons.

A pure function from a topology and a workload to a ``Plan``; measuring the topology is ``profile``'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from conduit_jax.errors import ConfigError, PlacementError, check_choice, refuse
from conduit_jax.sharding.candidates import disk_candidate, mixed_candidates, pure_candidates
from conduit_jax.sharding.layout import Layout
from conduit_jax.sharding.plans import Plan, Rejected
from conduit_jax.sharding.topology import DISK, TIERS, Endpoint, Topology
from conduit_jax.sharding.transfer import predicted_s
from conduit_jax.sharding.workload import Workload

_ONE_NODE = "another node is used only where the memory of one does not hold it"
_TIE = 1 + 1e-9
FAMILIES = ("pageable", "pinned_host", "single_device", "shared", "mixed", "disk")


def plan(
    topology: Topology,
    workload: Workload,
    *,
    only: Sequence[str] = (),
    admits: Callable[[Layout], str] = lambda _: "",
) -> Plan:
    """Return the cheapest placement of ``workload`` on ``topology`` that fits.

    Args:
        topology: links and memory; limit tiers with ``topology.limited``.
        workload: bytes kept and moved.
        only: names or families of candidates to choose from (``"pinned_host"``, ``"shared"``, ``"shared:4"``); one name
            pins it. Empty: all.
        admits: says why whoever asks cannot have a layout; empty where it can.

    Raises ``PlacementError`` naming the shortfall and the smallest change that would fit where nothing does;
    ``ConfigError`` for a learner's rank or a candidate's name that the topology does not have.

    Source: Algorithm 1 (linear scan). Mixtures of tiers are scanned where no pure tier fits, the disk where nothing else does.
    """
    _check_ranks(topology, workload)
    stages = (
        ("pure", lambda: pure_candidates(topology, workload)),
        ("mixed", lambda: mixed_candidates(topology, workload)),
        ("disk", lambda: [disk_candidate(topology, workload)]),
    )
    seen: list[Rejected] = []
    for stage, candidates in stages:
        listed = _named(candidates(), only)
        feasible: list[tuple[float, Layout, dict[str, float]]] = []
        for layout, reason in zip(listed, _reasons(topology, listed, workload, admits), strict=True):
            if reason:
                seen.append(Rejected(layout, reason))
                continue
            seconds = predicted_s(topology, layout, workload)
            feasible.append((sum(seconds.values()), layout, seconds))
        if feasible:
            return _decide(topology, workload, feasible, seen, later=stage != "disk" and not only)
    return _refuse(topology, workload, seen, only)


def fitting(
    topology: Topology,
    workload: Workload,
    *,
    only: Sequence[str] = (),
    admits: Callable[[Layout], str] = lambda _: "",
) -> list[Layout]:
    """Return the placements that ``plan`` would weigh, in memory: of one tier, else mixtures; needs no links."""
    for candidates in (pure_candidates, mixed_candidates):
        listed = _named(candidates(topology, workload), only)
        reasons = _reasons(topology, listed, workload, admits)
        if fits := [layout for layout, reason in zip(listed, reasons, strict=True) if not reason]:
            return fits
    return []


def _reasons(
    topology: Topology, layouts: Sequence[Layout], workload: Workload, admits: Callable[[Layout], str]
) -> list[str]:
    """Return why each of ``layouts`` is not to be weighed, empty where it is.

    Another node than the learners' is used only where no one node's memory of the kind holds the buffer.
    """
    reasons = [admits(layout) or why_not(topology, layout, workload) for layout in layouts]
    home = {rank // topology.devices for rank in workload.learners}
    pairs = list(zip(layouts, reasons, strict=True))
    enough = {layout.parts[0].tier for layout, reason in pairs if not reason and len(layout.nodes) == 1}
    return [
        reason or (_ONE_NODE if set(layout.nodes) - home and layout.parts[0].tier in enough else "")
        for layout, reason in pairs
    ]


def why_not(topology: Topology, layout: Layout, workload: Workload) -> str:
    """Return why ``layout`` cannot hold the workload on ``topology``, with the shortfall; empty where it can."""
    for part in layout.parts:
        if part.tier in topology.unavailable:
            return f"does not work here: {topology.unavailable[part.tier]}"
        if not topology.offers(part.tier):
            return f"the topology has no {part.tier} memory"
    short = shortfalls(topology, layout, workload)
    if not short:
        return ""
    where, missing = max(short.items(), key=lambda item: item[1])
    others = f" (and {len(short) - 1} more)" if len(short) > 1 else ""
    return f"lacks {missing:,} bytes on {where}{others}"


def shortfalls(topology: Topology, layout: Layout, workload: Workload) -> dict[Endpoint, int]:
    """Return the bytes missing at each endpoint that the layout overfills."""
    held = layout.bytes_by_endpoint(workload)
    short = {where: size - topology.memory_bytes(where) for where, size in held.items()}
    if topology.node_memory_bytes is not None:
        for node in layout.nodes:
            own = {where: size for where, size in held.items() if where.node == node and where.tier != DISK}
            if not own:
                continue
            over, largest = sum(own.values()) - topology.node_memory_bytes, max(own, key=lambda where: own[where])
            short[largest] = max(short[largest], over)
    return {where: missing for where, missing in short.items() if missing > 0}


def _named(layouts: Iterable[Layout], only: Sequence[str]) -> list[Layout]:
    """Return the candidates that ``only`` lets through, each holder set once."""
    if isinstance(only, str):
        only = (only,)
    for name in only:
        check_choice("candidate", name.partition(":")[0].partition("@")[0], (*FAMILIES, "device"))
    kept: dict[object, Layout] = {}
    for layout in layouts:
        if not only or any(_matches(layout.name, name) for name in only):
            kept.setdefault(layout.parts, layout)
    return list(kept.values())


def _matches(name: str, wanted: str) -> bool:
    if wanted == "device":
        return name.startswith(("single_device", "shared"))
    return name == wanted or name.startswith((f"{wanted}:", f"{wanted}@", f"{wanted}["))


def _decide(
    topology: Topology,
    workload: Workload,
    feasible: list[tuple[float, Layout, dict[str, float]]],
    seen: list[Rejected],
    *,
    later: bool,
) -> Plan:
    """Take the cheapest; the first listed wins a tie, as in the paper's scan: sums over more holders only round otherwise."""
    least = min(total for total, _, _ in feasible)
    chosen = next(one for one in feasible if one[0] <= least * _TIE)
    best_s, best, seconds = chosen
    others = sorted((one for one in feasible if one is not chosen), key=lambda one: one[0])
    slower = [Rejected(layout, _slower(total, best_s), total) for total, layout, _ in others]
    if later:
        disk = disk_candidate(topology, workload)
        if topology.offers(disk.parts[0].tier):
            seen = [*seen, Rejected(disk, "taken only when nothing else fits")]
    held = best.bytes_by_endpoint(workload)
    memory = {where: (size, topology.memory_bytes(where)) for where, size in held.items()}
    return Plan(topology, workload, best, seconds, memory, (*slower, *seen))


def _slower(total: float, best: float) -> str:
    return f"{total / best:.3g} times the time" if best > 0 and total > best * _TIE else "no faster"


def _check_ranks(topology: Topology, workload: Workload) -> None:
    count = topology.devices * topology.nodes
    if max(workload.learners) >= count:
        want = f"ranks 0 to {count - 1}"
        refuse(ConfigError, f"{topology.name} has no such device.", got=f"learner {max(workload.learners)}", want=want)


def _refuse(topology: Topology, workload: Workload, seen: list[Rejected], only: Sequence[str]) -> Plan:
    """Raise what does not fit: each candidate's reason, and the smallest change with which the nearest one would."""
    if not seen:
        want = f"one of {', '.join((*FAMILIES, 'device'))}, with a number of devices the topology has"
        fix = (
            None if len(workload.leaves) > 1 else "mixtures split leaves: Workload(leaves=...), plan --leaf NAME=BYTES"
        )
        fix = fix if any(name.startswith("mixed") for name in only) else None
        refuse(ConfigError, "No candidate has that name.", got=list(only), want=want, fix=fix)
    short = {id(one): sum(shortfalls(topology, one.layout, workload).values()) for one in seen}
    works = [one for one in seen if short[id(one)]]
    lines = "; ".join(f"{one.layout.name} {one.reason}" for one in sorted(seen, key=lambda one: short[id(one)])[:6])
    got = f"{workload.capacity_items:,} items of {workload.item_bytes:,} bytes = {workload.storage_bytes:,} bytes; {lines}"
    fix = _smallest_change(topology, workload, min(works, key=lambda one: short[id(one)])) if works else None
    what = f"{only[0]} was asked for and does not fit." if only else "The buffer does not fit anywhere."
    return refuse(PlacementError, what, got=got, want="storage within the limits of a placement", fix=fix)


def _smallest_change(topology: Topology, workload: Workload, nearest: Rejected) -> str:
    held, layout = nearest.layout.bytes_by_endpoint(workload), nearest.layout
    short = shortfalls(topology, layout, workload)
    where, missing = max(short.items(), key=lambda item: item[1])
    share = min((held[one] - lacking) / held[one] for one, lacking in short.items())
    items, item_bytes = int(workload.capacity_items * share), int(workload.item_bytes * share)
    return (
        f"lower capacity or smaller items: {layout.name} fits with capacity={items:,}, or items of {item_bytes:,} bytes, "
        f"or {missing:,} bytes more of {where.tier} memory"
    )


__all__ = ["FAMILIES", "TIERS", "Plan", "Rejected", "plan", "shortfalls", "why_not"]
