"""Memory kinds of this backend: which there are, how much they hold, and how to touch arrays that live in host memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.compute_on import compute_on

from conduit_jax.replay import ring
from conduit_jax.replay.reads import gather_rows
from conduit_jax.replay.storage import Storage, in_device_memory
from conduit_jax.replay.window_writes import Arrays, Window, window_slots, write_steps
from conduit_jax.types import Device

Array = jax.Array

DEVICE, PINNED_HOST, DISK = "device", "pinned_host", "disk"
_PINNED_POOL_LIMIT = 64 << 30  # XLA's host pool on CUDA, by default


def memory_kinds(device: Device) -> tuple[str, ...]:
    """Return the memory kinds ``device`` can address."""
    return tuple(memory.kind for memory in device.addressable_memories())


def available_bytes(device: Device, memory_kind: str) -> int:
    """Return the bytes that may still be allocated in ``memory_kind`` of ``device``, as far as the system tells."""
    if device.platform == "cpu":
        return host_available()
    if memory_kind == PINNED_HOST:
        return min(host_available(), pinned_pool_bytes())
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)


def tier_memory(devices: Sequence[Device]) -> tuple[tuple[int, ...], dict[str, int], int | None]:
    """Return the bytes still free on each device, in each host tier, and, where they are one memory, in all together.

    What learner and actors hold already is not free. On the CPU backend all tiers are one memory.
    """
    each = tuple(available_bytes(device, DEVICE) for device in devices)
    host = {PINNED_HOST: available_bytes(devices[0], PINNED_HOST)} if PINNED_HOST in memory_kinds(devices[0]) else {}
    if devices[0].platform == "cpu":
        return each, host, host_available()
    return each, host | {"pageable": host_available()}, None


def pinned_pool_bytes() -> int:
    """Return the cap of XLA's pool of pinned host memory on CUDA, which the process may set in GB."""
    chosen = os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "")
    return int(chosen) << 30 if chosen.isdigit() else _PINNED_POOL_LIMIT


