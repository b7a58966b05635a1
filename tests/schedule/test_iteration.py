"""Laws of on-policy experience: this iteration only, each item once an epoch, the same mini-batches under every schedule."""

from __future__ import annotations

import time
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conduit_jax as conduit
from conduit_jax.testing import count_traces, delayed
from tests.reference_plane import assert_intact, unit

MINIBATCHES, EPOCHS, UNITS = 4, 3, 2
ITEMS = 32 * UNITS


def plane_with(schedule: Any = "sequential", *, seed: int = 0, **options: Any) -> conduit.ExperiencePlane:
    settings = {"num_minibatches": MINIBATCHES, "num_epochs": EPOCHS, "units_per_iteration": UNITS} | options
    return conduit.ExperiencePlane(algorithm=conduit.OnPolicy(**settings), schedule=schedule, seed=seed)


def iterate(plane: conduit.ExperiencePlane, iterations: int = 3) -> list[list[conduit.Sample]]:
    """Run whole iterations; return their mini-batches on the host."""
    batches = []
    for iteration in range(iterations):
        for part in range(UNITS):
            plane.push(unit(iteration * UNITS + part), version=iteration)
        batches.append([jax.tree.map(np.asarray, sample) for sample in plane.epochs()])
    return batches


def bits(batches: list[list[conduit.Sample]]) -> bytes:
    return b"".join(leaf.tobytes() for leaf in jax.tree.leaves(batches))


@pytest.fixture(scope="module")
def sequential() -> list[list[conduit.Sample]]:
    return iterate(plane_with())


def test_every_epoch_delivers_each_item_of_this_iteration_exactly_once(sequential: list[list[conduit.Sample]]) -> None:
    for iteration, batches in enumerate(sequential):
        assert len(batches) == EPOCHS * MINIBATCHES
        for epoch in range(EPOCHS):
            own = batches[epoch * MINIBATCHES : (epoch + 1) * MINIBATCHES]
            ids = np.concatenate([sample.data["id"] for sample in own])
            np.testing.assert_array_equal(np.sort(ids), iteration * ITEMS + np.arange(ITEMS))


def test_rows_are_delivered_as_they_were_pushed_and_described_truly(sequential: list[list[conduit.Sample]]) -> None:
    for iteration, batches in enumerate(sequential):
        for sample in batches:
            assert_intact(sample.data)
            np.testing.assert_array_equal(sample.info.slot, sample.data["id"] - iteration * ITEMS)
            assert set(sample.info.policy_version) == {iteration}
            assert set(sample.info.table_size) == {ITEMS}
            assert sample.valid.all()
            np.testing.assert_array_equal(sample.weights, 1)


def test_epochs_and_iterations_are_permuted_apart(sequential: list[list[conduit.Sample]]) -> None:
    orders = [
        tuple(np.concatenate([sample.info.slot for sample in batches[epoch * MINIBATCHES : (epoch + 1) * MINIBATCHES]]))
        for batches in sequential
        for epoch in range(EPOCHS)
    ]
    assert len(set(orders)) == len(orders)
    assert tuple(range(ITEMS)) not in orders


ON_POLICY_SCHEDULES = [
    conduit.Schedule(
        overlap_ingestion=ingestion < 1, g_ingestion=ingestion, overlap_delivery=ahead, g_delivery=delivery
    )
    for ingestion in (Fraction(1), Fraction(1, 4), Fraction(3, 4))
    for ahead, delivery in ((False, Fraction(1)), (True, Fraction(1, MINIBATCHES)))
]


@pytest.mark.parametrize("schedule", ["auto", "overlap", *ON_POLICY_SCHEDULES], ids=str)
def test_every_schedule_delivers_the_same_mini_batches_bit_for_bit(
    schedule: Any, sequential: list[list[conduit.Sample]]
) -> None:
    assert bits(iterate(plane_with(schedule))) == bits(sequential)


def test_the_floats_of_hooks_are_the_same_under_every_schedule() -> None:
    runs = []
    for schedule in ON_POLICY_SCHEDULES:
        plane = plane_with(schedule)
        plane.register_ingestion(lambda unit: {"x": jnp.exp(-unit["large"] / 40) @ jnp.linspace(0, 1, 260)})
        plane.register_finalize(lambda records: {"x": (records["x"] - records["x"].mean()) / records["x"].std()})
        plane.register_delivery(lambda data: {"x": jnp.log1p(jnp.abs(data["x"])) * 0.37 + 0.1})
        runs.append(bits(iterate(plane, 2)))
    assert len(set(runs)) == 1


