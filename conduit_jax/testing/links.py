"""Emulated links: transfers between the devices of this process take the time a topology says, by waiting.

    links = conduit.testing.shaped_links(topology, pause=time.sleep, clock=time.perf_counter)
    links.put(tree, sharding)            # a transfer function: device_put, and the rest of the table's time
    with links.on(plane): ...            # every transfer of a built plane's tables

Virtual devices share one memory, so that all placements are nearly equally fast; with shaped links they differ as those of
another system would. Bytes are untouched: only time passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from conduit_jax.errors import ConfigError, refuse
from conduit_jax.plane import ExperiencePlane
from conduit_jax.sharding.far import far_storage
from conduit_jax.sharding.placement import Placement, part_bytes
from conduit_jax.sharding.topology import DEVICE, DISK, PAGEABLE, PINNED_HOST, Endpoint, Topology, link_kind
from conduit_jax.testing.shadow import shadow
from conduit_jax.types import Device

PyTree = Any
Put = Callable[[PyTree, Any], PyTree]


class ShapedLinks:
    """Transfers that take ``topology``'s time between ``devices`` (by rank); ``host`` stands for its pageable memory.

    A message is all that goes from one endpoint to another in a call; the messages of a call follow one another, as the
    planner's terms add. Calls of several threads contend as the topology says.
    """

    def __init__(
        self,
        topology: Topology,
        devices: Sequence[Device],
        *,
        pause: Callable[[float], object],
        clock: Callable[[], float],
        host: Device | None = None,
    ):
        if topology.devices * topology.nodes < len(devices):
            got = f"{topology.devices * topology.nodes} of {len(devices)} devices"
            refuse(ConfigError, f"{topology.name} has too few devices.", got=got, want="one for each of devices=")
        self.topology = topology
        self._rank = {device: rank for rank, device in enumerate(devices)}
        self._host, self._pause, self._clock = host, pause, clock
        self._moving: set[tuple[str, object]] = set()  # adding and discarding need no lock

    def put(self, tree: PyTree, shardings: Any) -> PyTree:
        """Return ``jax.device_put(tree, shardings)``, arrived, not before the table's time has passed."""
        return self._put(tree, shardings, DEVICE, 0.0)

    def put_into(self, tier: str, share: float = 1.0) -> Put:
        """Return ``put`` for a placement that has ``share`` of its bytes in ``tier``.

        What goes on to host memory from the device is charged as one way.
        """
        return lambda tree, shardings: self._put(tree, shardings, tier, share)

    def seconds(self, messages: Counter[tuple[Endpoint, Endpoint]]) -> float:
        """Return the table's seconds of ``messages``, bytes by source and destination, one after the other."""
        return sum(self._one(source, destination, size) for (source, destination), size in messages.items())

    @contextmanager
    def on(self, plane: ExperiencePlane) -> Iterator[None]:
        """Shape the transfers of the tables ``plane`` has built, inside the block: rollouts in, batches out."""
        undo = []
        for built in plane._tables.values():
            placement: Placement | None = getattr(built, "placement", None)
            if placement is None:
                refuse(
                    ConfigError, "Only replayed tables have links to shape.", got="an on-policy plane", want="OffPolicy"
                )
            undo += self._shape(built, placement)
        try:
            yield
        finally:
            for restore in reversed(undo):
                restore()

    def _shape(self, built: Any, placement: Placement) -> list[Callable[[], None]]:
        """Shape a table's transfers; return what undoes it."""
        pipeline, held = built.pipeline, part_bytes(placement, built.blueprint.traffic.stored_bytes)
        pinned = sum(size for part, size in held.items() if part.memory_kind == PINNED_HOST) / sum(held.values())
        undo = []
        if placement.far:  # rows go by way of the home, in device memory
            pinned, far = 0.0, far_storage(pipeline.state.storage)
            undo += self._shape_disk(far, placement) if placement.disk is not None else self._shape_scattered(far)
        undo.append(shadow(built.intake._stager, "_put", self.put_into(PINNED_HOST, pinned)))
        slow = {"batch_to_learner": self._to_learner(pipeline._programs.batch_to_learner, pinned == 1)}
        if pinned:
            programs = {name: getattr(pipeline._programs, name) for name in ("deliver", "deliver_group")}
            slow |= {name: self._from_host(program, pinned) for name, program in programs.items()}
        return [*undo, shadow(pipeline, "_programs", pipeline._programs._replace(**slow))]

    def _shape_scattered(self, far: Any) -> list[Callable[[], None]]:
        def beside(rows: Any, kinds: tuple[str, ...], arriving: bool) -> Any:
            messages: Counter[tuple[Endpoint, Endpoint]] = Counter()
            start = self._clock()
            for row, kind in zip(jax.block_until_ready(rows), kinds, strict=True):
                here = self._endpoint(next(iter(row.devices())), DEVICE)
                there = Endpoint(PINNED_HOST, here.node)
                if kind == PINNED_HOST:
                    messages[(here, there) if arriving else (there, here)] += row.nbytes
            self._wait(messages, start)
            return rows

        return [shadow(far, "put", self.put), shadow(far, "beside", beside)]

    def _shape_disk(self, far: Any, placement: Placement) -> list[Callable[[], None]]:
        device = self._endpoint(placement.part.devices[0], DEVICE)
        disk, gather, scatter = Endpoint(DISK, device.node), far.gather, far.scatter

        def slow_gather(slots: Any) -> Any:
            start, rows = self._clock(), gather(slots)
            self._wait(Counter({(disk, device): sum(row.nbytes for row in rows)}), start)
            return rows

        def slow_scatter(slots: Any, values: Sequence[Any]) -> None:
            start = self._clock()
            scatter(slots, values)
            self._wait(Counter({(device, disk): sum(value.nbytes for value in values)}), start)

        return [shadow(far, "gather", slow_gather), shadow(far, "scatter", slow_scatter)]

    def _put(self, tree: PyTree, shardings: Any, tier: str, share: float) -> PyTree:
        start = self._clock()
        arrived = jax.block_until_ready(jax.device_put(tree, shardings))
        messages: Counter[tuple[Endpoint, Endpoint]] = Counter()
        for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(arrived), strict=True):
            messages += self._messages(before, after, None if share < 1 else tier)
        if 0 < share < 1:
            messages = self._split(messages, tier, share)
        self._wait(messages, start)
        return arrived

    def _split(
        self, messages: Counter[tuple[Endpoint, Endpoint]], tier: str, share: float
    ) -> Counter[tuple[Endpoint, Endpoint]]:
        """Return ``messages`` with ``share`` of each going on to its destination's ``tier``."""
        split: Counter[tuple[Endpoint, Endpoint]] = Counter()
        for (source, destination), size in messages.items():
            onward = round(share * size)
            split[source, Endpoint(tier, destination.node)] += onward
            split[source, destination] += size - onward
        return split

    def _to_learner(self, function: Callable[[PyTree], PyTree], from_host: bool) -> Callable[[PyTree], PyTree]:
        """Charge the way to the learner; what a program has brought from host memory is read where it arrived for nothing."""

        def slow(sample: PyTree) -> PyTree:
            jax.block_until_ready(sample)
            start = self._clock()
            arrived = jax.block_until_ready(function(sample))
            messages: Counter[tuple[Endpoint, Endpoint]] = Counter()
            for before, after in zip(jax.tree.leaves(sample), jax.tree.leaves(arrived), strict=True):
                messages += self._messages(before, after, None)
            if from_host:
                messages = Counter({ends: size for ends, size in messages.items() if ends[0] != ends[1]})
            self._wait(messages, start)
            return arrived

        return slow

    def _from_host(self, function: Callable[..., tuple], share: float = 1.0) -> Callable[..., tuple]:
        """Charge what a program brings from pinned memory to its devices: ``share`` of the batch."""

        def slow(*arguments: Any) -> tuple:
            state, batch = jax.block_until_ready(function(*arguments))
            start, messages = self._clock(), Counter()
            for leaf in jax.tree.leaves(batch):
                for shard in leaf.addressable_shards:
                    device = self.topology.endpoint(DEVICE, self._rank[shard.device])
                    messages[Endpoint(PINNED_HOST, device.node), device] += round(share * shard.data.nbytes)
            self._wait(messages, start)
            return state, batch

        return slow

    def _messages(self, before: Any, after: jax.Array, tier: str | None) -> Counter[tuple[Endpoint, Endpoint]]:
        """Return the bytes by source and destination of one array: shards that stay where they are move over nothing."""
        messages: Counter[tuple[Endpoint, Endpoint]] = Counter()
        held = self._held(before)
        for shard in after.addressable_shards:
            destination = self._endpoint(shard.device, tier or after.sharding.memory_kind)
            if destination in held and held[destination] >= shard.data.nbytes and len(held) > 1:
                continue
            whole = sum(held.values()) or 1
            for source, size in held.items():
                messages[source, destination] += round(shard.data.nbytes * size / whole)
        return messages

    def _held(self, leaf: Any) -> dict[Endpoint, int]:
        if not isinstance(leaf, jax.Array):
            return {Endpoint(PAGEABLE): np.asarray(leaf).nbytes}
        return {
            self._endpoint(shard.device, leaf.sharding.memory_kind): shard.data.nbytes
            for shard in leaf.addressable_shards
        }

    def _endpoint(self, device: Device, memory_kind: str | None) -> Endpoint:
        if device == self._host:
            return Endpoint(PAGEABLE)
        if device not in self._rank:
            refuse(ConfigError, "The links do not know a device.", got=device, want="one of devices=, or host=")
        place = self.topology.endpoint(DEVICE, self._rank[device])
        return Endpoint(PINNED_HOST, place.node) if memory_kind == PINNED_HOST else place

    def _one(self, source: Endpoint, destination: Endpoint, size: int) -> float:
        if source == destination and not self.topology.has_link(source, destination):
            return 0.0
        return self.topology.link(source, destination).transfer_s(size)

    def _wait(self, messages: Counter[tuple[Endpoint, Endpoint]], start: float) -> None:
        """Wait for what is left of the table's time since ``start``, longer where other threads move on links of the kind."""
        this = object()
        own = {(link_kind(*ends), this) for ends in messages}
        self._moving |= own
        slower = max((self._slow_down(*ends, size) for ends, size in messages.items()), default=1.0)
        try:
            left = slower * self.seconds(messages) - (self._clock() - start)
            if left > 0:
                self._pause(left)
        finally:
            self._moving -= own

    def _slow_down(self, source: Endpoint, destination: Endpoint, size: int) -> float:
        kind, devices = link_kind(source, destination), self.topology.devices
        links = devices * (devices - 1) if kind == "device->device" else devices
        moving = sum(1 for other, _ in tuple(self._moving) if other == kind)
        alone = self._one(source, destination, size)
        if links < 2 or alone <= 0:
            return 1.0
        return 1 + self.topology.slowed_s(kind, size, alone) / alone * (moving - 1) / (links - 1)


def shaped_links(
    topology: Topology,
    *,
    pause: Callable[[float], object],
    clock: Callable[[], float],
    devices: Sequence[Device] | None = None,
    host: Device | None = None,
) -> ShapedLinks:
    """Return transfers that take ``topology``'s time between ``devices`` (this process', unless given).

    Args:
        topology: whose links to emulate.
        pause: what waits, ``time.sleep``; a value, so that a test may only record.
        clock: seconds, ``time.perf_counter``.
        devices: by rank of the topology.
        host: a device that stands for pageable host memory.
    """
    return ShapedLinks(topology, devices or jax.devices(), pause=pause, clock=clock, host=host)
