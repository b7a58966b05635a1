"""Laws of a plane inside the caller's mesh context: what it hands out is computed on there as any array of the caller's."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import conduit_jax as conduit

by_mesh = pytest.mark.parametrize("devices", [1, 8])
by_axes = pytest.mark.parametrize("axes", [AxisType.Explicit, AxisType.Auto], ids=str)
by_spec = pytest.mark.parametrize("spec", [None, PartitionSpec(), PartitionSpec("data")], ids=str)
by_schedule = pytest.mark.parametrize("schedule", ["sequential", "overlap"])


def mesh_of(devices: int, axes: AxisType) -> Mesh:
    return jax.make_mesh((devices,), ("data",), axis_types=(axes,), devices=jax.devices()[:devices])


def off_policy(sampler: Any = None, **options: Any) -> conduit.ExperiencePlane:
    config = conduit.ReplayConfig(capacity=128, sampler=sampler or conduit.Prioritized())
    return conduit.ExperiencePlane(algorithm=conduit.OffPolicy(batch_size=16), replay=config, **options)


def columns(start: float = 0) -> dict[str, jax.Array]:
    return {"x": start + jnp.arange(32.0).reshape(4, 8)}


def use(sample: conduit.Sample) -> jax.Array:
    """Compute on every leaf, with an array of the caller's, eagerly and compiled."""
    for leaf in jax.tree.leaves(sample):
        _ = leaf + jnp.ones((), leaf.dtype)
    return jax.jit(lambda data, own: data["x"] * own)(sample.data, jnp.float32(2))


def by_hand(plane: conduit.ExperiencePlane) -> list[np.ndarray]:
    seen = []
    for number in range(3):
        added = plane.push(columns(32.0 * number))
        if added is not None:
            assert int((added.added + 1).sum()) == 32 + added.added.size
        sample = plane.pull()
        use(sample)
        priorities = jnp.abs(sample.data["x"]) + 1
        applied = plane.update_priorities(sample.info, priorities)
        assert int((applied + 1).sum()) == 16 + applied.size
        plane.update_priorities(sample.info, np.full(16, 2.0, np.float32))
        seen.append(np.asarray(sample.data["x"]))
    plane.flush()
    return seen


@by_schedule
@by_axes
@by_mesh
def test_by_hand_a_mesh_context_changes_no_bit_and_refuses_nothing(devices: int, axes: AxisType, schedule: str) -> None:
    want = by_hand(off_policy(schedule=schedule))
    with jax.set_mesh(mesh_of(devices, axes)):
        np.testing.assert_array_equal(by_hand(off_policy(schedule=schedule)), want)


@by_axes
@by_mesh
@pytest.mark.parametrize("given", [True, False])
def test_a_plane_told_of_the_mesh_works_inside_and_outside_of_its_context(
    devices: int, axes: AxisType, *, given: bool
) -> None:
    mesh = mesh_of(devices, axes)
    learner = jax.device_put(jnp.ones(8), NamedSharding(mesh, PartitionSpec("data")))
    plane = off_policy(mesh=mesh if given else None)
    with jax.set_mesh(mesh):
        plane.build(columns(), None if given else learner)
        by_hand(plane)
        sample = plane.pull()
        assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(sample))
    by_hand(plane)
    assert (plane.pull().data["x"].reshape(8, 2) * learner[:, None]).shape == (8, 2)


def test_a_mesh_of_one_device_names_the_device() -> None:
    device = jax.devices()[3]
    mesh = jax.make_mesh((1,), ("data",), devices=[device])
    plane = off_policy(mesh=mesh)
    by_hand_sample = [plane.push(columns()), plane.pull()][1]
    assert {leaf.sharding.device_set.copy().pop() for leaf in jax.tree.leaves(by_hand_sample)} == {device}
    with pytest.raises(conduit.PlacementError, match="no such axis"):
        off_policy(mesh=mesh, data_axis="model")


@by_spec
@by_axes
@by_mesh
def test_a_loop_trains_in_a_mesh_context_whatever_the_learner_says(
    devices: int, axes: AxisType, spec: PartitionSpec | None
) -> None:
    mesh = mesh_of(devices, axes)

    def train_step(learner: dict, sample: conduit.Sample) -> tuple:
        loss = (sample.data["x"] * sample.weights).mean()
        return {"w": learner["w"] + loss}, {"loss": loss}, jnp.abs(sample.data["x"]) + 1

    def rollout(actor: Any, policy: Any, key: Any) -> tuple:
        return actor + 1, columns()

    with jax.set_mesh(mesh):
        weights = jnp.zeros(8)
        weights = weights if spec is None else jax.device_put(weights, NamedSharding(mesh, spec))
        plane = off_policy()
        loop = conduit.wrap(train_step, rollout=rollout, policy=lambda learner: learner, plane=plane)
        learner, _, metrics = loop.run({"w": weights}, jnp.int32(0), 3)
        assert (learner["w"] + 1).shape == (8,)
        assert np.isfinite(float(metrics["loss"]))
    assert plane.stats().tables["experience"].priority_updates == 3


@by_axes
@by_mesh
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_on_policy_batches_belong_to_the_callers_mesh(
    devices: int, axes: AxisType, *, inside: bool, given: bool
) -> None:
    mesh = mesh_of(devices, axes)
    algorithm = conduit.OnPolicy(num_minibatches=2, num_epochs=2)
    plane = conduit.ExperiencePlane(algorithm=algorithm, mesh=mesh if given else None)
    with jax.set_mesh(mesh) if inside else nullcontext():
        for _ in range(2):
            plane.push(columns())
            for sample in plane.epochs():
                use(sample)


def test_without_a_context_nothing_of_the_planes_own_mesh_is_on_a_batch_and_nothing_is_copied() -> None:
    plane = off_policy()
    plane.push(columns())
    sample = plane.pull()
    transfer = plane._tables["experience"].pipeline._programs.to_placement
    given = (sample.info, sample.weights)
    assert transfer(given) is given
    leaves = [*jax.tree.leaves(sample), plane.update_priorities(*given)]
    assert {type(leaf.sharding) for leaf in leaves} == {jax.sharding.SingleDeviceSharding}


def test_a_context_of_the_same_device_copies_nothing() -> None:
    plane = off_policy(schedule="overlap")
    plane.push(columns())
    plane.pull()
    pipeline = plane._tables["experience"].pipeline
    drawn = pipeline._drawn[0].sample.data["x"]
    with jax.set_mesh(mesh_of(1, AxisType.Explicit)):
        assert plane.pull().data["x"].unsafe_buffer_pointer() == drawn.unsafe_buffer_pointer()


def test_a_plane_is_counted_updated_and_saved_in_another_meshs_context(tmp_path: Any) -> None:
    plane = off_policy(conduit.Uniform(), mesh=mesh_of(8, AxisType.Explicit))
    with jax.set_mesh(jax.make_mesh((4,), ("other",), devices=jax.devices()[4:])):
        plane.push(columns())
        assert int(np.sum(plane.update_priorities(plane.pull().info, np.ones(16, np.float32)))) == 0
        assert plane.stats().tables["experience"].live_items == 32
        plane.save(tmp_path / "saved")
