"""Links and capacities of a system as data: what the planner decides by, measured here or read from JSON.

A topology is ``nodes`` identical nodes of ``devices`` devices. Within a node links are named by their endpoints, from the
particular to the general: ``"device:0->device:3"``, then ``"device->device"``; ``"device->self"`` is a read within a
device's own memory; host tiers are ``"pageable"``, ``"pinned_host"`` and ``"disk"``. ``network`` joins any two nodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from conduit_jax.errors import ConfigError, check_choice, check_integer, refuse
from conduit_jax.sharding.links import Link

DEVICE, PINNED_HOST, PAGEABLE, DISK = "device", "pinned_host", "pageable", "disk"
HOST_TIERS = (PINNED_HOST, PAGEABLE, DISK)
TIERS = (DEVICE, *HOST_TIERS)


class Endpoint(NamedTuple):
    """Where bytes may be: a host tier of ``node``, or the device with global ``rank`` (host tiers have rank -1)."""

    tier: str
    node: int = 0
    rank: int = -1

    def __str__(self) -> str:
        if self.tier == DEVICE:
            return f"device:{self.rank}"
        return self.tier if self.node == 0 else f"{self.tier}@node:{self.node}"


@dataclass(frozen=True)
class Topology:
    """A system as the planner sees it.

    Attributes:
        name: what it is called; ``source`` says where the figures come from.
        device_memory_bytes: what each device of a node may hold of the buffer.
        host_memory_bytes: the same for each host tier of a node; a tier that is not named is not offered.
        links: seconds by transfer, by name (see above). ``"device"``, ``"pinned_host"``, ... with ``":gather"`` or
            ``":write"`` are the seconds of reading scattered rows, and of inserting, within that memory.
        network: between devices of any two nodes; ``None`` on one node. What begins or ends in a host tier has the way to or
            from a device of its node besides.
        contention: by kind of link (``"device->device"``): how many times longer a transfer takes when all links of that
            kind move at once, or a table of the seconds it then takes; as long as alone where not named.
        nodes: identical nodes.
        launch_s: seconds an iteration's programs take over 1, 2, ... devices with hardly any data; empty: not known.
        node_memory_bytes: what all tiers of a node may hold together, where they are one memory; ``None``: apart.
        unavailable: tiers that a probe found not to work here, and why.
    """

    name: str
    source: str
    device_memory_bytes: tuple[int, ...]
    host_memory_bytes: Mapping[str, int]
    links: Mapping[str, Link]
    network: Link | None = None
    contention: Mapping[str, float | Link] = field(default_factory=dict)
    nodes: int = 1
    launch_s: tuple[float, ...] = ()
    node_memory_bytes: int | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_integer("Topology(nodes=)", self.nodes, 1)
        if not self.device_memory_bytes:
            refuse(ConfigError, "A topology needs devices.", got="device_memory_bytes=()", want="bytes a device")
        together = () if self.node_memory_bytes is None else (self.node_memory_bytes,)
        for size in (*self.device_memory_bytes, *self.host_memory_bytes.values(), *together):
            check_integer("A memory size", size, 0)
        for tier in (*self.host_memory_bytes, *self.unavailable):
            check_choice("tier", tier, TIERS)
        for kind, slow in self.contention.items():
            if not isinstance(slow, Link) and not 0 < slow < float("inf"):
                refuse(ConfigError, f"contention[{kind!r}] is out of range.", got=slow, want="a finite number > 0")
            if isinstance(slow, Link) and kind not in self.links:
                want = f"links[{kind!r}], which it is compared with"
                refuse(ConfigError, "A table of contention needs its link.", got=sorted(self.links)[:12], want=want)
        if self.nodes > 1 and self.network is None:
            refuse(ConfigError, "Several nodes need a network.", got=f"nodes={self.nodes}", want="network=Link(...)")

    @property
    def devices(self) -> int:
        """Devices of one node."""
        return len(self.device_memory_bytes)

    def endpoint(self, tier: str, rank: int = -1, node: int = 0) -> Endpoint:
        """Return the endpoint of a device's global ``rank``, or of a host ``tier`` of ``node``."""
        return Endpoint(DEVICE, rank // self.devices, rank) if tier == DEVICE else Endpoint(tier, node)

    def memory_bytes(self, where: Endpoint) -> int:
        """Return the bytes of the buffer that ``where`` may hold."""
        if where.tier == DEVICE:
            return self.device_memory_bytes[where.rank % self.devices]
        return self.host_memory_bytes.get(where.tier, 0)

    def offers(self, tier: str) -> bool:
        """Whether the tier is there and works."""
        return tier not in self.unavailable and (tier == DEVICE or tier in self.host_memory_bytes)

    def link(self, source: Endpoint, destination: Endpoint) -> Link:
        """Return the link between two endpoints; ``ConfigError`` naming it where the topology does not have it."""
        if source.node != destination.node:
            return self.network or refuse(ConfigError, "No network.", got=self.name, want="a link between nodes")
        for name in self._names(source, destination):
            if name in self.links:
                return self.links[name]
        got, want = self._names(source, destination)[0], f"one of {', '.join(sorted(self.links)[:12])}"
        return refuse(ConfigError, "The topology has no such link.", got=got, want=want, fix="profile it again")

    def has_link(self, source: Endpoint, destination: Endpoint) -> bool:
        """Whether ``link`` would find one."""
        if source.node != destination.node:
            return self.network is not None
        return any(name in self.links for name in self._names(source, destination))

    def _names(self, source: Endpoint, destination: Endpoint) -> tuple[str, str]:
        return f"{self._local(source)}->{self._local(destination)}", link_kind(source, destination)

    def slowed_s(self, kind: str, size_bytes: float, seconds: float) -> float:
        """Return how much longer a transfer that takes ``seconds`` alone takes when all links of its kind move at once."""
        slow = self.contention.get(kind, 1.0)
        if isinstance(slow, Link):
            return max(0.0, slow.transfer_s(size_bytes) - self.links[kind].transfer_s(size_bytes))
        return seconds * (slow - 1)

    def within(self, tier: str, what: str) -> Link | None:
        """Return the link of ``what`` (``"gather"``, ``"write"``) within memory of ``tier``, if it is known."""
        return self.links.get(f"{tier}:{what}")

    def launch(self, devices: int) -> float:
        """Return the seconds an iteration's programs take over so many devices, 0 where not known."""
        return self.launch_s[min(devices, len(self.launch_s)) - 1] if self.launch_s else 0.0

    def limited(self, limits: Mapping[str, int]) -> Topology:
        """Return the topology with at most ``limits[tier]`` bytes a device or host tier."""
        for tier, size in limits.items():
            check_choice("tier", tier, TIERS)
            check_integer(f"limits[{tier!r}]", size, 0)
        device = tuple(min(size, limits.get(DEVICE, size)) for size in self.device_memory_bytes)
        host = {tier: min(size, limits.get(tier, size)) for tier, size in self.host_memory_bytes.items()}
        return replace(self, device_memory_bytes=device, host_memory_bytes=host)

    def _local(self, where: Endpoint) -> str:
        return f"device:{where.rank % self.devices}" if where.tier == DEVICE else where.tier

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        data: dict[str, Any] = {"name": self.name, "source": self.source, "nodes": self.nodes}
        data |= {"device_memory_bytes": list(self.device_memory_bytes)}
        data |= {"host_memory_bytes": dict(self.host_memory_bytes), "unavailable": dict(self.unavailable)}
        contention = {kind: one.as_dict() if isinstance(one, Link) else one for kind, one in self.contention.items()}
        data |= {"contention": contention, "launch_s": list(self.launch_s)}
        data |= {"node_memory_bytes": self.node_memory_bytes}
        data |= {"network": self.network.as_dict() if self.network else None}
        return data | {"links": {name: link.as_dict() for name, link in self.links.items()}}

    @staticmethod
    def from_dict(data: Any) -> Topology:
        """Invert ``as_dict``; ``ConfigError`` naming what is missing or unknown."""
        needed = {"name", "device_memory_bytes", "host_memory_bytes", "links"}
        known = needed | {"source", "nodes", "contention", "network", "launch_s", "node_memory_bytes", "unavailable"}
        if not isinstance(data, Mapping) or not needed <= set(data) <= known:
            got = sorted(data) if isinstance(data, Mapping) else type(data).__name__
            refuse(ConfigError, "No topology can be read.", got=got, want=f"{sorted(needed)}, and {sorted(known)}")
        try:
            return Topology(
                name=str(data["name"]),
                source=str(data.get("source", "")),
                device_memory_bytes=tuple(data["device_memory_bytes"]),
                host_memory_bytes=dict(data["host_memory_bytes"]),
                links={str(name): Link.from_dict(link) for name, link in data["links"].items()},
                network=Link.from_dict(data["network"]) if data.get("network") else None,
                contention={str(kind): _contention(one) for kind, one in data.get("contention", {}).items()},
                nodes=data.get("nodes", 1),
                launch_s=tuple(float(seconds) for seconds in data.get("launch_s", ())),
                node_memory_bytes=data.get("node_memory_bytes"),
                unavailable=dict(data.get("unavailable", {})),
            )
        except ConfigError:
            raise
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            refuse(ConfigError, "No topology can be read.", got=str(error), want="the form Topology.as_dict() has")

    def save(self, path: Path) -> None:
        """Write the topology as JSON."""
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")


def _contention(data: Any) -> float | Link:
    return Link.from_dict(data) if isinstance(data, Mapping) else float(data)


def link_kind(source: Endpoint, destination: Endpoint) -> str:
    """Return the general name of a link: ``"pageable->device"``, ``"device->self"``, ``"network"``."""
    if source.node != destination.node:
        return "network"
    return f"{source.tier}->{'self' if source == destination else destination.tier}"


def shipped_topologies() -> tuple[str, ...]:
    """Return the names of the topologies that come with the package."""
    folder = resources.files("conduit_jax").joinpath("topologies")
    return tuple(sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json")))


def load_topology(name_or_path: str | Path) -> Topology:
    """Return a shipped topology by name, or one read from a JSON file.

    Raises ``ConfigError`` for a name that is neither, and for a file that holds no topology.
    """
    path = Path(name_or_path)
    if str(name_or_path) in shipped_topologies():
        text = resources.files("conduit_jax").joinpath("topologies", f"{name_or_path}.json").read_text()
    elif path.is_file():
        text = path.read_text()
    elif path.suffix == ".json":
        refuse(ConfigError, "There is no such file.", got=str(path), want="a topology saved by Topology.save")
    else:
        return check_choice("topology", str(name_or_path), shipped_topologies()) or load_topology(name_or_path)
    try:
        return Topology.from_dict(json.loads(text))
    except json.JSONDecodeError as error:
        refuse(ConfigError, f"{name_or_path} holds no JSON.", got=str(error), want="a topology saved by Topology.save")
