"""Moving a built table while it runs: pause, move storage and control, switch, resume (paper, section 5.3, Algorithm 2).

Programs are compiled and memory is allocated before the pause. The old placement stays whole until everything has
arrived, so a move that fails half way changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax

from conduit_jax.blueprint import Blueprint, Compiled, check_partitions, compile_on
from conduit_jax.build import ReplayTable
from conduit_jax.errors import PlacementError, refuse
from conduit_jax.outlook import look_ahead
from conduit_jax.rehearsal import compile_ahead, rehearse_small
from conduit_jax.replay.drawing import stores_of
from conduit_jax.replay.interface import ReplayState
from conduit_jax.schedule.ledger import Ledger
from conduit_jax.schedule.residence import Residence, relocate
from conduit_jax.sharding.choice import Wanted, choose_placement, is_automatic
from conduit_jax.sharding.deal import dealt, rates_of
from conduit_jax.sharding.disk import Disk
from conduit_jax.sharding.holders import Holder, Pieces, allocated, assembled, held, outlined
from conduit_jax.sharding.migration import PIECE_BYTES, Carrier, Edge, Put, Run, edges_between, move, rehearse
from conduit_jax.sharding.parts import storage_shardings
from conduit_jax.sharding.place import far_away, far_holder
from conduit_jax.sharding.placement import Placement, bytes_at, shortfall
from conduit_jax.sharding.plans import Plan
from conduit_jax.sharding.surroundings import ranked_devices

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
_KNOWN = 8  # placements whose programs are kept: a buffer that goes to and fro compiles nothing


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
    blueprint, stored = table.blueprint, table.blueprint.traffic.stored_bytes
    target, plan = chosen_for(table, placement, blueprint)
    check_partitions(target, blueprint)
    if reason == ASKED_FOR:
        outlook = look_ahead(blueprint, placement, "when it was moved", bytes_at(table.placement, stored))
        table = table._replace(wanted=placement, plan=plan, outlook=outlook)
    if target == table.placement:
        return table
    runs = [Run(number, 0, 0, blueprint.slots) for number in range(blueprint.partitions)]
    change = Change(lambda old: runs, runs, None, lambda old: (old.state.control, old.carry, old.ledger))
    go = partial(rehouse, blueprint=blueprint, target=target, change=change, reason=reason, put=put)
    if is_automatic(placement) and shortfall(target, stored):  # it fits, but not beside what is there now
        return by_way_of_disk(table, go, "room to move", put)
    return go(table, piece_bytes=piece_bytes)


def chosen_for(table: ReplayTable, placement: Wanted, blueprint: Blueprint) -> tuple[Placement, Plan | None]:
    """Return where ``table`` is to live as ``blueprint`` says, and the plan; what it holds now counts as free.

    What is chosen on a mesh of its own has its devices in the order in which a move ends soonest.
    """
    site, leaving = blueprint.site, bytes_at(table.placement, table.blueprint.traffic.stored_bytes)
    target, plan = choose_placement(placement, site, blueprint.partitions, blueprint.traffic, leaving=leaving)
    return in_order(table, target, plan), plan


def in_order(table: ReplayTable, target: Placement, plan: Plan | None) -> Placement:
    """Return ``target`` with its devices in the order in which a move there ends soonest."""
    if plan is None:
        return target
    ranks = {device: rank for rank, device in enumerate(ranked_devices(table.blueprint.site))}
    return dealt(table.placement, target, rates_of(plan.topology, ranks))


class Stranded(PlacementError):
    """A table went to disk to make room, could not go on, and could not go back: ``table`` is it, and it works."""

    def __init__(self, message: str, table: ReplayTable):
        super().__init__(message)
        self.table = table


def by_way_of_disk(table: ReplayTable, go: Callable[[ReplayTable], ReplayTable], reason: str, put: Put) -> ReplayTable:
    """Return the ``table`` that ``go`` makes of it once it is on disk; where that raises it goes back, if it still can."""
    on_disk = migrate_table(table, Disk(), reason=reason, put=put)
    try:
        return go(on_disk)
    except BaseException as error:
        try:
            migrate_table(on_disk, table.placement, reason=f"{reason} failed")
        except Exception as second:  # whatever it was, the table is on disk now
            raise Stranded(f"{error}\nIt stays on disk: {second}", on_disk) from error
        raise


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
    try:
        if target not in known:
            compile_ahead(compiled, table, blueprint, target, home.assemble())
        row_bytes = max(blueprint.layout.bytes_per_item, table.layout.bytes_per_item)
        edges = home.edges(_outline(table), change.expected)
        carrier = Carrier(row_bytes, piece_bytes, change.convert, put).for_edges(edges)
        rate = rehearse(edges, carrier)
        rehearse_small(table, compiled, blueprint, target)
        done = _move(table, compiled, home, change, carrier, target)
    except BaseException:
        for holder in chain(*home.stores):
            holder.discard()
        raise
    places = {"source": table.placement.name, "target": target.name}
    moved = Move(reason=reason, **places, link_bytes_per_s=rate, **done)
    known = dict([*known.items(), (target, compiled)][-_KNOWN:])
    return _at(table, blueprint, target, compiled)._replace(known=known, moves=(*table.moves, moved))


def _move(
    table: ReplayTable, compiled: Compiled, home: Home, change: Change, carrier: Carrier, target: Placement
) -> dict[str, Any]:
    """Pause, move, switch and resume; return what it took."""
    spent: dict[str, Any] = {}

    def travel(old: Residence) -> Residence:
        sources, runs = _holders(old.state.storage, table.placement), change.runs(old)
        edges = home.edges(sources, runs)
        begun = time.perf_counter()
        try:
            move(edges, carrier)
        finally:  # a second reference, kept alive by a traceback, say, would make the next donated insert a copy
            for source in chain(*sources):
                source.let_go()
        spent.update(seconds=time.perf_counter() - begun, edges=len(edges))
        steps = edges_between(sources[0], home.stores[0], runs)
        spent.update(bytes=table.blueprint.bytes_per_item * sum(edge.rows for edge in steps))
        return _settled(old, change.small(old), home.assemble(), compiled, target)

    begun = time.perf_counter()
    relocate(table.pipeline, travel)
    return spent | {"pause_s": time.perf_counter() - begun}


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


class Home(NamedTuple):
    """New storage that nothing uses yet, and what it comes to, all zeros until written to.

    ``stores``: the holders of each group of arrays, of ``slots`` each; first that of the steps, of which runs speak. What is
    kept beside them goes whole.
    """

    stores: list[Sequence[Holder]]
    slots: list[int]
    assemble: Callable[[], PyTree]

    def edges(self, sources: list[Sequence[Holder]], runs: list[Run]) -> list[Edge]:
        """Return the edges on which ``runs`` of steps travel here from ``sources``, and everything beside them."""
        partitions = {run.partition for run in runs}
        whole = [[Run(number, 0, 0, slots) for number in partitions] for slots in self.slots[1:]]
        groups = zip(sources, self.stores, [runs, *whole], strict=True)
        return [edge for group in groups for edge in edges_between(*group)]


def _new_home(compiled: Compiled, blueprint: Blueprint, target: Placement) -> Home:
    """Allocate storage for ``blueprint`` on ``target``; ``PlacementError`` where its memory is not to be had."""
    try:
        return _allocated(compiled, blueprint, target)
    except (RuntimeError, MemoryError, OSError) as error:  # what XLA and the kernel raise: nothing has paused yet
        refuse(
            PlacementError,
            "The memory of a new placement is not to be had.",
            got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no memory'}",
            want=f"{blueprint.storage_bytes:,} bytes on {target.name}, beside what is there now",
            fix="plane.migrate(...) to another placement, or a lower capacity",
        )


def _allocated(compiled: Compiled, blueprint: Blueprint, target: Placement) -> Home:
    one = jax.eval_shape(compiled.replay.init, blueprint.shapes.item.shapes()).storage
    slots = [jax.tree.leaves(store)[0].shape[0] for store in stores_of(one)]
    if target.far:
        storage = far_away(one, target)
        return Home(_holders(storage, target), slots, lambda: storage)
    partitions = blueprint.partitions
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((partitions, *leaf.shape), leaf.dtype), one)
    groups = _grouped(shapes, storage_shardings(target, one))
    stores: list[Any] = [allocated(*group) for group in groups]

    def assemble() -> PyTree:
        arrays = [assembled(own, partitions, kinds) for own, (_, kinds) in zip(stores, groups, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(one), list(chain(*arrays)))

    return Home(stores, slots, assemble)


def _grouped(arrays: PyTree, shardings: PyTree) -> list[tuple[list[Any], list[Any]]]:
    """Return (arrays, shardings) of each group of arrays."""
    pairs = zip(stores_of(arrays), stores_of(shardings), strict=True)
    return [(jax.tree.leaves(own), jax.tree.leaves(kinds)) for own, kinds in pairs]


def _outline(table: ReplayTable) -> list[Sequence[Holder]]:
    """Return the holders of the table's storage without its arrays, which others may be donating meanwhile."""
    storage = table.pipeline.state.storage
    if table.placement.far:
        return _holders(storage, table.placement)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), storage)
    return [outlined(*group) for group in _grouped(shapes, storage_shardings(table.placement, storage))]


def _holders(storage: PyTree, placement: Placement) -> list[Sequence[Holder]]:
    if placement.far:
        return [[far_holder(storage, placement)]]
    return [held(*group) for group in _grouped(storage, storage_shardings(placement, storage))]


def _settled(
    old: Residence, small: tuple[PyTree, PyTree, Ledger], storage: PyTree, compiled: Compiled, target: Placement
) -> Residence:
    """Return the residence on ``target``: the small arrays go in one transfer each."""
    split, whole = target.sharding(target.axis), target.sharding()
    control, carry = jax.device_put(small[:2], split)
    key = jax.device_put(old.key, whole)
    jax.block_until_ready((control, carry, key))
    return Residence(compiled.programs, ReplayState(storage, control), carry, key, small[2], compiled.door)


__all__ = [
    "Change",
    "Move",
    "Stranded",
    "by_way_of_disk",
    "chosen_for",
    "in_order",
    "migrate_table",
    "rehouse",
]
