"""Planning ahead: the placement map over the sizes items may reach, exact to the byte (paper, section 5.3).

What is swept are the sizes at which the planner's answer may turn. Between two of them the same placements fit, and the
seconds of each are linear in the item's size. The cheapest of several linear functions is each for one interval at most, so
that a placement taken at two sizes is taken at all between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from conduit_jax.errors import ConfigError, refuse
from conduit_jax.sharding.candidates import best_subsets
from conduit_jax.sharding.layout import Layout
from conduit_jax.sharding.links import Link
from conduit_jax.sharding.placement_map import PlacementMap, placement_map
from conduit_jax.sharding.planner import fitting, plan
from conduit_jax.sharding.topology import DISK, PAGEABLE, PINNED_HOST, Topology
from conduit_jax.sharding.transfer import predicted_s
from conduit_jax.sharding.workload import Workload


def plan_ahead(topology: Topology, workload: Workload, largest: int, *, only: Sequence[str] = ()) -> PlacementMap:
    """Return the map from item bytes to the layout that ``plan`` takes, from ``workload.item_bytes`` to ``largest``.

    ``None`` where nothing fits. Of several leaves it says which one memory kind holds all of them: ``None`` is then where
    leaves would be split or the disk taken, which depends on how each of them grows.

    Raises ``ConfigError`` for a largest size below the present one, and what ``plan`` raises it for.
    """
    if largest < workload.item_bytes:
        got, want = f"{largest:,} bytes", f"at least the {workload.item_bytes:,} bytes they have"
        refuse(ConfigError, "Items do not grow to less than they are.", got=got, want=want)
    in_one = replace(workload, leaves={})
    splits = len(workload.leaves) > 1
    if splits and splits_alone(only):
        return PlacementMap((workload.item_bytes,), (None,), largest)

    def admits(layout: Layout) -> str:
        return "leaves may be split" if splits and layout.parts[0].tier == DISK else ""

    def layout_of(item_bytes: int) -> Layout:
        return plan(topology, in_one.with_item_bytes(item_bytes), only=only, admits=admits).layout

    return placement_map(layout_of, turning_sizes(topology, in_one, largest, only=only))


def splits_alone(only: Sequence[str]) -> bool:
    """Whether ``only`` leaves no placement of one memory kind to choose from."""
    return bool(only) and all(name.partition(":")[0].partition("[")[0] == "mixed" for name in only)


def turning_sizes(
    topology: Topology,
    workload: Workload,
    largest: int,
    *,
    only: Sequence[str] = (),
    admits: Callable[[Layout], str] = lambda _: "",
    besides: Iterable[Layout] = (),
) -> list[int]:
    """Return the item sizes from ``workload.item_bytes`` to ``largest`` to sweep for a map of placements of one memory kind.

    ``only`` and ``admits`` are ``plan``'s; ``besides`` are layouts that may be taken without being weighed. A topology without
    links is swept for what fits alone.
    """
    workload = replace(workload, leaves={})

    def within(kinks: Iterable[float]) -> set[int]:
        near = {size for kink in kinks for size in (int(kink), int(kink) + 1)}
        return {size for size in near if workload.item_bytes <= size <= largest}

    def fits(sizes: Iterable[int]) -> set[Layout]:
        loads = map(workload.with_item_bytes, sizes)
        return {layout for load in loads for layout in fitting(topology, load, only=only, admits=admits)}

    def turns(layouts: Iterable[Layout]) -> set[int]:
        return within(kink for layout in layouts for kink in _of_layout(topology, layout, workload))

    sizes = {workload.item_bytes, largest} | within(_of_candidates(topology, workload))
    layouts = fits(sizes) | set(besides)
    sizes |= turns(layouts)
    if any(name.startswith("device:") for name in topology.links):  # then the best devices depend on the size too
        subsets = placement_map(lambda size: best_subsets(topology, workload.with_item_bytes(size)), sizes)
        sizes |= within(start - 1 for start in subsets.starts[1:])
        sizes |= turns(fits(subsets.starts) - layouts)
    return sorted(sizes)


def _of_candidates(topology: Topology, workload: Workload) -> Iterator[float]:
    """Yield the sizes at which other placements come into question: of more nodes, and dealt otherwise."""
    memory = sorted(set(topology.device_memory_bytes))
    whole = [
        sum(topology.device_memory_bytes),
        *(topology.host_memory_bytes.get(t, 0) for t in (PAGEABLE, PINNED_HOST)),
    ]
    for nodes in range(1, topology.nodes):
        yield from (nodes * size / workload.capacity_items for size in whole)
    if len(memory) == 1:
        return  # an uneven deal fits where an even one does
    devices = range(2, topology.devices * topology.nodes + 1)
    counts = {workload.partitions} if workload.partitions else {8 * count for count in devices}
    for count in counts:
        each = -(-workload.capacity_items // count)
        yield from (size // (each * held) for size in memory for held in range(1, count + 1))


def _of_layout(topology: Topology, layout: Layout, workload: Workload) -> Iterator[float]:
    """Yield the sizes at which a layout ceases to fit, and at which a message of its reaches a point of its link's table."""
    items = layout.bytes_by_endpoint(replace(workload, item_bytes=1))
    yield from (topology.memory_bytes(where) // count for where, count in items.items())
    if topology.node_memory_bytes is not None:
        for node in layout.nodes:
            own = sum(count for where, count in items.items() if where.node == node and where.tier != DISK)
            yield topology.node_memory_bytes // max(own, 1)
    if topology.links:
        yield from (workload.item_bytes * share for share in _messages(topology, layout, workload))


def _messages(topology: Topology, layout: Layout, workload: Workload) -> set[float]:
    """Return how much larger items would be at which a message is as large as a point of its link's table."""
    seen: set[float] = set()

    def watched(link: Link) -> Link:
        return _Watched(link.bytes, link.seconds, link.fresh_seconds, link.spread, link.latency_s, seen)

    links = {name: watched(link) for name, link in topology.links.items()}
    network = watched(topology.network) if topology.network else None
    slow = {kind: watched(one) if isinstance(one, Link) else one for kind, one in topology.contention.items()}
    predicted_s(replace(topology, links=links, network=network, contention=slow), layout, workload)
    return seen


@dataclass(frozen=True)
class _Watched(Link):
    """A link that writes down how much larger each of its messages would be at the points of its table."""

    seen: set[float] = field(default_factory=set, compare=False)

    def transfer_s(self, size_bytes: float, *, fresh: bool = False) -> float:
        self.seen.update(point / size_bytes for point in self.bytes if size_bytes > 0)
        return super().transfer_s(size_bytes, fresh=fresh)


__all__ = ["plan_ahead", "splits_alone", "turning_sizes"]
