"""Memory kinds of this backend: which there are, how much they hold, and how to touch arrays that live in host memory."""

from __future__ import annotations

from pathlib import Path

import jax
from jax.experimental.compute_on import compute_on

from conduit_jax.replay.storage import Storage, in_device_memory
from conduit_jax.types import Device

Array = jax.Array

DEVICE, PINNED_HOST = "device", "pinned_host"
_PINNED_POOL_LIMIT = 64 << 30  # XLA's host pool on CUDA, unless XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says otherwise


def memory_kinds(device: Device) -> tuple[str, ...]:
    """Return the memory kinds ``device`` can address."""
    return tuple(memory.kind for memory in device.addressable_memories())


def available_bytes(device: Device, memory_kind: str) -> int:
    """Return the bytes that may still be allocated in ``memory_kind`` of ``device``, as far as the system tells."""
    if device.platform == "cpu":
        return _host_available()
    if memory_kind == PINNED_HOST:
        return min(_host_available(), _PINNED_POOL_LIMIT)
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)


def _host_available() -> int:
    """Return available host memory: what the kernel calls available, within the control group's limit."""
    fields = (
        dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
        if Path("/proc/meminfo").exists()
        else {}
    )
    available = int(fields.get("MemAvailable", f"{1 << 40} kB").split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (ceiling := limit.read_text().strip()) != "max":
        available = min(available, int(ceiling) - int(used.read_text()))
    return max(available, 0)


def storage_access(memory_kind: str) -> Storage:
    """Return how storage in ``memory_kind`` is written and gathered inside ``jit``."""
    return in_host_memory if memory_kind == PINNED_HOST else in_device_memory


def _to_host(value: Array) -> Array:
    return jax.device_put(value, jax.memory.Space.Host)


def _host_scatter(array: Array, slots: Array, values: Array) -> Array:
    with compute_on("device_host"):
        return jax.jit(in_device_memory.scatter)(array, _to_host(slots), _to_host(values))


def _host_gather(array: Array, slots: Array) -> Array:
    with compute_on("device_host"):
        rows = jax.jit(in_device_memory.gather)(array, _to_host(slots))
    return jax.device_put(rows, jax.memory.Space.Device)


# Operands of one operation must share a memory space (jax 0.10.2: "memory_space of all inputs passed to gather must be
# the same"), so indices and values go to the host first and the batch comes back.
in_host_memory = Storage(_host_scatter, _host_gather)
