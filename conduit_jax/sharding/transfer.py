"""Predicted seconds of an iteration's traffic on a placement, one function a term (paper, section 5.1, generalised).

The paper's ``T(p) = x / BW(actor -> p) + x / BW(p -> learner)`` becomes inserted bytes over the first leg plus sampled bytes
over the second; a leg's bandwidth is that of the message that really moves. With several holders a leg is the mixture over
them: times add, bandwidths do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from conduit_jax.sharding.layout import Layout, LayoutPart
from conduit_jax.sharding.topology import DEVICE, PAGEABLE, Endpoint, Topology, link_kind
from conduit_jax.sharding.workload import Workload

TERMS = ("launch_s", "write_s", "insert_s", "gather_s", "sample_s", "detour_s", "contention_s")


class Leg(NamedTuple):
    """One leg of a part: from each of ``ends`` (actors, or learners) to or from its holders.

    ``bytes_each`` go over the leg at each end; ``local`` is the share an end finds at home (``None``: by the shares).
    """

    part: LayoutPart
    ends: tuple[Endpoint, ...]
    bytes_each: float
    local: float | None
    towards_holders: bool


def insert_legs(topology: Topology, layout: Layout, workload: Workload) -> list[Leg]:
    """Return the first legs, actor to placement, a part each."""
    learners = [topology.endpoint(DEVICE, rank) for rank in workload.learners]
    on_device = workload.actors == "device"
    ends = learners if on_device else [Endpoint(PAGEABLE, node) for node in sorted({end.node for end in learners})]
    local = workload.local_write_fraction if on_device else None
    return [
        Leg(part, tuple(ends), workload.inserted_items * workload.leaf_bytes(part.leaves) / len(ends), local, True)
        for part in layout.parts
    ]


def sample_legs(topology: Topology, layout: Layout, workload: Workload) -> list[Leg]:
    """Return the second legs, placement to learner, a part each."""
    ends = tuple(topology.endpoint(DEVICE, rank) for rank in workload.learners)
    each = workload.sampled_items / len(ends)
    local = workload.local_read_fraction
    return [Leg(part, ends, each * workload.leaf_bytes(part.leaves), local, False) for part in layout.parts]


def predicted_s(topology: Topology, layout: Layout, workload: Workload) -> dict[str, float]:
    """Return the seconds of one iteration on ``layout`` by term; their sum is what placements are compared by."""
    inserts, samples = insert_legs(topology, layout, workload), sample_legs(topology, layout, workload)
    detours: list[Leg] = []
    if layout.scattered:
        inserts, samples, detours = _by_way_of_home(topology, layout, workload)
    contention = sum(contention_s(topology, leg) for leg in (*inserts, *samples, *detours))
    return {
        "launch_s": _launch_s(topology, layout),
        "write_s": within_s(topology, layout, workload, "write", workload.inserted_items),
        "insert_s": sum(leg_s(topology, leg) for leg in inserts),
        "gather_s": within_s(topology, layout, workload, "gather", workload.sampled_items),
        "sample_s": sum(leg_s(topology, leg) for leg in samples),
        "detour_s": sum(leg_s(topology, leg) * len(leg.ends) for leg in detours),
        "contention_s": contention,
    }


def _launch_s(topology: Topology, layout: Layout) -> float:
    """Return the seconds of an iteration's programs; a scattered buffer has those of its home, then those of its holders."""
    widest = max(topology.launch(len(part.holders)) for part in layout.parts)
    return widest + topology.launch(1) if layout.scattered else widest


def _by_way_of_home(topology: Topology, layout: Layout, workload: Workload) -> tuple[list[Leg], list[Leg], list[Leg]]:
    """Return the legs of a scattered buffer, whose rows pass through the first learner's device, its home.

    Inserts go from home to the holders and samples from these to home; the detours are actors to home, and home to the other
    learners.
    """
    home = topology.endpoint(DEVICE, workload.learners[0])
    inserts = [
        Leg(part, (home,), workload.inserted_items * workload.leaf_bytes(part.leaves), None, True)
        for part in layout.parts
    ]
    samples = [
        Leg(part, (home,), workload.sampled_items * workload.leaf_bytes(part.leaves), None, False)
        for part in layout.parts
    ]
    at_home = Layout(layout.name, (LayoutPart((home,), (1,)),))
    ways = [*insert_legs(topology, at_home, workload), *sample_legs(topology, at_home, workload)]
    detours = [way._replace(ends=tuple(end for end in way.ends if end != home)) for way in ways]
    return inserts, samples, [way for way in detours if way.ends]


def leg_s(topology: Topology, leg: Leg) -> float:
    """Return the mean over the ends of the expected seconds of the leg: ``mean_e sum_h share_h * T_eh``."""
    return _mean_over_ends(topology, leg, lambda kind, size_bytes, seconds: seconds)


def contention_s(topology: Topology, leg: Leg) -> float:
    """Return the seconds the leg takes longer because all its ends move at once.

    A message that takes ``S`` seconds longer when all ``E`` links of its kind move is taken to take ``S (k - 1)/(E - 1)`` longer
    with ``k`` of them moving.
    """

    def extra(kind: str, size_bytes: float, seconds: float) -> float:
        links = topology.devices * (topology.devices - 1) if kind == "device->device" else topology.devices
        moving = min(len(leg.ends), links)
        if moving < 2:
            return 0.0
        return topology.slowed_s(kind, size_bytes, seconds) * (moving - 1) / (links - 1)

    return _mean_over_ends(topology, leg, extra) if topology.contention else 0.0