@pytest.mark.parametrize(("share", "waiting"), [(Fraction(1, 4), [0, 0]), (Fraction(3, 4), [1, 0])])
def test_a_share_of_an_iteration_is_ingested_as_soon_as_it_is_there(share: Fraction, waiting: list[int]) -> None:
    plane = plane_with(conduit.Schedule(overlap_ingestion=True, g_ingestion=share))
    seen = []
    for part in range(UNITS):
        plane.push(unit(part))
        seen.append(plane.stats().tables["experience"].waiting_units)
    assert seen == waiting


def test_an_iteration_whose_finalize_fails_is_kept(sequential: list[list[conduit.Sample]]) -> None:
    plane = plane_with()

    @plane.register_finalize
    def pick(records: dict[str, jax.Array], context: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return jax.tree.map(lambda leaf: leaf + context["zero"].astype(leaf.dtype), records)

    plane.build(unit(0), context={"zero": jnp.int32(0)})
    plane.push(unit(0), version=0, context={"zero": jnp.int32(0)})
    plane.push(unit(1), version=0, context={"zero": jnp.int32(0)})
    with pytest.raises((KeyError, conduit.HookError), match="zero"):
        plane.epochs(context={"one": jnp.int32(0)})
    kept = [jax.tree.map(np.asarray, sample) for sample in plane.epochs(context={"zero": jnp.int32(0)})]
    assert bits([kept]) == bits(sequential[:1])


def test_delays_change_no_bit_and_another_seed_changes_the_order(sequential: list[list[conduit.Sample]]) -> None:
    slow = plane_with()
    slow.build(unit(0))
    with delayed(slow, pause=time.sleep, seed=2):
        assert bits(iterate(slow)) == bits(sequential)
    assert bits(iterate(plane_with(seed=1))) != bits(sequential)


@pytest.mark.parametrize("axes", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto])
def test_on_a_mesh_the_same_mini_batches_arrive_split_over_its_data_axis(
    axes: Any, sequential: list[list[conduit.Sample]]
) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axes,))
    algorithm = conduit.OnPolicy(num_minibatches=MINIBATCHES, num_epochs=EPOCHS, units_per_iteration=UNITS)
    plane = conduit.ExperiencePlane(algorithm=algorithm, mesh=mesh, seed=0)
    with jax.set_mesh(mesh):
        plane.push(unit(0), version=0)
        plane.push(unit(1), version=0)
        samples = list(plane.epochs())
    assert all(leaf.sharding.mesh == mesh and leaf.sharding.spec[0] == "data" for leaf in jax.tree.leaves(samples[0]))
    assert bits([jax.tree.map(np.asarray, samples)]) == bits(sequential[:1])


def test_a_user_mesh_of_other_devices_does_not_disturb_an_iteration(sequential: list[list[conduit.Sample]]) -> None:
    with jax.set_mesh(jax.make_mesh((8,), ("other",))):
        batches = iterate(plane_with(), iterations=1)
    assert bits(batches) == bits(sequential[:1])


def test_finalize_runs_once_an_iteration_over_all_its_units_in_order() -> None:
    plane, calls = plane_with(), []

    @plane.register_finalize
    def advantages(records: dict[str, jax.Array], scale: jax.Array) -> dict[str, jax.Array]:
        ids = records["id"].astype(jnp.float32)
        return {"id": records["id"], "later": jnp.cumsum(ids[::-1], axis=0)[::-1] * scale}

    plane.build(unit(0), context=jnp.float32(2))
    pipeline = plane._tables["experience"].pipeline
    finalize = pipeline._finalize
    pipeline._finalize = lambda *arguments: calls.append(1) or finalize(*arguments)
    for iteration in range(2):
        for part in range(UNITS):
            plane.push(unit(iteration * UNITS + part), context=jnp.float32(2))
        everything = np.concatenate([unit(iteration * UNITS + part)["id"] for part in range(UNITS)]).astype(np.float32)
        later = np.cumsum(everything[::-1], axis=0)[::-1] * 2
        for sample in plane.epochs(context=jnp.float32(2)):
            want = later.reshape(-1)[np.asarray(sample.info.slot)]
            np.testing.assert_array_equal(np.asarray(sample.data["later"]), want)
        assert len(calls) == iteration + 1


