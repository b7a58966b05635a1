"""Laws of saving and restoring tables that live on disk or have grown: the next batches are the uninterrupted run's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import conduit_jax as conduit
from tests.reference_plane import BATCH, CAPACITY, ReferencePlane, assert_same_batch, priorities_for, run_program, unit

CONFIG = conduit.ReplayConfig(capacity=CAPACITY, sampler=conduit.Prioritized())


def plane_on(where: str, schedule: Any = "sequential", **config: Any) -> conduit.ExperiencePlane:
    return conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=BATCH),
        replay=replace(CONFIG, **config),
        placement=where,
        schedule=schedule,
        seed=3,
    )


@pytest.mark.parametrize(
    ("saved_on", "restored_on", "schedule"),
    [
        ("disk", "device", "sequential"),
        pytest.param("disk", "disk", "sequential", marks=pytest.mark.slow),
        pytest.param(
            "device",
            "disk",
            conduit.Schedule(overlap_ingestion=True, overlap_delivery=True),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_table_on_disk_is_saved_and_restored(saved_on: str, restored_on: str, schedule: Any, tmp_path: Path) -> None:
    ahead = {} if schedule == "sequential" else {"ahead": 1, "late_inserts": True}
    want = run_program(ReferencePlane(CONFIG, 1, seed=3, **ahead))
    plane = plane_on(saved_on, schedule)
    plane.push(unit(0), version=7)
    for number in range(1, 7):
        plane.push(unit(number), version=7 + number)
        if number == 4:
            plane.save(tmp_path / "saved")
            plane.close()
            plane = plane_on(restored_on, schedule)
            plane.restore(tmp_path / "saved")
        sample = plane.pull()
        assert_same_batch(sample, want[number - 1])
        plane.update_priorities(sample.info, priorities_for(sample))
    stats = plane.stats().tables["experience"]
    assert (stats.placement, stats.inserted_items) == (restored_on, 7 * 32)


class Own(NamedTuple):
    """A batch of a kind that has no form on the disk: restoring asks the delivery hook what it looks like."""

    id: Any


@pytest.mark.slow
def test_batches_drawn_ahead_from_disk_that_only_a_hook_can_describe_come_back(tmp_path: Path) -> None:
    def made() -> conduit.ExperiencePlane:
        plane = plane_on("disk", "overlap")
        plane.register_delivery(lambda data: Own(data["id"]))
        return plane

    plane = made()
    for number in range(2):
        plane.push(unit(number), version=number)
    plane.pull()
    plane.save(tmp_path / "saved")
    other = made()
    other.restore(tmp_path / "saved")
    for _ in range(2):
        got, want = other.pull().data, plane.pull().data
        assert isinstance(got, Own)
        np.testing.assert_array_equal(np.asarray(got.id), np.asarray(want.id))


@pytest.mark.parametrize("grows", ["leaf", pytest.param("capacity", marks=pytest.mark.slow)])
def test_a_table_that_has_grown_is_saved_and_restored(grows: str, tmp_path: Path) -> None:
    growth = conduit.Growth(axes={"large": {0: 260}})
    capacity = 2 * CAPACITY if grows == "capacity" else CAPACITY

    def smaller(number: int) -> dict[str, Any]:
        return {**unit(number), "large": unit(number)["large"][..., :200]}

    plane = plane_on("device", growth=growth)
    for number in range(2):
        plane.push(smaller(number), version=number)
    plane.pull()
    plane.grow(unit(0)) if grows == "leaf" else plane.grow(capacity=capacity)
    plane.save(tmp_path / "saved")
    if grows == "capacity":
        with pytest.raises(conduit.ConfigError, match=r"capacity[\s\S]*192[\s\S]*96"):
            plane_on("device", growth=growth).restore(tmp_path / "saved")
    other = plane_on("pinned_host", growth=growth, capacity=capacity)
    other.restore(tmp_path / "saved")
    for number in range(2, 6):
        for one in (plane, other):
            one.push(unit(number) if grows == "leaf" else smaller(number), version=number)
        got, want = other.pull(), plane.pull()
        assert_same_batch(got, jax.tree.map(np.asarray, want))
        for one in (plane, other):
            one.update_priorities(want.info, priorities_for(want))
    stats, wanted = (one.stats().tables["experience"] for one in (other, plane))
    counts = ("inserted_items", "live_items", "capacity_items", "bytes_per_item", "priority_updates")
    assert [getattr(stats, name) for name in counts] == [getattr(wanted, name) for name in counts]
    assert stats.inserted_items == 6 * 32
