"""Profiles kept on disk by a fingerprint of the machine: links are measured once, memory is read every time."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np

from conduit_jax.errors import ConfigError
from conduit_jax.sharding.disk import disk_memory
from conduit_jax.sharding.memory import tier_memory
from conduit_jax.sharding.network import agreed, everyones
from conduit_jax.sharding.probe import probe
from conduit_jax.sharding.profile import profile
from conduit_jax.sharding.topology import Topology
from conduit_jax.types import Device

_FORM = 4  # of what is kept: raise it when a profile measures something else


def cache_folder() -> Path:
    """Return where profiles are kept: ``CONDUIT_JAX_CACHE_DIR``, or ``conduit_jax`` in the user's cache folder."""
    if chosen := os.environ.get("CONDUIT_JAX_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "conduit_jax"


def fingerprint(devices: Sequence[Device], processes: int = 1) -> str:
    """Return a name for this machine, one of ``processes``, as far as links depend on it: processor, devices, jax."""
    cpu = Path("/proc/cpuinfo")
    models = (
        [line for line in cpu.read_text().splitlines() if line.startswith("model name")][:1] if cpu.exists() else []
    )
    facts = [_FORM, jax.__version__, platform.machine(), platform.system(), os.cpu_count(), models]
    facts += [[device.platform, device.device_kind] for device in devices]
    facts += [processes] if processes > 1 else []
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:20]


def cached_profile(
    devices: Sequence[Device] | None = None,
    *,
    refresh: bool = False,
    alone: bool = False,
    measure: Callable[..., Topology] = profile,
    try_tiers: Callable[[], dict[str, str]] = probe,
) -> Topology:
    """Return the topology of ``devices``: links from the cache where they were measured before, memory as it is now.

    ``refresh`` measures again. A file that cannot be read is measured anew and replaced; a folder that cannot be written is
    done without. Where ``jax.distributed`` is up all processes call it together, unless it is this one ``alone`` that wants
    to know. ``measure`` and ``try_tiers`` are values, so that a test may count.
    """
    chosen = tuple(devices or jax.local_devices())
    alone = alone or jax.process_count() == 1
    path = cache_folder() / f"topology-{fingerprint(chosen, 1 if alone else jax.process_count())}.json"
    kept = None if refresh else _read(path)
    missing = kept is None if alone else everyones(np.array([float(kept is None)])).any()  # all measure, or none does
    if kept is None or missing:
        kept = (partial(measure, alone=True) if alone else measure)(chosen, unavailable=try_tiers())
        _write(path, kept)
    device_bytes, host_bytes, node_bytes = tier_memory(chosen)
    host = {tier: size for tier, size in (host_bytes | disk_memory()).items() if tier in kept.host_memory_bytes}
    now = replace(kept, device_memory_bytes=device_bytes, host_memory_bytes=host, node_memory_bytes=node_bytes)
    return now if alone else agreed(now)


def _read(path: Path) -> Topology | None:
    try:
        return Topology.from_dict(json.loads(path.read_text()))
    except (OSError, ValueError, ConfigError):
        return None


def _write(path: Path, topology: Topology) -> None:
    """Write whole or not at all: others may read at the same time."""
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        topology.save(part)
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
