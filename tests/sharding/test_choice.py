"""Laws of ``placement="auto"``: nothing is measured without need, the planner's choice is what runs, and the bytes are the same."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import pytest
from jax.sharding import AxisType, Mesh

import conduit_jax as conduit
from conduit_jax.errors import ConfigError, PlacementError
from conduit_jax.sharding.choice import AutoPlacement, choose_placement
from conduit_jax.sharding.links import Link
from conduit_jax.sharding.placement import LearnerSite
from conduit_jax.sharding.surroundings import memory_only
from conduit_jax.sharding.workload import Traffic
from tests.reference_plane import BATCH, CAPACITY, ReferencePlane, assert_same_batch, run_program

CONFIG = conduit.ReplayConfig(capacity=CAPACITY, partitions=8)
TRAFFIC = Traffic(item_bytes=100, capacity_items=80, inserted_items=8, sampled_items=16)


def eight_devices(**speeds: float) -> conduit.Topology:
    """This process' devices with made-up links, in GB/s."""
    known = {"pageable->device": 10, "device->device": 50, "pinned_host->device": 5, "pageable->pinned_host": 5}
    known |= {"device->pinned_host": 5, "device->pageable": 5} | {
        name.replace("_to_", "->"): speed for name, speed in speeds.items()
    }
    links = {name: Link.of_bandwidth(speed * 1e9) for name, speed in known.items()}
    return replace(memory_only(jax.devices()), name="made up", source="a test", links=links)


def never(_devices) -> conduit.Topology:
    raise AssertionError("nothing had to be measured")


def mesh_of(*shape: int, names: tuple[str, ...] = ("data",)) -> Mesh:
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


@cache
def reference() -> tuple[conduit.Sample, ...]:
    return tuple(run_program(ReferencePlane(CONFIG, 8, seed=3), updates=False))


def run_on(placement, **chosen) -> conduit.ExperiencePlane:
    """Run the program on a plane and hold what it delivers to the reference."""
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=BATCH),
        replay=CONFIG,
        placement=placement,
        schedule="sequential",
        seed=3,
        **chosen,
    )
    for batch, want in zip(run_program(plane, updates=False), reference(), strict=True):
        assert_same_batch(batch, want)
    return plane


def test_the_learners_own_memory_is_taken_without_measuring_anything() -> None:
    placement, decided = choose_placement("auto", LearnerSite(jax.devices()[2]), 1, TRAFFIC, never)
    assert placement.part.devices == (jax.devices()[2],)
    assert decided is not None
    assert decided.layout.name == "single_device"
    reasons = {one.layout.name: one.reason for one in decided.rejected}
    assert "further from the learner" in reasons["pinned_host"]
    assert "own memory is pageable" in reasons["pageable"]


@pytest.mark.parametrize(("partitions", "devices"), [(8, 8), (16, 8), (1, 1)])
def test_a_data_parallel_learner_has_its_shard_beside_it(partitions: int, devices: int) -> None:
    mesh = mesh_of(8)
    placement, _ = choose_placement("auto", LearnerSite(jax.devices()[0], mesh, "data"), partitions, TRAFFIC, never)
    assert len(placement.part.devices) == devices
    assert (placement.mesh is mesh) == (devices == 8)


def test_other_axes_of_a_mesh_hold_copies() -> None:
    mesh = mesh_of(4, 2, names=("data", "model"))
    placement, decided = choose_placement("auto", LearnerSite(jax.devices()[0], mesh, "data"), 4, TRAFFIC, never)
    assert placement.mesh is mesh
    assert decided is not None
    assert len(decided.memory) == 4
    assert {held for held, _ in decided.memory.values()} == {2000}


def test_what_does_not_fit_one_device_is_shared_over_as_few_as_hold_it() -> None:
    request = AutoPlacement(topology=eight_devices(), limits={"device": 2000, "pinned_host": 0})
    placement, decided = choose_placement(request, LearnerSite(jax.devices()[0]), 8, TRAFFIC, never)
    assert placement.name == "shared:4"
    assert placement.part.devices == tuple(jax.devices()[:4])
    assert decided is not None
    assert all(one.reason for one in decided.rejected)
    odd = next(one for one in decided.rejected if one.layout.name == "shared:5")
    assert "do not divide evenly" in odd.reason


def test_links_are_measured_where_more_than_one_placement_has_to_be_weighed() -> None:
    called = []

    def measure(devices) -> conduit.Topology:
        called.append(devices)
        return eight_devices()

    request = AutoPlacement(limits={"device": 4000})
    placement, _ = choose_placement(request, LearnerSite(jax.devices()[0]), 8, TRAFFIC, measure)
    assert called == [tuple(jax.devices())]
    assert placement.name == "shared:2"
    fast_host = AutoPlacement(limits={"device": 4000}, topology=eight_devices(**{"pinned_host_to_device": 500}))
    placement, _ = choose_placement(fast_host, LearnerSite(jax.devices()[0]), 8, TRAFFIC, never)
    assert placement.part.memory_kind == "device"  # inserts still cross a slow link
    rarely = TRAFFIC._replace(inserted_items=0)
    placement, _ = choose_placement(fast_host, LearnerSite(jax.devices()[0]), 8, rarely, never)
    assert placement.part.memory_kind == "pinned_host"


def test_one_that_fits_is_taken_and_none_is_refused_without_measuring() -> None:
    site, narrow = LearnerSite(jax.devices()[0]), {"device": 500}
    placement, decided = choose_placement(AutoPlacement(limits=narrow), site, 8, TRAFFIC, never)
    assert placement.part.memory_kind == "pinned_host"
    assert decided is not None
    assert not decided.seconds
    with pytest.raises(PlacementError, match="does not fit anywhere"):
        choose_placement(AutoPlacement(limits={**narrow, "pinned_host": 7, "disk": 0}), site, 8, TRAFFIC, never)


