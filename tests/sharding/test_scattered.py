"""Laws of scattered storage: leaves on different devices and uneven deals deliver what one device would."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

import conduit_jax as conduit
from conduit_jax.sharding.choice import choose_placement
from conduit_jax.sharding.placement import LearnerSite
from conduit_jax.testing import count_traces
from tests.reference_plane import assert_same_batch, run_program, unit
from tests.sharding.places import apart, both, plane_on, reference, scattered, uneven
from tests.sharding.test_choice import TRAFFIC, eight_devices, never


@pytest.mark.parametrize(
    ("where", "partitions"),
    [
        pytest.param(apart(), 1, id="leaf apart"),
        pytest.param(uneven(3, 3, 2), 8, id="3-3-2", marks=pytest.mark.slow),
        pytest.param(apart(8, "pinned_host"), 8, id="pinned leaf apart", marks=pytest.mark.slow),
        pytest.param(uneven(1, 7), 8, id="1-7", marks=pytest.mark.slow),
        pytest.param(both(), 8, id="both", marks=pytest.mark.slow),
    ],
)
def test_scattered_storage_delivers_the_bytes_of_one_device(where: conduit.Placement, partitions: int) -> None:
    plane = plane_on(where, partitions)
    for batch, want in zip(run_program(plane), reference(partitions), strict=True):
        assert_same_batch(batch, want)
    stats = plane.stats().tables["experience"]
    assert (stats.placement, stats.inserted_items, stats.stale_updates) == ("scattered", 7 * 32, 0)


def test_partitions_are_dealt_unevenly_where_even_shares_do_not_fit() -> None:
    topology = eight_devices()
    room = [8 * 12 * 1064 // 8 * count + 500 for count in (3, 1, 4)] + [0] * 5
    topology = replace(topology, device_memory_bytes=tuple(room))
    plane = plane_on(conduit.AutoPlacement(topology=topology, limits={"pinned_host": 0}), 8)
    for batch, want in zip(run_program(plane), reference(8), strict=True):
        assert_same_batch(batch, want)
    assert plane.stats().tables["experience"].placement == "shared:3:uneven"
    assert "dealt [3, 1, 4]" in plane.explain()


@pytest.mark.slow
def test_programs_of_scattered_storage_are_compiled_before_the_pause() -> None:
    plane = plane_on("single_device", 8)
    for number in range(2):
        plane.push(unit(number))
        plane.pull()
    plane.migrate(uneven(3, 5))
    with count_traces() as traces:
        plane.push(unit(2))
        plane.pull()
    assert traces.compiled == 0


def test_deals_that_are_none_are_refused() -> None:
    devices = tuple(jax.devices()[:2])
    for counts in ((3, 4), (8,), (8, 0), (3, 3, 2)):
        with pytest.raises(conduit.ConfigError, match="not dealt over"):
            scattered(
                conduit.Part(devices, "device", 8, None, counts), conduit.Part(devices[:1], "device", 8, ("large",))
            )
    lagging = conduit.ExperiencePlane(algorithm=conduit.BoundedLag(batch_size=16, max_policy_lag=2), placement=apart())
    with pytest.raises(conduit.PlacementError, match="not kept far away"):
        lagging.push(unit(0))
    with pytest.raises(conduit.PlacementError, match=r"4 partitions[\s\S]*want: 1"):
        plane_on(uneven(1, 3)).push(unit(0))


def test_a_mixture_with_pageable_memory_has_its_leaves_on_the_processor() -> None:
    known = eight_devices()
    topology = replace(known, host_memory_bytes={"pageable": 7200}, unavailable={}).limited({"device": 800})
    traffic = TRAFFIC._replace(leaves=(("(small)", 10), ("image", 90)))
    placement, decided = choose_placement(
        conduit.AutoPlacement(topology=topology), LearnerSite(jax.devices()[3]), 1, traffic, never
    )
    assert decided is not None
    assert {part.tier for part in decided.layout.parts} == {"device", "pageable"}
    assert {part.leaves: part.devices for part in placement.parts} == {
        ("image",): (jax.devices("cpu")[0],),
        ("(small)",): (jax.devices()[3],),
    }
    assert placement.scattered
    assert placement.part.devices == (jax.devices()[3],)
