"""The two systems placements are measured on, as topologies: this machine, and an A100 node's links slowed down."""

from __future__ import annotations

import time
from dataclasses import replace

import jax

from benchmarks.placement.workload import BATCH, DEVICES
from conduit_jax.sharding.links import Link
from conduit_jax.sharding.profile import profile
from conduit_jax.sharding.topology import Topology, load_topology

SLOWER = 2000  # an emulated transfer takes so many times what it takes on the A100's links
_LATENCY_S = 2e-4
_SIZES = (1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 23)
_SPIN_S = 3e-4


def native_topology(launch_s: tuple[float, ...], repeats: int) -> Topology:
    """Return what a profile finds on the first eight devices; ``launch_s`` comes from running planes without data."""
    measured = profile(jax.devices()[:DEVICES], sizes=_SIZES, rows=BATCH, repeats=repeats)
    return replace(measured, launch_s=launch_s)


def emulated_topology(native: Topology) -> Topology:
    """Return the A100 node with every link ``SLOWER`` times as slow, and this machine's own times within memory."""
    node = load_topology("a100_80gb_x8")
    slowed = {
        name: Link.of_bandwidth(link.bytes_per_s(1 << 30) / SLOWER, _LATENCY_S if name != "device->self" else 0.0)
        for name, link in node.links.items()
        if "disk" not in name
    }
    own = {name: link for name, link in native.links.items() if ":" in name and "->" not in name}
    own |= {f"pageable:{what}": own[f"device:{what}"] for what in ("gather", "write")}  # the ninth device's own memory
    host = {tier: size for tier, size in node.host_memory_bytes.items() if tier != "disk"}
    return replace(
        node,
        name="a100_80gb_x8 emulated",
        source=f"{node.name} with links {SLOWER} times as slow; memory access and launches of this machine",
        links={**slowed, **own},
        host_memory_bytes=host,
        launch_s=native.launch_s,
    )


def wait(seconds: float) -> None:
    """Sleep most of ``seconds`` and spin the rest: ``time.sleep`` alone is late by up to a tenth of a millisecond."""
    end = time.perf_counter() + seconds
    if seconds > _SPIN_S:
        time.sleep(seconds - _SPIN_S)
    while time.perf_counter() < end:
        pass
