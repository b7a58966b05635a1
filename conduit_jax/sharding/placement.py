"""A placement as a value: which devices and memory kind hold the partitions of a buffer, and the shardings that follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from conduit_jax.errors import ConfigError, PlacementError, check_choice, nearest_multiples, refuse
from conduit_jax.sharding.disk import Disk
from conduit_jax.sharding.memory import DEVICE, DISK, PINNED_HOST, available_bytes, memory_kinds
from conduit_jax.sharding.mesh import PARTITION_AXIS, data_axis, learner_mesh, single_device_mesh
from conduit_jax.types import Device

PAGEABLE = "pageable"
SINGLE_DEVICE = "single_device"
PLACEMENT_NAMES = ("auto", DEVICE, SINGLE_DEVICE, PINNED_HOST, PAGEABLE, DISK)


@dataclass(frozen=True)
class Part:
    """``partitions`` partitions over ``devices``, in ``memory_kind``: ``dealt[i]`` of them on each, evenly unless given.

    ``leaves`` are the stored leaves it has, by name (``"observation"``, ``"a/b"``; ``"(small)"`` for all that are packed
    together); ``None``: all that no other part names.
    """

    devices: tuple[Device, ...]
    memory_kind: str
    partitions: int
    leaves: tuple[str, ...] | None = None
    dealt: tuple[int, ...] | None = None

    @property
    def uneven(self) -> bool:
        """Whether some devices have more partitions than others."""
        return self.dealt is not None and len(set(self.dealt)) > 1


@dataclass(frozen=True)
class Placement:
    """Where a buffer lives: ``parts`` laid out on ``mesh``, partitions along its ``axis``.

    Several parts have different leaves: in different memories of the same devices (images in pinned host memory, the rest on
    the device), or on different devices. Where storage is ``far``, on different devices, dealt unevenly, or with ``disk`` in a
    file of its folder, ``mesh`` has what is small and what is delivered.
    """

    name: str
    parts: tuple[Part, ...]
    mesh: Mesh
    axis: str
    disk: Disk | None = None

    def __post_init__(self) -> None:
        named = [leaf for part in self.parts for leaf in part.leaves or ()]
        rest = sum(part.leaves is None for part in self.parts)
        alike = len({part.partitions for part in self.parts}) == 1
        if not alike or rest > 1 or len(set(named)) != len(named):
            want = "the same partitions in all parts, each leaf in one of them"
            refuse(ConfigError, "The parts of a placement do not go together.", got=str(self.parts), want=want)
        if self.scattered and (self.mesh.size > 1 or not all(map(_is_dealt, self.parts))):
            want = "one device in mesh=, and every partition dealt to one device of a part"
            refuse(ConfigError, "Partitions are not dealt over the devices of a part.", got=str(self.parts), want=want)

    @property
    def scattered(self) -> bool:
        """Whether parts are on different devices, or dealt unevenly: no one program reaches all of it."""
        return len({part.devices for part in self.parts}) > 1 or any(part.uneven for part in self.parts)

    @property
    def far(self) -> bool:
        """Whether storage is out of a program's reach, and is told which rows to find or write."""
        return self.disk is not None or self.scattered

    @property
    def part(self) -> Part:
        """The part nearest to the learner, in device memory where there is one; of a scattered buffer, where its control is."""
        if self.scattered:
            return Part(tuple(self.mesh.devices.flat), DEVICE, self.parts[0].partitions)
        return next((part for part in self.parts if part.memory_kind == DEVICE), self.parts[0])

    @property
    def memory_kinds(self) -> tuple[str, ...]:
        """The memories its arrays are in."""
        return tuple(dict.fromkeys(part.memory_kind for part in self.parts))

    @property
    def in_reach(self) -> Placement:
        """The same placement with arrays in device memory of ``mesh``: what programs see of a far one."""
        return replace(self, parts=(replace(self.part, memory_kind=DEVICE),), disk=None)

    def sharding(self, *spec: str | None, memory_kind: str = DEVICE) -> NamedSharding:
        """Return the sharding of an array laid out as ``spec`` on this placement's mesh."""
        return NamedSharding(self.mesh, PartitionSpec(*spec), memory_kind=memory_kind)

    def __str__(self) -> str:
        places = "; ".join(_described(part, alone=len(self.parts) == 1) for part in self.parts)
        return f"{self.name}: {self.part.partitions} partition(s) in {places}"


def _described(part: Part, *, alone: bool) -> str:
    devices = ", ".join(str(device) for device in part.devices[:4]) + (", ..." if len(part.devices) > 4 else "")
    leaves = "" if alone else "the rest in " if part.leaves is None else f"{', '.join(part.leaves)} in "
    return f"{leaves}{part.memory_kind} of [{devices}]" + (f", dealt {list(part.dealt or ())}" if part.uneven else "")


