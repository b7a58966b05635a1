"""Items grow from 128 to 20,000 numbers while the plane runs (paper, Fig. 13): adaptive placement beside two fixed ones.

python -m benchmarks.migration_trace --json benchmarks/results/migration_trace.json

* adaptive: one device while the buffer fits it, then as few as it takes: the planner decides when items grow;
* conservative: all eight devices from the beginning; greedy: one device for ever, which runs out of memory.

Programs, copies and moves are real, on eight virtual devices. They share one memory here, so what differs between local and
remote memory is waited for: every transfer takes the seconds that a shipped topology gives its link, its bandwidth divided by
``SLOWER``. What is scaled down is the number of items; a device's memory is scaled alike, so the buffer outgrows one device at
10,000 and two at 20,000, as on the paper's A100s. The paper's largest iteration (Conservative, 403 ms) and its replacement
(30 ms for up to half of a full buffer) fix how much an iteration moves of a buffer on links of one speed: about as many items as
the buffer holds. So many are inserted and sampled here, and ``SLOWER`` gives the largest iteration the paper's length.

Compilation is left out of an iteration, for all policies alike, and reported; programs compiled within one are counted. What is
stored moves along. The paper's replacement "reallocates the buffer under the new shard layout";
``trace_vs_conservative_reallocated`` is that, with items stored before dropped. The two policies take turns, and the ratio is the
median of the turns.

``migration_link_fraction`` is that of moves of a full buffer of ``MOVED`` items to eight devices and back, each against bare
transfers of a piece on the same edges right before it: the median of the moves in either direction, the lower of the two.
``migration_link_fraction_native`` is the same with nothing waited for: copies within one memory.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import argparse
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

import conduit_jax as conduit
from benchmarks.harness import arguments, report
from conduit_jax.errors import PlacementError
from conduit_jax.relocation import Move
from conduit_jax.sharding.topology import DEVICE, Topology, load_topology
from conduit_jax.testing import count_traces

DIMENSIONS = (128, 256, 512, 1_000, 2_000, 5_000, 10_000, 20_000)
CAPACITY, STEPS, LANES, BATCH = 192, 4, 24, 96
PARTITIONS = 24  # dealt evenly over two devices, three, or all eight
PAPER_CAPACITY = 1_000_000
SLOWER = 4_500  # an iteration of the largest items then takes about as long as the paper's (403 ms)
MOVED = 960


class Wires:
    """Transfers between virtual devices as ``topology`` has them, of ``slower`` times less bandwidth; one at a time leaves a device."""

    def __init__(self, topology: Topology, slower: float):
        self._topology, self._slower = topology, slower
        self._ports: dict[int, threading.Lock] = defaultdict(threading.Lock)

    def seconds(self, source: int, target: int, size: float) -> float:
        """Return the seconds ``size`` bytes take between two ranks, or within one."""
        link = self._topology.link(*(self._topology.endpoint(DEVICE, rank) for rank in (source, target)))
        return link.latency_s + self._slower * (link.transfer_s(size) - link.latency_s)

    def put(self, pieces: Any, sharding: Any) -> Any:
        """Transfer as ``jax.device_put``, for as long as the link takes."""
        source = next(iter(jax.tree.leaves(pieces)[0].devices())).id
        target = next(iter(sharding.device_set)).id
        arrived = jax.block_until_ready(jax.device_put(pieces, sharding))
        if source != target:
            with self._ports[source]:
                time.sleep(self.seconds(source, target, sum(leaf.nbytes for leaf in jax.tree.leaves(pieces))))
        return arrived

    def scattered(self, size: float, holders: int) -> float:
        """Return the seconds ``size`` bytes take between rank 0 and ``holders`` ranks that hold equal shares, 0 among them."""
        return sum(self.seconds(0, rank, size / holders) for rank in range(holders))


class Trace(NamedTuple):
    """Seconds of each iteration, those of compiling and preparing growth, the moves, and whether the policy came to the end.

    ``compiled`` counts programs that were compiled within iterations.
    """

    dimensions: list[int]
    iterations: list[float]
    prepare_s: float
    moves: tuple[Move, ...]
    completed: bool
    lost_items: int
    placements: list[str]
    compiled: int


def rollout(number: int, dimension: int) -> dict[str, jax.Array]:
    """Return the ``number``-th unit: items say their own number, and observations are as large as asked."""
    ids = number * STEPS * LANES + np.arange(STEPS * LANES, dtype=np.int32).reshape(STEPS, LANES)
    observation = np.broadcast_to(ids[..., None].astype(np.float32), (STEPS, LANES, dimension))
    unit = {"id": ids, "reward": ids.astype(np.float32), "observation": observation, "next_observation": observation}
    return jax.block_until_ready(jax.device_put(unit, jax.devices()[0]))


def policies(topology: Topology, limit: int) -> dict[str, conduit.AutoPlacement]:
    """Return what each policy may choose from, a device holding at most ``limit`` bytes of the buffer."""
    within = {"limits": {"device": limit}, "topology": topology}
    return {
        "adaptive": conduit.AutoPlacement(only=("single_device", "shared"), **within),
        "conservative": conduit.AutoPlacement(only=("shared:8",), **within),
        "greedy": conduit.AutoPlacement(only=("single_device",), **within),
    }


def run(
    placement: conduit.AutoPlacement, wires: Wires, dimensions: list[int], old_items: Literal["pad", "drop"] = "pad"
) -> Trace:
    """Drive one policy through the trace."""
    largest = max(dimensions)
    growth = conduit.Growth(axes={"observation": {0: largest}, "next_observation": {0: largest}}, old_items=old_items)
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=BATCH),
        replay=conduit.ReplayConfig(capacity=CAPACITY, partitions=PARTITIONS, growth=growth),
        placement=placement,
        schedule="sequential",
    )
    plane._put = wires.put
    seconds, prepare_s, placements, last, compiled, first = [], 0.0, [], dimensions[0], 0, 0
    plane.push(rollout(0, last))
    jax.block_until_ready(plane.pull().data)  # compiled; from here on time counts
    for number, dimension in enumerate(dimensions, start=1):
        unit, pause = rollout(number, dimension), 0.0
        if dimension != last:
            begun, moved = time.perf_counter(), len(stats_of(plane).moves)
            try:
                plane.grow(unit)
            except PlacementError:
                missing = lost(plane, number, first)
                return Trace(
                    dimensions, seconds, prepare_s, stats_of(plane).moves, False, missing, placements, compiled
                )
            pause = sum(move.pause_s for move in stats_of(plane).moves[moved:])  # two of them by way of the disk
            prepare_s += time.perf_counter() - begun - pause
            last, first = dimension, number if old_items == "drop" else 0
        with count_traces() as traces:
            seconds.append(pause + iteration(plane, unit, wires))
        compiled += traces.compiled
        placements.append(stats_of(plane).placement)
    missing = lost(plane, len(dimensions) + 1, first)
    return Trace(dimensions, seconds, prepare_s, stats_of(plane).moves, True, missing, placements, compiled)


def iteration(plane: conduit.ExperiencePlane, unit: dict[str, jax.Array], wires: Wires) -> float:
    """Return the seconds of one push and one pull, both legs over the wires."""
    holders = len(plane._tables["experience"].placement.part.devices)  # type: ignore[union-attr]
    begun = time.perf_counter()
    plane.push(unit)
    time.sleep(wires.scattered(sum(leaf.nbytes for leaf in unit.values()), holders))
    data = jax.block_until_ready(plane.pull().data)
    time.sleep(wires.scattered(sum(leaf.nbytes for leaf in jax.tree.leaves(data)), holders))
    return time.perf_counter() - begun


def stats_of(plane: conduit.ExperiencePlane) -> Any:
    """Return the statistics of the plane's only table."""
    return plane.stats().tables["experience"]


