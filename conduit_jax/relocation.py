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
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from conduit_jax.blueprint import Blueprint, Compiled, compile_on
from conduit_jax.build import ReplayTable
from conduit_jax.config import BoundedLag
from conduit_jax.errors import PlacementError, refuse
from conduit_jax.hooks import Hook
from conduit_jax.ingestion import partition_view
from conduit_jax.replay.interface import ReplayState
from conduit_jax.schedule.ledger import Ledger
from conduit_jax.schedule.residence import Residence, relocate
from conduit_jax.sharding.choice import Wanted, choose_placement, is_automatic
from conduit_jax.sharding.disk import DiskHolder, on_disk
from conduit_jax.sharding.holders import Holder, Pieces, allocated, assembled, held, outlined
from conduit_jax.sharding.memory import DEVICE, DISK, PINNED_HOST
from conduit_jax.sharding.migration import PIECE_BYTES, Carrier, Put, Run, edges_between, move, rehearse
from conduit_jax.sharding.place import storage_on_disk
from conduit_jax.sharding.placement import PAGEABLE, Placement
from conduit_jax.sharding.pressure import MemoryPressure

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
        """The share of the link's rate that the move reached; 0 where nothing had to travel."""
        return self.bytes / max(self.seconds, 1e-9) / self.link_bytes_per_s if self.bytes else 0.0

    def __str__(self) -> str:
        return (
            f"{self.source} -> {self.target} ({self.reason}): {self.bytes / 1e6:,.1f} MB over {self.edges} edge(s) in "
            f"{self.seconds * 1e3:,.1f} ms, paused {self.pause_s * 1e3:,.1f} ms, {self.link_fraction:.0%} of the link"
        )


ASKED_FOR = "asked for"


class Change(NamedTuple):
    """What becomes of what is stored: ``runs`` of slots to be moved as pieces ``convert`` makes new ones of, and the rest.

    ``expected`` are the runs to prepare for, before the table pauses; ``small(old)`` returns control, carry and ledger.
    """

    runs: Callable[[Residence], list[Run]]
    expected: list[Run]
    convert: Callable[[Pieces], Pieces] | None
    small: Callable[[Residence], tuple[PyTree, PyTree, Ledger]]


def migrate_table(
    table: ReplayTable,
    placement: Wanted,
    *,
    reason: str = ASKED_FOR,
    put: Put = jax.device_put,
    piece_bytes: int = PIECE_BYTES,
) -> ReplayTable:
    """Return ``table`` living on ``placement``; its batches are the ones it would have delivered where it was, bit for bit.

    Args:
        table: the built table; its pipeline goes on, from the new placement.
        placement: a name, what may be chosen, or a placement with the table's number of partitions.
        reason: for ``stats``; what is not asked for does not change what is wanted when the table grows.
        put: the transfer, ``jax.device_put`` unless links are emulated.
        piece_bytes: how much travels at a time on each edge.

    Raises ``PlacementError`` where it does not fit or a transfer fails; the table then stays where it is and works on.
    """
    blueprint = table.blueprint
    target, plan = choose_placement(placement, blueprint.site, blueprint.partitions, blueprint.traffic)
    _check_partitions(target, blueprint)
    if reason == ASKED_FOR:
        table = table._replace(wanted=placement, plan=plan)
    if target == table.placement:
        return table
    slots = blueprint.length * blueprint.shapes.lanes // blueprint.partitions
    runs = [Run(number, 0, 0, slots) for number in range(blueprint.partitions)]
    change = Change(lambda old: runs, runs, None, lambda old: (old.state.control, old.carry, old.ledger))
    return rehouse(table, blueprint, target, change, reason=reason, put=put, piece_bytes=piece_bytes)


