"""What the plane tells about itself: statistics as values, and its choices explained as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from conduit_jax.build import IterationTable, ReplayTable
from conduit_jax.config import ReplayConfig
from conduit_jax.errors import ValueRefusedError, refuse
from conduit_jax.relocation import Move
from conduit_jax.schedule.flow import is_limited
from conduit_jax.schedule.history import Change, History
from conduit_jax.schedule.lag import LagLedger
from conduit_jax.schedule.metrics import LatencyReport
from conduit_jax.schedule.mixed import Mixed
from conduit_jax.schedule.semantics import Schedule, draw_staleness, feasible_delivery, feasible_ingestion
from conduit_jax.sharding.memory import available_bytes, memory_kinds
from conduit_jax.sharding.plans import decision


@dataclass(frozen=True, kw_only=True)
class TableStats:
    """Counts of one table since it was built; ``staleness`` maps updates between draw and use to batches delivered so.

    Of bounded lag: ``lag`` maps policy versions between acting and use to items delivered so; ``stale_items`` waited too
    long, ``refused_items`` were too old when pushed, ``overflow_items`` were overwritten: none of these were delivered.
    """

    capacity_items: int
    pushed_units: int
    inserted_items: int
    drawn_batches: int
    delivered_batches: int
    staleness: dict[int, int]
    bytes_per_item: int
    live_items: int = 0
    undelivered_batches: int = 0
    dropped_batches: int = 0
    priority_updates: int = 0
    refused_updates: int = 0
    replaced_priorities: int = 0
    stale_updates: int = 0
    storage_bytes: int = 0
    placement: str = ""
    moves: tuple[Move, ...] = ()
    waiting_units: int = 0
    lag: dict[int, int] = field(default_factory=dict)
    stale_items: int = 0
    refused_items: int = 0
    overflow_items: int = 0


@dataclass(frozen=True)
class PlaneStats:
    """Statistics by table and the latency of recent iterations; ``deterministic`` is False once timing decided any order.

    ``schedule_history`` holds what was run from which iteration on: given as ``schedule=`` it repeats the run. ``stalls_s``
    are the seconds the host waited, by cause.
    """

    tables: dict[str, TableStats]
    latency: LatencyReport
    deterministic: bool
    schedule_history: tuple[Change, ...] = ()
    stalls_s: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "tables": {name: asdict(table) for name, table in self.tables.items()},
            "latency": self.latency.as_dict(),
            "deterministic": self.deterministic,
            "schedule_history": [
                {"iteration": change.iteration, "schedule": str(change.schedule), "reason": change.reason}
                for change in self.schedule_history
            ],
            "stalls_s": self.stalls_s,
        }


def table_stats(table: ReplayTable | IterationTable) -> TableStats:
    """Return the present statistics of one table; reads counters from the device."""
    if isinstance(table, IterationTable):
        pipeline = table.pipeline
        units, per_unit = pipeline.pushed_units, pipeline.items // pipeline.algorithm.units_per_iteration
        return TableStats(
            capacity_items=pipeline.items,
            pushed_units=units,
            inserted_items=units * per_unit,
            drawn_batches=pipeline.delivered_batches,
            delivered_batches=pipeline.delivered_batches,
            staleness={0: pipeline.delivered_batches},
            bytes_per_item=table.layout.spec.bytes,
            waiting_units=pipeline.waiting_units,
        )
    ledger, faults = table.pipeline.ledger, table.pipeline.faults()
    if isinstance(ledger, LagLedger):
        faults |= {name: getattr(ledger, name) for name in ("stale_items", "refused_items", "overflow_items")}
    return TableStats(
        live_items=table.pipeline.live_items(),
        capacity_items=ledger.capacity,
        pushed_units=ledger.pushed_units,
        inserted_items=table.pipeline.inserted_items(),
        drawn_batches=ledger.drawn_batches,
        delivered_batches=ledger.delivered_batches,
        undelivered_batches=table.pipeline.undelivered,
        dropped_batches=ledger.dropped_batches,
        priority_updates=ledger.priority_updates,
        staleness=dict(ledger.staleness),
        storage_bytes=table.storage_bytes,
        placement=table.placement.name,
        moves=table.moves,
        bytes_per_item=table.blueprint.bytes_per_item,
        waiting_units=table.pipeline.waiting_units,
        lag=dict(ledger.lag) if isinstance(ledger, LagLedger) else {},
        **faults,
    )


def explain_plane(
    algorithm: Any,
    tables: Mapping[str, ReplayTable | IterationTable],
    wanted: tuple[Any, Any],
    history: History,
    latency: LatencyReport,
    mixed: Mixed | None = None,
) -> str:
    """Return placement and schedule of every table as text, with what else there was and why it was not taken."""
    if not tables:
        return (
            f"{algorithm}\nnot built yet: placement={wanted[0]!r}, schedule={wanted[1]!r} are decided at the first push"
        )
    return "\n".join(
        [str(algorithm), *_parts_of_a_batch(mixed)]
        + [line for name, table in tables.items() for line in _explain_table(name, table, algorithm, wanted)]
        + history.as_text(latency)
    )


def _parts_of_a_batch(mixed: Mixed | None) -> list[str]:
    if mixed is None:
        return []
    return ["every batch  " + ", ".join(f"{rows:,} rows of table {name!r}" for name, rows in mixed.shares.items())]


def _explain_table(
    name: str, table: ReplayTable | IterationTable, algorithm: Any, wanted: tuple[Any, Any]
) -> list[str]:
    lines = [f"table {name!r}"]
    if isinstance(table, ReplayTable):
        ledger = table.pipeline.ledger
        rounded = (
            ""
            if ledger.capacity == table.config.capacity
            else f" (asked for {table.config.capacity:,}, rounded up to divide by {_divisor(table)})"
        )
        lines += [
            f"  capacity    {ledger.capacity:,} {'items' if table.config.items is None else 'steps'}{rounded}",
            *_rules(table.config),
            f"  item        {table.layout.spec.bytes} bytes, stored in {table.blueprint.bytes_per_item}",
            f"  storage     {table.storage_bytes / 1e6:,.1f} MB",
            f"  placement   {table.placement}  [{'asked for' if table.plan is None else 'chosen'}]",
            *_decision(table),
            *(f"    moved {move}" for move in table.moves),
        ]
    chosen, taken = "chosen" if wanted[1] == "auto" else "asked for", table.pipeline.schedule
    lines += [f"  schedule    {taken}  [{chosen}], draw staleness {draw_staleness(taken)} update(s)"]
    for what, pairs, own in (
        ("ingestion", feasible_ingestion(algorithm), (taken.overlap_ingestion, taken.g_ingestion)),
        ("delivery", feasible_delivery(algorithm), (taken.overlap_delivery, taken.g_delivery)),
    ):
        others = [pair for pair in pairs if pair != own]
        limited = isinstance(table, ReplayTable) and is_limited(table.config)
        reason = f"feasible, {_why_not(taken, wanted[1])}"
        lines += _not_taken(what, others, _IN_ORDER if limited else reason)
    return lines


def _decision(table: ReplayTable) -> list[str]:
    """Return why the table is where it is, and where it will be as its items grow."""
    if table.plan is None:
        return [*_other_tiers(table), *(table.outlook.lines() if table.outlook else [])]
    if table.outlook is None:
        return [f"  {line}" for line in decision(table.plan)]
    return [*(f"  {line}" for line in decision(table.outlook.reasons(table.plan))), *table.outlook.lines()]


_IN_ORDER = "draws decide what may be inserted and drawn next, so they keep their order"


def _rules(config: ReplayConfig) -> list[str]:
    """Return what a table is besides a plain ring, as lines."""
    kept = (
        []
        if config.resolved_storage == "ring"
        else [f"  slots       drawn by {config.sampler}, removed by {config.remover}"]
    )
    kept += [f"  limiter     {config.limiter}"] if config.limiter is not None else []
    if config.items is not None:
        kept += [f"  items       {config.items}, drawn from {config.min_size:,} {config.items.noun} on"]
    return kept + ([f"  draws       at most {config.max_times_sampled} an item"] if config.max_times_sampled else [])


def _divisor(table: ReplayTable) -> str:
    blueprint = table.blueprint
    return f"{blueprint.partitions} partitions" if blueprint.independent else f"{blueprint.shapes.lanes} lanes"


def _why_not(taken: Schedule, wanted: Any) -> str:
    if wanted != "auto":
        return "but another was asked for"
    if taken.fused:
        return "but one fused program does the same without dispatching anything between its stages"
    if taken.overlap_delivery:
        return "but the path has a device of its own and can run behind the learner"
    return "but overlap hides nothing on a device the learner computes on, and needs a staleness of 1"


def _not_taken(what: str, pairs: list[Any], reason: str) -> list[str]:
    settings = ", ".join(f"(overlap={int(overlap)}, g={g})" for overlap, g in pairs)
    return [f"    not taken {what} {settings}: {reason}"] if pairs else []


def _other_tiers(table: ReplayTable) -> list[str]:
    part = table.placement.part
    lines = []
    for kind in memory_kinds(part.devices[0]):
        if kind in (part.memory_kind, "unpinned_host"):
            continue
        free = available_bytes(part.devices[0], kind)
        reason = (
            "fits, but one more copy away from the learner"
            if free >= table.storage_bytes
            else f"lacks {table.storage_bytes - free:,} bytes"
        )
        lines.append(f"    not taken {kind}: {reason}")
    return lines


def refuse_new_faults(table: str, faults: dict[str, int], reported: dict[str, dict[str, int]]) -> None:
    """Raise ``ValueRefusedError`` for what device-side values did wrong since it was last ``reported``, and enter it there."""
    before, reported[table] = reported.get(table, {}), faults
    bad = {name: faults[name] - before.get(name, 0) for name in ("refused_updates", "replaced_priorities")}
    if any(bad.values()):
        refuse(
            ValueRefusedError,
            f"Table {table!r} was given priorities that are NaN, infinite or negative.",
            got=f"{bad['refused_updates']} updates refused whole, "
            f"{bad['replaced_priorities']} initial priorities replaced by the maximum",
            want="finite priorities >= 0",
            fix="take abs() of TD errors and check the loss for NaN",
        )
