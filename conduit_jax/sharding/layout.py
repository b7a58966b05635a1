"""A placement on a topology, before it is one on devices: which endpoint holds how many partitions of which leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conduit_jax.sharding.topology import DEVICE, PINNED_HOST, Endpoint
from conduit_jax.sharding.workload import Workload


@dataclass(frozen=True)
class LayoutPart:
    """``partitions[i]`` partitions at ``holders[i]``; ``leaves`` by path, ``None``: all of them."""

    holders: tuple[Endpoint, ...]
    partitions: tuple[int, ...]
    leaves: tuple[str, ...] | None = None

    @property
    def tier(self) -> str:
        """The memory all holders are of."""
        return self.holders[0].tier

    @property
    def shares(self) -> tuple[float, ...]:
        """The fraction of the items at each holder."""
        total = sum(self.partitions)
        return tuple(count / total for count in self.partitions)


@dataclass(frozen=True)
class Layout:
    """A candidate placement: its ``name`` and ``parts``, which together hold every partition of every leaf once."""

    name: str
    parts: tuple[LayoutPart, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes it uses."""
        return tuple(sorted({holder.node for part in self.parts for holder in part.holders}))

    @property
    def scattered(self) -> bool:
        """Whether no one program reaches all of it: rows then pass through the learner's device.

        One program reaches evenly dealt partitions of one tier, and leaves that are split over devices and their pinned host
        memory.
        """
        tiers = {part.tier for part in self.parts}
        uneven = any(len(set(part.partitions)) > 1 for part in self.parts)
        return uneven or (len(self.parts) > 1 and tiers != {DEVICE, PINNED_HOST})

    def bytes_by_endpoint(self, workload: Workload) -> dict[Endpoint, int]:
        """Return the bytes of the buffer at each endpoint: the volumes V of the paper's eq. 3."""
        held: dict[Endpoint, int] = {}
        for part in self.parts:
            leaf_bytes, total = workload.leaf_bytes(part.leaves), sum(part.partitions)
            each = -(-workload.capacity_items // total) * leaf_bytes
            for holder, count in zip(part.holders, part.partitions, strict=True):
                held[holder] = held.get(holder, 0) + count * each
        return held

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        parts = [
            {
                "tier": part.tier,
                "holders": [str(holder) for holder in part.holders],
                "partitions": list(part.partitions),
                "leaves": None if part.leaves is None else list(part.leaves),
            }
            for part in self.parts
        ]
        return {"name": self.name, "parts": parts}