def host_available(root: Path = Path("/")) -> int:
    """Return available host memory: what the kernel calls available, within the control group's limit (version 1 or 2).

    The group's use has the kernel's cache of files in it; what of that is inactive is given up as soon as memory is asked for.
    """
    info, group = root / "proc/meminfo", root / "sys/fs/cgroup"
    lines = info.read_text().splitlines() if info.exists() else []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    available = int(fields.get("MemAvailable", f"{1 << 40} kB").split()[0]) * 1024
    for own, limit, use, cached in (
        (group, "memory.max", "memory.current", "inactive_file"),
        (group / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        if not ((own / limit).exists() and (own / use).exists()):
            continue
        if (ceiling := (own / limit).read_text().strip()).isdigit():
            available = min(
                available, int(ceiling) - int((own / use).read_text()) + _counted(own / "memory.stat", cached)
            )
    return max(available, 0)


def _counted(stat: Path, name: str) -> int:
    """Return the bytes a control group counts under ``name``; 0 where it does not tell."""
    fields = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
    return int(fields.get(name, 0))


def storage_access(*memory_kinds: str) -> Storage:
    """Return how storage whose arrays are in one of ``memory_kinds`` each is written and gathered inside ``jit``."""
    if PINNED_HOST not in memory_kinds:
        return in_device_memory
    return in_host_memory if set(memory_kinds) == {PINNED_HOST} else in_either_memory


def _to_host(value: Array) -> Array:
    return jax.device_put(value, jax.memory.Space.Host)


def _host_gather(array: Array, slots: Array) -> Array:
    """Gather on the host's processor, started asynchronously; only the rows cross to the device.

    Without ``compute_on`` XLA (jax 0.10.2, CUDA) lets a kernel gather into host memory and copies the rows from there.
    """
    with compute_on("device_host"):
        rows = jax.jit(gather_rows)(array, _to_host(slots))
    return jax.device_put(rows, jax.memory.Space.Device)


def _host_scatter(array: Array, slots: Array, values: Array) -> Array:
    """Scatter in place: on CUDA a kernel that writes through to host memory, values read where they are.

    Not under ``compute_on``: XLA's host computations have results of their own, so the whole storage would be written to
    one and copied back (jax 0.10.2, CUDA: ``host_temp_size_in_bytes`` is the size of the storage).
    """
    return in_device_memory.scatter(array, _to_host(slots), _to_host(values))


def _host_write(array: Array, values: Array, window: Window) -> Array:
    """Write a whole window by slices, which XLA moves to host memory asynchronously and in place.

    It scatters on the CPU backend, where XLA fuses slices with the reshapes around them and then copies the array, and
    under ``vmap``, where slices become a scatter with indices in device memory, which its types refuse (jax 0.10.2).
    """

    def scatter(array: Array, head: Array, values: Array) -> Array:
        slots = window_slots(window._replace(head=head), values.shape[0] // window.lanes)
        return _host_scatter(array, slots, values)

    def slices(array: Array, head: Array, values: Array) -> Array:
        steps = values.reshape(-1, window.lanes, *values.shape[1:])
        return write_slices(array, window._replace(head=head), jnp.swapaxes(steps, 0, 1).reshape(values.shape))

    @custom_vmap
    def write(array: Array, head: Array, values: Array) -> Array:
        return jax.lax.platform_dependent(array, head, values, cpu=scatter, default=slices)

    @write.def_vmap
    def _(size: int, batched: list[bool], *operands: Array) -> tuple[Array, bool]:
        return jax.vmap(scatter, [0 if one else None for one in batched], axis_size=size)(*operands), True

    return write(array, window.head, values)


def write_slices(array: Array, window: Window, values: Array) -> Array:
    """Write the window in ``pieces``, each of them whole before or whole behind the end of the ring.

    A ``cond`` on whether the window wraps would need fewer slices, but copies the array (jax 0.10.2, CUDA).
    """
    lanes, length, head = window
    rest = array.shape[1:]
    kept, steps = array.reshape(lanes, length, *rest), values.reshape(lanes, -1, *rest)
    zero, zeros = np.int32(0), (np.int32(0),) * len(rest)  # indices of one dtype, with 64 bits enabled too
    before, behind = jnp.int32(0), jnp.minimum(length - head, steps.shape[1])  # the next step of either side
    room = behind
    for size in pieces(steps.shape[1]):
        fits = before + size <= room
        source = jnp.where(fits, before, behind)
        piece = jax.lax.dynamic_slice(steps, (zero, source, *zeros), (lanes, size, *rest))
        time = ring.wrap(head, length, source)
        kept = jax.lax.dynamic_update_slice(kept, _to_host(piece), (zero, time, *zeros))
        before, behind = jnp.where(fits, before + size, before), jnp.where(fits, behind, behind + size)
    return kept.reshape(array.shape)


def pieces(steps: int) -> list[int]:
    """Cut ``steps`` into about log2(steps) sizes, largest first, that fill any number of steps from 0 to all of them.

    Taking each that still fits fills exactly that number: 32 is 16 + 8 + 4 + 2 + 1 + 1, 7 is 4 + 2 + 1.
    """
    sizes = []
    while steps:
        sizes.append(-(-steps // 2))
        steps -= sizes[-1]
    return sizes


# Operands of one operation must share a memory space (jax 0.10.2: "memory_space of all inputs passed to gather must be
# the same"), so indices and values go to the host first and the batch comes back.
in_host_memory = Storage(
    _host_scatter,
    _host_gather,
    lambda arrays, window, values: tuple(_host_write(*pair, window) for pair in zip(arrays, values, strict=True)),
)


def _own(array: Array) -> Storage:
    """Return the access of the memory that ``array`` is in: its type says which, inside ``jit`` too."""
    return in_host_memory if jax.typeof(array).memory_space == jax.memory.Space.Host else in_device_memory


def _write_window(arrays: Arrays, window: Window, values: Arrays) -> Arrays:
    """Write the arrays in host memory one by one, and those in device memory together."""
    pairs = list(zip(arrays, values, strict=True))
    near = [(array, new) for array, new in pairs if _own(array) is in_device_memory]
    together = iter(
        write_steps(tuple(array for array, _ in near), window, tuple(new for _, new in near)) if near else ()
    )
    return tuple(
        next(together) if _own(array) is in_device_memory else _host_write(array, new, window) for array, new in pairs
    )


# Leaves in different memories (a placement of several parts): each array is touched as its own memory wants it.
in_either_memory = Storage(
    lambda array, slots, values: _own(array).scatter(array, slots, values),
    lambda array, slots: _own(array).gather(array, slots),
    _write_window,
)
