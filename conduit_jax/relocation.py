"""Moving a built table while it runs: pause, move storage and control, switch, resume (paper, section 5.3, Algorithm 2).

Programs are compiled and memory is allocated before the pause. The old placement stays whole until everything has
arrived, so a move that fails half way changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import NamedSharding

from conduit_jax.blueprint import Blueprint, Compiled, compile_on
from conduit_jax.build import ReplayTable
from conduit_jax.config import BoundedLag
from conduit_jax.errors import PlacementError, refuse
from conduit_jax.replay.interface import ReplayState
from conduit_jax.schedule.residence import Residence, relocate
from conduit_jax.sharding.disk import Disk, DiskHolder, on_disk
from conduit_jax.sharding.holders import Holder, allocated, assembled, held, outlined
from conduit_jax.sharding.migration import PIECE_BYTES, Put, Run, edges_between, move, rehearse
from conduit_jax.sharding.place import storage_on_disk
from conduit_jax.sharding.placement import Placement, resolve_placement

Array = jax.Array
PyTree = Any


@dataclass(frozen=True, kw_only=True)
class Move:
    """One move of a table: ``bytes`` of storage that travelled in ``seconds``, while pushes and pulls waited ``pause_s``.

    ``link_bytes_per_s`` is what bare transfers of a piece reach on the same edges at once, into fresh memory.
    """

    reason: str
    source: str
    target: str
    edges: int
    bytes: int
    seconds: float
    pause_s: float
    link_bytes_per_s: float

    @property
    def link_fraction(self) -> float:
        """The share of the link's rate that the move reached."""
        return self.bytes / max(self.seconds, 1e-9) / self.link_bytes_per_s

    def __str__(self) -> str:
        return (
            f"{self.source} -> {self.target} ({self.reason}): {self.bytes / 1e6:,.1f} MB over {self.edges} edge(s) in "
            f"{self.seconds * 1e3:,.1f} ms, paused {self.pause_s * 1e3:,.1f} ms, {self.link_fraction:.0%} of the link"
        )


def migrate_table(
    table: ReplayTable,
    placement: str | Placement | Disk,
    *,
    reason: str = "asked for",
    put: Put = jax.device_put,
    piece_bytes: int = PIECE_BYTES,
) -> ReplayTable:
    """Return ``table`` living on ``placement``; its batches are the ones it would have delivered where it was, bit for bit.

    Args:
        table: the built table; its pipeline goes on, from the new placement.
        placement: a name, or a placement with the table's number of partitions.
        reason: for ``stats``.
        put: the transfer, ``jax.device_put`` unless links are emulated.
        piece_bytes: how much travels at a time on each edge.

    Raises ``PlacementError`` where it does not fit or a transfer fails; the table then stays where it is and works on.
    """
    blueprint = table.blueprint
    target = resolve_placement(placement, blueprint.site, blueprint.partitions, blueprint.storage_bytes)
    _check_partitions(target, blueprint)
    if target == table.placement:
        return table
    compiled = table.known.get(target) or compile_on(blueprint, target)
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(table.pipeline.state.storage)]
    home = _new_home(shapes, compiled, blueprint, target)
    if target not in table.known:
        _compile_ahead(compiled, table, target, home)
    row_bytes = blueprint.layout.bytes_per_item
    runs = [Run(number, 0, 0, shapes[0].shape[1]) for number in range(blueprint.partitions)]
    outline = edges_between(_outline(shapes, table), home.holders, runs)
    rate = rehearse(outline, row_bytes=row_bytes, piece_bytes=piece_bytes, put=put)
    spent: dict[str, Any] = {}

    def travel(old: Residence) -> Residence:
        edges = edges_between(_holders(old.state.storage, table.placement), home.holders, runs)
        begun = time.perf_counter()
        move(edges, row_bytes=row_bytes, piece_bytes=piece_bytes, put=put)
        spent.update(seconds=time.perf_counter() - begun, edges=len(edges))
        spent.update(bytes=row_bytes * sum(edge.rows for edge in edges))
        return _settled(old, home.assemble(), compiled, target)

    begun = time.perf_counter()
    relocate(table.pipeline, travel)
    paused = time.perf_counter() - begun
    places = {"source": table.placement.name, "target": target.name}
    done = Move(reason=reason, **places, pause_s=paused, link_bytes_per_s=rate, **spent)
    known = {**table.known, target: compiled}
    return table._replace(placement=target, intake=compiled.door, known=known, moves=(*table.moves, done))


