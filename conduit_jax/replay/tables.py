"""Several tables behind one numbering of slots: whose item a slot is, and changes that reach their own table only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.replay.interface import Faults, Replay
from conduit_jax.replay.selectors import usable
from conduit_jax.types import SampleInfo

Array = jax.Array


class TablesGeometry(NamedTuple):
    """The geometries of ``tables``, whose slots are counted one table after the other."""

    tables: tuple[Any, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first slot of every table."""
        return tuple(accumulate((table.slots for table in self.tables[:-1]), initial=0))

    @property
    def slots(self) -> int:
        return sum(table.slots for table in self.tables)

    def table_of(self, slots: Array) -> Array:
        """Return the table number, int32, of each of the mixture's ``slots``."""
        return sum((slots >= offset for offset in self.offsets[1:]), jnp.zeros(slots.shape, jnp.int32))


class TablesControl(NamedTuple):
    """The tables' controls. ``foreign`` uint32: entries of updates that a table saw as stale because they were another's."""

    tables: tuple[Any, ...]
    foreign: Array

    @property
    def faults(self) -> Faults:
        """The tables' faults together; an update that was refused is counted once."""
        total = jax.tree.map(lambda *counts: sum(counts[1:], counts[0]), *(table.faults for table in self.tables))
        return total._replace(stale_updates=total.stale_updates - self.foreign)


def update_tables(
    replays: Sequence[Replay], geometry: TablesGeometry, control: TablesControl, info: SampleInfo, priorities: Array
) -> tuple[TablesControl, Array]:
    """Give every table the priorities of its own items and return ``(control, applied)``; a bad one refuses all of them.

    To a table the others' items have the slot -1, which it counts as stale and never touches. A refused update is shown to
    the first table alone, so that it is counted once.
    """
    accepted, table = jnp.all(usable(priorities.astype(jnp.float32))), geometry.table_of(info.slot)
    kept, applied = [], jnp.zeros((), jnp.int32)
    for number, (replay, offset) in enumerate(zip(replays, geometry.offsets, strict=True)):
        own = info._replace(slot=jnp.where((table == number) & accepted, info.slot - offset, -1))
        shown = jnp.where(accepted | (number == 0), priorities, 0)
        after, count = replay.update_priorities(control.tables[number], own, shown)
        kept.append(after)
        applied = applied + count
    # All but one table see each entry as foreign; where it was refused, all but the first see it as stale.
    foreign = jnp.uint32((len(replays) - 1) * info.slot.shape[0])
    return TablesControl(tuple(kept), control.foreign + foreign), applied


def delete_from_tables(
    replays: Sequence[Replay], geometry: TablesGeometry, control: TablesControl, info: SampleInfo
) -> tuple[TablesControl, Array]:
    """Delete every table's own items and return ``(control, deleted)``; refused as soon as one table cannot delete."""
    table, kept, deleted = geometry.table_of(info.slot), [], jnp.zeros((), jnp.int32)
    for number, (replay, offset) in enumerate(zip(replays, geometry.offsets, strict=True)):
        own = info._replace(slot=jnp.where(table == number, info.slot - offset, -1))
        after, count = replay.delete(control.tables[number], own)
        kept.append(after)
        deleted = deleted + count
    return control._replace(tables=tuple(kept)), deleted
