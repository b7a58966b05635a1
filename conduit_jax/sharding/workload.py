"""What a placement has to serve: how many bytes are kept, inserted and sampled, by whom."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from conduit_jax.errors import ConfigError, check_choice, check_fraction, check_integer, refuse

ACTOR_KINDS = ("host", "device")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One iteration's traffic of a buffer (paper, section 5.1, generalised).

    Attributes:
        item_bytes: bytes of one stored item, ``x``.
        capacity_items: items kept, ``C_buf``.
        inserted_items: items a iteration inserts over the first leg, actor to placement.
        sampled_items: items an iteration samples over the second leg, placement to each learner's share. The paper's
            equal weights are ``inserted_items == sampled_items``.
        actors: ``"host"`` or ``"device"``: where rollouts are made; device actors run on the learners' devices.
        learners: global ranks of the devices that consume batches; each takes ``sampled_items / len(learners)``.
        local_read_fraction: share of a learner's items that its own device (or node's host) holds: 1 for draws local to a
            data-parallel learner's partition; ``None``: by the shares, 1/n over n devices (global reads).
        local_write_fraction: the same of device actors and inserts.
        partitions: partitions the buffer is cut into; ``None``: as many as a placement has holders.
        leaves: bytes an item by leaf, for placements whose leaves live in different tiers; empty: one leaf.
    """

    item_bytes: int
    capacity_items: int
    inserted_items: int = 1
    sampled_items: int = 1
    actors: str = "host"
    learners: tuple[int, ...] = (0,)
    local_read_fraction: float | None = None
    local_write_fraction: float | None = None
    partitions: int | None = None
    leaves: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("item_bytes", "capacity_items", "inserted_items", "sampled_items"):
            check_integer(
                f"Workload({name}=)", getattr(self, name), 1 if name in ("item_bytes", "capacity_items") else 0
            )
        check_choice("Workload(actors=)", self.actors, ACTOR_KINDS)
        for name in ("local_read_fraction", "local_write_fraction"):
            if getattr(self, name) is not None:
                check_fraction(f"Workload({name}=)", getattr(self, name))
        if self.partitions is not None:
            check_integer("Workload(partitions=)", self.partitions, 1)
        if not self.learners or len(set(self.learners)) != len(self.learners):
            refuse(ConfigError, "Learners must be ranks.", got=self.learners, want="at least one, each once")
        for rank in self.learners:
            check_integer("A learner's rank", rank, 0)
        if self.leaves and sum(self.leaves.values()) != self.item_bytes:
            got = f"{sum(self.leaves.values())} bytes in leaves, item_bytes={self.item_bytes}"
            refuse(ConfigError, "Leaves do not add up to the item.", got=got, want="equal sums")

    @property
    def storage_bytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.capacity_items * self.item_bytes

    def leaf_bytes(self, leaves: tuple[str, ...] | None) -> int:
        """Return the bytes an item has in ``leaves``; ``None``: all of them."""
        return self.item_bytes if leaves is None else sum(self.leaves[name] for name in leaves)

    def with_item_bytes(self, item_bytes: int) -> Workload:
        """Return the workload with items of another size; leaves keep their proportions, the largest takes what is over."""
        if not self.leaves:
            return replace(self, item_bytes=item_bytes)
        scaled = {name: math.floor(size * item_bytes / self.item_bytes) for name, size in self.leaves.items()}
        largest = max(scaled, key=lambda name: scaled[name])
        scaled[largest] += item_bytes - sum(scaled.values())
        return replace(self, item_bytes=item_bytes, leaves=scaled)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"leaves": dict(self.leaves)}


class Traffic(NamedTuple):
    """What an iteration moves: items of ``item_bytes`` (``leaves``: stored ones by name), inserted from ``actors`` and sampled."""

    item_bytes: int
    capacity_items: int
    inserted_items: int
    sampled_items: int
    actors: str = "host"
    leaves: tuple[tuple[str, int], ...] = ()

    @property
    def stored_bytes(self) -> dict[str, int]:
        """Bytes of the whole buffer by stored leaf; where these are not known, together."""
        leaves = self.leaves or (("item", self.item_bytes),)
        return {leaf: size * self.capacity_items for leaf, size in leaves}