def rehouse(
    table: ReplayTable,
    blueprint: Blueprint,
    target: Placement,
    change: Change,
    *,
    reason: str,
    put: Put = jax.device_put,
    piece_bytes: int = PIECE_BYTES,
) -> ReplayTable:
    """Return ``table`` as ``blueprint`` says on ``target``, with what ``change`` keeps of its content.

    Everything is compiled and allocated first; then the table pauses, the content moves, and it goes on. Where anything
    raises, the table is as it was.
    """
    known = table.known if blueprint is table.blueprint else {}
    compiled = known.get(target) or compile_on(blueprint, target)
    home = _new_home(compiled, blueprint, target)
    if target not in known:
        _compile_ahead(compiled, table, blueprint, target, home)
    row_bytes = max(blueprint.layout.bytes_per_item, table.layout.bytes_per_item)
    carrier = Carrier(row_bytes, piece_bytes, change.convert, put)
    rate = rehearse(edges_between(_outline(table), home.holders, change.expected), carrier)
    _rehearse_small(table, target)
    spent: dict[str, Any] = {}

    def travel(old: Residence) -> Residence:
        sources = _holders(old.state.storage, table.placement)
        edges = edges_between(sources, home.holders, change.runs(old))
        begun = time.perf_counter()
        try:
            move(edges, carrier)
        finally:  # a second reference, kept alive by a traceback, say, would make the next donated insert a copy
            for source in sources:
                source.let_go()
        spent.update(seconds=time.perf_counter() - begun, edges=len(edges))
        spent.update(bytes=table.layout.bytes_per_item * sum(edge.rows for edge in edges))
        return _settled(old, change.small(old), home.assemble(), compiled, target)

    begun = time.perf_counter()
    try:
        relocate(table.pipeline, travel)
    except BaseException:
        for holder in home.holders:
            holder.discard()
        raise
    paused = time.perf_counter() - begun
    places = {"source": table.placement.name, "target": target.name}
    done = Move(reason=reason, **places, pause_s=paused, link_bytes_per_s=rate, **spent)
    return _at(table, blueprint, target, compiled)._replace(
        known={**known, target: compiled}, moves=(*table.moves, done)
    )


def _at(table: ReplayTable, blueprint: Blueprint, target: Placement, compiled: Compiled) -> ReplayTable:
    """Return ``table`` with what follows from its new blueprint and placement."""
    return table._replace(
        intake=compiled.door,
        config=blueprint.config,
        layout=blueprint.layout,
        placement=target,
        storage_bytes=blueprint.storage_bytes,
        blueprint=blueprint,
    )


def relieve_table(table: ReplayTable, pressure: MemoryPressure, put: Put = jax.device_put) -> ReplayTable:
    """Return ``table`` in the next tier that has room, further from the learner; raise ``pressure`` where none has or one was asked for."""
    device = table.placement.part.devices[0]
    further = {DEVICE: (PINNED_HOST, PAGEABLE, DISK), PINNED_HOST: (PAGEABLE, DISK)}.get(
        table.placement.part.memory_kind, (DISK,)
    )
    if device.platform == "cpu":
        further = (DISK,)  # there all other tiers are the same memory
    for tier in further if is_automatic(table.wanted) else ():
        try:
            return migrate_table(table, tier, reason="memory pressure", put=put)
        except PlacementError:
            continue
    raise pressure


class Home(NamedTuple):
    """New storage that nothing uses yet: its ``holders``, and what they come to, all zeros until written to."""

    holders: Sequence[Holder]
    assemble: Callable[[], PyTree]


def _new_home(compiled: Compiled, blueprint: Blueprint, target: Placement) -> Home:
    """Allocate storage for ``blueprint`` on ``target``."""
    one = jax.eval_shape(compiled.replay.init, blueprint.shapes.item.shapes()).storage
    if target.disk is not None:
        storage = storage_on_disk(one, target, target.disk)
        return Home(_holders(storage, target), lambda: storage)
    leaves, structure = jax.tree.flatten(one)
    partitions, sharding = blueprint.partitions, _storage_sharding(target)
    holders = allocated([jax.ShapeDtypeStruct((partitions, *leaf.shape), leaf.dtype) for leaf in leaves], sharding)
    return Home(holders, lambda: structure.unflatten(assembled(holders, partitions, sharding)))


