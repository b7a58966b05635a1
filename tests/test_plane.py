"""Laws of the plane's front door: life, tables, hooks in their forms, integrity, statistics, threads."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conduit_jax as conduit
from tests.reference_plane import assert_intact, unit

ROOT = Path(__file__).resolve().parent.parent


def make_plane(
    capacity: int = 64, batch_size: int = 8, *, schedule: str = "sequential", **config: Any
) -> conduit.ExperiencePlane:
    return conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=batch_size),
        replay=conduit.ReplayConfig(capacity=capacity, **config),
        schedule=schedule,
    )


def columns(value: float = 1.0, lanes: int = 8) -> dict[str, jax.Array]:
    return {"x": jnp.full((4, lanes), value)}


# ---------------------------------------------------------------- integrity


DTYPES = ("bool", "uint8", "int8", "int16", "float16", "bfloat16", "int32", "uint32", "float32")


@pytest.mark.parametrize(
    ("dtypes", "width"),
    [
        (DTYPES, 3),
        (DTYPES, 1100),
    ],
)
def test_every_bit_pattern_comes_back_as_it_was_pushed(dtypes: tuple[str, ...], width: int) -> None:
    draws = np.random.default_rng(width)
    pushed: dict[str, np.ndarray] = {"where": np.arange(32, dtype=np.int32).reshape(4, 8)}
    for name in dtypes:
        raw = draws.integers(0, 256, (4, 8, width, jnp.dtype(name).itemsize), np.uint8)
        pushed[name] = raw[..., 0] > 127 if name == "bool" else raw.view(jnp.dtype(name))[..., 0]
    plane = make_plane(capacity=32, batch_size=32)
    plane.push(pushed)
    data = plane.pull().data
    where = np.asarray(data["where"])
    assert len(set(where)) > 10
    for name in dtypes:
        assert data[name].dtype == jnp.dtype(name)
        assert np.asarray(data[name]).tobytes() == pushed[name].reshape(32, width)[where].tobytes(), name


def test_nested_trees_and_rollouts_keep_their_structure() -> None:
    plane = make_plane()
    tree = {"observation": (jnp.ones((4, 8, 2)), [jnp.zeros((4, 8), jnp.uint8)]), "none": None}
    plane.push(tree)
    data = plane.pull().data
    assert jax.tree.structure(data) == jax.tree.structure(tree)
    assert data["observation"][0].shape == (8, 2)


# ---------------------------------------------------------------- life


def test_a_plane_is_built_once_by_the_first_push_or_by_hand() -> None:
    plane = make_plane()
    assert not plane.ready()
    assert "not built yet" in plane.explain()
    plane.build(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), columns()))
    with pytest.raises(conduit.LifecycleError, match="built already"):
        plane.build(columns())
    plane.push(columns())
    assert plane.ready()
    assert "placement" in plane.explain()
    assert "schedule" in plane.explain()


@pytest.mark.parametrize("register", ["register_ingestion", "register_delivery"])
def test_registering_after_build_is_refused(register: str) -> None:
    plane = make_plane()
    plane.push(columns())
    with pytest.raises(conduit.LifecycleError, match=f"{register} came after[\\s\\S]*before the first push"):
        getattr(plane, register)(lambda data: data)


CALLS = {
    "push": lambda plane: plane.push(columns()),
    "pull": lambda plane: plane.pull(),
    "ready": lambda plane: plane.ready(),
    "update_priorities": lambda plane: plane.update_priorities(None, None),
    "flush": lambda plane: plane.flush(),
    "stats": lambda plane: plane.stats(),
    "epochs": lambda plane: plane.epochs(),
    "build": lambda plane: plane.build(columns()),
    "register_delivery": lambda plane: plane.register_delivery(lambda data: data),
}


@cache
def closed_plane() -> conduit.ExperiencePlane:
    plane = make_plane()
    plane.push(columns())
    plane.close()
    return plane


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_plane_refuses_every_call_by_name(call: str) -> None:
    plane = closed_plane()
    plane.close()  # closing again does nothing
    with pytest.raises(conduit.LifecycleError, match=f"{call} was called on a closed plane"):
        CALLS[call](plane)


def test_pulling_before_any_push_says_what_is_missing() -> None:
    with pytest.raises(conduit.LifecycleError, match=r"pull needs a built table[\s\S]*push a rollout first"):
        make_plane().pull()


def test_leaving_the_context_closes_and_releases_the_buffers() -> None:
    gc.collect()  # what earlier tests left is not to go in between
    before = len(jax.live_arrays())
    with make_plane(sampler=conduit.Prioritized()) as plane:
        plane.push(columns())
        assert len(jax.live_arrays()) > before + 3
    with pytest.raises(conduit.LifecycleError):
        plane.pull()
    assert len(jax.live_arrays()) <= before + 2


def test_a_closed_plane_explains_itself_as_before() -> None:
    with make_plane() as plane:
        plane.push(columns())
        before = plane.explain()
    assert "placement" in before
    assert plane.explain() == before


def test_an_exception_inside_the_context_is_not_replaced_by_one_of_closing() -> None:
    plane = make_plane(sampler=conduit.Prioritized())

    def fail_inside() -> None:
        with plane:
            plane.push(columns())
            plane.update_priorities(plane.pull().info, jnp.full((8,), jnp.nan))  # would raise at a clean close
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    with pytest.raises(conduit.LifecycleError):
        plane.push(columns())


def test_closing_raises_what_device_values_did_wrong_and_still_closes() -> None:
    plane = make_plane(sampler=conduit.Prioritized())
    plane.push(columns())
    plane.update_priorities(plane.pull().info, jnp.full((8,), jnp.nan))
    with pytest.raises(conduit.ValueRefusedError):
        plane.close()
    with pytest.raises(conduit.LifecycleError):
        plane.push(columns())


FORKING = """
import os, sys, warnings
warnings.simplefilter("ignore")
import jax.numpy as jnp
import conduit_jax as conduit
plane = conduit.ExperiencePlane(algorithm=conduit.OffPolicy(batch_size=8), replay=conduit.ReplayConfig(capacity=64))
plane.push({"x": jnp.ones((4, 8))})
plane.flush()
rollout, sample = {"x": jnp.ones((4, 8))}, plane.pull()
weights = sample.weights
child = os.fork()
if child == 0:
    refused = 0
    for call in (
        lambda: plane.push(rollout), plane.pull, lambda: plane.pull_group(2), plane.ready, plane.flush, plane.stats,
        lambda: plane.update_priorities(sample.info, weights), lambda: plane.register_delivery(len),
    ):
        try:
            call()
        except conduit.LifecycleError as error:
            refused += "forked child" in str(error) and "spawn" in str(error)
    plane.close()
    os._exit(refused)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 8, status
