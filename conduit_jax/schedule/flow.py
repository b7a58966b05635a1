"""What a plane refuses when it is set: rates under which pushes and pulls come to wait for each other, and who cannot serve them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from conduit_jax.config import Algorithm, BoundedLag, OffPolicy, ReplayConfig
from conduit_jax.errors import ConfigError, PlacementError, refuse
from conduit_jax.replay.rate_limiter import make_limiter
from conduit_jax.schedule.gates import Gate
from conduit_jax.schedule.history import Change
from conduit_jax.schedule.semantics import SEQUENTIAL, Schedule
from conduit_jax.sharding.choice import Wanted
from conduit_jax.sharding.disk import Disk
from conduit_jax.sharding.memory import DISK
from conduit_jax.sharding.placement import Placement


def is_limited(config: ReplayConfig) -> bool:
    """Return whether draws decide what may come next: a limiter of samples per insert, or draws that remove."""
    limits = config.limits
    return limits.min_diff is not None or limits.max_diff is not None or config.max_times_sampled > 0


def needs_gate(config: ReplayConfig) -> bool:
    """Return whether more than a size that never shrinks decides readiness: slots are deleted from, windows come and go."""
    thins = config.items is not None and config.items.most_lost(1) is not None
    return is_limited(config) or config.resolved_storage == "slots" or thins


def check_tables(algorithm: Algorithm, tables: Mapping[str, ReplayConfig], placement: Wanted = "auto") -> None:
    """Raise ``ConfigError`` for tables that ``algorithm`` could never fill or drain, or that cannot live at ``placement``."""
    for name, config in tables.items():
        if placement == DISK or isinstance(placement, Disk) or (isinstance(placement, Placement) and placement.far):
            check_reach(config, placement if isinstance(placement, str) else str(placement))
        if isinstance(algorithm, BoundedLag) and (needs_gate(config) or config.items is not None):
            refuse(
                ConfigError,
                "Experience of bounded lag is taken oldest first, each step once, from a ring without limiter.",
                got=f"table {name!r}: {config}",
                want="replay=None, or ReplayConfig(capacity=...) alone",
                fix="OffPolicy with ReplayConfig(sampler=Fifo(), max_times_sampled=1, limiter=Queue(...)) is a queue too",
            )
        if isinstance(algorithm, OffPolicy) and is_limited(config):
            _check_draws(name, config)
            partitions = config.partitions or 1
            if algorithm.batch_size % partitions == 0:
                make_limiter(config.limits, partitions=partitions, batch_size=algorithm.batch_size // partitions)


def _check_draws(name: str, config: ReplayConfig) -> None:
    """Refuse a limiter that wants more samples of an item than it may give: draws run out while inserts wait for them."""
    limits, times = config.limits, config.max_times_sampled
    if times and limits.max_diff is not None and limits.samples_per_insert > times:
        refuse(
            ConfigError,
            f"Table {name!r} would deadlock: its limiter wants more samples per insert than items may be drawn.",
            got=f"samples_per_insert={float(limits.samples_per_insert):g}, max_times_sampled={times}",
            want="samples_per_insert <= max_times_sampled",
        )


def run_in_order(
    tables: Mapping[str, ReplayConfig], schedule: str | Schedule | Sequence[tuple]
) -> str | Schedule | Sequence[tuple]:
    """Return the schedule of a plane of ``tables``: sequential where one is limited, as asked for otherwise.

    There a batch drawn ahead would let a unit in, or keep it out, by how far ahead it was drawn. ``ConfigError`` where
    another schedule was asked for.
    """
    limited = [name for name, config in tables.items() if is_limited(config)]
    if not limited:
        return schedule
    if isinstance(schedule, str | Schedule):
        others: list[Any] = [] if schedule in ("auto", "sequential", SEQUENTIAL) else [schedule]
    else:
        others = [entry for entry in schedule if Change(*entry).schedule != SEQUENTIAL]
    if others:
        refuse(
            ConfigError,
            f"Table {limited[0]!r} runs in sequential order: its draws decide what may be inserted and drawn next.",
            got=f"schedule={others[0]}",
            want="schedule='auto' or 'sequential'",
            fix="limiter=MinSize(...) and max_times_sampled=0 run in every schedule",
        )
    return "sequential" if schedule == "auto" else schedule


def check_growth(config: ReplayConfig) -> None:
    """Raise ``ConfigError`` for tables that do not grow: what is known of their items is no function of a ring's head."""
    if needs_gate(config) or config.items is not None:
        refuse(
            ConfigError,
            "Only a ring of single steps without limiter of samples per insert grows.",
            got=str(config),
            want="storage='ring', items=None, limiter=None or MinSize(...)",
            fix="make the table as large as it will be",
        )


def check_reach(config: ReplayConfig, placement: str) -> None:
    """Raise ``PlacementError`` for items that storage on disk or scattered over devices cannot serve."""
    if config.items is not None and not config.items.slots_known:
        refuse(
            PlacementError,
            "What is read for these items depends on what is stored, so a program must reach all of it.",
            got=f"items={config.items}, placement={placement}",
            want="device memory of one device or a mesh, or pinned host memory",
            fix="placement='device' or 'pinned_host'",
        )


def check_flow(gate: Gate) -> None:
    """Raise ``ConfigError`` where units and batches of a gate's sizes are sure to block each other at some time.

    With a = unit * p, b = batch * q and g = gcd(a, b) the debt walks over multiples of g in [min_debt, max_debt], a up and b
    down. Where fewer than (a + b) / g of them lie in there, no walk can be a cycle, and none is reversible: every order of
    pushes and pulls ends where neither is allowed.
    """
    limiter, unit = gate.limiter, gate.unit
    if limiter.min_debt is None or limiter.max_debt is None:
        return
    up, down = unit * limiter.p, gate.batch * limiter.q
    step = math.gcd(limiter.p if gate.counted else up, down)
    places = limiter.max_debt // step - -(-limiter.min_debt // step) + 1
    got = f"units of {unit} items, batches of {gate.batch}, min_diff={_per(limiter.min_debt, limiter.q)}, "
    got += f"max_diff={_per(limiter.max_debt, limiter.q)} in a partition"
    if places * step < up + down:
        least = f"max_diff - min_diff of about {_per(up + down - step, limiter.q)}"
        fix = "raise Queue(size=) or SampleToInsertRatio(error_buffer=), or push and sample less at a time"
        refuse(ConfigError, "Units and batches would come to wait for each other.", got=got, want=least, fix=fix)
    if not _starts(gate):
        want = f"max_diff >= {_per(-(-limiter.min_size // unit) * up, limiter.q)}, or min_size a multiple of a unit"
        refuse(ConfigError, "Units would never add up to min_size: the limiter stops them before.", got=got, want=want)


def _starts(gate: Gate) -> bool:
    """Return whether units are let in until ``min_size`` items are live."""
    limiter, unit = gate.limiter, gate.unit
    assert limiter.max_debt is not None
    if gate.counted:  # any number of real items may come, up to a whole unit
        return (limiter.min_size - 1 + unit) * limiter.p <= limiter.max_debt or unit == 1
    units = -(-limiter.min_size // unit)
    return units * unit == limiter.min_size or units * unit * limiter.p <= limiter.max_debt


def _per(debt: int, q: int) -> str:
    return f"{float(Fraction(debt, q)):g}"