class Home(NamedTuple):
    """New storage that nothing uses yet: its ``holders``, and what they come to, all zeros until written to."""

    holders: Sequence[Holder]
    assemble: Callable[[], PyTree]


def _new_home(shapes: list[jax.ShapeDtypeStruct], compiled: Compiled, blueprint: Blueprint, target: Placement) -> Home:
    """Allocate storage of ``shapes`` on ``target``."""
    structure = jax.tree.structure(jax.eval_shape(compiled.replay.init, blueprint.shapes.item.shapes()).storage)
    if target.disk is not None:
        one = structure.unflatten([jax.ShapeDtypeStruct(shape.shape[1:], shape.dtype) for shape in shapes])
        storage = storage_on_disk(one, target, target.disk)
        return Home(_holders(storage, target), lambda: storage)
    sharding = _storage_sharding(target)
    holders = allocated(shapes, sharding)
    return Home(holders, lambda: structure.unflatten(assembled(holders, blueprint.partitions, sharding)))


def _outline(shapes: list[jax.ShapeDtypeStruct], table: ReplayTable) -> Sequence[Holder]:
    """Return the holders of the table's storage without its arrays, which others may be donating meanwhile."""
    if table.placement.disk is not None:
        return _holders(table.pipeline.state.storage, table.placement)
    return outlined(shapes, _storage_sharding(table.placement))


def _holders(storage: PyTree, placement: Placement) -> Sequence[Holder]:
    if placement.disk is not None:
        return [DiskHolder(on_disk(storage), placement.part.devices[0])]
    return held(jax.tree.leaves(storage), _storage_sharding(placement))


def _check_partitions(target: Placement, blueprint: Blueprint) -> None:
    if target.part.partitions != blueprint.partitions:
        refuse(
            PlacementError,
            "A buffer keeps its partitions wherever it lives.",
            got=f"{target.part.partitions} partitions",
            want=f"{blueprint.partitions}, as it was built with",
        )


def _storage_sharding(placement: Placement) -> NamedSharding:
    return placement.sharding(placement.axis, memory_kind=placement.part.memory_kind)


def _settled(old: Residence, storage: PyTree, compiled: Compiled, target: Placement) -> Residence:
    """Return the residence on ``target``: the small arrays go in one transfer each."""
    split, whole = target.sharding(target.axis), target.sharding()
    control, carry = jax.device_put((old.state.control, old.carry), split)
    key = jax.device_put(old.key, whole)
    jax.block_until_ready((control, carry, key))
    return Residence(compiled.programs, ReplayState(storage, control), carry, key, old.ledger, compiled.door)


def _compile_ahead(compiled: Compiled, table: ReplayTable, target: Placement, home: Home) -> None:
    """Compile inserts and draws on ``target``, before anything pauses; the first priority update there compiles its own."""
    pipeline, blueprint, programs = table.pipeline, table.blueprint, cast(Any, compiled.programs)
    split, whole = target.sharding(target.axis), target.sharding()
    state, schedule = pipeline.state, pipeline.schedule
    control = _laid_out(state.control, split)
    storage = home.assemble() if target.disk else _laid_out(home.assemble(), _storage_sharding(target))
    carry, key = _laid_out(pipeline._carry, split), _laid_out(pipeline._key, whole)
    unit = compiled.door.shapes(), _laid_out(blueprint.context, whole), np.uint32(0)
    programs.ingest.ahead(storage, control, carry, *unit)
    if schedule.g_ingestion > 1 and target.disk is None:
        programs.ingest_group.ahead(storage, control, carry, *((part,) * int(schedule.g_ingestion) for part in unit))
    if isinstance(blueprint.algorithm, BoundedLag) or target.disk is not None:
        return  # what they take is named by the host, in shapes of its own
    drawn = control, storage, key, np.uint32(0), unit[1]
    programs.deliver.ahead(*drawn)
    if schedule.g_delivery > 1:
        programs.deliver_group.ahead(*drawn[:3], (np.uint32(0),) * int(schedule.g_delivery), unit[1])


def _laid_out(tree: PyTree, sharding: Any) -> PyTree:
    """Return the shapes of the arrays in ``tree``, laid out as ``sharding``; anything else as it is."""

    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)

    return jax.tree.map(shape, tree)


__all__ = ["Move", "migrate_table"]