def test_units_of_two_iterations_never_mix() -> None:
    plane = plane_with()
    plane.push(unit(0))
    with pytest.raises(conduit.NotReadyError, match=r"got:  1 units[\s\S]*want: 2"):
        plane.epochs()
    plane.push(unit(1))
    with pytest.raises(conduit.LifecycleError, match=r"units_per_iteration=2[\s\S]*consume plane.epochs"):
        plane.push(unit(2))
    first = plane.epochs()
    next(first)
    plane.push(unit(2))
    plane.push(unit(3))
    second = plane.epochs()
    remaining = np.concatenate([np.asarray(sample.data["id"]) for sample in first])
    assert (remaining < ITEMS).all()
    following = np.concatenate([np.asarray(sample.data["id"]) for sample in second])
    assert ((following >= ITEMS) & (following < 2 * ITEMS)).all()
    with pytest.raises(conduit.NotReadyError):
        plane.epochs()


def test_a_carry_flows_from_unit_to_unit_and_over_iterations() -> None:
    plane = plane_with()

    def running(carry: jax.Array, rollout: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        return carry + 1, {"id": rollout["id"], "unit": jnp.broadcast_to(carry, rollout["id"].shape)}

    plane.register_ingestion(running, init_carry=lambda rollout: jnp.int32(0))
    for batches in iterate(plane):
        for sample in batches:
            np.testing.assert_array_equal(sample.data["unit"], sample.data["id"] // 32)


def test_pushed_device_arrays_stay_usable_although_the_carry_is_donated() -> None:
    plane = plane_with()
    plane.register_ingestion(
        lambda carry, rollout: (rollout["x"], {"x": rollout["x"] + carry}), init_carry=lambda rollout: jnp.zeros((4, 8))
    )
    units = [{"x": jnp.full((4, 8), float(number))} for number in range(UNITS)]
    for one in units:
        plane.push(one)
    assert [float(one["x"][0, 0]) for one in units] == [0.0, 1.0]


def test_delivery_draws_other_random_numbers_for_every_batch_and_the_same_on_every_run() -> None:
    runs = []
    for _ in range(2):
        plane = plane_with(num_epochs=2)
        plane.register_delivery(lambda data, key: {"noise": jax.random.bits(key, (len(data["id"]),))})
        runs.append(np.stack([sample.data["noise"] for sample in iterate(plane, 2)[0]]))
    np.testing.assert_array_equal(*runs)
    assert len(np.unique(runs[0])) == runs[0].size


def test_an_iteration_traces_nothing_after_the_first() -> None:
    plane = plane_with()
    iterate(plane, 1)
    with count_traces() as traces:
        iterate(plane, 20)
    assert (traces.count, traces.compiled) == (0, 0)


@pytest.mark.parametrize(
    ("register", "hook", "match"),
    [
        ("register_finalize", lambda records: 1 / 0, "ZeroDivisionError"),
        ("register_finalize", lambda records: jax.tree.map(lambda leaf: leaf.sum(), records), "without .T, lanes."),
        ("register_delivery", lambda data: data["missing"], "KeyError"),
        ("register_delivery", lambda data: data["id"].sum(), "without the batch axis"),
    ],
)
def test_hooks_that_cannot_work_are_refused_at_the_first_push(register: str, hook: Any, match: str) -> None:
    plane = plane_with()
    getattr(plane, register)(hook)
    with pytest.raises(conduit.HookError, match=match):
        plane.push(unit(0))


def test_items_that_do_not_divide_into_mini_batches_are_refused_with_the_nearest_numbers() -> None:
    with pytest.raises(conduit.ConfigError, match=r"64 items, num_minibatches=5[\s\S]*60 or 65 items"):
        plane_with(num_minibatches=5).push(unit(0))


def test_replay_calls_are_refused_with_what_to_use_instead() -> None:
    plane = plane_with()
    plane.push(unit(0))
    with pytest.raises(conduit.LifecycleError, match=r"plane.epochs\(\)"):
        plane.pull()
    with pytest.raises(conduit.ConfigError, match="no replay"):
        conduit.ExperiencePlane(algorithm=conduit.OnPolicy(num_minibatches=1), replay=conduit.ReplayConfig(capacity=8))
