"""Laws of placements of several parts: leaves in different memories, and nothing of what is delivered tells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import conduit_jax as conduit
from conduit_jax.relocation import migrate_table
from conduit_jax.sharding.choice import choose_placement
from conduit_jax.sharding.placement import LearnerSite
from tests.reference_plane import CAPACITY, ReferencePlane, assert_same_batch, priorities_for, run_program, unit
from tests.sharding.places import CONFIG, apart, both, fragile, plane_on, reference, split, uneven
from tests.sharding.test_choice import TRAFFIC, eight_devices, never

LARGE, SMALL = 1040, 24  # bytes an item has in its large leaf, and packed
LIMITS = {"device": CAPACITY * SMALL + 500, "pinned_host": CAPACITY * LARGE + 100}  # no tier holds both
slow = pytest.mark.slow


def memories(plane: conduit.ExperiencePlane) -> list[str | None]:
    """The memory of the packed rows, and of the large leaf."""
    return [leaf.sharding.memory_kind for leaf in jax.tree.leaves(plane._tables["experience"].pipeline.state.storage)]


@pytest.mark.parametrize(
    ("partitions", "devices", "pinned", "kinds"),
    [
        (1, 1, ("large",), ["device", "pinned_host"]),
        pytest.param(1, 1, ("(small)",), ["pinned_host", "device"], marks=slow),
        pytest.param(8, 4, ("large",), ["device", "pinned_host"], marks=slow),
    ],
)
def test_leaves_in_two_memories_deliver_the_bytes_of_one(
    partitions: int, devices: int, pinned: tuple[str, ...], kinds: list[str]
) -> None:
    plane = plane_on(split(partitions, devices, pinned), partitions)
    for batch, want in zip(run_program(plane), reference(partitions), strict=True):
        assert_same_batch(batch, want)
    assert memories(plane) == kinds
    assert f"{pinned[0]} in pinned_host of [" in plane.explain()
    assert "the rest in device of [" in plane.explain()


@slow
@pytest.mark.parametrize("where", [split(), apart()], ids=["two memories", "scattered"])
def test_groups_and_batches_drawn_ahead_come_from_several_parts_too(where: conduit.Placement) -> None:
    got = run_program(plane_on(where, schedule=conduit.Schedule(overlap_ingestion=True, overlap_delivery=True)))
    want = run_program(ReferencePlane(CONFIG, 1, seed=3, ahead=1, late_inserts=True))
    for batch, other in zip(got, want, strict=True):
        assert_same_batch(batch, other)


@pytest.mark.parametrize("partitions", [1, pytest.param(8, marks=slow)])
def test_a_mixture_is_chosen_where_no_tier_holds_the_buffer(partitions: int) -> None:
    plane = plane_on(conduit.AutoPlacement(topology=eight_devices(), limits=LIMITS), partitions)
    for batch, want in zip(run_program(plane), reference(partitions), strict=True):
        assert_same_batch(batch, want)
    assert plane.stats().tables["experience"].placement.startswith("mixed:")
    assert memories(plane) == ["device", "pinned_host"]
    lines = plane.explain()
    assert "large in pinned_host" in lines
    assert "not taken pinned_host" in lines


def test_without_a_profile_the_only_mixture_that_fits_needs_none() -> None:
    traffic = TRAFFIC._replace(leaves=(("(small)", 10), ("image", 90)))
    request = conduit.AutoPlacement(limits={"device": 800, "pinned_host": 7200})
    placement, decided = choose_placement(request, LearnerSite(jax.devices()[0]), 1, traffic, never)
    assert {part.memory_kind: part.leaves for part in placement.parts} == {
        "device": ("(small)",),
        "pinned_host": ("image",),
    }
    assert decided is not None
    tight = conduit.AutoPlacement(limits={"device": 799, "pinned_host": 7199, "disk": 0})
    with pytest.raises(conduit.PlacementError, match="does not fit anywhere"):
        choose_placement(tight, LearnerSite(jax.devices()[0]), 1, traffic, never)


def test_a_data_parallel_learner_keeps_its_mesh_under_a_mixture() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    request = conduit.AutoPlacement(topology=eight_devices(), only="mixed:8")
    traffic = TRAFFIC._replace(leaves=(("(small)", 10), ("image", 90)))
    placement, _ = choose_placement(request, LearnerSite(jax.devices()[0], mesh, "data"), 8, traffic, never)
    assert placement.mesh is mesh
    assert set(placement.memory_kinds) == {"device", "pinned_host"}


FEW = (split(), "device")
MANY = (split(), split(pinned=("(small)",)), "pinned_host", split(), "disk", split(), "device")
APART = (uneven(3, 5), both(), split(8), uneven(1, 1, 6), "disk", apart(8), "single_device")


@pytest.mark.parametrize(
    ("places", "partitions"),
    [
        pytest.param(FEW, 1, id="few"),
        pytest.param(MANY, 1, id="many", marks=slow),
        pytest.param(APART, 8, id="scattered", marks=slow),
    ],
)
def test_a_buffer_moves_into_several_parts_and_out_of_them_and_loses_nothing(
    places: tuple[Any, ...], partitions: int
) -> None:
    plane, model = plane_on("device", partitions), ReferencePlane(CONFIG, partitions, seed=3)
    for number, where in enumerate(places):
        for one in (plane, model):
            one.push(unit(number), version=number)
        sample = plane.pull()
        assert_same_batch(sample, model.pull())
        plane.migrate(where)
        got = plane.update_priorities(sample.info, priorities_for(sample))
        want = model.update_priorities(jax.tree.map(np.asarray, sample.info), priorities_for(sample))
        assert int(got.sum()) == want
        assert_same_batch(plane.pull(), model.pull())
    stats = plane.stats().tables["experience"]
    assert [move.bytes for move in stats.moves] == [stats.storage_bytes] * len(places)
    assert (stats.inserted_items, stats.stale_updates) == (len(places) * 32, 0)


@pytest.mark.parametrize(
    ("where", "target", "partitions"),
    [("device", split(), 1), pytest.param(uneven(3, 5), "device", 8, marks=slow)],
    ids=["into two memories", "out of scattered ones"],
)
def test_a_move_that_fails_half_way_leaves_the_old_placement_working(where: Any, target: Any, partitions: int) -> None:
    plane, model = plane_on(where, partitions), ReferencePlane(CONFIG, partitions, seed=3)
    for number in range(2):
        for one in (plane, model):
            one.push(unit(number), version=number)
    before = plane.stats().tables["experience"].placement
    with pytest.raises(conduit.PlacementError, match="half way: RuntimeError: the link is down"):
        migrate_table(plane._tables["experience"], target, put=fragile(8), piece_bytes=1024)
    assert plane.stats().tables["experience"].placement == before
    assert_same_batch(plane.pull(), model.pull())


@pytest.mark.parametrize(
    ("places", "partitions"),
    [
        (("split", "device"), 1),
        pytest.param(("device", "split"), 1, marks=slow),
        pytest.param(("uneven", "device", "both"), 8, marks=slow),
    ],
    ids=str,
)
def test_several_parts_are_saved_and_restored(places: tuple[str, ...], partitions: int, tmp_path: Path) -> None:
    known = {"split": split(), "device": "device", "uneven": uneven(3, 5), "both": both()}
    plane, want, later = plane_on(known[places[0]], partitions), reference(partitions), list(places[1:])
    plane.push(unit(0), version=7)
    for number in range(1, 7):
        plane.push(unit(number), version=7 + number)
        if number in (3, 5) and later:
            plane.save(tmp_path / f"saved {number}")
            plane = plane_on(known[later.pop(0)], partitions)
            plane.restore(tmp_path / f"saved {number}")
        sample = plane.pull()
        assert_same_batch(sample, want[number - 1])
        plane.update_priorities(sample.info, priorities_for(sample))
    assert plane.stats().tables["experience"].placement == getattr(known[places[-1]], "name", places[-1])


@slow
def test_several_parts_grow_where_they_are() -> None:
    growth = conduit.Growth(axes={"large": {0: 260}})
    plane = plane_on(uneven(3, 5), 8, growth=growth)
    plane.push({**unit(0), "large": unit(0)["large"][..., :70]})
    plane.push(unit(1))
    assert_padded(plane.pull())


def assert_padded(sample: conduit.Sample) -> None:
    """Items of the first unit had 70 numbers, those of later ones have 260."""
    data = jax.tree.map(np.asarray, sample.data)
    size = np.where(data["id"] < 32, 70, 260)
    want = np.where(np.arange(260) < size[:, None], data["id"][:, None], 0).astype(np.float32)
    np.testing.assert_array_equal(data["large"], want)


def test_growth_moves_the_large_leaf_to_the_host_where_no_tier_holds_both() -> None:
    growth = conduit.Growth(axes={"large": {0: 260}})
    limits = {"device": CAPACITY * (SMALL + 4 * 70), "pinned_host": CAPACITY * LARGE + 100}
    plane = plane_on(conduit.AutoPlacement(topology=eight_devices(), limits=limits), growth=growth)
    plane.push({**unit(0), "large": unit(0)["large"][..., :70]})
    assert memories(plane) == ["device", "device"]
    plane.push(unit(1))
    assert memories(plane) == ["device", "pinned_host"]
    assert_padded(plane.pull())


@pytest.mark.parametrize(
    ("pinned", "says"),
    [
        (("pixels",), r"not stored by itself[\s\S]*pixels[\s\S]*\(small\), large[\s\S]*256 bytes"),
        (("larger",), "not stored by itself"),
    ],
)
def test_parts_that_do_not_go_with_what_is_stored_are_refused(pinned: tuple[str, ...], says: str) -> None:
    with pytest.raises(conduit.ConfigError, match=says):
        plane_on(split(pinned=pinned)).push(unit(0))
    plane = plane_on("device")
    plane.push(unit(0))
    with pytest.raises(conduit.ConfigError, match=says):
        plane.migrate(split(pinned=pinned))
    assert memories(plane) == ["device", "device"]


def test_parts_that_leave_a_leaf_out_or_do_not_go_together_are_refused() -> None:
    whole = split()
    named = tuple(replace(part, leaves=("large",) if part.leaves is None else ("(small)",)) for part in whole.parts)
    apart = replace(whole, parts=(replace(named[0], leaves=("large",)), replace(named[1], leaves=())))
    with pytest.raises(conduit.ConfigError, match=r"leaves out what is stored[\s\S]*\(small\)"):
        plane_on(apart).push(unit(0))
    for bad in (
        (whole.parts[0], whole.parts[0]),
        (replace(whole.parts[0], leaves=None), whole.parts[1]),
        (whole.parts[0], replace(whole.parts[1], partitions=2)),
    ):
        with pytest.raises(conduit.ConfigError, match="do not go together"):
            replace(whole, parts=bad)
