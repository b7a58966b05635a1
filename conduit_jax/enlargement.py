"""Growing a built table while it runs: larger leaves, leaves that come later, another capacity (paper, section 5.3).

What was stored moves into new storage, padded where its leaves grew, in the order and with the priorities it had. Where the
new storage does not fit beside the old, the old one goes to disk first; where it does not fit its tier at all, it goes to
another, as ``placement="auto"`` would choose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from conduit_jax.blueprint import Blueprint, check_partitions, draw_up
from conduit_jax.build import ReplayTable
from conduit_jax.config import BoundedLag
from conduit_jax.errors import ConfigError, SpecError, refuse
from conduit_jax.growth import Growth, check_grows, fitted, only_declared, pad_items, padded
from conduit_jax.outlook import look_up
from conduit_jax.rehearsal import carry_shapes, compiled_for
from conduit_jax.relocation import Change, by_way_of_disk, chosen_for, in_order, rehouse
from conduit_jax.replay import records
from conduit_jax.replay.resize import kept_runs, resized
from conduit_jax.replay.ring import RingState
from conduit_jax.replay.selectors import Geometry
from conduit_jax.schedule.flow import check_growth
from conduit_jax.schedule.ledger import Ledger
from conduit_jax.schedule.residence import Residence
from conduit_jax.sharding.choice import is_automatic
from conduit_jax.sharding.holders import Pieces
from conduit_jax.sharding.mesh import on_host, processes_of
from conduit_jax.sharding.migration import Put, Run
from conduit_jax.sharding.placement import Placement, bytes_at, resolve_placement, shortfall
from conduit_jax.trees import check_matches, tree_spec

Array = jax.Array
PyTree = Any


def outgrown(table: ReplayTable, rollout: PyTree) -> PyTree | None:
    """Return ``rollout``, completed, where it needs larger leaves than the table has, as declared; ``None`` where it does not.

    What was not declared is refused when the rollout is let in.
    """
    door = table.intake
    if door.growth is None:
        return None
    larger, spec = fitted(rollout, door.spec, door.growth)
    return larger if spec != door.spec and only_declared(larger, door.spec, door.growth) else None


def grow_table(
    table: ReplayTable,
    *,
    rollout: PyTree = None,
    capacity: int | None = None,
    put: Put = jax.device_put,
) -> ReplayTable:
    """Return ``table`` for rollouts shaped like ``rollout`` and for ``capacity`` items, each as before unless given.

    ``put`` is the transfer, ``jax.device_put`` unless links are emulated.

    Raises ``SpecError`` or ``ConfigError`` for what cannot be, ``PlacementError`` where it fits nowhere; the table is as it
    was then.
    """
    blueprint = _grown(table.blueprint, rollout, capacity)
    if blueprint is table.blueprint:
        return table
    change = _change(table, blueprint)
    target, beside, table = _target(table, blueprint)
    check_partitions(target, blueprint)
    go = partial(rehouse, blueprint=blueprint, target=target, change=change, reason="growth", put=put)
    return go(table) if beside else by_way_of_disk(table, go, "room to grow", put)


def _grown(old: Blueprint, rollout: PyTree, capacity: int | None) -> Blueprint:
    config, growth = old.config, old.config.growth
    if capacity is not None and capacity != config.capacity:
        if isinstance(old.algorithm, BoundedLag):
            refuse(ConfigError, "A queue of bounded lag does not change its capacity.", got=f"capacity={capacity}")
        if old.site.mesh is not None and len(processes_of(old.site.mesh.devices.flat)) > 1:
            fix = "ReplayConfig(capacity=...) when the plane is made; leaves may grow"
            refuse(
                ConfigError, "A plane over several processes keeps its capacity.", got=f"capacity={capacity}", fix=fix
            )
        config = dataclasses.replace(config, capacity=capacity)
    shapes = old.rollout
    if rollout is not None:
        if growth is None:
            check_matches(rollout, tree_spec(old.rollout), "Rollout")
        else:
            shapes, _ = fitted(rollout, tree_spec(old.rollout), growth)
    check_growth(config)
    if config == old.config and tree_spec(shapes) == tree_spec(old.rollout):
        return old
    new = draw_up(config, old.algorithm, old.hooks, shapes, old.context, old.site)
    arrays = [leaf for leaf in jax.tree.leaves(shapes) if isinstance(leaf, jax.Array | np.ndarray)]
    if len({isinstance(leaf, jax.Array) for leaf in arrays}) != 1:
        new = new._replace(
            actors=old.actors
        )  # shapes do not say where rollouts are made, nor leaves that were filled in
    if (new.shapes.steps, new.shapes.lanes) != (old.shapes.steps, old.shapes.lanes):
        got, want = (new.shapes.steps, new.shapes.lanes), (old.shapes.steps, old.shapes.lanes)
        refuse(SpecError, "Steps and lanes of a rollout do not grow.", got=got, want=want)
    return new


def _target(table: ReplayTable, blueprint: Blueprint) -> tuple[Placement, bool, ReplayTable]:
    """Return where the grown table is to live, whether it fits there beside the old one, and the table with the reasons."""
    size, present, site = blueprint.traffic.stored_bytes, table.placement, blueprint.site
    if is_automatic(table.wanted):
        foreseen = _foreseen(table, blueprint)
        table = table._replace(plan=foreseen.plan, outlook=foreseen.outlook)
        return foreseen.placement, not shortfall(foreseen.placement, size), table
    if shortfall(present, size) and not shortfall(present, _beyond(size, table.blueprint.traffic.stored_bytes)):
        return present, False, table._replace(plan=None)
    refused = resolve_placement(present, site, blueprint.partitions, size)  # with the shortfall, where it does not fit
    return refused, True, table._replace(plan=None)


def _foreseen(table: ReplayTable, blueprint: Blueprint) -> ReplayTable:
    """Return ``table``, placed automatically, with the placement, plan and outlook it is to have as ``blueprint`` says.

    Looked up where its leaves were declared to grow, else planned; raises as ``chosen_for`` does.
    """
    if table.outlook is None:
        target, plan = chosen_for(table, table.wanted, blueprint)
        return table._replace(placement=target, plan=plan)
    leaving = bytes_at(table.placement, table.blueprint.traffic.stored_bytes)
    target, plan, outlook = look_up(table.outlook, blueprint, table.wanted, leaving)
    return table._replace(placement=in_order(table, target, plan), plan=plan, outlook=outlook)


def _beyond(size: Mapping[str, int], old: Mapping[str, int]) -> Mapping[str, int]:
    """Return what each stored leaf takes beyond what is there of it already; less than nothing for rows that get shorter."""
    return {leaf: own - old.get(leaf, 0) for leaf, own in size.items()}


def _change(table: ReplayTable, blueprint: Blueprint) -> Change:
    old = table.blueprint
    growth = blueprint.config.growth or Growth()
    keep, before, after = (
        growth.old_items == "pad" or old.shapes.item == blueprint.shapes.item,
        _geometry(old),
        _geometry(blueprint),
    )
    if keep:
        check_grows(old.shapes.item, blueprint.shapes.item)
    count, resizes = old.partitions, before != after or not keep

    def runs(residence: Residence) -> list[Run]:
        if not keep:
            return []
        if not resizes:
            return whole
        return [Run(*run) for run in kept_runs(_read(residence.state.control.ring), before, after)]

    resize = partial(resized, old=before, new=after, sampler=blueprint.config.sampler, keep=keep)
    resize = compiled_for(jax.vmap(resize), table.pipeline.state.control) if resizes else None
    wider = compiled_for(lambda carry: _grown_carry(carry, blueprint, growth.fill), table.pipeline.store[2])

    def small(residence: Residence) -> tuple[PyTree, PyTree, Ledger]:
        control, ledger = residence.state.control, residence.ledger
        if resize is not None:
            fresh = resize(control)
            ledger = _account(ledger, _read(control.ring), _read(fresh.ring), blueprint)
            control = fresh
        return control, wider(residence.carry), ledger

    whole = [Run(number, 0, 0, before.slots) for number in range(count)]
    sizes = (
        [1 << power for power in range(min(before.length, after.length).bit_length())] if resizes else [before.slots]
    )
    expected = [Run(number, 0, 0, size) for number in range(count) for size in sizes] if keep else []
    convert = None if old.shapes.item == blueprint.shapes.item else converter(old, blueprint, growth.fill)
    return Change(runs, expected, convert, small)


def _geometry(blueprint: Blueprint) -> Geometry:
    return Geometry(blueprint.shapes.lanes // blueprint.partitions, blueprint.length)


def converter(old: Blueprint, new: Blueprint, fill: float) -> Callable[[Pieces], Pieces]:
    """Return pieces of old storage -> pieces of new storage: unpacked, padded with ``fill``, packed again with their versions."""
    before, after = old.layout, new.layout

    @jax.jit
    def convert(pieces: Pieces) -> Pieces:
        rows, *apart = pieces
        items = pad_items(records.unpack(before, rows, tuple(apart)), before.spec, after.spec, fill)
        packed, large = records.pack(after, items, rows[:, : records.VERSION_WORDS])
        return (packed, *large)

    return convert


def _grown_carry(carry: PyTree, blueprint: Blueprint, fill: float) -> PyTree:
    """Return ``carry`` in the shapes it has from now on, padded with ``fill``."""
    wanted = carry_shapes(blueprint.hooks.ingestion, blueprint)
    leaves, shapes = jax.tree.leaves(carry), jax.tree.leaves(wanted)
    if len(leaves) != len(shapes):
        fix = "an init_carry whose leaves only grow"
        refuse(
            SpecError, "The hook's carry becomes another tree.", got=f"{len(shapes)} leaves", want=len(leaves), fix=fix
        )
    grown = [padded(leaf, (leaf.shape[0], *shape.shape), fill) for leaf, shape in zip(leaves, shapes, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(wanted), grown)


def _account(ledger: Ledger, before: RingState, after: RingState, blueprint: Blueprint) -> Ledger:
    """Return the account of a ring that has become another; what was inserted so far stays counted."""
    lanes, length = ledger.lanes, blueprint.length
    live = _count(after.filled, lanes)
    missing = _written(before, ledger.length, lanes) - _written(after, length, lanes)
    elsewhere = ledger.inserted_elsewhere + missing
    exact = ledger.exact and (live > 0 or not blueprint.shapes.counted)
    return dataclasses.replace(ledger, length=length, size=live, inserted_elsewhere=elsewhere, exact=exact)


def _read(steps: RingState) -> RingState:
    """Return a ring's columns on the host: taking one from it on the device would compile, while the table pauses."""
    return jax.tree.map(on_host, steps)


def _written(steps: RingState, length: int, lanes: int) -> int:
    return _count(np.asarray(steps.laps).astype(np.int64) * length + np.asarray(steps.head), lanes)


def _count(steps: Array | np.ndarray, lanes: int) -> int:
    """Return items of ``steps`` a partition ``(partitions,)``, or a lane of it ``(partitions, lanes)``."""
    values = np.asarray(steps, np.int64)
    return int(values.sum()) * (lanes // values.shape[0] if values.ndim == 1 else 1)


__all__ = ["grow_table", "outgrown"]
