"""A plan, and its text: the chosen placement, its cost by term, its memory, and a line for every candidate that was not taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conduit_jax.sharding.layout import Layout
from conduit_jax.sharding.topology import Endpoint, Topology
from conduit_jax.sharding.workload import Workload

_MOST_HOLDERS = 8
_MOST_REJECTED = 24


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


def plan_text(plan: Plan) -> str:
    """Return the plan as lines of plain text."""
    load = plan.workload
    lines = [
        f"placement on {plan.topology.name}: {plan.layout.name}",
        f"  {load.capacity_items:,} items of {load.item_bytes:,} bytes = {size(load.storage_bytes)}; an iteration inserts "
        f"{load.inserted_items:,} and samples {load.sampled_items:,}; actors on the {load.actors}, {_learners(load.learners)}",
        *(f"  {line}" for line in describe(plan.layout)),
        *_cost(plan),
    ]
    tightest = sorted(plan.memory.items(), key=lambda item: -item[1][0] / max(item[1][1], 1))
    lines += [
        f"  memory      {where}: {size(held)} of {size(limit)}" for where, (held, limit) in tightest[:_MOST_HOLDERS]
    ]
    over = len(tightest) - _MOST_HOLDERS
    lines += [f"              and {over} more, less full"] if over > 0 else []
    return "\n".join(
        [*lines, *(["  not taken"] if plan.rejected else []), *(f"    {line}" for line in _rejections(plan))]
    )


def decision(plan: Plan) -> list[str]:
    """Return what speaks for the chosen placement and against each other candidate, for a plane that shows the rest itself."""
    return [*_cost(plan), *(f"  not taken {line}" for line in _rejections(plan))]


def _cost(plan: Plan) -> list[str]:
    if not plan.seconds:
        return ["  predicted   nothing was measured: nothing else had to be weighed"]
    terms = ", ".join(f"{term[:-2]} {duration(value)}" for term, value in plan.seconds.items() if value)
    return [f"  predicted   {terms}; together {duration(plan.total_s)} an iteration, {plan.topology.source[:60]}"]


def _rejections(plan: Plan) -> list[str]:
    shown = plan.rejected[:_MOST_REJECTED]
    width = max((len(one.layout.name) for one in shown), default=0)
    costs = [duration(one.seconds) if one.seconds is not None else "-" for one in shown]
    lines = [f"{one.layout.name:<{width}}  {cost:>9}  {one.reason}" for one, cost in zip(shown, costs, strict=True)]
    over = len(plan.rejected) - len(shown)
    return [*lines, *([f"and {over} more, all listed in Plan.rejected and by --json"] if over else [])]


def describe(layout: Layout) -> list[str]:
    """Return a line for each part of a layout."""
    lines = []
    for part in layout.parts:
        names = [str(holder) for holder in part.holders]
        shown = ", ".join(names[:_MOST_HOLDERS]) + (f", ... ({len(names)})" if len(names) > _MOST_HOLDERS else "")
        dealt = "" if len(set(part.partitions)) == 1 else f", dealt {list(part.partitions[:_MOST_HOLDERS])}"
        what = "all leaves" if part.leaves is None else ", ".join(part.leaves)
        lines.append(f"holds       {what}: {sum(part.partitions)} partition(s) over {shown}{dealt}")
    return lines


def _learners(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:_MOST_HOLDERS])
    return f"learner{'s' if len(ranks) > 1 else ''} on device {shown}{', ...' if len(ranks) > _MOST_HOLDERS else ''}"


def size(count: float) -> str:
    """Return bytes for people."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count:,.0f} B"


def duration(seconds: float) -> str:
    """Return seconds for people."""
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:,.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.1f} us"
