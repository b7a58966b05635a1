"""Laws of scattered storage: leaves on different devices and uneven deals deliver what one device would."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import conduit_jax as conduit
from conduit_jax.relocation import migrate_table
from conduit_jax.sharding.choice import choose_placement
from conduit_jax.sharding.mesh import PARTITION_AXIS, single_device_mesh
from conduit_jax.sharding.placement import LearnerSite
from conduit_jax.testing import count_traces
from tests.reference_plane import ReferencePlane, assert_same_batch, priorities_for, run_program, unit
from tests.sharding.test_choice import TRAFFIC, eight_devices, never
from tests.sharding.test_parts import CONFIG, plane_on, reference, split


def scattered(*parts: conduit.Part) -> conduit.Placement:
    return conduit.Placement("scattered", parts, single_device_mesh(jax.devices()[0]), PARTITION_AXIS)


def apart(partitions: int = 1, kind: str = "device") -> conduit.Placement:
    """The large leaf on another device (as pageable host memory is to a GPU), the rest at home."""
    one, other = jax.devices()[:2]
    return scattered(conduit.Part((other,), kind, partitions, ("large",)), conduit.Part((one,), "device", partitions))


def uneven(*counts: int) -> conduit.Placement:
    """Everything dealt over as many devices as there are ``counts``."""
    return scattered(conduit.Part(tuple(jax.devices()[1 : 1 + len(counts)]), "device", sum(counts), None, counts))


def both() -> conduit.Placement:
    """The large leaf dealt over three devices, the rest in pinned memory of a fourth."""
    chosen = tuple(jax.devices()[:4])
    return scattered(
        conduit.Part(chosen[:3], "device", 8, ("large",), (1, 5, 2)), conduit.Part(chosen[3:], "pinned_host", 8)
    )


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


@pytest.mark.slow
def test_groups_and_batches_drawn_ahead_come_from_scattered_storage_too() -> None:
    got = run_program(plane_on(apart(), schedule=conduit.Schedule(overlap_ingestion=True, overlap_delivery=True)))
    want = run_program(ReferencePlane(CONFIG, 1, seed=3, ahead=1, late_inserts=True))
    for batch, other in zip(got, want, strict=True):
        assert_same_batch(batch, other)


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
def test_a_scattered_buffer_moves_anywhere_and_back_and_loses_nothing() -> None:
    plane, model = plane_on("single_device", 8), ReferencePlane(CONFIG, 8, seed=3)
    for number, where in enumerate((uneven(3, 5), both(), split(8), uneven(1, 1, 6), "disk", apart(8), "device")):
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
    assert [move.bytes for move in stats.moves] == [stats.storage_bytes] * 7
    assert stats.stale_updates == 0


@pytest.mark.slow
def test_a_move_that_fails_half_way_leaves_scattered_storage_working() -> None:
    plane, model = plane_on(uneven(3, 5), 8), ReferencePlane(CONFIG, 8, seed=3)
    for one in (plane, model):
        one.push(unit(0), version=0)
    sent: list[int] = []

    def fragile(pieces: Any, sharding: Any) -> Any:
        sent.append(1)
        if len(sent) > 8:
            raise RuntimeError("the link is down")
        return jax.device_put(pieces, sharding)

    with pytest.raises(conduit.PlacementError, match="half way"):
        migrate_table(plane._tables["experience"], "device", put=fragile, piece_bytes=1024)
    assert plane.stats().tables["experience"].placement == "scattered"
    assert_same_batch(plane.pull(), model.pull())


@pytest.mark.slow
def test_scattered_storage_is_saved_and_restored(tmp_path: Path) -> None:
    plane, want = plane_on(uneven(3, 5), 8), reference(8)
    plane.push(unit(0), version=7)
    for number in range(1, 7):
        plane.push(unit(number), version=7 + number)
        if number in (3, 5):
            plane.save(tmp_path / f"saved {number}")
            plane = plane_on("single_device" if number == 3 else both(), 8)
            plane.restore(tmp_path / f"saved {number}")
        sample = plane.pull()
        assert_same_batch(sample, want[number - 1])
        plane.update_priorities(sample.info, priorities_for(sample))


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


@pytest.mark.slow
def test_scattered_storage_grows() -> None:
    growth = conduit.Growth(axes={"large": {0: 260}})
    plane = plane_on(uneven(3, 5), 8, growth=growth)
    plane.push({**unit(0), "large": unit(0)["large"][..., :70]})
    plane.push(unit(1))
    data = jax.tree.map(np.asarray, plane.pull().data)
    size = np.where(data["id"] < 32, 70, 260)
    want = np.where(np.arange(260) < size[:, None], data["id"][:, None], 0).astype(np.float32)
    np.testing.assert_array_equal(data["large"], want)


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