def lost(plane: conduit.ExperiencePlane, units: int, first: int = 0) -> int:
    """Return how many of the items pushed in ``units``, from the ``first`` on, are missing, or are not what was pushed."""
    stats, items = stats_of(plane), STEPS * LANES
    live = min(CAPACITY, (units - first) * items)
    missing = abs(units * items - stats.inserted_items) + abs(live - stats.live_items)
    for _ in range(8):
        data = jax.tree.map(np.asarray, plane.pull().data)
        known = (data["id"] >= units * items - live) & (data["id"] < units * items)
        intact = (data["observation"][:, :128] == data["id"][:, None]).all(axis=1)
        missing += int((~(known & intact & (data["reward"] == data["id"]))).sum())
    return missing


def migrations(topology: Topology, put: Any, dimension: int, trips: int) -> tuple[Move, ...]:
    """Return the moves of a full buffer from one device to eight and back, ``trips`` times after one to warm up, by ``put``."""
    replay = conduit.ReplayConfig(capacity=MOVED, partitions=PARTITIONS)
    algorithm = conduit.OffPolicy(batch_size=BATCH)
    plane, wide = (
        conduit.ExperiencePlane(algorithm=algorithm, replay=replay, placement=placement, schedule="sequential")
        for placement in ("single_device", conduit.AutoPlacement(only=("shared:8",), topology=topology))
    )
    plane._put = put
    plane.push(rollout(0, dimension))
    wide.push(rollout(0, 1))
    there = wide._tables["experience"].placement  # type: ignore[union-attr]
    wide.close()
    for _ in range(trips + 1):
        plane.migrate(there)
        plane.migrate("single_device")
    return stats_of(plane).moves[2:]


