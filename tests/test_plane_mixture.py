"""Laws of a plane that draws from several tables: its batches are the rows that each table delivers alone, joined."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conduit_jax as conduit
from conduit_jax.testing import compiled_facts
from tests.reference_items import unit

BATCH, SHARES = 32, {"demonstrations": 8, "experience": 24}
PRIORITIZED = conduit.Prioritized(exponent=0.7)
TABLES = {
    "demonstrations": conduit.ReplayConfig(capacity=48, sampler=PRIORITIZED),
    "experience": conduit.ReplayConfig(capacity=96, min_size=24, sampler=PRIORITIZED),
}
ONLINE = "experience"


def mixture(**tables: Any) -> conduit.Mixture:
    return conduit.Mixture(tables=TABLES | tables, proportions={"demonstrations": 1, "experience": 3})


def plane_of(replay: Any = None, batch_size: int = BATCH, **options: Any) -> conduit.ExperiencePlane:
    options = {"schedule": "sequential"} | options
    algorithm = conduit.OffPolicy(batch_size=batch_size)
    return conduit.ExperiencePlane(algorithm=algorithm, replay=mixture() if replay is None else replay, **options)


class Alone:
    """Each table of a mixture in a plane of its own, with its share of the batch; rows are joined on the host, by shard."""

    def __init__(self, tables: dict[str, conduit.ReplayConfig] = TABLES, shards: int = 1, **options: Any):
        self._shards = shards
        self.planes = {name: plane_of({name: own}, SHARES[name], **options) for name, own in tables.items()}

    def push(self, rollout: Any, table: str = ONLINE, version: int = 0) -> None:
        self.planes[table].push(rollout, table=table, version=version)

    def ready(self) -> bool:
        return all(plane.ready(table=name) for name, plane in self.planes.items())

    def pull(self) -> conduit.Sample:
        parts = [jax.tree.map(np.asarray, plane.pull(table=name)) for name, plane in self.planes.items()]
        self.infos = [part.info for part in parts]
        numbered = [
            part._replace(
                info=part.info._replace(
                    table=np.full(part.info.shape, number, np.int32),
                    probability=part.info.probability * np.float32(SHARES[name] / BATCH),
                )
            )
            for number, (name, part) in enumerate(zip(self.planes, parts, strict=True))
        ]
        return jax.tree.map(self._rows, *numbered)

    def update_priorities(self, info: Any, priorities: np.ndarray) -> None:
        for part, own, (name, plane) in zip(self._split(priorities), self.infos, self.planes.items(), strict=True):
            plane.update_priorities(own, part, table=name)

    def _rows(self, *leaves: np.ndarray) -> np.ndarray:
        parts = [np.split(leaf, self._shards) for leaf in leaves]
        return np.concatenate([part for shard in zip(*parts, strict=True) for part in shard])

    def _split(self, values: np.ndarray) -> list[np.ndarray]:
        bounds = np.cumsum([rows // self._shards for rows in SHARES.values()])[:-1]
        by_shard = [np.split(shard, bounds) for shard in np.split(values, self._shards)]
        return [np.concatenate(parts) for parts in zip(*by_shard, strict=True)]


def run(plane: Any, rounds: int = 8, start: int = 0, make: Any = unit) -> list[conduit.Sample]:
    """Push now to one table, now to the other, pull, and give new priorities; return the batches on the host."""
    batches = []
    for number in range(start, start + rounds):
        if number % 3 == 0:
            plane.push(make(number), table="demonstrations", version=number)
        plane.push(make(number), table=ONLINE, version=number)
        if not plane.ready():
            continue
        sample = plane.pull()
        batches.append(jax.tree.map(np.asarray, sample))
        plane.update_priorities(sample.info, (np.asarray(sample.info.slot) * 13 % 7).astype(np.float32))
    return batches


def assert_same(got: list[conduit.Sample], wanted: list[conduit.Sample]) -> None:
    assert len(got) == len(wanted) > 0
    for one, other in zip(got, wanted, strict=True):
        assert jax.tree.structure(one) == jax.tree.structure(other)
        for have, want in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            assert (have.dtype, have.shape) == (want.dtype, want.shape)
            assert have.tobytes() == want.tobytes()


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param("sequential", marks=pytest.mark.slow),
        "overlap",
        pytest.param(conduit.Schedule(g_delivery=2, g_ingestion=2), marks=pytest.mark.slow),
        conduit.Schedule(g_delivery=2, overlap_delivery=True),
    ],
    ids=["sequential", "overlap", "two a call", "two a call, ahead"],
)
def test_rows_are_those_that_each_table_delivers_alone(schedule: Any) -> None:
    plane = plane_of(schedule=schedule)
    batches = run(plane, 10)
    assert_same(batches, run(Alone(schedule=schedule), 10))
    np.testing.assert_array_equal(batches[0].info.table, [0] * 8 + [1] * 24)
    assert {table.delivered_batches for table in plane.stats().tables.values()} == {len(batches)}


@pytest.mark.parametrize("axis_type", [pytest.param("Auto", marks=pytest.mark.slow), "Explicit"])
def test_over_the_devices_of_a_mesh_every_device_has_rows_of_every_table(axis_type: str) -> None:
    kind = getattr(jax.sharding.AxisType, axis_type)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    plane = plane_of(mesh=mesh)
    assert_same(run(plane, 5), run(Alone(shards=8, mesh=mesh), 5))
    with jax.set_mesh(mesh):
        sample = plane.pull()
        plane.update_priorities(sample.info, jnp.ones_like(sample.weights))
    assert [shard.data.shape[0] for shard in sample.data["id"].addressable_shards] == [4] * 8
    np.testing.assert_array_equal(np.asarray(sample.info.table).reshape(8, 4), [[0, 1, 1, 1]] * 8)


def test_joining_and_splitting_ask_for_no_collective() -> None:
    plane = plane_of(mesh=jax.make_mesh((8,), ("data",)))
    run(plane, 3)
    assert plane.mixed is not None
    sample = plane.pull()
    parts = [plane.mixed._pipeline_of(name).prepare((), 1)[0] for name in SHARES]
    programs = [(plane.mixed._join, tuple(parts)), (plane.mixed._split, (sample.info, sample.weights))]
    for program, arguments in programs:
        assert not compiled_facts(program.compiled, *arguments).collectives  # type: ignore[attr-defined]


def test_tables_may_be_in_memories_of_their_own_and_move() -> None:
    plane, alone = plane_of(), Alone()
    assert_same(run(plane, 4), run(alone, 4))
    plane.migrate("pinned_host", table="demonstrations")
    assert_same(run(plane, 4, 4), run(alone, 4, 4))


def test_items_of_several_steps_are_mixed_too() -> None:
    tables = {name: conduit.ReplayConfig(capacity=96, items=conduit.Windows(length=4)) for name in TABLES}
    batches = run(plane_of(mixture(**tables)), 6)
    assert_same(batches, run(Alone(tables), 6))
    assert batches[0].mask.shape == (BATCH, 4)


def test_where_one_table_is_not_ready_nothing_is_drawn_from_any() -> None:
    plane, alone = plane_of(), Alone()
    for one in (plane, alone):
        one.push(unit(0), table="demonstrations")
    assert not plane.ready()
    with pytest.raises(conduit.LifecycleError, match="'experience' without any push"):
        plane.pull()
    tables = {"demonstrations": TABLES["demonstrations"], ONLINE: conduit.ReplayConfig(capacity=96, min_size=60)}
    plane, alone = plane_of(mixture(**tables)), Alone(tables)
    for one in (plane, alone):
        one.push(unit(0), table="demonstrations")
        one.push(unit(1))
    with pytest.raises(conduit.NotReadyError, match=r"'experience' of the mixture[\s\S]*24 items"):
        plane.pull()
    with pytest.raises(conduit.NotReadyError, match=r"'experience' of the mixture[\s\S]*24 items"):
        plane.pull(deadline_s=0.05)
    assert plane.stats().tables["demonstrations"].drawn_batches == 0
    assert_same(run(plane, 4, 2), run(alone, 4, 2))


def test_a_pull_waits_for_whoever_pushes() -> None:
    plane = plane_of()
    for number in range(2):
        plane.push(unit(number), table="demonstrations")
    plane.build(unit(0))
    thread = threading.Timer(0.05, lambda: plane.push(unit(2)))
    thread.start()
    assert np.asarray(plane.pull(deadline_s=30).valid).all()
    thread.join()


def test_whoever_waits_for_a_batch_keeps_nobody_from_a_save_or_a_reset(tmp_path: Any) -> None:
    plane = plane_of()
    run(plane, 3)
    plane.reset(table="demonstrations")
    got: list[conduit.Sample] = []
    thread = threading.Thread(target=lambda: got.append(plane.pull(deadline_s=10)))
    thread.start()
    while not plane.running("demonstrations")._lock._hoping:  # until it waits
        time.sleep(0.001)
    plane.save(tmp_path / "saved")
    plane.reset()
    assert thread.is_alive()
    plane.push(unit(8), table="demonstrations")
    plane.push(unit(9))
    thread.join()
    assert set(np.asarray(got[0].data["id"])[8:]) <= set(unit(9)["id"].reshape(-1))


def test_threads_that_pull_get_whole_batches_each_once() -> None:
    plane, alone = plane_of(), Alone()
    for one in (plane, alone):
        one.push(unit(0), table="demonstrations")
        one.push(unit(1))
    got: list[conduit.Sample] = []
    threads = [threading.Thread(target=lambda: got.extend(plane.pull() for _ in range(5))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = sorted(alone.pull().data["id"].tobytes() for _ in range(15))
    assert sorted(np.asarray(sample.data["id"]).tobytes() for sample in got) == wanted


@pytest.mark.parametrize("schedule", [pytest.param("sequential", marks=pytest.mark.slow), "overlap"])
def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_never_ended(schedule: str, tmp_path: Any) -> None:
    saved, again = plane_of(schedule=schedule), plane_of(schedule=schedule)
    run(saved, 5)
    saved.save(tmp_path)
    again.restore(tmp_path)
    assert_same(run(again, 5, 5), run(saved, 5, 5))


def test_a_checkpoint_of_other_proportions_is_refused_by_name(tmp_path: Any) -> None:
    saved = plane_of()
    run(saved, 3)
    saved.save(tmp_path)
    even = conduit.Mixture(tables=TABLES, proportions=dict.fromkeys(TABLES, 1))
    with pytest.raises(conduit.ConfigError, match=r"rows of a batch\.demonstrations: saved 8, here 16"):
        plane_of(even).restore(tmp_path)
    turned = conduit.Mixture(tables=dict(reversed(TABLES.items())), proportions=mixture().proportions)
    with pytest.raises(conduit.ConfigError, match=r"tables of a batch\[0\]: saved 'demonstrations', here 'experience'"):
        plane_of(turned).restore(tmp_path)
    with pytest.raises(conduit.ConfigError, match="rows of a batch"):
        plane_of(TABLES).restore(tmp_path)


def test_an_update_reaches_each_table_and_rows_in_another_place_reach_none() -> None:
    plane = plane_of()
    for number in range(2):
        plane.push(unit(number), table="demonstrations"), plane.push(unit(number))
    sample = plane.pull()
    applied = plane.update_priorities(sample.info, np.ones(BATCH, np.float32))
    assert {name: int(np.asarray(count).sum()) for name, count in applied.items()} == SHARES  # type: ignore[union-attr]
    turned = jax.tree.map(lambda words: words[::-1], sample.info)
    applied = plane.update_priorities(turned, np.ones(BATCH, np.float32))
    assert sum(int(np.asarray(count).sum()) for count in applied.values()) == 16  # type: ignore[union-attr]
    with pytest.raises(conduit.SpecError, match=r"no info of a batch of the mixture[\s\S]*32 rows"):
        plane.update_priorities(jax.tree.map(lambda words: words[:8], sample.info), np.ones(8, np.float32))
    with pytest.raises(conduit.ValueRefusedError, match="nan"):
        plane.update_priorities(sample.info, np.full(BATCH, np.nan, np.float32))
    bad = jnp.ones(BATCH).at[3].set(jnp.nan)  # a row of the first table: the second refuses its part too
    plane.update_priorities(sample.info, bad)
    assert {table.refused_updates for table in plane.stats().tables.values()} == {1}
    with pytest.raises(conduit.ValueRefusedError):
        plane.check()


def test_deletes_reach_their_own_table() -> None:
    slots = {name: conduit.ReplayConfig(capacity=48, storage="slots") for name in TABLES}
    plane = plane_of(mixture(**slots))
    for name in TABLES:
        plane.push(unit(0), table=name)
    sample = plane.pull()
    deleted = plane.delete(sample.info)
    for number, (name, count) in enumerate(deleted.items()):  # type: ignore[union-attr]
        named = np.unique(np.asarray(sample.info.slot)[np.asarray(sample.info.table) == number])
        assert int(np.asarray(count).sum()) == len(named)
        assert plane.stats().tables[name].live_items == 24 - len(named)
    ring = plane_of()
    for name in TABLES:
        ring.push(unit(0), table=name)
    with pytest.raises(conduit.ConfigError, match="cannot delete single items"):
        ring.delete(ring.pull().info)


def test_a_limiter_of_one_table_holds_the_mixture_back() -> None:
    limiter = conduit.SampleToInsertRatio(samples_per_insert=1.0, min_size=24, error_buffer=48)
    tables = {ONLINE: conduit.ReplayConfig(capacity=96, limiter=limiter)}
    plane, alone = plane_of(mixture(**tables)), Alone(TABLES | tables)
    for one in (plane, alone):
        one.push(unit(0), table="demonstrations"), one.push(unit(1))
    assert plane.is_limited()
    counts = []
    for one in (plane, alone):
        counts.append(0)
        while one.ready():
            one.pull()
            counts[-1] += 1
    assert counts[0] == counts[1] > 0
    assert plane.stats().tables["demonstrations"].drawn_batches == counts[0]


def test_an_emptied_table_holds_the_mixture_back_until_it_is_filled() -> None:
    plane = plane_of(schedule="overlap")
    run(plane, 4)
    plane.reset(table="demonstrations")
    assert not plane.ready()
    plane.push(unit(9), table="demonstrations")
    data = plane.pull().data["id"]
    assert set(np.asarray(data)[:8]) <= set(unit(9)["id"].reshape(-1))


@pytest.mark.parametrize("schedule", ["auto", pytest.param("overlap", marks=pytest.mark.slow)])
def test_a_loop_trains_from_the_mixture_and_pushes_to_the_table_of_experience(schedule: str) -> None:
    algorithm = conduit.OffPolicy(batch_size=BATCH, updates_per_rollout=2)
    plane = conduit.ExperiencePlane(algorithm=algorithm, replay=mixture(), schedule=schedule)
    plane.push({"id": unit(0)["id"]}, table="demonstrations")

    def rollout(actor: jax.Array, policy: jax.Array, key: jax.Array) -> Any:
        return actor + 1, {"id": jnp.full((3, 8), 1000, jnp.int32) + actor}

    def train_step(learner: jax.Array, sample: conduit.Sample) -> Any:
        shown = jnp.where(sample.info.table == 0, sample.data["id"] < 1000, sample.data["id"] >= 1000)
        return learner + shown.all() + 0 * sample.valid.sum(), {}, jnp.ones(BATCH)

    loop = conduit.wrap(train_step, rollout=jax.jit(rollout), policy=lambda learner: learner, plane=plane)
    learner, *_ = loop.run(jnp.int32(0), jnp.int32(0), 40)
    assert int(learner) == loop.updates == 80
    stats = plane.stats()
    assert stats.tables["demonstrations"].pushed_units == 1
    assert not any(change.schedule.fused for change in stats.schedule_history)
    assert loop.measure(learner, jnp.int32(0), iterations=2, blocks=1).blocks == 1


def test_a_loop_warns_of_a_table_that_nobody_has_pushed_to() -> None:
    plane = plane_of()

    def rollout(actor: jax.Array, policy: jax.Array, key: jax.Array) -> Any:
        return actor, {"id": jnp.zeros((3, 8), jnp.int32)}

    loop = conduit.wrap(lambda learner, sample: (learner, {}), rollout=rollout, policy=lambda _: (), plane=plane)
    with pytest.warns(
        UserWarning, match=r"pushes to table 'demonstrations' of the mixture: a loop pushes to 'experience'"
    ):
        loop.run(jnp.int32(0), jnp.int32(0), 2)
    assert loop.updates == 0
    plane.push({"id": unit(0)["id"]}, table="demonstrations")
    loop.run(jnp.int32(0), jnp.int32(0), 2)
    assert loop.updates == 2


def test_a_plane_tells_what_its_batches_are_made_of() -> None:
    plane = plane_of()
    run(plane, 2)
    assert "every batch  8 rows of table 'demonstrations', 24 rows of table 'experience'" in plane.explain()


# ---------------------------------------------------------------- what is refused


def mixed(**changes: Any) -> conduit.Mixture:
    return conduit.Mixture(**{"tables": TABLES, "proportions": {"demonstrations": 1, "experience": 3}} | changes)


def packed() -> conduit.Mixture:
    items = conduit.Episodes(max_length=8, delivery=conduit.Packed(rows=4, row_length=8))
    return mixture(demonstrations=conduit.ReplayConfig(capacity=96, items=items))


grown = conduit.ReplayConfig(capacity=96, growth=conduit.Growth(axes={"hidden": {0: 8}}))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: mixed(tables=[TABLES]), r"named[\s\S]*two dicts"),
        (lambda: mixed(proportions={"experience": 1}), r"a proportion for each[\s\S]*the same names"),
        (lambda: mixed(tables={"experience": TABLES["experience"]}, proportions={"experience": 1}), "several tables"),
        (lambda: mixed(proportions={"experience": 0, "demonstrations": 1}), r"proportions=\)\['experience'\]"),
        (lambda: mixed(proportions={"experience": 10**7, "demonstrations": 1}), "out of range"),
        (lambda: plane_of(mixed(tables={"experience": 1, "demonstrations": 2})), "not described by a ReplayConfig"),
        (lambda: plane_of(mixed(proportions={"experience": 1000, "demonstrations": 1})), "no row in any batch"),
        (lambda: plane_of(mixture(experience=conduit.ReplayConfig(capacity=8))), "smaller than its share"),
        (lambda: plane_of(packed()), r"Packed episodes cannot be mixed[\s\S]*Padded"),
        (lambda: plane_of(mixture(experience=grown)), r"mixture do not grow[\s\S]*'experience'"),
        (lambda: plane_of(schedule="fused"), "does not run fused"),
        (lambda: plane_of(schedule=[(0, conduit.Schedule(fused=4))]), "does not run fused"),
        (
            lambda: conduit.ExperiencePlane(
                algorithm=conduit.BoundedLag(batch_size=8, max_policy_lag=1), replay=mixture()
            ),
            "bounded lag comes from one queue",
        ),
        (
            lambda: conduit.ExperiencePlane(algorithm=conduit.OnPolicy(num_minibatches=1), replay=mixture()),
            "no replay",
        ),
    ],
)  # fmt: skip
def test_what_can_never_work_is_refused_when_it_is_set(make: Any, match: str) -> None:
    with pytest.raises(conduit.ConfigError, match=match):
        make()


def test_a_single_table_of_a_mixture_is_not_drawn_and_the_next_batch_is_as_if_nobody_had_asked() -> None:
    plane, alone = plane_of(), Alone()
    assert_same(run(plane, 3), run(alone, 3))
    for call in (plane.pull, lambda table: plane.pull_group(2, table=table)):
        with pytest.raises(conduit.ConfigError, match=r"drawn together[\s\S]*info\.table"):
            call(table="demonstrations")
    assert_same(run(plane, 3, 3), run(alone, 3, 3))


def test_tables_that_deliver_different_data_are_refused_and_no_batch_is_lost() -> None:
    plane = plane_of()
    plane.push(unit(0), table="demonstrations")
    plane.push({name: leaf for name, leaf in unit(1).items() if name != "hidden"})
    for _ in range(2):
        with pytest.raises(
            conduit.SpecError, match=r"'demonstrations' and 'experience' deliver different data[\s\S]*hidden"
        ):
            plane.pull()
    assert {table.delivered_batches for table in plane.stats().tables.values()} == {0}


def test_a_host_hook_behind_which_nothing_is_joined_is_refused() -> None:
    plane = plane_of()
    plane.register_delivery(lambda data: data, host=True)
    with pytest.raises(conduit.HookError, match="joined on the device"):
        plane.push(unit(0))


def test_shares_that_do_not_divide_over_the_data_axis_are_refused() -> None:
    even = conduit.Mixture(tables=TABLES, proportions={"demonstrations": 1, "experience": 7})
    plane = plane_of(even, mesh=jax.make_mesh((8,), ("data",)))
    with pytest.raises(conduit.ConfigError, match=r"'experience': 28[\s\S]*axis 'data' of size 8"):
        plane.push(unit(0))


def test_tables_built_for_two_learners_are_refused() -> None:
    plane = plane_of()
    plane.push(unit(0), table="demonstrations")
    mesh = jax.make_mesh((8,), ("data",))
    plane.consumed_by(jax.device_put(jnp.zeros(8), jax.NamedSharding(mesh, jax.P("data"))))
    with pytest.raises(conduit.ConfigError, match=r"for one learner[\s\S]*consumed_by"):
        plane.push(unit(0))


def test_a_plane_without_a_table_of_experience_says_how_a_loop_would_push() -> None:
    tables = {"online": TABLES["experience"], "shown": TABLES["demonstrations"]}
    plane = plane_of(conduit.Mixture(tables=tables, proportions=dict.fromkeys(tables, 1)))
    with pytest.raises(conduit.ConfigError, match=r"no default table[\s\S]*table='online'"):
        plane.push(unit(0))
