"""Laws of emulated links: bytes are untouched, and the time that passes is the table's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import conduit_jax as conduit
from conduit_jax.errors import ConfigError
from conduit_jax.sharding.links import Link
from conduit_jax.sharding.mesh import single_device_mesh
from conduit_jax.sharding.surroundings import memory_only
from conduit_jax.testing import ShapedLinks, shaped_links
from tests.reference_plane import BATCH, CAPACITY, ReferencePlane, assert_same_batch, run_program, unit
from tests.sharding.places import CONFIG, apart, both, plane_on, split

SPEEDS = {"pageable->device": 1e6, "device->device": 4e6, "device->self": 1e9, "pinned_host->device": 2e6}
SPEEDS |= {"pageable->pinned_host": 5e5, "pageable->self": 8e6, "device->pinned_host": 5e5}
SPEEDS |= {"disk->device": 2e5, "device->disk": 2e5}


class Recorder:
    """A clock that only the links' own waiting moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def pause(self, seconds: float) -> None:
        self.now += seconds


def links_between(recorder: Recorder, count: int = 4, **chosen) -> ShapedLinks:
    links = {name: Link.of_bandwidth(speed) for name, speed in SPEEDS.items()}
    topology = replace(memory_only(jax.devices()[:count]), name="slow", links=links, **chosen)
    host = jax.devices()[7]
    devices = jax.devices()[:count]
    return shaped_links(topology, pause=recorder.pause, clock=lambda: recorder.now, devices=devices, host=host)


@pytest.mark.parametrize(
    ("start", "end", "seconds"),
    [
        ("numpy", "0", 4e-3),
        ("0", "1", 1e-3),
        ("1", "1", 4e-6),
        ("7", "0", 4e-3),
        ("numpy", "7", 5e-4),
        ("pinned", "2", 2e-3),
        ("spread", "0", 3 * 2.5e-4 + 1e-6),
    ],
)
def test_a_transfer_takes_the_tables_time_and_brings_the_bytes(start: str, end: str, seconds: float) -> None:
    recorder, data = Recorder(), np.arange(1000, dtype=np.float32)
    links, tree = links_between(recorder), data
    if start == "pinned":
        tree = jax.device_put(
            data, NamedSharding(single_device_mesh(jax.devices()[2]), PartitionSpec(), memory_kind="pinned_host")
        )
    elif start == "spread":
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
        tree = jax.device_put(data, NamedSharding(mesh, PartitionSpec("data")))
    elif start != "numpy":
        tree = jax.device_put(data, jax.devices()[int(start)])
    arrived = links.put(tree, SingleDeviceSharding(jax.devices()[int(end)]))
    assert np.array_equal(np.asarray(arrived), data)
    assert arrived.devices() == {jax.devices()[int(end)]}
    assert recorder.now == pytest.approx(seconds, rel=1e-6)


def test_what_was_spent_already_is_not_waited_for_again() -> None:
    recorder = Recorder()
    links = links_between(recorder)
    ticks = iter([0.0, 0.003])
    links._clock = lambda: next(ticks)
    links.put(np.zeros(1000, np.float32), SingleDeviceSharding(jax.devices()[0]))
    assert recorder.now == pytest.approx(1e-3)


def test_transfers_that_move_at_once_are_slower() -> None:
    recorder = Recorder()
    links = links_between(recorder, contention={"device->device": 12.0})
    moved = jax.device_put(np.zeros(1000, np.float32), jax.devices()[0])
    links._moving |= {("device->device", other) for other in range(11)}  # all other links between four devices
    links.put(moved, SingleDeviceSharding(jax.devices()[1]))
    assert recorder.now == pytest.approx(12e-3)