def link_fraction(moves: Sequence[Move]) -> float:
    """Return the lower of the medians of the two directions."""
    return min(median(move.link_fraction for move in moves[way::2]) for way in (0, 1))


def main() -> None:
    """Run every policy, several turns of those that are compared, and report."""
    options = arguments(__doc__ or "").parse_args()
    with tempfile.TemporaryDirectory() as folder:  # the turns compile the same programs
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Run the trace and the moves, and report."""
    dimensions = (128, 5_000, 10_000) if options.quick else DIMENSIONS
    trace = [dimension for dimension in dimensions for _ in range(2 if options.quick else 5)]
    topology = load_topology("a100_80gb_x8")
    wires = Wires(topology, SLOWER)
    limit = topology.device_memory_bytes[0] * CAPACITY // PAPER_CAPACITY
    chosen = policies(topology, limit)
    turns = [
        {name: run(chosen[name], wires, trace) for name in ("adaptive", "conservative")}
        for _ in range(1 if options.quick else 3)
    ]
    found = turns[0] | {"greedy": run(chosen["greedy"], wires, trace)}
    found |= {f"{name}, reallocated": run(chosen[name], wires, trace, "drop") for name in turns[0]}
    moved = migrations(topology, wires.put, 5_000, 2 if options.quick else 5)
    native = migrations(topology, jax.device_put, 5_000, 2 if options.quick else 5)
    results = [*((name, result) for turn in turns[1:] for name, result in turn.items()), *found.items()]
    rows = [{"policy": name} | result._asdict() for name, result in results]
    rows += [{"policy": "migration", "moves": moved}, {"policy": "migration, native", "moves": native}]
    rows = [
        row | {"moves": [vars(move) | {"link_fraction": move.link_fraction} for move in row["moves"]]} for row in rows
    ]
    report(options.json, rows, summarised(turns, found, moved, native))


def summarised(
    turns: list[dict[str, Trace]], found: dict[str, Trace], moved: Sequence[Move], native: Sequence[Move]
) -> dict[str, Any]:
    """Return the figures asked for."""
    adaptive = found["adaptive"]
    ratios = sorted(sum(turn["conservative"].iterations) / sum(turn["adaptive"].iterations) for turn in turns)
    anew = [sum(found[f"{name}, reallocated"].iterations) for name in ("conservative", "adaptive")]
    everything = [*found.values(), *(result for turn in turns[1:] for result in turn.values())]
    moves = [move for turn in turns for move in turn["adaptive"].moves]
    return {
        "trace_vs_conservative": median(ratios),
        "trace_vs_conservative_turns": ratios,
        "trace_vs_conservative_reallocated": anew[0] / anew[1],
        "compiled_in_iterations": sum(result.compiled for result in everything),
        "greedy_completed": found["greedy"].completed,
        "migration_link_fraction": link_fraction(moved),
        "migration_link_fraction_native": link_fraction(native),
        "migration_link_fraction_lowest": min(move.link_fraction for move in moved),
        "pause_ms_max": 1e3 * max(move.pause_s for move in moves),
        "pause_ms_max_full_buffer": 1e3 * max(move.pause_s for move in moved),
        "lost_items": sum(result.lost_items for result in everything),
        "prepare_s": adaptive.prepare_s,
        "placements": " -> ".join(dict.fromkeys(adaptive.placements)),
        "iteration_ms": {
            name: {size: 1e3 * median(times(found[name], size)) for size in dict.fromkeys(adaptive.dimensions)}
            for name in ("adaptive", "conservative")
        },
    }


def times(trace: Trace, dimension: int) -> list[float]:
    """Return the seconds of the iterations with items of ``dimension``."""
    return [seconds for seconds, own in zip(trace.iterations, trace.dimensions, strict=False) if own == dimension]


if __name__ == "__main__":
    main()
