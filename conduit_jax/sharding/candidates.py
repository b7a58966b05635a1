"""The placements a planner considers (paper, section 5.2): pageable, pinned, one device, device subsets, several nodes, mixtures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

from conduit_jax.sharding.layout import Layout, LayoutPart
from conduit_jax.sharding.topology import DEVICE, DISK, PAGEABLE, PINNED_HOST, Endpoint, Topology
from conduit_jax.sharding.transfer import leg_s, sample_legs
from conduit_jax.sharding.workload import Workload

_ALL_SUBSETS_UP_TO = 8  # devices a node: 2**8 subsets; beyond, the fast ranks are taken one by one
_MOST_MIXTURES = 4096


def pure_candidates(topology: Topology, workload: Workload) -> Iterator[Layout]:
    """Yield the placements of one memory kind: host tiers, one device, shared within a node, balanced over nodes."""
    home = workload.learners[0] // topology.devices
    for tier in (PAGEABLE, PINNED_HOST):
        yield host_layout(tier, home, workload)
    near = range(home * topology.devices, (home + 1) * topology.devices)
    for rank in dict.fromkeys((*workload.learners[: topology.devices], *near)):
        yield device_layout(topology, (rank,), workload, _single_name(rank, workload))
    subsets = best_subsets(topology, workload)
    for subset in subsets:
        ranks = tuple(home * topology.devices + local for local in subset)
        yield device_layout(topology, ranks, workload, f"shared:{len(subset)}")
    yield from node_candidates(topology, workload, [(workload.learners[0] % topology.devices,), *subsets])


def _single_name(rank: int, workload: Workload) -> str:
    return "single_device" if rank == workload.learners[0] else f"single_device:{rank}"


def node_candidates(topology: Topology, workload: Workload, subsets: list[tuple[int, ...]]) -> Iterator[Layout]:
    """Yield what is balanced over 2, 4, ... and all nodes, the learners' first: their hosts, and ``subsets`` of each one's devices.

    More holders than the workload has partitions are left out.
    """
    for count in _node_counts(topology, workload):
        if count > (workload.partitions or count):
            continue
        nodes = _nodes_from_learners(topology, workload)[:count]
        for tier in (PAGEABLE, PINNED_HOST):
            holders = tuple(Endpoint(tier, node) for node in nodes)
            yield Layout(f"{tier}@{count}_nodes", (_dealt(holders, workload),))
        for subset in subsets:
            ranks = tuple(node * topology.devices + local for node in nodes for local in sorted(subset))
            if len(ranks) <= (workload.partitions or len(ranks)):
                yield device_layout(topology, ranks, workload, f"shared:{len(subset)}@{count}_nodes")


def _node_counts(topology: Topology, workload: Workload) -> list[int]:
    """Return powers of two, all nodes, the learners' nodes, and the fewest whose devices, or hosts, hold the buffer."""
    home = {rank // topology.devices for rank in workload.learners}
    counts = {2**power for power in range(1, topology.nodes.bit_length())} | {topology.nodes, len(home)}
    for size in (
        sum(topology.device_memory_bytes),
        *(topology.host_memory_bytes.get(t, 0) for t in (PAGEABLE, PINNED_HOST)),
    ):
        counts |= {-(-workload.storage_bytes // size)} if size else set()
    return sorted(count for count in counts if 1 < count <= topology.nodes)


def _nodes_from_learners(topology: Topology, workload: Workload) -> list[int]:
    home = sorted({rank // topology.devices for rank in workload.learners})
    return home + [node for node in range(topology.nodes) if node not in set(home)]


def host_layout(tier: str, node: int, workload: Workload) -> Layout:
    """Return the placement of everything in one host tier."""
    return Layout(tier, (LayoutPart((Endpoint(tier, node),), (workload.partitions or 1,)),))


def device_layout(topology: Topology, ranks: tuple[int, ...], workload: Workload, name: str) -> Layout:
    """Return the placement over the devices with global ``ranks``; dealt unevenly where an even share does not fit all of them."""
    holders = tuple(topology.endpoint(DEVICE, rank) for rank in ranks)
    part = _dealt(holders, workload)
    memory = [topology.memory_bytes(holder) for holder in holders]
    even = Layout(name, (part,))
    held = even.bytes_by_endpoint(workload)
    if all(held[holder] <= size for holder, size in zip(holders, memory, strict=True)):
        return even
    counts = _uneven(memory, workload, workload.partitions or 8 * len(ranks))
    return even if counts is None else Layout(f"{name}:uneven", (LayoutPart(holders, counts),))


def _dealt(holders: tuple[Endpoint, ...], workload: Workload) -> LayoutPart:
    """Deal partitions evenly; the first holders take one more where they do not divide."""
    partitions = workload.partitions or len(holders)
    each, over = divmod(partitions, len(holders))
    counts = tuple(each + (index < over) for index in range(len(holders)))
    kept = [(holder, count) for holder, count in zip(holders, counts, strict=True) if count]
    return LayoutPart(tuple(holder for holder, _ in kept), tuple(count for _, count in kept))


def _uneven(memory: list[int], workload: Workload, partitions: int) -> tuple[int, ...] | None:
    """Deal ``partitions`` by what each holder's memory takes; ``None`` where all of them together do not hold it."""
    each = -(-workload.capacity_items // partitions) * workload.item_bytes
    room = [size // each for size in memory]
    if sum(room) < partitions or min(room) == 0:
        return None
    counts = [0] * len(room)
    for _ in range(partitions):  # level them: one at a time to the emptiest with room
        index = min((i for i in range(len(room)) if counts[i] < room[i]), key=lambda i: (counts[i], i))
        counts[index] += 1
    return tuple(counts)


def best_subsets(topology: Topology, workload: Workload) -> list[tuple[int, ...]]:
    """Return the best subset of a node's devices for each size from 2: that with the least mean read time (paper, Fig. 4).

    Sizes that the partitions cannot be dealt over are left out. Ties go to subsets with the learners' ranks, then to low ranks.
    """
    devices = topology.devices
    most = min(devices, workload.partitions or devices)
    node = workload.learners[0] // devices
    workload = replace(workload, learners=tuple(rank for rank in workload.learners if rank // devices == node))
    if len(set(topology.links) & {f"device:{a}->device:{b}" for a in range(devices) for b in range(devices)}) == 0:
        order = _learners_first(topology, workload)
        return [tuple(sorted(order[:size])) for size in range(2, most + 1)]
    if devices > _ALL_SUBSETS_UP_TO:
        return _greedy_subsets(topology, workload, most)
    sizes = range(2, most + 1)
    return [min(combinations(range(devices), size), key=lambda s: _subset_key(topology, workload, s)) for size in sizes]


def _greedy_subsets(topology: Topology, workload: Workload, most: int) -> list[tuple[int, ...]]:
    chosen: list[tuple[int, ...]] = [(workload.learners[0] % topology.devices,)]
    while len(chosen[-1]) < most:
        wider = (tuple(sorted((*chosen[-1], one))) for one in range(topology.devices) if one not in chosen[-1])
        chosen.append(min(wider, key=lambda subset: _subset_key(topology, workload, subset)))
    return chosen[1:]


def _subset_key(topology: Topology, workload: Workload, subset: tuple[int, ...]) -> tuple[float, int, tuple[int, ...]]:
    """Order subsets by their mean read time; ``workload`` has the learners of one node."""
    node = workload.learners[0] // topology.devices
    ranks = tuple(node * topology.devices + local for local in subset)
    layout = Layout("", (LayoutPart(tuple(topology.endpoint(DEVICE, rank) for rank in ranks), (1,) * len(ranks)),))
    seconds = sum(leg_s(topology, leg) for leg in sample_legs(topology, layout, workload))
    return round(seconds, 12), -len(set(ranks) & set(workload.learners)), subset


def _learners_first(topology: Topology, workload: Workload) -> list[int]:
    local = [rank % topology.devices for rank in workload.learners]
    return local + [rank for rank in range(topology.devices) if rank not in set(local)]


def mixed_candidates(topology: Topology, workload: Workload) -> Iterator[Layout]:
    """Yield placements whose leaves live in different tiers: for when no pure tier fits.

    Each leaf goes to the devices (the fewest-to-all of ``best_subsets``, or the learner's own), pinned or pageable memory.
    """
    names = sorted(workload.leaves, key=lambda name: -workload.leaves[name])
    if len(names) < 2:
        return
    home = workload.learners[0] // topology.devices
    own = (workload.learners[0] % topology.devices,)
    hosts = [tier for tier in (PINNED_HOST, PAGEABLE) if topology.offers(tier)]
    for subset in (own, *best_subsets(topology, workload)):
        ranks = tuple(home * topology.devices + local for local in subset)
        on_devices = _dealt(tuple(topology.endpoint(DEVICE, rank) for rank in ranks), workload)
        for tiers in _assignments((DEVICE, *hosts), len(names)):
            parts = []
            for tier in dict.fromkeys(tiers):
                leaves = tuple(name for name, chosen in zip(names, tiers, strict=True) if chosen == tier)
                host = LayoutPart((Endpoint(tier, home),), (sum(on_devices.partitions),))
                base = on_devices if tier == DEVICE else host
                parts.append(LayoutPart(base.holders, base.partitions, leaves))
            label = ",".join(
                f"{tier}={'+'.join(p.leaves or ())}" for tier, p in zip(dict.fromkeys(tiers), parts, strict=True)
            )
            yield Layout(f"mixed:{len(subset)}[{label}]", tuple(parts))


def _assignments(tiers: tuple[str, ...], count: int) -> Iterator[tuple[str, ...]]:
    """Yield which tier each leaf goes to, at least two tiers used; with many leaves, only cuts of them by size."""
    if len(tiers) ** count <= _MOST_MIXTURES:
        yield from (one for one in product(tiers, repeat=count) if len(set(one)) > 1)
        return
    for host in tiers[1:]:
        for cut in range(1, count):  # the largest leaves leave the device first
            yield (host,) * cut + (DEVICE,) * (count - cut)


def disk_candidate(topology: Topology, workload: Workload) -> Layout:
    """Return the memory-mapped tier: for when nothing else fits."""
    return host_layout(DISK, workload.learners[0] // topology.devices, workload)