def within_s(topology: Topology, layout: Layout, workload: Workload, what: str, items: int) -> float:
    """Return the seconds of touching ``items`` within the holders' own memory, where the topology knows them.

    Holders work side by side, so the one with the largest share counts; parts follow one another.
    """
    total = 0.0
    for part in layout.parts:
        link = topology.within(part.tier, what)
        if link is not None:
            total += link.transfer_s(max(part.shares) * items * workload.leaf_bytes(part.leaves))
    return total


Weigh = Callable[[str, float, float], float]  # kind of link, bytes of a message, its seconds
Shares = dict[Endpoint, float]


class _Mixture(NamedTuple):
    """A leg with its holders by node, each node's shape, and what like nodes and like ends share."""

    topology: Topology
    leg: Leg
    nodes: dict[int, Shares]
    shapes: Mapping[int, object]
    weigh: Weigh
    memo: dict[object, float]


def _mean_over_ends(topology: Topology, leg: Leg, weigh: Weigh) -> float:
    nodes: dict[int, Shares] = {}
    for holder, share in zip(leg.part.holders, leg.part.shares, strict=True):
        nodes.setdefault(holder.node, {})[holder] = share
    shapes = {
        node: tuple((h.tier, h.rank % topology.devices, share) for h, share in held.items())
        for node, held in nodes.items()
    }
    mixture = _Mixture(topology, leg, nodes, shapes, weigh, {})
    alike = Counter((shapes.get(end.node), end.tier, end.rank % topology.devices) for end in leg.ends)
    one_of = {(shapes.get(end.node), end.tier, end.rank % topology.devices): end for end in leg.ends}
    return sum(count * _end(mixture, one_of[key]) for key, count in alike.items()) / len(leg.ends)


def _end(mixture: _Mixture, end: Endpoint) -> float:
    """Return one end's weighed seconds: over its own node's links, and over the network to the other nodes."""
    leg, held = mixture.leg, mixture.nodes.get(end.node, {})
    home = next((holder for holder in held if holder == end or holder.tier != DEVICE), None)
    if leg.local is None or home is None or held[home] == 1.0:
        return _near(mixture, end, held) + _far(mixture, end.node, 1.0)
    rest = (1 - leg.local) / (1 - held[home])
    scaled = {holder: leg.local if holder == home else share * rest for holder, share in held.items()}
    return _near(mixture, end, scaled) + _far(mixture, end.node, rest)


def _near(mixture: _Mixture, end: Endpoint, held: Shares) -> float:
    """Return the weighed seconds over the links of the end's own node."""
    return sum(_one(mixture, end, holder, share) for holder, share in held.items())


def _one(mixture: _Mixture, end: Endpoint, holder: Endpoint, share: float) -> float:
    topology, leg = mixture.topology, mixture.leg
    source, destination = (end, holder) if leg.towards_holders else (holder, end)
    if source == destination and not topology.has_link(source, destination):
        return 0.0  # nothing moves
    size = share * leg.bytes_each
    return mixture.weigh(link_kind(source, destination), size, topology.link(source, destination).transfer_s(size))


def _far(mixture: _Mixture, own: int, scale: float) -> float:
    """Return the weighed seconds over the network to all nodes but ``own``, with their shares times ``scale``."""
    if mixture.topology.network is None or scale == 0 or not set(mixture.nodes) - {own}:
        return 0.0
    if ("all", scale) not in mixture.memo:
        everyone = (_over_network(mixture, node, scale) for node in mixture.nodes)
        mixture.memo["all", scale] = sum(everyone)
    return mixture.memo["all", scale] - (_over_network(mixture, own, scale) if own in mixture.nodes else 0.0)


def _over_network(mixture: _Mixture, node: int, scale: float) -> float:
    """Return the weighed seconds of what ``node`` holds: over the network, and between devices and host memory at either end."""
    link, key, leg = mixture.topology.network, (mixture.shapes[node], scale), mixture.leg
    if link is None:
        return 0.0
    if key not in mixture.memo:
        total = 0.0
        for holder, share in mixture.nodes[node].items():
            size = share * scale * leg.bytes_each
            total += mixture.weigh("network", size, link.transfer_s(size))
            ends = ((leg.ends[0], leg.towards_holders), (holder, not leg.towards_holders))
            total += sum(_hop(mixture, end, size, outward=outward) for end, outward in ends)
        mixture.memo[key] = total
    return mixture.memo[key]


def _hop(mixture: _Mixture, end: Endpoint, size: float, *, outward: bool) -> float:
    """Return the weighed seconds between a host tier and its node's device, where messages enter and leave the network.

    0 for a device, and where the topology does not have the link.
    """
    topology, device = mixture.topology, Endpoint(DEVICE, end.node, end.node * mixture.topology.devices)
    source, destination = (end, device) if outward else (device, end)
    if end.tier == DEVICE or not topology.has_link(source, destination):
        return 0.0
    seconds = topology.link(source, destination).transfer_s(size)
    return mixture.weigh(link_kind(source, destination), size, seconds)