@pytest.mark.parametrize(
    ("limits", "name"), [({}, "device"), ({"device": 13_000}, "shared:8"), ({"device": 100}, "pinned_host")]
)
def test_planes_deliver_the_same_bytes_wherever_the_planner_puts_them(limits: dict[str, int], name: str) -> None:
    plane = run_on(AutoPlacement(topology=eight_devices(), limits=limits, only=() if limits else ("single_device",)))
    lines = plane.explain()
    assert f"{name}: 8 partition(s)" in lines
    assert "[chosen]" in lines
    assert "not taken" in lines
    assert "together" in lines  # predicted seconds


def test_explain_says_when_nothing_had_to_be_measured() -> None:
    lines = run_on("auto").explain()
    assert "nothing was measured" in lines
    assert "not taken pinned_host" in lines
    assert "fits, but is further from the learner" in lines


def test_a_pinned_candidate_that_does_not_fit_is_refused_at_build() -> None:
    request = AutoPlacement(topology=eight_devices(), limits={"pinned_host": 7000}, only="pinned_host")
    with pytest.raises(PlacementError, match="lacks 1,000 bytes") as raised:
        choose_placement(request, LearnerSite(jax.devices()[0]), 8, TRAFFIC, never)
    assert "capacity=70" in str(raised.value)


def test_what_fits_nowhere_is_refused_with_every_reason() -> None:
    request = AutoPlacement(topology=eight_devices(), limits={"device": 999, "pinned_host": 7999, "disk": 0})
    with pytest.raises(PlacementError, match="does not fit anywhere") as raised:
        choose_placement(request, LearnerSite(jax.devices()[0]), 8, TRAFFIC, never)
    assert "pinned_host fits with capacity=79" in str(raised.value)


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({"limits": {"devices": 5}}, "did you mean 'device'"),
        ({"limits": {"device": -5}}, "limits"),
        ({"limits": {"device": 1.5}}, "limits"),
    ],
)
def test_limits_that_cannot_be_are_refused(chosen, says) -> None:
    with pytest.raises(ConfigError, match=says):
        AutoPlacement(**chosen)


def test_a_topology_with_more_memory_than_is_free_here_does_not_plan_with_it() -> None:
    rich = replace(
        eight_devices(),
        device_memory_bytes=(1 << 60,) * 8,
        host_memory_bytes={"pinned_host": 1 << 60, "pageable": 1 << 60},
        node_memory_bytes=None,
        unavailable={},
    )
    huge = TRAFFIC._replace(capacity_items=1 << 48)
    request = AutoPlacement(topology=rich, limits={"disk": 0})
    with pytest.raises(PlacementError, match="does not fit anywhere"):
        choose_placement(request, LearnerSite(jax.devices()[0]), 8, huge, never)


def test_what_a_buffer_holds_counts_as_free_under_given_links_too() -> None:
    free = memory_only(jax.devices()).node_memory_bytes
    assert free is not None
    beyond = TRAFFIC._replace(item_bytes=1 << 20, capacity_items=free * 5 // 4 >> 20)
    rich = replace(eight_devices(), device_memory_bytes=(1 << 60,) * 8, node_memory_bytes=None)
    request, site = AutoPlacement(topology=rich, limits={"disk": 0}), LearnerSite(jax.devices()[0])
    held = {(jax.devices()[0], "device"): free}
    placement, decided = choose_placement(request, site, 8, beyond, never, leaving=held)
    assert placement.part.devices[0] == jax.devices()[0]
    assert decided is not None
    with pytest.raises(PlacementError, match="lacks"):
        choose_placement(request, site, 8, beyond, never)


def test_ranks_of_several_nodes_are_bounded_by_the_least_of_those_here() -> None:
    nodes = replace(
        eight_devices(),
        device_memory_bytes=(1 << 60,) * 4,
        nodes=2,
        network=Link.of_bandwidth(1e9),
        node_memory_bytes=None,
    )
    _, decided = choose_placement(
        AutoPlacement(topology=nodes, only="single_device"), LearnerSite(jax.devices()[0]), 1, TRAFFIC, never
    )
    assert decided is not None
    assert len(decided.topology.device_memory_bytes) == 4
    assert max(decided.topology.device_memory_bytes) < 1 << 60


def test_host_memory_of_several_nodes_is_not_chosen_for_one_process() -> None:
    nodes = replace(
        eight_devices(), device_memory_bytes=(100,) * 4, nodes=2, network=Link.of_bandwidth(1e9), node_memory_bytes=None
    )
    request = AutoPlacement(topology=nodes, limits={"pinned_host": TRAFFIC.stored_bytes["item"] - 1, "disk": 0})
    with pytest.raises(PlacementError, match="this process is on one host"):
        choose_placement(request, LearnerSite(jax.devices()[0]), 2, TRAFFIC, never)


def test_a_topology_with_too_few_devices_is_refused() -> None:
    small = replace(eight_devices(), device_memory_bytes=(100,))
    with pytest.raises(ConfigError, match="too few devices"):
        choose_placement(AutoPlacement(topology=small), LearnerSite(jax.devices()[0]), 1, TRAFFIC, never)


def test_a_placement_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="did you mean 'pinned_host'"):
        conduit.ExperiencePlane(algorithm=conduit.OffPolicy(batch_size=4), replay=CONFIG, placement="pined_host")