def _outline(table: ReplayTable) -> Sequence[Holder]:
    """Return the holders of the table's storage without its arrays, which others may be donating meanwhile."""
    storage = table.pipeline.state.storage
    if table.placement.disk is not None:
        return _holders(storage, table.placement)
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(storage)]
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


def _settled(
    old: Residence, small: tuple[PyTree, PyTree, Ledger], storage: PyTree, compiled: Compiled, target: Placement
) -> Residence:
    """Return the residence on ``target``: the small arrays go in one transfer each."""
    split, whole = target.sharding(target.axis), target.sharding()
    control, carry = jax.device_put(small[:2], split)
    key = jax.device_put(old.key, whole)
    jax.block_until_ready((control, carry, key))
    return Residence(compiled.programs, ReplayState(storage, control), carry, key, small[2], compiled.door)


def _rehearse_small(table: ReplayTable, target: Placement) -> None:
    """Send zeros the way control and carry will go: JAX compiles a transfer that splits or joins arrays for each shape."""
    small = table.pipeline.state.control, table.pipeline._carry
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), small)
    present = table.placement.sharding(table.placement.axis)
    with jax.set_mesh(table.placement.mesh):
        zeros = jax.jit(
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), out_shardings=present
        )()
    jax.block_until_ready(jax.device_put(zeros, target.sharding(target.axis)))


def _compile_ahead(compiled: Compiled, table: ReplayTable, blueprint: Blueprint, target: Placement, home: Home) -> None:
    """Compile inserts and draws on ``target``, before anything pauses; the first priority update there compiles its own."""
    programs, schedule = cast(Any, compiled.programs), table.pipeline.schedule
    split, whole = target.sharding(target.axis), target.sharding()
    one = jax.eval_shape(compiled.replay.init, blueprint.shapes.item.shapes()).control
    control = _laid_out(_stacked(one, blueprint.partitions), split)
    carry = _laid_out(_stacked(carry_shapes(blueprint.hooks.ingestion, blueprint), blueprint.partitions), split)
    key = _laid_out(table.pipeline._key, whole)
    storage = home.assemble() if target.disk else _laid_out(home.assemble(), _storage_sharding(target))
    units = [(one, _laid_out(blueprint.context, whole), np.uint32(0)) for one in compiled.door.shapes(table.intake)]
    for unit in units:
        programs.ingest.ahead(storage, control, carry, *unit)
    if target.disk is not None:
        return  # there the host has a part in every draw
    for unit in units if schedule.g_ingestion > 1 else ():
        programs.ingest_group.ahead(storage, control, carry, *((part,) * int(schedule.g_ingestion) for part in unit))
    if isinstance(blueprint.algorithm, BoundedLag):
        return  # what it takes is named by the host, in shapes of its own
    drawn = control, storage, key, np.uint32(0), units[0][1]
    programs.deliver.ahead(*drawn)
    if schedule.g_delivery > 1:
        programs.deliver_group.ahead(*drawn[:3], (np.uint32(0),) * int(schedule.g_delivery), units[0][1])


def _stacked(tree: PyTree, partitions: int) -> PyTree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((partitions, *leaf.shape), leaf.dtype), tree)


def carry_shapes(hook: Hook, blueprint: Blueprint) -> PyTree:
    """Return the shapes of the carry of one partition."""
    return jax.eval_shape(hook.init_carry, partition_view(blueprint.rollout, blueprint.partitions))


def _laid_out(tree: PyTree, sharding: Any) -> PyTree:
    """Return the shapes of the arrays in ``tree``, laid out as ``sharding``; anything else as it is."""

    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)

    return jax.tree.map(shape, tree)


__all__ = ["Change", "Move", "carry_shapes", "migrate_table", "rehouse", "relieve_table"]
