"""The placement decision: ``arg min_p T(p)`` subject to ``C_buf * x <= Mem(p)`` (paper, eq. 1 and Algorithm 1), with its reasons.

A pure function from a topology and a workload to a ``Plan``; measuring the topology is ``profile``'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from conduit_jax.errors import ConfigError, PlacementError, check_choice, refuse
from conduit_jax.sharding.candidates import disk_candidate, mixed_candidates, pure_candidates
from conduit_jax.sharding.layout import Layout
from conduit_jax.sharding.plan_table import plan_text
from conduit_jax.sharding.topology import DISK, TIERS, Endpoint, Topology
from conduit_jax.sharding.transfer import predicted_s
from conduit_jax.sharding.workload import Workload

_ONE_NODE = "another node is used only where the memory of one does not hold it"
FAMILIES = ("pageable", "pinned_host", "single_device", "shared", "mixed", "disk")


@dataclass(frozen=True)
class Rejected:
    """A candidate that was not taken, why, and its predicted seconds an iteration where it would work."""

    layout: Layout
    reason: str
    seconds: float | None = None


@dataclass(frozen=True)
class Plan:
    """The chosen placement with what it is predicted to cost, and everything that was not chosen.

    Attributes:
        layout: which endpoints hold which partitions and leaves.
        seconds: predicted seconds of one iteration by term (``transfer.TERMS``).
        memory: bytes held at each endpoint, and the bytes it may hold.
        rejected: every other candidate, cheapest first, those that do not fit last.
    """

    topology: Topology
    workload: Workload
    layout: Layout
    seconds: dict[str, float]
    memory: dict[Endpoint, tuple[int, int]]
    rejected: tuple[Rejected, ...]

    @property
    def total_s(self) -> float:
        """Predicted seconds of one iteration."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        return plan_text(self)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        memory = {
            str(where): {"held_bytes": held, "limit_bytes": limit} for where, (held, limit) in self.memory.items()
        }
        rejected = [
            {"name": one.layout.name, "reason": one.reason, "seconds": one.seconds, "layout": one.layout.as_dict()}
            for one in self.rejected
        ]
        return {
            "topology": self.topology.name,
            "workload": self.workload.as_dict(),
            "placement": self.layout.as_dict(),
            "seconds": self.seconds,
            "total_s": self.total_s,
            "memory": memory,
            "rejected": rejected,
        }


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
    """Take the cheapest; the first listed wins a tie, as in the paper's scan."""
    ranked = sorted(feasible, key=lambda one: one[0])
    best_s, best, seconds = ranked[0]
    slower = [Rejected(layout, _slower(total, best_s), total) for total, layout, _ in ranked[1:]]
    if later:
        disk = disk_candidate(topology, workload)
        if topology.offers(disk.parts[0].tier):
            seen = [*seen, Rejected(disk, "taken only when nothing else fits")]
    held = best.bytes_by_endpoint(workload)
    memory = {where: (size, topology.memory_bytes(where)) for where, size in held.items()}
    return Plan(topology, workload, best, seconds, memory, (*slower, *seen))


def _slower(total: float, best: float) -> str:
    return f"{total / best:.3g} times the time" if best > 0 and total > best else "no faster"


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