plane.pull()
print("parent goes on")
"""


def test_a_forked_child_is_refused_and_the_parent_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert done.stdout.strip() == "parent goes on", done.stderr


# ---------------------------------------------------------------- tables


def test_tables_are_apart_by_name_in_data_draws_and_statistics() -> None:
    tables = {
        "demonstrations": conduit.ReplayConfig(capacity=64),
        "online": conduit.ReplayConfig(capacity=32, min_size=32),
    }
    plane = conduit.ExperiencePlane(algorithm=conduit.OffPolicy(batch_size=8), replay=tables, schedule="sequential")
    plane.register_delivery(lambda data: {"x": data["x"] * 10}, table="online")
    for _ in range(2):
        plane.push(columns(1.0), table="demonstrations")
        plane.push({"x": jnp.full((4, 8), 2.0), "extra": jnp.zeros((4, 8, 3))}, table="online")
    np.testing.assert_array_equal(np.asarray(plane.pull(table="demonstrations").data["x"]), 1)
    online = plane.pull(table="online")
    np.testing.assert_array_equal(np.asarray(online.data["x"]), 20)
    stats = plane.stats().tables
    assert {name: table.live_items for name, table in stats.items()} == {"demonstrations": 64, "online": 32}
    with pytest.raises(conduit.ConfigError, match="did you mean 'online'"):
        plane.push(columns(), table="onlin")
    with pytest.raises(conduit.ConfigError, match="demonstrations, online"):
        plane.push(columns())


def test_two_tables_with_equal_data_draw_apart() -> None:
    tables = {"one": conduit.ReplayConfig(capacity=64), "two": conduit.ReplayConfig(capacity=64)}
    plane = conduit.ExperiencePlane(algorithm=conduit.OffPolicy(batch_size=32), replay=tables)
    for name in tables:
        plane.push(columns(), table=name)
    assert not np.array_equal(plane.pull(table="one").info.slot, plane.pull(table="two").info.slot)


# ---------------------------------------------------------------- versions, statistics, keys


@pytest.mark.parametrize("stamped", [False, True])
def test_a_row_tells_the_version_it_was_made_with(stamped: bool) -> None:
    plane = make_plane(capacity=128, batch_size=64)
    if stamped:
        plane.register_ingestion(lambda rollout: {"x": rollout.reward})
    for version in (3, 2**32 - 1):
        x = jnp.full((4, 8), float(version % 100))
        none = jnp.zeros((4, 8), bool)
        rollout = conduit.Rollout(x, x, x, none, none, policy_version=jnp.uint32(version)) if stamped else {"x": x}
        plane.push(rollout, version=0 if stamped else version)
    sample = plane.pull()
    want = np.where(np.asarray(sample.data["x"]) == 3, 3, 2**32 - 1)
    np.testing.assert_array_equal(np.asarray(sample.info.policy_version), want)
    assert len(set(want)) == 2


def test_capacity_that_does_not_divide_is_rounded_up_and_said() -> None:
    plane = make_plane(capacity=50)
    plane.push(columns())
    assert plane.stats().tables["experience"].capacity_items == 56
    assert "asked for 50, rounded up" in plane.explain()


def test_statistics_are_plain_data_and_count_what_was_lost() -> None:
    plane = make_plane(capacity=32, sampler=conduit.Prioritized())
    plane.push(columns())
    old = plane.pull()
    plane.push(columns())  # overwrites every item of the batch
    assert int(plane.update_priorities(old.info, np.ones(8, np.float32))[0]) == 0
    table = plane.stats().as_dict()["tables"]["experience"]
    assert table["stale_updates"] == len(set(np.asarray(old.info.slot).tolist())) or table["stale_updates"] == 8
    assert (table["live_items"], table["inserted_items"], table["pushed_units"]) == (32, 64, 2)
    assert plane.stats().deterministic


def test_iteration_keys_differ_from_each_other_and_repeat_with_the_seed() -> None:
    data = {int(i): jax.random.key_data(make_plane().iteration_key(i)).tolist() for i in range(5)}
    assert len({tuple(words) for words in data.values()}) == 5
    assert jax.random.key_data(make_plane().iteration_key(3)).tolist() == data[3]


# ---------------------------------------------------------------- threads


def run_threads(*bodies: Any) -> list[BaseException]:
    errors: list[BaseException] = []

    def guarded(body: Any) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return errors


@pytest.mark.parametrize("schedule", ["sequential", "overlap"])
def test_one_thread_pushing_and_one_pulling_get_only_whole_rows(schedule: str) -> None:
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=16),
        replay=conduit.ReplayConfig(capacity=64, sampler=conduit.Prioritized()),
        schedule=schedule,
    )
    plane.push(unit(0))
    plane.update_priorities(plane.pull().info, np.ones(16, np.float32))  # compiles
    stop, pulled = time.monotonic() + 1.0, []

    def produce() -> None:
        number = 1
        while time.monotonic() < stop:
            plane.push(unit(number))
            number += 1

    def consume() -> None:
        while time.monotonic() < stop:
            sample = plane.pull()
            pulled.append(jax.tree.map(np.asarray, sample.data))
            plane.update_priorities(sample.info, np.ones(16, np.float32))

    assert run_threads(produce, consume) == []
    for data in pulled:
        assert_intact(data)
    assert len(pulled) > 10
    assert len(np.unique(np.concatenate([data["id"] for data in pulled]))) > 64, "the consumer never saw a new item"


def test_threads_may_race_to_the_first_push() -> None:
    plane, start = make_plane(capacity=256), threading.Barrier(4)

    def produce() -> None:
        start.wait()
        plane.push(columns())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_threads(*[produce] * 4) == []
    assert plane.stats().tables["experience"].pushed_units == 4
