"""``ExperiencePlane``: the facade over ingestion, placement, delivery and schedule; the only file that knows everyone."""

from __future__ import annotations

import importlib
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import jax
from jax.sharding import Mesh

from conduit_jax import snapshot
from conduit_jax.build import IterationTable, ReplayTable, build_iteration_table, build_replay_table, release
from conduit_jax.config import DEFAULT_TABLE, Algorithm, Mixture, OnPolicy, ReplayConfig, checked_seed, replay_tables
from conduit_jax.enlargement import grow_table, outgrown
from conduit_jax.errors import (
    ConfigError,
    HookError,
    LifecycleError,
    SpecError,
    refuse,
    refuse_forked,
)
from conduit_jax.registration import Registration
from conduit_jax.relocation import migrate_table
from conduit_jax.report import PlaneStats, explain_plane, refuse_new_faults, table_stats
from conduit_jax.schedule.flow import check_tables, is_limited, run_in_order
from conduit_jax.schedule.history import Change, History
from conduit_jax.schedule.host import HostEnds, host_ends, settle
from conduit_jax.schedule.iteration import IterationPipeline
from conduit_jax.schedule.metrics import Spans
from conduit_jax.schedule.mixed import Mixed, by_table, check_not_fused
from conduit_jax.schedule.pipeline import ReplayPipeline
from conduit_jax.schedule.producers import Producers
from conduit_jax.schedule.programs import Unit
from conduit_jax.schedule.semantics import Schedule
from conduit_jax.schedule.trace import Event, Recorder
from conduit_jax.schedule.worker import HostQueue, Pending
from conduit_jax.sharding.choice import Wanted, check_wanted
from conduit_jax.sharding.mesh import data_axis as axis_of
from conduit_jax.sharding.mesh import is_on_a_mesh
from conduit_jax.sharding.placement import LearnerSite, learner_site
from conduit_jax.sharding.pressure import MemoryPressure
from conduit_jax.tables import Tables
from conduit_jax.types import AddInfo, Sample, SampleInfo

PyTree = Any

_fold_in = jax.jit(jax.random.fold_in)  # eagerly it costs more than all else a plane does in an iteration


