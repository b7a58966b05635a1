"""Links to other processes: round trips between two of them, and what all of them have to agree on.

Everything here is called by all processes alike, in the same order: a transfer between processes is a collective, and a
number that decides a placement must be the same in all of them.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from conduit_jax.errors import ConfigError, refuse
from conduit_jax.sharding.topology import Topology

ALONE = "this is the only process: links to others are measured where jax.distributed is up"
_ALL_PAIRS_UP_TO = 8  # processes; of more, each with the next one


def process_pairs(processes: int) -> list[tuple[int, int]]:
    """Return the pairs of processes to measure between."""
    if processes <= _ALL_PAIRS_UP_TO:
        return list(combinations(range(processes), 2))
    return [(process, (process + 1) % processes) for process in range(processes)]


def round_trip(pair: tuple[int, int], size_bytes: int) -> Callable[[], Any] | None:
    """Return what sends ``size_bytes`` from the first device of one process to that of the other and back.

    ``None`` in a process that is neither. Both ends wait for the same message, so their clocks need not agree.
    """
    if jax.process_index() not in pair:
        return None
    ends = [next(device for device in jax.devices() if device.process_index == process) for process in pair]
    mesh = Mesh(np.array(ends), ("end",))
    words = max(1, size_bytes // 4)

    def there_and_back(block: jax.Array) -> jax.Array:
        return jax.lax.ppermute(jax.lax.ppermute(block, "end", [(0, 1)]), "end", [(1, 0)])

    spec = PartitionSpec("end")
    program = jax.jit(jax.shard_map(there_and_back, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    block = np.arange(words, dtype=np.uint32)
    start = jax.make_array_from_process_local_data(NamedSharding(mesh, spec), block, (2 * words,))
    return lambda: program(start)


def everyones(values: np.ndarray) -> np.ndarray:
    """Return the float ``values`` of all processes, ``(processes, *values.shape)``; with one process its own."""
    if jax.process_count() == 1:
        return values[None]
    words = np.asarray(values, np.float64).view(np.uint32)  # as they are, whatever the default precision
    gathered = np.asarray(multihost_utils.process_allgather(words))
    return np.ascontiguousarray(gathered.reshape(jax.process_count(), *words.shape)).view(np.float64)


def agreed(topology: Topology) -> Topology:
    """Return the first process' ``topology`` with the least memory any of them has: the same in all of them.

    Host memory is divided among processes of one host. ``ConfigError`` where they have different numbers of devices.
    """
    if jax.process_count() == 1:
        return topology
    hosts = everyones(np.frombuffer(platform.node().encode()[:64].ljust(64), np.uint8).astype(np.float64))
    sharing = max(int((hosts == host).all(axis=1).sum()) for host in hosts)
    counts = everyones(np.array([float(topology.devices)])).ravel()
    if len(set(counts)) > 1:
        got = ", ".join(f"{int(count)}" for count in counts)
        refuse(ConfigError, "Processes have different numbers of devices.", got=got, want="as many in each")
    first = Topology.from_dict(json.loads(_of_the_first(json.dumps(topology.as_dict()))))
    device = everyones(np.array(topology.device_memory_bytes, np.float64)).min(axis=0).astype(np.int64)
    device = device if first.node_memory_bytes is None else device // sharing  # there it is the host's
    host = {tier: _least(topology.host_memory_bytes.get(tier, 0)) // sharing for tier in first.host_memory_bytes}
    together = None if first.node_memory_bytes is None else _least(topology.node_memory_bytes or 0) // sharing
    return replace(
        first,
        device_memory_bytes=tuple(device.tolist()),
        host_memory_bytes=host,
        node_memory_bytes=together,
        nodes=len(counts),
    )


def _least(value: int) -> int:
    return int(everyones(np.array([float(value)])).min())


def _of_the_first(text: str) -> str:
    """Return the ``text`` of process 0."""
    data = np.frombuffer(text.encode(), np.uint8)
    size = int(everyones(np.array([float(data.size)]))[0, 0])
    padded = np.resize(data, size) if data.size else np.zeros(size, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes().decode()


def joined(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Bring up ``jax.distributed``: as told, or as the cluster's environment says where nothing is.

    ``ConfigError`` for some of the three without the others, or where it cannot be brought up.
    """
    told: Sequence[Any] = (coordinator, processes, process)
    if any(one is None for one in told) and any(one is not None for one in told):
        want = "--coordinator HOST:PORT, --processes N and --process I, or none of them in a cluster JAX knows"
        refuse(ConfigError, "Where the other processes are is told in part.", got=str(tuple(told)), want=want)
    try:
        jax.distributed.initialize(coordinator, processes, process)
    except (ValueError, RuntimeError) as error:
        fix = "--coordinator HOST:PORT --processes N --process I, in every process"
        refuse(ConfigError, "The processes did not find each other.", got=str(error).splitlines()[0], fix=fix)
