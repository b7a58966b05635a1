"""A plane's memory across runs: what ``plane.save`` writes and what ``plane.restore`` makes of it.

What is saved decides all batches to come: each table's live rows, control, carry, keys, batches drawn and not delivered,
units waiting, account and schedule; the plane's policy version. What was said when the plane was made is saved too, and
compared: a plane that was made otherwise would go on differently, so it is refused with the list of differences.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any

import jax

from conduit_jax.build import IterationTable, ReplayTable
from conduit_jax.checkpoint import folder, pipelines
from conduit_jax.checkpoint.arrays import Reader, Writer
from conduit_jax.checkpoint.hosts import HostLoader, save_host
from conduit_jax.checkpoint.pipelines import IterationLoader, ReplayLoader
from conduit_jax.checkpoint.structure import (
    differences,
    settings_as_data,
    structure_as_data,
    structure_from_data,
)
from conduit_jax.config import ReplayConfig
from conduit_jax.errors import CheckpointError, ConfigError, HookError, refuse
from conduit_jax.schedule.history import Change
from conduit_jax.schedule.programs import Unit
from conduit_jax.schedule.turns import Turns
from conduit_jax.trees import TreeSpec

PyTree = Any
Plane = Any  # an ExperiencePlane, which stands above this file
Data = dict[str, Any]
Table = ReplayTable | IterationTable
PathLike = str | os.PathLike[str]


def save(plane: Plane, path: PathLike, also: Callable[[Writer], Data] | None = None) -> None:
    """Write ``plane`` to the folder ``path``, whole or not at all; ``also`` adds a section ``"loop"``."""
    if jax.process_count() > 1:
        got = f"{jax.process_count()} processes"
        refuse(CheckpointError, "A plane over several processes is not saved yet.", got=got, want="one process")
    with folder.replacing(path) as draft, _held(plane):
        writer = Writer(draft.data)
        draft.body["written_by"] = f"conduit_jax {version('conduit_jax')}, jax {jax.__version__}"
        draft.body["plane"] = _plane_as_data(plane, writer)
        if also is not None:
            draft.body["loop"] = also(writer)
        writer.close()


@contextmanager
def _held(plane: Plane) -> Iterator[None]:
    """Let no other thread change a table in the block."""
    with ExitStack() as locks:
        if plane.mixed is not None:  # or a batch may be handed over by some of its tables
            locks.enter_context(plane.mixed.lock)
        for name in sorted(plane._ends):  # before the lock of building: what they insert may have to grow its table
            if (hook := _host_ingestion(plane, name)) is not None:
                locks.enter_context(hook._lock)
                for (
                    pending,
                    _,
                    _,
                ) in hook._pending:  # in order of arrival it inserts by itself, which wants the table's lock
                    pending.result(hook.deadline_s)
        locks.enter_context(plane._tables.lock)
        for name in sorted(plane._tables):
            lock = plane._tables[name].pipeline._lock
            if isinstance(lock, Turns):
                locks.enter_context(lock.lock)
            locks.enter_context(lock)
        yield


def _host_ingestion(plane: Plane, table: str) -> Any:
    ends = plane._ends.get(table)
    return None if ends is None else ends.ingestion


def _plane_as_data(plane: Plane, writer: Writer) -> Data:
    return {
        "settings": _settings(plane),
        "policy_version": plane.policy_version,
        "reported": plane._reported,
        "history": [
            [change.iteration, pipelines.schedule_as_data(change.schedule), change.reason]
            for change in plane.history.changes
        ],
        "tables": {
            name: {**_table_as_data(built, writer), "host": _host_as_data(plane, name, writer)}
            for name, built in plane._tables.items()
        },
    }


def _host_as_data(plane: Plane, table: str, writer: Writer) -> Data | None:
    hook = _host_ingestion(plane, table)
    return None if hook is None else save_host(writer, hook)


def _settings(plane: Plane) -> Data:
    """Return what was said when the plane was made, but for what only a built table decides."""
    return {
        "algorithm": settings_as_data(plane.algorithm),
        "seed": plane.seed,
        "replay": {name: _replay_settings(config) for name, config in plane.replay.items()},
        **({} if plane.mixed is None else _mixture_settings(plane.mixed.shares)),
    }


def _mixture_settings(shares: dict[str, int]) -> Data:
    return {"tables of a batch": list(shares), "rows of a batch": shares}  # in their order too


def _replay_settings(config: ReplayConfig) -> Data:
    data = settings_as_data(config)
    return {name: value for name, value in data.items() if name not in ("partitions", "ragged")}


def _table_as_data(built: Table, writer: Writer) -> Data:
    data = {
        "settings": _table_settings(built),
        "rollout": _rollout_as_data(built.intake.spec),
        "schedule": pipelines.schedule_as_data(built.pipeline.schedule),
    }
    if isinstance(built, ReplayTable):
        state = pipelines.save_replay(writer, built.pipeline, built.placement)
        return {**data, "placement": str(built.placement), "state": state}
    return {**data, "state": pipelines.save_iteration(writer, built.pipeline)}


def _rollout_as_data(spec: TreeSpec) -> Data:
    shapes = [[leaf.dtype.name, list(leaf.shape)] for leaf in spec.leaves]
    return {"structure": structure_as_data(spec.shapes()), "leaves": shapes}


def _table_settings(built: Table) -> Data:
    data: Data = {"rollout": _leaves_as_data(built.intake.spec), "item": _leaves_as_data(built.layout.spec)}
    if isinstance(built, ReplayTable):
        ledger, partitions = built.pipeline.ledger, built.placement.part.partitions
        data |= {
            "partitions": partitions,
            "lanes": ledger.lanes,
            "length": ledger.length,
            "ragged": built.config.ragged,
        }
    return data


def _leaves_as_data(spec: TreeSpec) -> dict[str, str]:
    words = [f"{leaf.dtype.name}{list(leaf.shape)}" for leaf in spec.leaves]
    return dict(zip(spec.paths, words, strict=True))


class Restoration:
    """What a checkpoint has to say to tables that are yet to be built; without one, nothing.

    A table is built when it is restored where the checkpoint tells what a rollout looks like; otherwise (a user's own
    NamedTuple) at the first push, and filled then, before that push is ingested.
    """

    def __init__(self, plane: Plane, reader: Reader | None = None, body: Data | None = None):
        self._plane, self._reader = plane, reader
        self._tables = body["tables"] if body else {}
        self._history = _history_from_data(body["history"]) if body else []
        self._waiting: set[str] = set()

    def config(self, table: str, config: ReplayConfig) -> ReplayConfig:
        """Return ``config`` with the saved number of partitions where it leaves that open."""
        saved = self._tables.get(table, {}).get("settings", {}).get("partitions")
        return dataclasses.replace(config, partitions=saved) if config.partitions is None and saved else config

    def wanted(self, table: str, wanted: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return (placement, schedule) with the saved schedule where it is chosen automatically."""
        automatic = wanted[1] == "auto" and table in self._tables
        return (wanted[0], pipelines.schedule_from_data(self._tables[table]["schedule"])) if automatic else wanted

    def complete(self, table: str, built: Table, context: PyTree) -> Table:
        """Return ``built``, filled with what was saved of it if it was waiting for that."""
        if table not in self._waiting:
            return built
        filled, commit = self.prepare(table, built, context)
        commit()
        self._waiting.discard(table)
        return filled

    def wait_for(self, tables: set[str]) -> None:
        """Fill ``tables`` as soon as they are built."""
        self._waiting = tables

    def prepare(self, table: str, built: Table, context: PyTree) -> tuple[Table, Callable[[], None]]:
        """Return the table as it will be and what makes it so; raises what stands against it, and changes nothing."""
        saved, reader = self._tables[table], self._reader
        assert reader is not None
        schedule = pipelines.schedule_from_data(saved["schedule"])
        lines = differences(saved["settings"], _table_settings(built), table)
        asked, automatic = self._history[0].schedule, self._plane._wanted[1] == "auto" or self._plane.history.pinned
        if built.schedule not in (asked, schedule) and not automatic:
            lines.append(f"{table}.schedule: saved {asked}, here {built.schedule}")
        _refuse_differences(lines)
        spec, state = built.intake.spec, saved["state"]
        if isinstance(built, IterationTable):
            loader = IterationLoader(reader, state, built.pipeline, spec, context)
        else:
            loader = ReplayLoader(reader, state, built.pipeline, built.placement, spec, context)

        hook = _host_ingestion(self._plane, table)
        host = None if hook is None else HostLoader(reader, saved["host"], hook, spec.treedef, context)

        def commit() -> None:
            loader.commit(lambda unit: _at_home(built, unit))
            built.pipeline.schedule = schedule
            if host is not None:
                host.commit()

        return built._replace(schedule=schedule), commit