class ExperiencePlane(Registration):
    """The buffer between actors and learner, as a runtime: you say what is stored and consumed, it decides where and when.

    Life: open (hooks may be registered) -> built (at the first ``push``, or ``build``) -> closed.

    Args:
        algorithm: ``OffPolicy``, ``OnPolicy`` or ``BoundedLag``; decides which data may be used how late.
        replay: one ``ReplayConfig``, several by table name, or a ``Mixture`` of them that is drawn as one; ``None`` for
            on-policy and, if you like, bounded lag.
        placement: ``"auto"``, ``"device"``, ``"single_device"``, ``"pinned_host"``, ``"pageable"``, ``"disk"``, an
            ``AutoPlacement``, a ``Disk`` or a ``Placement``.
        schedule: ``"auto"``, ``"sequential"``, ``"overlap"``, ``"fused"``, a ``Schedule``, or another run's
            ``stats().schedule_history``, to repeat it bit for bit. Tables with a limiter of samples per insert or with
            ``max_times_sampled`` run in sequential order.
        seed: what all draws derive from: equal seeds, pushes and schedules give equal batches, bit for bit.
        mesh: the learner's mesh; taken from the learner's shardings unless given. ``data_axis`` names the axis batches
            are split over (``"data"``, or the only axis, unless given).
        host_queue: how far host hooks may fall behind, ``HostQueue()`` unless given.

    Raises ``ConfigError`` for a value or a combination that can never work, before anything is pushed.
    """

    def __init__(
        self,
        *,
        algorithm: Algorithm,
        replay: ReplayConfig | Mapping[str, ReplayConfig] | Mixture | None = None,
        placement: Wanted = "auto",
        schedule: str | Schedule | Sequence[tuple] = "auto",
        seed: int = 0,
        mesh: Mesh | None = None,
        data_axis: str | None = None,
        host_queue: HostQueue | None = None,
    ):
        self.seed = checked_seed(seed)
        super().__init__(algorithm, replay_tables(algorithm, replay))
        check_wanted(placement)
        self._algorithms = by_table(algorithm, replay, self.replay)
        for name, own in self._algorithms.items():
            check_tables(own, {name: self.replay[name]}, placement)
        self._limited = frozenset(name for name, config in self.replay.items() if is_limited(config))
        self.history = History(run_in_order(self.replay, schedule), algorithm)
        if mesh is not None:
            axis_of(mesh, data_axis)
        self.spans, self.recorder = Spans(), Recorder()
        self.policy_version = 0
        self._wanted = (placement, self.history.wanted)
        self._mesh, self._axis = mesh, data_axis
        self._key = jax.random.key(self.seed, impl="threefry2x32")
        self.loop_key = jax.random.fold_in(self._key, 0x6C6F6F70)
        self.mixed: Mixed | None = None
        if isinstance(replay, Mixture):
            check_not_fused([self.history.wanted, *(change.schedule for change in self.history.pinned)])
            self.mixed = Mixed(self._algorithms, self._drawn_from, self._with_room)
        self._site: LearnerSite | None = None
        self._tables, self._queue = Tables(self.replay), host_queue or HostQueue()
        self._ends: dict[str, HostEnds] = {}
        self._shared: list[Producers] = []
        self._process = os.getpid()
        self._closed = False
        self._put: Callable[[PyTree, Any], PyTree] = jax.device_put  # what moves go by; emulated links replace it
        self._reported: dict[str, dict[str, int]] = {}
        self._last_words: str | None = None
        self._restoration = snapshot.Restoration(self)

    # ---------------------------------------------------------------- built: by hand

    def build(
        self, rollout: PyTree, learner: PyTree = None, *, table: str = DEFAULT_TABLE, context: PyTree = ()
    ) -> None:
        """Plan, allocate and compile for rollouts shaped like ``rollout`` (arrays or ``ShapeDtypeStruct``); ``push`` does it by itself.

        ``learner`` tells where batches are consumed; ``context`` is like the one ``push`` will be given. Raises what the
        configuration and the hooks give reason for; nothing is built then.
        """
        self._must_be_alive("build")
        with self._tables.lock:
            if table in self._tables:
                refuse(
                    LifecycleError,
                    f"Table {table!r} is built already.",
                    fix="build a plane once, or let the first push do it",
                )
            if learner is not None:
                self.consumed_by(learner)
            self._tables[table] = self._build_table(self._tables.known(table), rollout, context)

    def consumed_by(self, learner: PyTree) -> None:
        """Tell, before the plane is built, whose arrays' mesh or device batches are to be delivered to."""
        if self._axis is not None and self._mesh is None and not is_on_a_mesh(learner):
            refuse(
                ConfigError,
                "There is no mesh whose axis data_axis= could name.",
                got=f"data_axis={self._axis!r}",
                want="mesh=, or a learner laid out on a mesh",
                fix="leave data_axis= out",
            )
        self._site = learner_site(learner, self._mesh, self._axis)

    def push(
        self,
        rollout: PyTree,
        *,
        table: str = DEFAULT_TABLE,
        version: int | None = None,
        context: PyTree = (),
        deadline_s: float = 0.0,
    ) -> AddInfo | None:
        """Ingest one rollout unit; host arrays are copied before this returns.

        ``version`` is that of the policy that acted (the plane's present ``policy_version`` unless given, or the
        rollout's own). Returns what the insert did (device arrays), or ``None`` where it was only queued. Raises
        ``SpecError`` naming the leaf that differs from the first push, and ``BackpressureError`` where the table's rate
        limiter does not let the unit in: at once, or after ``deadline_s`` in which another thread may pull.
        """
        built = self._tables.get(table)
        if built is None:
            built = self._built_by_push(rollout, table, context)
        version = self.policy_version if version is None else version
        ends = self._ends.get(table)
        if ends is not None and ends.ingestion is not None:
            return ends.ingestion.push(rollout, context, version, deadline_s)
        return self._enter(built, table, rollout, version, context, deadline_s)

    def pull(self, *, table: str = DEFAULT_TABLE, context: PyTree = (), deadline_s: float = 0.0) -> Sample:
        """Return the next training-ready batch; ``NotReadyError`` where the replay holds too little or its limiter forbids it.

        That is raised at once, or after ``deadline_s`` in which another thread may push. Of a ``Mixture`` it is a batch of
        all tables.

        ``context`` goes to the delivery hook; with a schedule that draws ahead, that of the ``pull`` that drew the batch.
        """
        return self.pull_group(1, table=table, context=context, deadline_s=deadline_s)[0]

    def pull_group(
        self, most: int, *, table: str = DEFAULT_TABLE, context: PyTree = (), deadline_s: float = 0.0
    ) -> list[Sample]:
        """Return the next batch and, up to ``most`` in all, those behind it that come without another draw; raises as ``pull``.

        They are what as many pulls would return, whatever updates came between: what is drawn stays as it is.
        """
        if self.mixed is not None:
            self._must_be_whole(table, "pull")
            return self.mixed.pull_group(context, most, deadline_s)
        built = self._replayed(table, "pull")
        if self._ends:
            settle(self._ends.get(table), built.pipeline)
        try:
            samples = built.pipeline.pull_group(context, most, deadline_s)
        except MemoryPressure as pressure:
            self._tables.relieve(table, built, pressure, self._put)
            samples = built.pipeline.pull_group(context, most, deadline_s)
        return [one.result() if isinstance(one, Pending) else one for one in samples] if self._ends else samples

    def ready(self, *, table: str = DEFAULT_TABLE) -> bool:
        """Return whether ``pull`` (or ``epochs``) would deliver now."""
        self._must_be_alive("ready")
        if self.mixed is not None and table == DEFAULT_TABLE:
            return all(self._ready(name) for name in self.replay)
        return self._ready(table)

    def _ready(self, table: str) -> bool:
        built = self._tables.get(table)
        if built is None:
            self._tables.known(table)
            return False
        settle(self._ends.get(table), built.pipeline)
        return built.pipeline.ready()

    def update_priorities(
        self, info: SampleInfo, priorities: Any, *, table: str = DEFAULT_TABLE
    ) -> jax.Array | dict[str, jax.Array]:
        """Give the items of a delivered batch new priorities, float32 ``(batch,)``; return how many still were there.

        That is int32 a partition, of a ``Mixture`` by table. Host values are checked here (``ValueRefusedError``); device
        values are judged in the program, refused whole, counted, and raised at the next sync point (``flush``, ``close``).
        """
        if not isinstance(info, SampleInfo):
            self._must_be_alive("update_priorities")
            got, fix = type(info).__name__, "plane.update_priorities(sample.info, priorities)"
            refuse(SpecError, "Priorities go with the info of a batch.", got=got, want="SampleInfo", fix=fix)
        if self.mixed is not None:
            self._must_be_whole(table, "update_priorities")
            return self.mixed.update_priorities(info, priorities)
        built = self._replayed(table, "update_priorities")
        try:
            return built.pipeline.update_priorities(info, priorities)
        except MemoryPressure as pressure:
            self._tables.relieve(table, built, pressure, self._put)
            return built.pipeline.update_priorities(info, priorities)

    def delete(self, info: SampleInfo, *, table: str = DEFAULT_TABLE) -> jax.Array | dict[str, jax.Array]:
        """Remove the items of a delivered batch from a table of slots; return how many still were there, int32 a partition.

        Of a ``Mixture`` that is by table, all of which are slots. To keep some of them give these the slot -1. Batches drawn
        ahead are delivered as they were drawn. ``ConfigError`` where the table is a ring.
        """
        self._must_be_alive("delete")
        if not isinstance(info, SampleInfo):
            got, fix = type(info).__name__, "plane.delete(sample.info)"
            refuse(SpecError, "Items are named by the info of a batch.", got=got, want="SampleInfo", fix=fix)
        if self.mixed is not None:
            self._must_be_whole(table, "delete")
            return self.mixed.delete(info)
        return self._tables.replayed(table, "delete").pipeline.delete(info)

    def reset(self, *, table: str = DEFAULT_TABLE) -> None:
        """Empty a table: items, priorities and the limiter's counts begin anew, batches drawn ahead are dropped: a sync point.

        What hooks carry and the numbers that draws derive from go on. Infos of batches delivered before name nothing now.
        """
        self._must_be_alive("reset")
        built = self._tables.replayed(table, "reset")
        if (ends := self._ends.get(table)) is not None:
            ends.flush()
        with nullcontext() if self.mixed is None else self.mixed.lock:
            built.pipeline.reset(counted=built.blueprint.shapes.counted)

    def epochs(self, *, table: str = DEFAULT_TABLE, context: PyTree = ()) -> Iterator[Sample]:
        """Yield this iteration's mini-batches, ``num_epochs * num_minibatches`` of them (on-policy)."""
        self._must_be_alive("epochs")
        built = self._tables.built(table, "epochs")
        if not isinstance(built, IterationTable):
            refuse(
                LifecycleError,
                "Only on-policy experience comes in epochs.",
                got=type(self.algorithm).__name__,
                fix="plane.pull()",
            )
        settle(self._ends.get(table), built.pipeline)
        return built.pipeline.epochs(built.intake.context(context))

    def migrate(self, placement: Wanted, *, table: str = DEFAULT_TABLE) -> None:
        """Move a built table to ``placement`` while it runs: pushes and pulls wait, nothing is lost, reordered or drawn anew.

        ``AutoPlacement(limits=...)`` moves it where the planner would put it under new limits, if it has to move at all.

        ``PlacementError`` where it does not fit or a transfer fails; the table then works on where it was. ``stats`` tells
        what each move took.
        """
        self._must_be_alive("migrate")
        with self._tables.lock:
            built = self._tables.replayed(table, "migrate")
            self._tables.change(table, lambda: migrate_table(built, placement, put=self._put))

    def grow(self, rollout: PyTree = None, *, capacity: int | None = None, table: str = DEFAULT_TABLE) -> None:
        """Make room for rollouts shaped like ``rollout`` (arrays or ``ShapeDtypeStruct``), or for ``capacity`` items.

        Leaves grow as ``ReplayConfig(growth=)`` declares; a ``push`` that needs it does the same by itself. Where the buffer
        no longer fits its tier, ``placement="auto"`` moves it to another. Raises for what was not declared or fits nowhere;
        nothing has changed then.
        """
        self._must_be_alive("grow")
        with self._tables.lock:
            built = self._tables.replayed(table, "grow")
            self._tables.change(table, lambda: grow_table(built, rollout=rollout, capacity=capacity, put=self._put))
            if capacity is not None:
                self.replay[table] = replace(self.replay[table], capacity=capacity)

    def torch_batches(self, **options: Any) -> Iterator[Any]:
        """Yield batches of torch tensors; ``options`` are those of ``adapters.torch.TorchBatches``."""
        return importlib.import_module("conduit_jax.adapters.torch").TorchBatches(self, **options)

    def flush(self) -> None:
        """Insert what is queued, wait for the device, and raise what device-side values did wrong (``ValueRefusedError``)."""
        self._must_be_alive("flush")
        for name, built in self._tables.items():
            if (ends := self._ends.get(name)) is not None:
                ends.flush()
            if isinstance(built, ReplayTable):
                built.pipeline.flush()
                refuse_new_faults(name, built.pipeline.faults(), self._reported)

    def check(self) -> None:
        """Raise what device-side values did wrong so far (``ValueRefusedError``): a sync point that changes nothing."""
        self._must_be_alive("check")
        for name, built in self._tables.items():
            if isinstance(built, ReplayTable):
                refuse_new_faults(name, built.pipeline.faults(), self._reported)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all that decides the batches to come to the folder ``path``, whole or not at all: a sync point.

        A killed save leaves the former checkpoint; files of yours in the folder stay. Of an on-policy iteration whose
        mini-batches are being delivered, those that are left are what the restored plane's ``epochs`` yields.
        ``CheckpointError`` where it cannot be written.
        """
        self._must_be_alive("save")
        snapshot.save(self, path)

    def restore(self, path: str | os.PathLike[str], *, context: PyTree = ()) -> None:
        """Become what was saved to ``path``: the next batches are those of the run that was saved, bit for bit.

        Placement and number of devices may be others, ``partitions`` not. Register the same hooks first; ``context`` is like
        the one ``push`` is given. Raises ``CheckpointError`` for a missing or damaged checkpoint and ``ConfigError`` with
        all differences for a plane that was made otherwise; the plane is as before then.
        """
        self._must_be_alive("restore")
        snapshot.restore(self, path, context)

    def close(self) -> None:
        """End the plane: flush, then release the buffers. Closing twice does nothing."""
        if self._closed or os.getpid() != self._process:
            return
        try:
            self.flush()
        finally:
            self._end()

    def __enter__(self) -> ExperiencePlane:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._end()

    # ---------------------------------------------------------------- reading back

    def explain(self) -> str:
        """Return the chosen placement and schedule as text, with every rejected one and why; of a closed plane, as it was."""
        if self._last_words is not None:
            return self._last_words
        return explain_plane(self.algorithm, self._tables, self._wanted, self.history, self.spans.summary(), self.mixed)

    def stats(self) -> PlaneStats:
        """Return what the plane did so far: throughput counts, staleness, drops, faults and latency (a sync point)."""
        self._must_be_alive("stats")
        tables = {name: table_stats(built) for name, built in self._tables.items()}
        stalls = dict(self.recorder.stalls_s)
        late = any(ends.timing_decided for ends in self._ends.values()) or any(
            group.order == "arrival" and group.log for group in self._shared
        )
        return PlaneStats(tables, self.spans.summary(), not late, tuple(self.history.changes), stalls)

    def producers(self, count: int, *, order: str = "round_robin", deadline_s: float = 60.0) -> Producers:
        """Return the pushing end for ``count`` threads: in turns (``"round_robin"``, repeatable) or as they come (``"arrival"``)."""
        self._shared.append(Producers(self.push, count, order, deadline_s, self.recorder))
        return self._shared[-1]

    def trace(self, path: str | os.PathLike[str]) -> int:
        """Write what was done lately as a timeline for https://ui.perfetto.dev (JSON); return the number of its spans."""
        return self.recorder.write(os.fspath(path))

    def is_limited(self, table: str = DEFAULT_TABLE) -> bool:
        """Return whether the table's draws decide what may come next, so that a loop has to ask before every batch."""
        return table in self._limited or (self.mixed is not None and bool(self._limited))

    def running(self, table: str = DEFAULT_TABLE) -> ReplayPipeline | IterationPipeline | None:
        """Return the table's pipeline, for loops; ``None`` until it is built."""
        built = self._tables.get(table)
        return built.pipeline if built else None

    def reschedule(self, change: Change) -> None:
        """Run another schedule from here on, a safe point between iterations; it enters the history."""
        self._must_be_alive("reschedule")
        for built in self._tables.values():
            built.pipeline.reschedule(change.schedule)
        self.spans.clear(fused=change.schedule.fused > 0)
        self.history.enter(change)

    def iteration_key(self, iteration: int) -> jax.Array:
        """Return the key of training iteration ``iteration``, apart from every key draws are made with."""
        return _fold_in(self.loop_key, iteration)

    # ---------------------------------------------------------------- inside

    def _end(self) -> None:  # a forked child may not ask for devices
        if not self._closed and os.getpid() == self._process:
            self._last_words = self.explain()
            for ends in self._ends.values():
                ends.close()
        self._closed = True
        for built in self._tables.values():
            release(built)
        self._tables.clear()

    def _built_by_push(self, rollout: PyTree, table: str, context: PyTree) -> ReplayTable | IterationTable:
        self._must_be_alive("push")
        with self._tables.lock:  # threads may race to the first push
            if table not in self._tables:
                self._tables[table] = self._build_table(self._tables.known(table), rollout, context)
            return self._tables[table]

    def _build_table(self, table: str, rollout: PyTree, context: PyTree) -> ReplayTable | IterationTable:
        if self._site is None:
            self.consumed_by(None)
        site = cast(LearnerSite, self._site)
        key = jax.random.fold_in(self._key, zlib.crc32(table.encode()))
        hooks, saved = self._hooks.of(table), self._restoration
        wanted, config = saved.wanted(table, self._wanted), saved.config(table, self.replay[table])
        if self.mixed is not None:
            self.mixed.check(table, hooks, site)
        if hooks.ingestion.host or hooks.delivery.host:
            self._ends[table], hooks, rollout = host_ends(hooks, rollout, context, self._queue, self.recorder)
        try:
            if isinstance(self.algorithm, OnPolicy):
                built = build_iteration_table(self.algorithm, hooks, rollout, context, site, wanted[1], key)
            else:
                wanted = (*wanted, lambda: self.policy_version)
                algorithm: Any = self._algorithms[table]
                built = build_replay_table(config, algorithm, hooks, rollout, context, site, wanted, key)
                built.pipeline.record(self.recorder)
                if self.mixed is not None:
                    self.mixed.attach(built.pipeline, site)
            if table in self._ends:
                entered = lambda records, version: self._enter(self._tables[table], table, records, version)  # noqa: E731
                self._ends[table].attach(built.pipeline, entered)
            built = saved.complete(table, built, context)
            self.history.begin(built.pipeline.schedule)
            return built
        except HookError:
            self._hooks.may_be_replaced()
            raise

    def _enter(
        self,
        built: ReplayTable | IterationTable,
        table: str,
        rollout: PyTree,
        version: int,
        context: PyTree = (),
        deadline_s: float = 0.0,
    ) -> AddInfo | None:
        """Insert one unit, or what a host hook made of one, into a table, which grows for it where that was declared."""
        if built.intake.growth is not None and isinstance(built, ReplayTable):
            rollout, built = self._grown(rollout, built, table)
        start = time.perf_counter()
        unit, ticket = built.intake(rollout)
        if unit is not rollout:  # it was elsewhere
            self.recorder.add(Event("transfer", "unit to the buffer", start, time.perf_counter()))
        entry = Unit(unit, built.intake.context(context), version, ticket, built.intake)
        if isinstance(built, IterationTable):
            return built.pipeline.push(entry)
        try:
            return built.pipeline.push(entry, deadline_s)
        except MemoryPressure as pressure:
            self._tables.relieve(table, built, pressure, self._put)
            return built.pipeline.push(entry, deadline_s)

    def _replayed(self, table: str, call: str) -> ReplayTable:
        """Return a built table of replayed experience; a plane that is closed, or its parent's, has none."""
        built = self._tables.get(table)
        if isinstance(built, ReplayTable):
            return built
        self._must_be_alive(call)
        return self._tables.replayed(table, call)

    def _drawn_from(self, table: str) -> ReplayPipeline:
        """Return the pipeline that gives batches of ``table``, with all in it that a batch cannot be had without."""
        pipeline = self._replayed(table, "pull").pipeline
        if self._ends:
            settle(self._ends.get(table), pipeline)
        return pipeline

    def _with_room(self, table: str, call: Callable[[], Any]) -> Any:
        """Return what ``call`` returns; where memory is too full for it, after the table has moved away, if it may."""
        before = self._replayed(table, "pull")
        try:
            return call()
        except MemoryPressure as pressure:
            self._tables.relieve(table, before, pressure, self._put)
            return call()

    def _must_be_whole(self, table: str, call: str) -> None:
        self._must_be_alive(call)
        if table != DEFAULT_TABLE:
            got, fix = f"table={table!r}", "leave table= out: sample.info.table says whose row each is"
            refuse(ConfigError, "The tables of a mixture are drawn together.", got=got, want="no table=", fix=fix)

    def _grown(self, rollout: PyTree, built: ReplayTable, table: str) -> tuple[PyTree, ReplayTable]:
        """Return ``rollout`` and the table that takes it, which has grown where the rollout is larger, as declared."""
        larger = outgrown(built, rollout)
        if larger is None:
            return rollout, built
        self.grow(larger, table=table)
        return larger, cast(ReplayTable, self._tables[table])

    def _must_be_open(self, call: str) -> None:
        self._must_be_alive(call)
        if self._tables:
            refuse(
                LifecycleError,
                f"{call} came after the plane was built.",
                fix="register hooks before the first push: they are traced once",
            )

    def _must_be_alive(self, call: str) -> None:
        if self._closed:
            refuse(LifecycleError, f"{call} was called on a closed plane.", fix="make a new ExperiencePlane")
        if os.getpid() != self._process:
            refuse_forked(call)
