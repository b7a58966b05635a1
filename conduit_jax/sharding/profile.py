"""Measures a ``Topology`` of this process' devices with ``device_put`` micro-benchmarks at the sizes that will be moved.

A link is a table of medians by size with its spread, into memory that is used again and into fresh memory: bandwidth is not
latency plus bytes over bandwidth where fresh pages cost. Contention is measured by moving on all links of a kind at once.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median, quantiles
from typing import Any

import jax
import numpy as np

from conduit_jax.errors import ConfigError, check_integer, refuse
from conduit_jax.sharding.disk import disk_memory
from conduit_jax.sharding.links import Link
from conduit_jax.sharding.memory import PINNED_HOST, memory_kinds, tier_memory
from conduit_jax.sharding.moves import Move, System, launch, link_names, message, transfer, within
from conduit_jax.sharding.network import agreed, everyones, process_pairs, round_trip
from conduit_jax.sharding.topology import DEVICE, DISK, PAGEABLE, Topology
from conduit_jax.types import Device

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 24)  # small batches to a piece of a storage that moves
ROWS = 64
_ALIKE = 1.5  # links of a kind whose medians differ by less are one link: picking ranks by noise helps nobody
_BUDGET_S = 0.25  # a point's repeats end after so long
_SHORTEST_S = 1e-9
_AT_ONCE_BYTES = 512 << 20  # moved on all links of a kind at once, to measure contention
_DISK_ROOM = 256 << 20  # a disk with less is not tried


def profile(
    devices: Sequence[Device] | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    rows: int = ROWS,
    repeats: int = 7,
    unavailable: Mapping[str, str] | None = None,
    alone: bool = False,
) -> Topology:
    """Return the topology of ``devices`` (all local ones unless given), measured now; takes some seconds.

    Where ``jax.distributed`` is up all processes call it together: each is a node, the network between them is measured, and
    all are returned the same.

    Args:
        devices: this process' in order of rank; all of one platform.
        sizes: bytes of the messages to measure; between them links are interpolated, beyond them extended.
        rows: rows a message is gathered from or scattered to: a batch.
        repeats: of each point, of which the median is kept.
        unavailable: tiers not to be tried, and why (``probe``).
        alone: measure what this process has, whatever others there are: they need not call it, and there is no network.
    """
    _check(sizes, rows, repeats)
    chosen = tuple(devices or jax.local_devices())
    if others := [device for device in chosen if device.process_index != jax.process_index()]:
        want = "this process' devices: the links to others are measured between processes"
        refuse(ConfigError, "A profile measures what this process reaches.", got=str(others[0]), want=want)
    broken = dict(unavailable or {}) | _same_memory(chosen[0])
    tiers = (DEVICE, *(tier for tier in (PINNED_HOST, PAGEABLE, DISK) if tier not in broken and _has(chosen[0], tier)))
    system = System(chosen, tiers)
    links = _measured_links(system, sorted(set(sizes)), rows, repeats)
    device_bytes, host_bytes, node_bytes = tier_memory(chosen)
    here = Topology(
        name=f"{chosen[0].device_kind} x {len(chosen)}",
        source=f"measured here with jax {jax.__version__}",
        device_memory_bytes=device_bytes,
        host_memory_bytes={tier: size for tier, size in (host_bytes | disk_memory()).items() if tier in tiers},
        links=links,
        contention=_contention(system, links, sorted(set(sizes)), rows, repeats),
        launch_s=_launches(system, repeats),
        node_memory_bytes=node_bytes,
        unavailable=broken,
    )
    if alone or jax.process_count() == 1:
        return here
    return agreed(replace(here, network=_network(sorted(set(sizes)), repeats), nodes=jax.process_count()))


def _network(sizes: list[int], repeats: int) -> Link | None:
    """Return the link between two processes, the median over pairs of them; ``None`` in the only process.

    Its spread is that of the repeats or that of the pairs, whichever is larger.
    """
    pairs = process_pairs(jax.process_count())
    if not pairs:
        return None
    own = np.full((len(pairs), len(sizes), 2), np.nan)
    for number, pair in enumerate(pairs):
        for place, size in enumerate(sizes):
            if (trip := round_trip(pair, size)) is not None:
                times = _as_often(trip, max(repeats, 5))  # both ends as often: no budget of time may end one of them
                own[number, place] = max(median(times) / 2, _SHORTEST_S), _spread(times)
    table = np.nanmedian(everyones(own), axis=0)
    seconds, spread = np.median(table[..., 0], axis=0), np.max(table[..., 1], axis=0)
    apart = (table[..., 0].max(axis=0) - table[..., 0].min(axis=0)) / seconds
    return Link(tuple(sizes), tuple(seconds.tolist()), (), tuple(np.maximum(spread, apart).tolist()), seconds.min())


def _as_often(move: Move, repeats: int) -> list[float]:
    for _ in range(2):
        jax.block_until_ready(move())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(move())
        times.append(time.perf_counter() - start)
    return times


def _check(sizes: Sequence[int], rows: int, repeats: int) -> None:
    if not sizes:
        refuse(ConfigError, "A profile needs sizes.", got="none", want="bytes of the messages to measure")
    for size in sizes:
        check_integer("A profiled size", size, 4)
    check_integer("profile(rows=)", rows, 1)
    check_integer("profile(repeats=)", repeats, 1)


def _same_memory(device: Device) -> dict[str, str]:
    same = "the devices' own memory is pageable host memory on this backend"
    return {PAGEABLE: same} if device.platform == "cpu" else {}


def _has(device: Device, tier: str) -> bool:
    if tier == DISK:
        return disk_memory().get(DISK, 0) >= _DISK_ROOM
    return tier == PAGEABLE or tier in memory_kinds(device)


def _measured_links(system: System, sizes: list[int], rows: int, repeats: int) -> dict[str, Link]:
    """Return every link, with pairs of devices as one where they are alike, and reads and writes within each tier."""
    links = {
        name: _link(lambda block, name=name: transfer(name, system, block), sizes, rows, repeats)
        for name in link_names(system)
    }
    links = _merged(links, alike=system.devices[0].platform == "cpu")  # virtual devices share one memory
    for tier in system.tiers:
        if tier == DISK:
            continue  # its links end at scattered rows
        for what, road in (("gather", f"{tier}->{DEVICE}"), ("write", f"{DEVICE}->{tier}")):
            if tier == PAGEABLE:
                road = ""  # pageable storage is touched by its own processor; the batch leaves over the link
            whole = _link(lambda block, t=tier, w=what: within(t, w, system, block), sizes, rows, repeats)
            links[f"{tier}:{what}"] = _without(whole, links[road] if tier != DEVICE and road else None)
    return links


def _link(make: Callable[[Any], Move], sizes: list[int], rows: int, repeats: int) -> Link:
    warm, fresh, spread = [], [], []
    for size in sizes:
        move = make(message(size, min(rows, size // 4)))
        times = _times(move, repeats)
        warm.append(max(median(times), _SHORTEST_S))
        spread.append(_spread(times))
        fresh.append(max(median(_times(move, max(2, repeats // 2), keep=True)), _SHORTEST_S))
    return Link(tuple(sizes), tuple(warm), tuple(fresh), tuple(spread), latency_s=min(warm))


def _times(move: Move, repeats: int, *, keep: bool = False) -> list[float]:
    """Return seconds of repeated moves after two to warm up; ``keep`` holds every result, so that memory is fresh each time."""
    for _ in range(2):
        jax.block_until_ready(move())
    times, kept, spent = [], [], 0.0
    while len(times) < repeats and (spent < _BUDGET_S or len(times) < 2):
        start = time.perf_counter()
        arrived = jax.block_until_ready(move())
        times.append(time.perf_counter() - start)
        spent += times[-1]
        kept += [arrived] if keep else []
    return times


def _spread(times: list[float]) -> float:
    if len(times) < 2:
        return 0.0
    tenths = quantiles(times, n=10, method="inclusive")
    return (tenths[-1] - tenths[0]) / median(times)


def _merged(links: dict[str, Link], *, alike: bool) -> dict[str, Link]:
    """Return the links with those between devices under one name where they differ by no more than noise."""
    pairs = {name: link for name, link in links.items() if name.startswith("device:")}
    if not pairs:
        return links
    rest = {name: link for name, link in links.items() if name not in pairs}
    columns = list(zip(*(link.seconds for link in pairs.values()), strict=True))
    first = next(iter(pairs.values()))
    typical = Link(
        first.bytes,
        tuple(median(column) for column in columns),
        tuple(median(column) for column in zip(*(link.fresh_seconds for link in pairs.values()), strict=True)),
        tuple(median(column) for column in zip(*(link.spread for link in pairs.values()), strict=True)),
        latency_s=median(link.latency_s for link in pairs.values()),
    )
    tenths = quantiles(columns[-1], n=10, method="inclusive") if len(columns[-1]) > 1 else [1.0, 1.0]
    alike = alike or tenths[-1] / tenths[0] < _ALIKE
    return {**rest, "device->device": typical} if alike else {**rest, "device->device": typical, **pairs}


def _without(whole: Link, road: Link | None) -> Link:
    """Return ``whole`` less the time of the link it contains."""
    if road is None:
        return whole
    left = [
        max(seconds - road.transfer_s(size), _SHORTEST_S)
        for size, seconds in zip(whole.bytes, whole.seconds, strict=True)
    ]
    return Link(whole.bytes, tuple(left), spread=whole.spread, latency_s=left[0])


def _contention(
    system: System, links: Mapping[str, Link], sizes: list[int], rows: int, repeats: int
) -> dict[str, Link]:
    """Return the seconds of a transfer when all links of its kind move at once, at the sizes that are measured alone.

    Sizes of which all links together would move more than ``_AT_ONCE_BYTES`` are left out: the table is extended.
    """
    count = len(system.devices)
    if count < 2:
        return {}
    kinds = {"device->device": [f"device:{i}->device:{j}" for i in range(count) for j in range(count) if i != j]}
    for tier in (PAGEABLE, PINNED_HOST):
        if f"{tier}->{DEVICE}" in links:
            kinds[f"{tier}->{DEVICE}"] = [f"{tier}->device:{rank}" for rank in range(count)]
    tables = {}
    for kind, names in kinds.items():
        within_bound = [size for size in sizes if size * len(names) <= _AT_ONCE_BYTES] or sizes[:1]
        seconds = []
        for size in within_bound:
            moves = [transfer(name, system, message(size, min(rows, size // 4))) for name in names]
            together = median(_times(lambda moves=moves: [move() for move in moves], repeats))
            seconds.append(max(together, links[kind].transfer_s(size)))
            del moves
        tables[kind] = Link(tuple(within_bound), tuple(seconds), latency_s=max(links[kind].latency_s, min(seconds)))
    gc.collect()
    return tables


def _launches(system: System, repeats: int) -> tuple[float, ...]:
    """Return the seconds of an iteration's programs over 1, 2, ... devices, interpolated between powers of two."""
    total = len(system.devices)
    counts = sorted({2**power for power in range(total.bit_length()) if 2**power <= total} | {total})
    seconds = [median(_times(launch(system, count), max(repeats, 5))) for count in counts]
    table = Link(tuple(counts), tuple(seconds), latency_s=seconds[0])  # the same interpolation, over devices
    return tuple(table.transfer_s(count) for count in range(1, total + 1))