def _at_home(built: Table, unit: Unit) -> Unit:
    rollout, ticket = built.intake(unit.rollout)
    return Unit(rollout, built.intake.context(unit.context), unit.version, ticket, built.intake)


def restore(plane: Plane, path: PathLike, context: PyTree) -> Data:
    """Make ``plane`` what was saved to ``path`` and return the checkpoint's body; where it raises, the plane is as it was."""
    saved = folder.opened(path)
    body = saved.body["plane"]
    _refuse_differences(differences(body["settings"], _settings(plane)))
    reader, before, built_before = Reader(saved.data), plane._restoration, dict(plane._tables)
    plane._restoration = restoration = Restoration(plane, reader, body)
    try:
        unknown = _build_missing(plane, body["tables"], context)
        ready = {}
        for name in sorted(set(body["tables"]) - unknown):
            ready[name] = restoration.prepare(name, plane._tables[name], context)
    except BaseException:
        plane._restoration = before
        plane._tables.become(built_before)
        raise
    for _, commit in ready.values():
        commit()
    plane._tables.become({name: table for name, (table, _) in ready.items()})
    plane.policy_version, plane._reported = body["policy_version"], body["reported"]
    plane.history.changes = _history_from_data(body["history"])
    restoration.wait_for(unknown)
    return {**saved.body, "reader": reader}


def _history_from_data(data: list[Any]) -> list[Change]:
    return [Change(iteration, pipelines.schedule_from_data(schedule), reason) for iteration, schedule, reason in data]


def _build_missing(plane: Plane, tables: Data, context: PyTree) -> set[str]:
    """Build the saved tables that are not; return those whose rollouts have no form on the disk."""
    unknown = set()
    for name, table in tables.items():
        if name in plane._tables:
            continue
        structure = table["rollout"]["structure"]
        if structure is None or plane._hooks.of(name).ingestion.host:  # a host hook is asked for shapes by running it
            unknown.add(name)
            continue
        leaves = [jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in table["rollout"]["leaves"]]
        try:
            plane.build(structure_from_data(structure).unflatten(leaves), table=name, context=context)
        except HookError as error:
            fix = "give what push is given: plane.restore(path, context=...)"
            raise HookError(f"{error}\n  fix:  {fix}") from error
    return unknown


def _refuse_differences(lines: list[str]) -> None:
    if lines:
        refuse(
            ConfigError,
            "The checkpoint was saved by a plane that was made otherwise; nothing was restored.",
            got="\n        ".join(lines),
            want="the settings that were saved",
            fix="make the plane as it was; schedule='auto' and ReplayConfig(partitions=None) take what was saved",
        )
