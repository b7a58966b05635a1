"""Laws of links between processes: two real ones measure each other and come to the same topology."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from conduit_jax.errors import ConfigError
from conduit_jax.sharding.network import agreed, everyones, joined, process_pairs
from conduit_jax.sharding.profile import profile
from conduit_jax.sharding.topology import Topology

PROGRAM = """
import json, sys
import jax
from conduit_jax.sharding.network import joined
from conduit_jax.sharding.profile import profile
joined(sys.argv[1], 2, int(sys.argv[2]))
print(json.dumps(profile(sizes=(1 << 12, 1 << 18), rows=8, repeats=2).as_dict()))
"""


PLANES = """
import sys
import jax, numpy as np
import conduit_jax as conduit
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
rollout = {"x": np.zeros((2, 8, 4), np.float32)}

def plane_on(devices):
    mesh = None if devices is None else jax.make_mesh((len(devices),), ("data",), devices=devices)
    config = conduit.ReplayConfig(capacity=64)
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=8), replay=config, mesh=mesh, schedule="sequential"
    )
    plane.push(rollout)
    return plane

alone = plane_on(None)
print("alone", alone.pull().data["x"].devices() <= set(jax.local_devices()))
over_all = plane_on(jax.devices())
for placement in ("single_device", "pageable", "disk"):
    try:
        over_all.migrate(placement)
    except conduit.PlacementError as error:
        print(placement, str(error).splitlines()[0])
try:
    over_all.grow(capacity=128)
except conduit.ConfigError as error:
    print("grow", str(error).splitlines()[0])
try:
    over_all.migrate(conduit.AutoPlacement(only=("shared", "pinned_host")))
except conduit.ConfigError as error:
    print("auto", str(error).splitlines()[0])
over_all.migrate("pinned_host")
print("all", over_all.pull().data["x"].shape)
table = over_all.stats().tables["experience"]
print("stats", table.live_items, table.inserted_items)
over_all.reset()
over_all.flush()
over_all.check()
over_all.close()
mesh = jax.make_mesh((len(jax.devices()),), ("data",), devices=jax.devices())
growth = conduit.Growth(axes={"x": {0: 8}}, old_items="drop")
config = conduit.ReplayConfig(capacity=64, growth=growth, sampler=conduit.Prioritized())
with conduit.ExperiencePlane(
    algorithm=conduit.OffPolicy(batch_size=8), replay=config, mesh=mesh, placement="device", schedule="sequential"
) as plane:
    plane.push(rollout)
    plane.push({"x": np.zeros((2, 8, 6), np.float32)})
    sample = plane.pull()
    plane.update_priorities(sample.info, -sample.weights)
    print("grown", sample.data["x"].shape, plane.stats().tables["experience"].live_items)
    try:
        plane.check()
    except conduit.ValueRefusedError as error:
        print("check", str(error).splitlines()[0])
"""


def two_processes(*words: str) -> list[str]:
    """Run two processes that find each other over loopback; return what they printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen(
            [sys.executable, *words, address, str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **flags},
        )
        for number in range(2)
    ]
    try:
        ended = [one.communicate(timeout=120) for one in running]
    finally:
        for one in running:
            one.kill()
    for one, (_, errors) in zip(running, ended, strict=True):
        assert one.returncode == 0, errors[-2000:]
    return [output for output, _ in ended]


def test_two_processes_measure_the_network_and_agree() -> None:
    first, second = (output.splitlines()[-1] for output in two_processes("-c", PROGRAM))
    assert first == second
    topology = Topology.from_dict(json.loads(first))
    assert (topology.nodes, topology.devices) == (2, 2)
    assert topology.network is not None
    assert topology.network.bytes == (1 << 12, 1 << 18)
    assert all(0 < seconds < 10 for seconds in topology.network.seconds)
    assert topology.node_memory_bytes is not None
    one = topology.endpoint("device", 0)
    assert topology.link(one, topology.endpoint("device", 2)) == topology.network


@pytest.mark.slow
def test_a_plane_over_two_processes_stays_on_the_devices_of_both() -> None:
    """Each process may have a plane of its own; one that both have says what it cannot do, in both, and works on."""
    stays = "A buffer that several processes have is on the devices of all of them."
    for output in two_processes("-c", PLANES):
        lines = [line for line in output.splitlines() if not line.startswith("[Gloo]")]
        assert lines == [
            "alone True",
            *(f"{placement} {stays}" for placement in ("single_device", "pageable", "disk")),
            "grow A plane over several processes keeps its capacity.",
            "auto Links are weighed by each process alone.",
            "all (8, 4)",
            "stats 16 16",
            "grown (8, 6) 16",
            "check Table 'experience' was given priorities that are NaN, infinite or negative.",
        ]


def test_a_process_alone_has_no_network() -> None:
    alone = profile(jax.devices()[:1], sizes=(1 << 12,), rows=8, repeats=1)
    assert (alone.network, alone.nodes) == (None, 1)
    assert agreed(alone) == alone
    np.testing.assert_array_equal(everyones(np.array([1.5, 2.0])), [[1.5, 2.0]])


def test_every_pair_of_a_few_processes_is_measured_and_neighbours_of_many() -> None:
    assert process_pairs(1) == []
    assert process_pairs(3) == [(0, 1), (0, 2), (1, 2)]
    many = process_pairs(12)
    assert len(many) == 12
    assert {end for pair in many for end in pair} == set(range(12))


@pytest.mark.parametrize("told", [("127.0.0.1:1", None, 0), (None, 2, None)])
def test_half_an_address_is_refused(told: tuple) -> None:
    with pytest.raises(ConfigError, match="told in part"):
        joined(*told)
