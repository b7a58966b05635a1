"""Several tables drawn as one: every batch has rows of each, joined where the learner takes them.

Each table goes on by itself: its own draws, account, limiter, placement and programs. What is here is that a batch is of all
of them or of none: nothing is drawn before every table may give its share, and nothing is handed over before all shares
are one batch. So the rows of a table are those it would deliver alone, and there is no state beyond the tables'.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from conduit_jax.config import Algorithm, Mixture, OffPolicy, ReplayConfig
from conduit_jax.errors import ConfigError, HookError, NotReadyError, SpecError, refuse
from conduit_jax.registry import Hooks
from conduit_jax.replay.episode_batches import Packed
from conduit_jax.replay.joining import joined
from conduit_jax.replay.shares import fixed_shares
from conduit_jax.schedule.pipeline import ReplayPipeline
from conduit_jax.schedule.programs import checked_priorities
from conduit_jax.schedule.semantics import Schedule
from conduit_jax.sharding.lift import in_own_mesh
from conduit_jax.sharding.mesh import in_callers_mesh, single_device_mesh
from conduit_jax.sharding.placement import LearnerSite
from conduit_jax.types import Sample, SampleInfo

Array = jax.Array
PyTree = Any


def by_table(algorithm: Algorithm, replay: Mixture | Any, tables: Mapping[str, ReplayConfig]) -> dict[str, Algorithm]:
    """Return what each of ``tables`` serves: ``algorithm``, in a mixture with the table's share of the batch.

    ``ConfigError`` where a table would have no row of any batch, or fewer items than rows, or cannot be mixed.
    """
    if not isinstance(replay, Mixture) or not isinstance(algorithm, OffPolicy):
        return dict.fromkeys(tables, algorithm)
    shares = fixed_shares([replay.proportions[name] for name in tables], algorithm.batch_size)
    for (name, config), rows in zip(tables.items(), shares, strict=True):
        got = f"{rows} rows of a batch of {algorithm.batch_size}, capacity={config.capacity}"
        if rows == 0:
            fix = "a larger batch, or leave the table out"
            refuse(ConfigError, f"Table {name!r} would have no row in any batch.", got=got, want="1 or more", fix=fix)
        if rows > config.capacity:
            refuse(
                ConfigError, f"Table {name!r} is smaller than its share of a batch.", got=got, want="capacity >= rows"
            )
        if config.growth is not None:
            got, fix = f"table {name!r}: growth={config.growth}", "pad what is pushed"
            refuse(ConfigError, "Tables of a mixture do not grow: batches would differ.", got=got, fix=fix)
        if isinstance(getattr(config.items, "delivery", None), Packed):
            got, fix = f"table {name!r}: {config.items}", "Episodes(delivery=Padded())"
            refuse(ConfigError, "Packed episodes cannot be mixed: their rows are several draws each.", got=got, fix=fix)
    return {name: replace(algorithm, batch_size=rows) for name, rows in zip(tables, shares, strict=True)}


def check_not_fused(schedules: list[str | Schedule]) -> None:
    """Raise ``ConfigError`` where a fused schedule was asked for: each table has programs of its own."""
    for schedule in schedules:
        if schedule == "fused" or (isinstance(schedule, Schedule) and schedule.fused):
            want = "'auto', 'sequential', 'overlap' or another that is not fused"
            refuse(ConfigError, "A mixture of tables does not run fused.", got=f"schedule={schedule}", want=want)


class Mixed:
    """The end that batches of a mixture come from; threads may share it.

    ``algorithms`` say how many rows each table has, ``pipeline_of(name)`` is its pipeline, and ``with_room(name, call)`` returns
    what ``call`` does, where memory is too full after the table has moved.
    """

    def __init__(
        self,
        algorithms: Mapping[str, Any],
        pipeline_of: Callable[[str], ReplayPipeline],
        with_room: Callable[[str, Callable[[], Any]], Any],
    ):
        self.lock = threading.Lock()
        self._shares = {name: own.batch_size for name, own in algorithms.items()}
        self._pipeline_of, self._with_room = pipeline_of, with_room
        self._site: LearnerSite | None = None
        self._join: Callable[..., Any] = _unbuilt
        self._split: Callable[..., Any] = _unbuilt

    def check(self, name: str, hooks: Hooks, site: LearnerSite) -> None:
        """Raise for a table that cannot be joined to the others for a learner at ``site``, before it is built.

        ``HookError`` for a delivery hook on the host, ``ConfigError`` where the others were built for another learner, or
        shares do not divide over its data axis.
        """
        if hooks.delivery.host:
            what, fix = (
                f"A mixture is joined on the device, behind {hooks.delivery.name!r}.",
                "do it to what pull returns",
            )
            refuse(HookError, what, got="host=True", want="a traced delivery hook", fix=fix)
        if self._site is not None and self._site != site:
            fix = "plane.consumed_by(learner) before the first push, or ExperiencePlane(mesh=)"
            got = f"{_words(self._site)}, then table {name!r} for {_words(site)}"
            refuse(ConfigError, "Tables of a mixture are for one learner.", got=got, want="one mesh or device", fix=fix)
        shards = site.default_partitions
        if any(rows % shards for rows in self._shares.values()):
            got = f"{self._shares} rows of a batch, axis {site.axis!r} of size {shards}"
            want, fix = f"multiples of {shards}", "another batch_size or other proportions"
            refuse(ConfigError, "Tables' shares do not divide over the data axis.", got=got, want=want, fix=fix)

    def attach(self, pipeline: ReplayPipeline, site: LearnerSite) -> None:
        """Take a table that was built for a learner at ``site``."""
        pipeline.apart = True
        if self._site is None:
            shares = [rows // site.default_partitions for rows in self._shares.values()]
            bounds = list(pairwise(accumulate(shares, initial=0)))
            self._site = site
            self._join, self._split = (_over_shards(make(bounds), site) for make in (self._joining, _splitting))

    @property
    def shares(self) -> dict[str, int]:
        """Rows of each table in a batch, in the order of tables."""
        return self._shares

    def warn_unready(self, pushed: str, ready: Callable[[str], bool]) -> None:
        """Warn of tables but ``pushed`` that cannot give their share: a loop fills that one alone, and draws no batch."""
        if names := ", ".join(repr(name) for name in self._shares if name != pushed and not ready(name)):
            what = (
                f"no update is made until somebody pushes to table {names} of the mixture: a loop pushes to {pushed!r}"
            )
            warnings.warn(what, stacklevel=3)

    def pull_group(self, context: PyTree, most: int, deadline_s: float = 0.0) -> list[Sample]:
        """Return the next batch, and up to ``most`` that no table has to draw for; ``NotReadyError`` as of the table that is not.

        Where it raises no table has handed anything over.
        """
        until = time.monotonic() + deadline_s
        while True:
            with self.lock:
                if all(self._pipeline_of(name).ready() for name in self._shares):
                    return [in_callers_mesh(sample) for sample in self._next(context, most)]
            for name in self._shares:  # not behind the lock: a save and a reset have it while somebody waits here
                try:
                    self._pipeline_of(name).await_ready(max(0.0, until - time.monotonic()))
                except NotReadyError as error:
                    raise NotReadyError(f"Table {name!r} of the mixture: {error}") from None

    def _next(self, context: PyTree, most: int) -> list[Sample]:
        """Return the next batches, of tables that all are ready."""
        drawn = [self._prepared(name, context, most) for name in self._shares]
        samples = [self._join(*parts) for parts in zip(*drawn, strict=False)]  # as many as the fewest
        for name in self._shares:
            self._pipeline_of(name).hand_over(len(samples))
        return samples

    def _prepared(self, name: str, context: PyTree, most: int) -> list[Sample]:
        pipeline = self._pipeline_of(name)
        return self._with_room(name, lambda: pipeline.prepare(context, most))

    def update_priorities(self, info: SampleInfo, priorities: Any) -> dict[str, Array]:
        """Give every table the priorities of its rows; return by table how many items still were there, int32 a partition."""
        if not isinstance(priorities, jax.Array):
            priorities = checked_priorities(priorities)
        if priorities.shape != info.shape:
            got = f"priorities {priorities.shape}"
            refuse(SpecError, "Priorities and info are of different batches.", got=got, want=f"{info.shape}")
        parts = self._parts(info, priorities)
        return {
            name: self._with_room(name, lambda own=own, name=name: self._pipeline_of(name).update_priorities(*own))
            for name, own in zip(self._shares, parts, strict=True)
        }

    def delete(self, info: SampleInfo) -> dict[str, Array]:
        """Remove the items of a batch from tables that all are slots; return by table how many still were there."""
        for name in self._shares:
            if not self._pipeline_of(name).deletes:
                fix = 'ReplayConfig(storage="slots") in all of them'
                refuse(ConfigError, "A ring cannot delete single items.", got=f"table {name!r}", want="slots", fix=fix)
        parts = self._parts(info, np.zeros(info.shape, np.float32))
        return {name: self._pipeline_of(name).delete(own) for name, (own, _) in zip(self._shares, parts, strict=True)}

    def _parts(self, info: SampleInfo, values: Any) -> tuple:
        """Return each table's part of a batch's ``info`` and ``values``."""
        rows, site = sum(self._shares.values()), self._site
        if site is None or info.shape != (rows,) or info.table is None:
            got = f"info of shape {info.shape}" + (", of no mixture" if info.table is None else "")
            refuse(SpecError, "This is no info of a batch of the mixture.", got=got, want=f"sample.info, {rows} rows")
        target: Any = SingleDeviceSharding(site.device) if _is_one_device(site) else site.batch_sharding()
        leaves, structure = jax.tree.flatten((info, values))
        at_home = [
            leaf if getattr(leaf, "sharding", None) == target else jax.device_put(leaf, target) for leaf in leaves
        ]
        return self._split(*structure.unflatten(at_home))

    def _joining(self, bounds: list[tuple[int, int]]) -> Callable[..., Sample]:
        names, rows = [repr(name) for name in self._shares], bounds[-1][1]

        def join(*parts: Sample) -> Sample:
            own = []
            for number, (part, (begin, end)) in enumerate(zip(parts, bounds, strict=True)):
                info = part.info
                of_batch = info.probability * jnp.float32((end - begin) / rows)
                own.append(
                    part._replace(info=info._replace(probability=of_batch, table=jnp.full_like(info.slot, number)))
                )
            return joined(own, names)

        return join


def _splitting(bounds: list[tuple[int, int]]) -> Callable[..., tuple]:
    def split(info: SampleInfo, values: Array) -> tuple:
        parts = []
        bad = ~jnp.all(jnp.isfinite(values) & (values >= 0))  # one bad priority refuses the update in every table
        values = jnp.where(bad, jnp.nan, values)
        for number, (begin, end) in enumerate(bounds):
            own = jax.tree.map(lambda leaf, begin=begin, end=end: leaf[begin:end], info)
            slot = jnp.where(own.table == number, own.slot, -1)  # rows that were moved to another place name nothing
            parts.append((own._replace(slot=slot, table=None), values[begin:end]))
        return tuple(parts)

    return split


def _over_shards(function: Callable[..., Any], site: LearnerSite) -> Callable[..., Any]:
    """Return ``function`` of a shard's rows, compiled over all shards of a batch: nothing is moved between devices."""
    if site.mesh is None or _is_one_device(site):
        return in_own_mesh(jax.jit(function), single_device_mesh(site.device))
    if site.axis is None:
        return in_own_mesh(jax.jit(function), site.mesh)
    spec = PartitionSpec(site.axis)
    over = jax.shard_map(function, mesh=site.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return in_own_mesh(jax.jit(over, out_shardings=NamedSharding(site.mesh, spec)), site.mesh)


def _is_one_device(site: LearnerSite) -> bool:
    """Whether batches of a table are on the learner's device alone, typed with no mesh."""
    return site.mesh is None or (site.mesh.size == 1 and AxisType.Explicit not in site.mesh.axis_types)


def _unbuilt(*_: Any) -> Any:
    raise AssertionError("no table of this mixture is built")


def _words(site: LearnerSite) -> str:
    return str(site.device) if site.mesh is None else f"{site.mesh.shape} over axis {site.axis!r}"


__all__ = ["Mixed", "by_table", "check_not_fused"]
