"""Laws of placement: where a buffer lives changes nothing about what is delivered, and what cannot live there is refused."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import conduit_jax as conduit
import conduit_jax.plane  # all that reads available_bytes, before a test replaces it
from conduit_jax.sharding import memory, placement
from conduit_jax.sharding.placement import LearnerSite, learner_site, resolve_placement
from tests.reference_plane import BATCH, CAPACITY, ReferencePlane, assert_same_batch, run_program

UNIFORM = conduit.ReplayConfig(capacity=CAPACITY)
PRIORITIZED = conduit.ReplayConfig(capacity=CAPACITY, sampler=conduit.Prioritized())


def mesh_of(axes: str) -> Mesh | None:
    if axes == "none":
        return None
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit if axes == "explicit" else AxisType.Auto,))


@cache
def reference(config: conduit.ReplayConfig, partitions: int) -> tuple[conduit.Sample, ...]:
    updates = isinstance(config.sampler, conduit.Prioritized)
    return tuple(run_program(ReferencePlane(config, partitions, seed=3), updates=updates))


def plane_on(config: conduit.ReplayConfig, partitions: int, where: str, axes: str) -> conduit.ExperiencePlane:
    return conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=BATCH),
        replay=replace(config, partitions=partitions),
        placement=where,
        schedule="sequential",
        seed=3,
        mesh=mesh_of(axes),
    )


@pytest.mark.parametrize(
    ("where", "axes", "partitions", "user_mesh"),
    [
        ("device", "none", 1, "none"),
        ("pinned_host", "none", 1, "none"),
        ("device", "none", 8, "none"),
        ("pageable", "none", 8, "none"),
        ("device", "explicit", 8, "none"),
        ("single_device", "explicit", 8, "none"),
        ("pinned_host", "explicit", 8, "none"),
        ("device", "auto", 8, "none"),
        ("pinned_host", "auto", 8, "none"),
        ("device", "explicit", 1, "none"),
        ("device", "none", 1, "explicit"),
        ("device", "explicit", 8, "explicit"),
        ("pageable", "auto", 8, "auto"),
    ],
)
def test_every_placement_delivers_the_bytes_of_one_partition_at_a_time(
    where: str, axes: str, partitions: int, user_mesh: str
) -> None:
    plane = plane_on(PRIORITIZED, partitions, where, axes)
    with jax.set_mesh(mesh_of(user_mesh)) if user_mesh != "none" else nullcontext():
        got = run_program(plane)
    for batch, want in zip(got, reference(PRIORITIZED, partitions), strict=True):
        assert_same_batch(batch, want)


@pytest.mark.parametrize(("where", "axes", "partitions"), [("device", "none", 1), ("device", "explicit", 8)])
def test_uniform_draws_are_the_same_everywhere_too(where: str, axes: str, partitions: int) -> None:
    got = run_program(plane_on(UNIFORM, partitions, where, axes), updates=False)
    for batch, want in zip(got, reference(UNIFORM, partitions), strict=True):
        assert_same_batch(batch, want)


def test_the_reference_discriminates_between_partition_counts_seeds_and_samplers() -> None:
    ids = [
        np.stack([batch.data["id"] for batch in reference(*which)])
        for which in ((PRIORITIZED, 1), (PRIORITIZED, 8), (UNIFORM, 1))
    ]
    ids.append(np.stack([batch.data["id"] for batch in run_program(ReferencePlane(PRIORITIZED, 1, seed=4))]))
    for index, one in enumerate(ids):
        assert not any(np.array_equal(one, other) for other in ids[index + 1 :])


@pytest.mark.parametrize(
    ("where", "axes", "kind", "devices"),
    [
        ("device", "explicit", "device", 8),
        ("single_device", "explicit", "device", 1),
        ("pinned_host", "explicit", "pinned_host", 8),
        ("pageable", "none", "device", 1),
    ],
)
def test_storage_lives_where_the_placement_says_and_batches_where_the_learner_is(
    where: str, axes: str, kind: str, devices: int
) -> None:
    plane = plane_on(UNIFORM, 8, where, axes)
    batches = run_program(plane, rounds=2, updates=False)
    assert len(batches) == 2
    state = plane._tables["experience"].pipeline.state
    for leaf in jax.tree.leaves(state.storage):
        assert leaf.sharding.memory_kind == kind
        assert len(leaf.sharding.device_set) == devices
    for leaf in jax.tree.leaves(state.control):
        assert leaf.sharding.memory_kind == "device"
    for leaf in jax.tree.leaves(plane.pull()):
        assert len(leaf.sharding.device_set) == (8 if axes != "none" else 1)
        assert leaf.sharding.memory_kind == "device"


def test_the_learner_decides_the_site_by_its_own_arrays() -> None:
    mesh = mesh_of("explicit")
    spread = jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, PartitionSpec("data")))
    alone = jax.device_put(np.zeros(8, np.float32), jax.devices()[3])
    assert learner_site({"w": spread}, None, None) == LearnerSite(jax.devices()[0], mesh, "data")
    assert learner_site({"w": alone}, None, None) == LearnerSite(jax.devices()[3])
    assert learner_site(None, None, None) == LearnerSite(jax.devices()[0])


def test_auto_takes_the_first_tier_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    site, chosen = LearnerSite(jax.devices()[0]), []
    for free in ({"device": 100, "pinned_host": 100}, {"device": 10, "pinned_host": 100}):
        monkeypatch.setattr(placement, "available_bytes", lambda device, kind, free=free: free[kind])
        chosen.append(resolve_placement("auto", site, 1, 50).name)
    assert chosen == ["device", "pinned_host"]


@pytest.mark.parametrize("where", ["device", "pinned_host", "pageable"])  # "auto" goes to the disk
def test_a_capacity_that_does_not_fit_is_refused_with_the_shortfall(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (placement, memory):
        monkeypatch.setattr(module, "available_bytes", lambda device, kind: 1000)
    plane = plane_on(UNIFORM, 1, where, "none")
    before = len(jax.live_arrays())
    with pytest.raises(conduit.PlacementError, match=r"does not fit[\s\S]*lacks [\d,]+ bytes[\s\S]*lower capacity"):
        run_program(plane, updates=False)
    assert len(jax.live_arrays()) <= before + 2, "something was allocated for a plane that could not be built"
    monkeypatch.undo()
    assert len(run_program(plane, updates=False)) == 6, "the refused plane is still open"


def test_partitions_that_do_not_divide_over_the_mesh_are_refused_with_the_nearest_legal_ones() -> None:
    site = LearnerSite(jax.devices()[0], mesh_of("auto"), "data")
    with pytest.raises(conduit.ConfigError, match=r"partitions=12[\s\S]*partitions=8 or 16"):
        resolve_placement("device", site, 12, 1)


def test_an_unknown_placement_comes_with_a_suggestion() -> None:
    with pytest.raises(conduit.ConfigError, match="did you mean 'pinned_host'"):
        resolve_placement("pined_host", LearnerSite(jax.devices()[0]), 1, 1)


def test_an_axis_the_mesh_lacks_is_refused() -> None:
    with pytest.raises(conduit.PlacementError, match=r"'model'[\s\S]*\('data',\)"):
        learner_site(None, mesh_of("auto"), "model")


def test_available_memory_is_a_plausible_number_for_every_kind() -> None:
    device = jax.devices()[0]
    assert {"device", "pinned_host"} <= set(memory.memory_kinds(device))
    for kind in memory.memory_kinds(device):
        assert 1 << 20 < memory.available_bytes(device, kind) < 1 << 50
