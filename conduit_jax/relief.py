"""Memory pressure, relieved: a buffer that may live elsewhere moves a tier further from the learner."""

from __future__ import annotations

import jax

from conduit_jax.build import ReplayTable
from conduit_jax.errors import PlacementError
from conduit_jax.relocation import Stranded, migrate_table
from conduit_jax.sharding.choice import AutoPlacement, is_automatic
from conduit_jax.sharding.memory import DEVICE, DISK, PINNED_HOST
from conduit_jax.sharding.migration import Put
from conduit_jax.sharding.placement import PAGEABLE
from conduit_jax.sharding.pressure import MemoryPressure


def relieve_table(table: ReplayTable, pressure: MemoryPressure, put: Put = jax.device_put) -> ReplayTable:
    """Return ``table`` in the next tier that has room and may be chosen, further from the learner.

    Raises ``pressure`` where there is none, with what was tried, or where its placement was asked for.
    """
    tried = ""
    device, kind = table.placement.part.devices[0], table.placement.part.memory_kind  # that of the nearest part
    further = {DEVICE: (PINNED_HOST, PAGEABLE, DISK), PINNED_HOST: (PAGEABLE, DISK)}.get(kind, ())
    if device.platform == "cpu":
        further = (DISK,) if kind != DISK else ()  # there all other tiers are the same memory
    for tier in further if is_automatic(table.wanted) else ():
        if not _may_choose(table, tier):
            continue
        try:
            return migrate_table(table, tier, reason="memory pressure", put=put)
        except Stranded:
            raise
        except PlacementError as error:
            tried += f"\n  tried {tier}: " + str(error).replace("\n", "\n  ")
    raise MemoryPressure(f"{pressure}{tried}") from pressure


def _may_choose(table: ReplayTable, tier: str) -> bool:
    """Whether what was asked of an automatic placement lets the table live in ``tier``."""
    if not isinstance(table.wanted, AutoPlacement):
        return True
    limit = table.wanted.limits.get(tier, table.storage_bytes)
    return table.storage_bytes <= limit and (not table.wanted.only or tier in table.wanted.only)


__all__ = ["relieve_table"]