def _is_dealt(part: Part) -> bool:
    counts = dealt_over(part)
    return len(counts) == len(part.devices) and sum(counts) == part.partitions and min(counts) >= 1


def dealt_over(part: Part) -> tuple[int, ...]:
    """Return how many partitions each device of ``part`` has."""
    return part.dealt or (part.partitions // len(part.devices),) * len(part.devices)


@dataclass(frozen=True)
class LearnerSite:
    """Where batches are consumed: the learner's ``mesh`` and data ``axis``, or a single ``device``."""

    device: Device
    mesh: Mesh | None = None
    axis: str | None = None

    @property
    def default_partitions(self) -> int:
        """The size of the data axis, 1 without one."""
        return self.mesh.shape[self.axis] if self.mesh is not None and self.axis is not None else 1

    def batch_sharding(self) -> NamedSharding:
        """Return the sharding of a batch as the learner takes it: split over the data axis."""
        if self.mesh is None:
            return NamedSharding(single_device_mesh(self.device), PartitionSpec())
        return NamedSharding(self.mesh, PartitionSpec(self.axis) if self.axis else PartitionSpec())


def learner_site(learner: object, mesh: Mesh | None, axis: str | None) -> LearnerSite:
    """Return the learner's site: ``mesh`` if given, else the mesh or the device its arrays are on, else this process' first device."""
    mesh = mesh if mesh is not None else learner_mesh(learner)
    if mesh is not None:
        return LearnerSite(mesh.devices.flat[0], mesh, data_axis(mesh, axis))
    devices = {device for leaf in jax.tree.leaves(learner) if isinstance(leaf, jax.Array) for device in leaf.devices()}
    return LearnerSite(min(devices, key=lambda device: device.id) if devices else jax.local_devices()[0])


StoredBytes = int | Mapping[str, int]  # all together, or by stored leaf


def resolve_placement(
    name: str | Placement | Disk, site: LearnerSite, partitions: int, storage_bytes: StoredBytes
) -> Placement:
    """Return the placement ``name`` stands for: device memory on the learner's mesh, one device, host memory, or the disk.

    ``"auto"`` takes device memory where ``storage_bytes`` fit, then pinned, then pageable host memory, then the disk.
    Raises ``PlacementError`` naming the shortfall where they do not fit.
    """
    if isinstance(name, Disk):
        placement = _on_disk(name, site, partitions)
        check_fits(placement, storage_bytes)
        return placement
    if isinstance(name, Placement):
        check_fits(name, storage_bytes)
        return name
    check_choice("placement", name, PLACEMENT_NAMES)
    if name != "auto":
        placement = _named(name, site, partitions)
        check_fits(placement, storage_bytes)
        return placement
    candidates = [
        _named(tier, site, partitions) for tier in (DEVICE, PINNED_HOST, PAGEABLE, DISK) if _offered(tier, site)
    ]
    return next(
        (candidate for candidate in candidates if not shortfall(candidate, storage_bytes)), None
    ) or _refuse_all(candidates, storage_bytes)


def _offered(tier: str, site: LearnerSite) -> bool:
    return tier != PINNED_HOST or PINNED_HOST in memory_kinds(site.device)


def _named(name: str, site: LearnerSite, partitions: int) -> Placement:
    if name == DISK:
        return _on_disk(Disk(), site, partitions)
    if name == PAGEABLE:
        device = site.device if site.device.platform == "cpu" else jax.devices("cpu")[0]
        return _on_device(name, device, DEVICE, partitions)
    kind = PINNED_HOST if name == PINNED_HOST else DEVICE
    if kind not in memory_kinds(site.device):
        refuse(
            PlacementError,
            f"{site.device} has no such memory.",
            got=kind,
            want=", ".join(memory_kinds(site.device)),
            fix="placement='pageable'",
        )
    if name == SINGLE_DEVICE or site.mesh is None or site.mesh.size == 1 or site.axis is None or partitions == 1:
        return _on_device(name, site.device, kind, partitions)
    shards = site.mesh.shape[site.axis]
    if partitions % shards:
        refuse(
            ConfigError,
            "Partitions do not divide evenly over the data axis.",
            got=f"partitions={partitions}, axis {site.axis!r} of size {shards}",
            want=f"partitions={nearest_multiples(partitions, shards)}",
        )
    return Placement(name, (Part(tuple(site.mesh.devices.flat), kind, partitions),), site.mesh, site.axis)


def _on_disk(disk: Disk, site: LearnerSite, partitions: int) -> Placement:
    """Return the placement in a file; what is small is on the learner's (first) device."""
    return replace(_on_device(DISK, site.device, DISK, partitions), disk=disk)


def _on_device(name: str, device: Device, kind: str, partitions: int) -> Placement:
    return Placement(name, (Part((device,), kind, partitions),), single_device_mesh(device), PARTITION_AXIS)


def total_bytes(storage_bytes: StoredBytes) -> int:
    """Return the bytes of all stored leaves together."""
    return storage_bytes if isinstance(storage_bytes, int) else sum(storage_bytes.values())


def shortfall(placement: Placement, storage_bytes: StoredBytes) -> int:
    """Return how many bytes are missing on the placement's memory, 0 where ``storage_bytes`` fit.

    Raises ``ConfigError`` where several parts do not name the stored leaves.
    """
    if placement.disk is not None:
        return max(0, total_bytes(storage_bytes) - placement.disk.available_bytes())
    held = part_bytes(placement, storage_bytes)
    devices = [device for part in placement.parts for device in part.devices]
    if all(device.platform == "cpu" for device in devices):  # there all memory is the host's
        return max(0, sum(held.values()) - available_bytes(devices[0], placement.parts[0].memory_kind))
    return max(max(0, size - available_bytes(*where)) for where, size in bytes_at(placement, storage_bytes).items())


def bytes_at(placement: Placement, storage_bytes: StoredBytes) -> Counter[tuple[Device, str]]:
    """Return the bytes held at each device and memory kind; pinned memory is one pool, under the first device's name."""
    held: Counter[tuple[Device, str]] = Counter()
    if placement.disk is not None:
        return held
    for part, size in part_bytes(placement, storage_bytes).items():
        for device, share in zip(part.devices, _shares(placement, part, size), strict=True):
            at = placement.parts[0].devices[0] if part.memory_kind == PINNED_HOST else device
            held[at, part.memory_kind] += share
    return held


def _shares(placement: Placement, part: Part, size: int) -> list[int]:
    """Return the bytes on each device of a part that holds ``size`` in all."""
    if placement.scattered:
        return [-(-size * count // part.partitions) for count in dealt_over(part)]
    if part.memory_kind == PINNED_HOST:
        return [-(-size // len(part.devices))] * len(part.devices)
    return [-(-size // placement.mesh.shape[placement.axis])] * len(part.devices)  # other axes hold copies


def part_bytes(placement: Placement, storage_bytes: StoredBytes) -> dict[Part, int]:
    """Return what each part is to hold; ``ConfigError`` where parts name leaves that are not stored, or leave some out."""
    if len(placement.parts) == 1 and placement.parts[0].leaves is None:
        return {placement.parts[0]: total_bytes(storage_bytes)}
    stored = {} if isinstance(storage_bytes, int) else storage_bytes
    held = dict.fromkeys(placement.parts, 0)
    for leaf, part in leaf_parts(placement, tuple(stored)).items():
        held[part] += stored[leaf]
    return held


def leaf_parts(placement: Placement, names: Sequence[str]) -> dict[str, Part]:
    """Return the part of each stored leaf; ``ConfigError`` where parts name leaves that are not stored, or leave some out."""
    named = {leaf: part for part in placement.parts for leaf in part.leaves or ()}
    if missing := sorted(set(named) - set(names)):
        fix = "leaves of at most 256 bytes are stored together, as '(small)'"
        got, want = ", ".join(missing), ", ".join(names)
        refuse(ConfigError, "The placement names a leaf that is not stored by itself.", got=got, want=want, fix=fix)
    rest = next((part for part in placement.parts if part.leaves is None), None)
    if rest is None and (left := sorted(set(names) - set(named))):
        want = "every stored leaf in a part, or one with leaves=None for the rest"
        refuse(ConfigError, "The placement leaves out what is stored.", got=", ".join(left), want=want)
    return {leaf: named.get(leaf) or rest or placement.parts[0] for leaf in names}


def check_fits(placement: Placement, storage_bytes: StoredBytes) -> None:
    """Raise ``PlacementError`` naming the shortfall unless the storage fits."""
    if shortfall(placement, storage_bytes):
        _refuse_all([placement], storage_bytes)


def _refuse_all(candidates: list[Placement], storage_bytes: StoredBytes) -> Placement:
    lines = [f"{candidate.name} lacks {shortfall(candidate, storage_bytes):,} bytes" for candidate in candidates]
    return refuse(
        PlacementError,
        "The buffer does not fit.",
        got=f"storage of {total_bytes(storage_bytes):,} bytes; " + "; ".join(lines),
        want="storage that fits the memory that is free now",
        fix="lower capacity, store smaller dtypes (uint8 images), or use a placement with more memory",
    )
