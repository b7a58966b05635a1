"""Laws of a table that may grow: what it will do is decided ahead, looked up, and decided anew when its grounds change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conduit_jax as conduit
from conduit_jax.outlook import Outlook, placements_ahead
from conduit_jax.sharding.choice import choose_placement, stand_on
from conduit_jax.sharding.placement import LearnerSite
from conduit_jax.sharding.surroundings import memory_only
from conduit_jax.sharding.workload import Traffic
from tests.sharding.test_choice import eight_devices, mesh_of, never
from tests.test_growth import Step, assert_padded, unit

CAPACITY, BATCH = 32, 16
GROWTH = conduit.Growth(axes={"observation": {0: 300}}, optional=("mask",), fill=-1)
LIMITS = {"device": 10_000, "pinned_host": 30_000}


def auto(**chosen: Any) -> conduit.AutoPlacement:
    return conduit.AutoPlacement(**({"topology": eight_devices(), "limits": LIMITS} | chosen))


def grown_plane(placement: Any = None, **config: Any) -> conduit.ExperiencePlane:
    """A plane with items of three numbers that may have three hundred, dealt over up to eight devices."""
    settings = {"capacity": CAPACITY, "partitions": 4, "growth": GROWTH} | config
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=BATCH),
        replay=conduit.ReplayConfig(**settings),
        placement=placement or auto(),
        schedule="sequential",
    )
    plane.push(unit(0, 3))
    return plane


def outlook_of(plane: conduit.ExperiencePlane) -> Outlook:
    outlook = plane._tables["experience"].outlook  # type: ignore[union-attr]
    assert outlook is not None
    return outlook


def planning(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("a growth that was foreseen planned anew")


sizes = st.integers(0, 30_000)


@given(sizes, sizes, st.sampled_from(["links", "measured", "mesh"]), st.sampled_from([(), ("shared", "pinned_host")]))
def test_the_map_of_a_table_says_what_would_be_chosen_at_every_size(
    device: int, pinned: int, how: str, only: tuple[str, ...]
) -> None:
    site = LearnerSite(jax.devices()[0], mesh_of(4), "data") if how == "mesh" else LearnerSite(jax.devices()[0])
    links = {"topology": eight_devices(**{"pinned_host_to_device": 40})} if how == "links" else {}
    wanted = conduit.AutoPlacement(limits={"device": device, "pinned_host": pinned, "disk": 0}, only=only, **links)
    traffic = Traffic(10, 80, 8, 16)
    measure = never if how == "links" else lambda _: eight_devices()
    found = placements_ahead(stand_on(wanted, site, 4, measure), traffic, 600)
    for item_bytes in {10, 600, *(start + more for start in found.starts[1:] for more in (-1, 0))}:
        ground, layout = stand_on(wanted, site, 4, measure), found(item_bytes)
        try:
            chosen, _ = choose_placement(wanted, site, 4, traffic._replace(item_bytes=item_bytes), measure)
        except conduit.PlacementError:
            assert layout is None
            continue
        assert layout is not None
        assert ground.laid_out(layout, ground.workload(traffic._replace(item_bytes=item_bytes))) == chosen


def test_where_leaves_may_be_split_a_map_says_nothing_that_no_one_program_reaches() -> None:
    memory = {"device_memory_bytes": (20_000, 10_000, *(0,) * 6), "host_memory_bytes": {"pinned_host": 20_000}}
    wanted = conduit.AutoPlacement(topology=replace(eight_devices(), **memory), limits={"disk": 0})
    site, leaves = LearnerSite(jax.devices()[0]), (("(small)", 90), ("image", 180))
    traffic, ground = Traffic(270, 90, 8, 16, leaves=leaves), stand_on(wanted, site, 3)
    placement, _ = choose_placement(wanted, site, 3, traffic, never)
    assert "mixed" in placement.name
    assert placements_ahead(ground, traffic._replace(item_bytes=100), 600)(270) is None
    assert placements_ahead(ground, traffic._replace(item_bytes=100, leaves=()), 600)(270).name == "shared:2"


def test_leaves_that_were_filled_in_do_not_say_where_rollouts_are_made() -> None:
    plane = grown_plane()
    plane.push(jax.device_put(unit(1, 5, mask=True)))
    plane.push(jax.device_put(unit(2, 7, mask=True)))
    assert outlook_of(plane).traffic.actors == "device"
    plane.push(jax.device_put(unit(3, 9)))
    assert plane._tables["experience"].blueprint.actors == "device"  # type: ignore[union-attr]
    assert "looked up" in outlook_of(plane).notes[-1]


def test_growth_looks_its_placement_up_and_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plane = grown_plane()
    assert [name for _, _, name in outlook_of(plane).found.rows] == ["single_device", "shared:2", "shared:4"]  # type: ignore[union-attr]
    for name in ("plan", "fitting"):
        monkeypatch.setattr(f"conduit_jax.sharding.choice.{name}", planning)
    plane.push(unit(1, 100))
    plane.grow(unit(2, 200))
    monkeypatch.undo()
    stats = plane.stats().tables["experience"]
    assert [(move.source, move.target) for move in stats.moves] == [("device", "shared:2"), ("shared:2", "shared:4")]
    assert_padded(plane.pull().data, {0: 3, 1: 100}, 200)
    lines = plane.explain()
    assert "map computed when it was built" in lines
    assert "looked up, shared:2" in lines
    assert "looked up, shared:4" in lines
    assert "not taken single_device" in lines  # the reasons are those at the present size


def test_a_map_is_computed_anew_when_its_grounds_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    plane = grown_plane()
    plane.grow(capacity=2 * CAPACITY)
    assert outlook_of(plane).notes[-2:][0] == "map computed anew: capacity_items 32 became 64"
    assert outlook_of(plane).traffic.capacity_items == 64
    plane.migrate(auto(limits={**LIMITS, "device": 30_000}))
    assert outlook_of(plane).notes == ("map computed when it was moved",)

    def room(devices: Any) -> conduit.Topology:
        return replace(memory_only(devices), device_memory_bytes=(12_000,) * len(devices))

    monkeypatch.setattr("conduit_jax.sharding.choice.memory_only", room)
    plane.push(unit(1, 100))
    assert "now" in outlook_of(plane).notes[1]
    assert plane.stats().tables["experience"].placement != "device"
    plane.push(unit(2, 100, mask=True))  # an optional leaf nobody could foresee, but small
    assert plane.stats().tables["experience"].live_items == 24


def test_sizes_that_no_one_memory_holds_are_planned_when_they_are_reached() -> None:
    plane = grown_plane(
        auto(limits={"device": 3000, "pinned_host": 38_500}, only=("single_device", "pinned_host", "mixed"))
    )
    assert [name for _, _, name in outlook_of(plane).found.rows] == ["single_device", "pinned_host", ""]  # type: ignore[union-attr]
    plane.push(unit(1, 300))
    assert "mixed" in plane.stats().tables["experience"].placement
    assert "planned when it is reached" in plane.explain()


def test_what_does_not_grow_or_was_asked_for_has_no_map() -> None:
    assert grown_plane("device")._tables["experience"].outlook is None  # type: ignore[union-attr]
    assert grown_plane(growth=None)._tables["experience"].outlook is None  # type: ignore[union-attr]


def test_a_hook_that_does_not_take_the_largest_items_is_built_all_the_same() -> None:
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=BATCH),
        replay=conduit.ReplayConfig(capacity=CAPACITY, growth=GROWTH),
        placement=auto(),
        schedule="sequential",
    )

    @plane.register_ingestion
    def ingestion(rollout: Step) -> Step:
        if rollout.observation.shape[-1] > 100:
            raise ValueError("too large for this hook")
        return rollout

    plane.push(unit(0, 3))
    assert "no map could be computed" in plane.explain()
    plane.push(unit(1, 5))
    assert_padded(plane.pull().data, {0: 3, 1: 5}, 5)