@pytest.mark.parametrize(
    ("where", "into", "out"),
    [
        ("single_device", "pageable->device", "device->self"),
        ("pinned_host", "pageable->pinned_host", "pinned_host->device"),
    ],
)
def test_a_planes_transfers_are_shaped_and_its_batches_are_not(where: str, into: str, out: str) -> None:
    recorder, config = Recorder(), conduit.ReplayConfig(capacity=CAPACITY)
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=BATCH), replay=config, placement=where, schedule="sequential", seed=3
    )
    plane.build(unit(0))
    links = links_between(recorder)
    pushed = sum(leaf.nbytes for leaf in jax.tree.leaves(unit(0)))
    with links.on(plane):
        got = run_program(plane, updates=False)
    reference = run_program(ReferencePlane(config, 1, seed=3), updates=False)
    for batch, want in zip(got, reference, strict=True):
        assert_same_batch(batch, want)
    delivered = sum(leaf.nbytes for leaf in jax.tree.leaves(got[0]))
    pushes = plane.stats().tables["experience"].pushed_units
    expected = pushes * pushed / SPEEDS[into] + len(got) * delivered / SPEEDS[out]
    assert recorder.now == pytest.approx(expected, rel=1e-6)
    before = recorder.now
    plane.pull()
    assert recorder.now == before, "outside the block nothing is shaped"


LARGE = 1040 / 1064  # the share of an item's stored bytes that its large leaf has


def part_links(into: float, out: float, name: str) -> tuple[float, float]:
    """Seconds that pushing ``into`` and delivering ``out`` bytes take on a placement of several parts."""
    rate = {key: 1 / speed for key, speed in SPEEDS.items()}
    if name == "split":
        ways = (LARGE * rate["pageable->pinned_host"], LARGE * rate["pinned_host->device"])
        return into * (ways[0] + (1 - LARGE) * rate["pageable->device"]), out * (ways[1] + rate["device->self"])
    return into * rate["pageable->device"], out * rate["device->self"]


@pytest.mark.parametrize(
    ("name", "where", "rows"),
    [
        ("split", split(), {}),
        ("apart", apart(), {"large": "device->device", "(small)": "device->self"}),
        pytest.param("both", both(), {"large": "device->device", "(small)": "device->device"}, marks=pytest.mark.slow),
        pytest.param("disk", "disk", {"large": "disk", "(small)": "disk"}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_several_parts_and_the_disk_are_shaped_too(name: str, where: Any, rows: dict[str, str]) -> None:
    partitions = 8 if name == "both" else 1
    recorder, plane = Recorder(), plane_on(where, partitions)
    plane.build(unit(0))
    links = links_between(recorder)
    with links.on(plane):
        got = run_program(plane, updates=False)
    for batch, want in zip(got, run_program(ReferencePlane(CONFIG, partitions, seed=3), updates=False), strict=True):
        assert_same_batch(batch, want)
    pushes = plane.stats().tables["experience"].pushed_units
    pushed = sum(leaf.nbytes for leaf in jax.tree.leaves(unit(0)))
    delivered = sum(leaf.nbytes for leaf in jax.tree.leaves(got[0]))
    least = sum(part_links(pushes * pushed, len(got) * delivered, name))
    stored = {"large": 1040, "(small)": 24}
    touched = 32 * pushes + BATCH * len(got)
    speeds = {**SPEEDS, "disk": 2e5}
    exact = least + sum(touched * stored[leaf] / speeds[link] for leaf, link in rows.items())
    if name == "both":  # a part of the large leaf is at home, and the small ones go on to pinned memory
        assert least < recorder.now < exact + touched * 24 * (1 / 5e5 + 1 / 2e6)
    else:
        assert recorder.now == pytest.approx(exact, rel=0.02)
    before = recorder.now
    plane.pull()
    assert recorder.now == before, "outside the block nothing is shaped"


def test_links_of_other_devices_are_refused() -> None:
    links = links_between(Recorder(), 2)
    with pytest.raises(ConfigError, match="do not know a device"):
        links.put(np.zeros(4), SingleDeviceSharding(jax.devices()[3]))
    topology = memory_only(jax.devices()[:1])
    with pytest.raises(ConfigError, match="too few devices"):
        shaped_links(topology, pause=print, clock=float, devices=jax.devices()[:2])
