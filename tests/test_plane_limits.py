"""Laws of a plane's limiters: the account, what they let in and out, who waits, what can never work."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conduit_jax as conduit
from conduit_jax.replay.rate_limiter import RateLimiter, make_limiter
from conduit_jax.schedule.flow import check_flow
from conduit_jax.schedule.gates import Account, Gate
from tests.reference_gated import (
    BATCH,
    LANES,
    OLDEST,
    QUEUE,
    RATIO,
    TABLES,
    UNIT,
    assert_account_holds,
    config_of,
    plane_of,
    table_of,
    unit,
)

# ---------------------------------------------------------------- the account


@pytest.mark.parametrize("name", ["queue", "ring, ratio", pytest.param("prioritized twice", marks=pytest.mark.slow)])
def test_where_program_order_decides_nothing_is_read_from_the_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = plane_of(config_of(**TABLES[name]))
    plane.build(unit(0))
    pipeline = table_of(plane)

    def read() -> list[Account]:
        raise AssertionError("the device was asked")

    monkeypatch.setattr(pipeline, "_accounts", read)
    for number in range(6):
        if pipeline.ledger.gate.admits(pipeline.ledger.account):
            plane.push(unit(number))
        while plane.ready() and pipeline.ledger.drawn_batches < 3 * number:
            plane.pull()
    assert all(least == most for least, most in pipeline.ledger.account)
    monkeypatch.undo()
    assert_account_holds(plane)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.sampled_from(["insert", "sample", "delete"]), max_size=30),
    times=st.integers(0, 3), capacity=st.integers(2, 9), unit=st.integers(1, 4), batch=st.integers(1, 4),
    counted=st.booleans(), data=st.data(),
)  # fmt: skip
def test_bounds_hold_whatever_items_come_go_and_are_drawn(
    steps: list[str], times: int, capacity: int, unit: int, batch: int, counted: bool, data: st.DataObject
) -> None:
    """Against a table in plain Python in which a hypothesis chooses every item that is drawn or removed."""
    limiter = make_limiter(RATIO.limits, batch_size=1)
    gate, account = Gate(limiter, capacity, unit, batch, times, counted), Account()
    items: list[int] = []  # draws left of each
    debt = 0
    for step in steps:
        if step == "insert":
            real = data.draw(st.integers(0, unit)) if counted else unit
            for _ in range(real):
                items.append(times)
                if len(items) > capacity:
                    items.pop(data.draw(st.integers(0, len(items) - 1)))
            debt, account = debt + real * limiter.p, gate.inserted(account)
        elif step == "sample":
            if not items or (times and sum(items) < batch and len(items) < batch):
                continue
            for _ in range(batch if times else 0):
                chosen = data.draw(st.integers(0, len(items) - 1))
                items[chosen] -= 1
                items = [left for left in items if left]
            debt, account = debt - batch * limiter.q, gate.sampled(account)
        elif items:
            named = data.draw(st.integers(0, 3))
            for _ in range(min(named, data.draw(st.integers(0, len(items))))):
                items.pop(data.draw(st.integers(0, len(items) - 1)))
            account = gate.deleted(account, named)
        exact = Account((len(items),) * 2, (debt,) * 2, (sum(items),) * 2)
        for (least, most), (value, _) in zip(account, exact, strict=True):
            assert least <= value <= most
        for verdict in (gate.admits, gate.allows):
            assert verdict(exact) is not None
            assert verdict(account) in (None, verdict(exact))


# ---------------------------------------------------------------- limiters


def test_a_queue_hands_over_each_item_once_in_order_and_blocks_when_full() -> None:
    plane, seen = plane_of(config_of(**QUEUE, storage="slots")), []
    plane.push(unit(0))
    with pytest.raises(conduit.BackpressureError, match=r"16 > 12[\s\S]*plane\.pull\(\) first"):
        plane.push(unit(1))
    for number in range(1, 4):
        seen += [np.asarray(plane.pull().data["id"]) for _ in range(2)]
        with pytest.raises(conduit.NotReadyError, match=r"sampling 4[\s\S]*push more"):
            plane.pull()
        plane.push(unit(number))
    np.testing.assert_array_equal(np.concatenate(seen), np.arange(3 * UNIT))
    assert plane.stats().tables["experience"].live_items == UNIT


def test_a_ratio_keeps_pushes_and_pulls_near_each_other() -> None:
    limiter = conduit.SampleToInsertRatio(samples_per_insert=0.5, min_size=8, error_buffer=12)
    plane, number = plane_of(config_of(capacity=64, limiter=limiter)), 0
    for _ in range(4):
        while True:
            try:
                plane.push(unit(number))
            except conduit.BackpressureError:
                break
            number += 1
        assert number * UNIT * 0.5 - plane.stats().tables["experience"].drawn_batches * BATCH in range(13, 17)
        while plane.ready():
            plane.pull()


def test_who_waits_is_woken_by_the_other_thread_and_gives_up_at_its_deadline() -> None:
    plane, seen = plane_of(config_of(**QUEUE)), []
    plane.push(unit(0))

    def consume() -> None:
        for _ in range(8):
            seen.append(np.asarray(plane.pull(deadline_s=30).data["id"]))

    thread = threading.Thread(target=consume)
    thread.start()
    producer = plane.producers(1, deadline_s=30)
    for number in range(1, 4):
        producer.push(0, unit(number))
    thread.join(60)
    np.testing.assert_array_equal(np.concatenate(seen), np.arange(4 * UNIT))
    with pytest.raises(conduit.NotReadyError):
        plane.pull(deadline_s=0.01)
    plane.push(unit(4))
    with pytest.raises(conduit.BackpressureError, match=r"for 0\.01 s"):
        plane.push(unit(5), deadline_s=0.01)


@pytest.mark.parametrize("order", ["program", "arrival"])
def test_a_host_hook_is_not_run_for_a_unit_that_is_kept_out(order: str) -> None:
    queue, ran = conduit.HostQueue(order=order, deadline_s=0.3), []
    plane = plane_of(config_of(**QUEUE), host_queue=queue)

    @plane.register_ingestion(host=True)
    def hook(rollout: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        ran.append(int(rollout["id"][0, 0]))
        return rollout

    plane.push(unit(0))
    while not table_of(plane).ledger.pushed_units:
        time.sleep(0.01)  # its insert compiles
    with pytest.raises(conduit.BackpressureError, match="rate limiter"):
        plane.push(unit(1)), plane.flush()
    np.testing.assert_array_equal(np.asarray(plane.pull().data["id"]), np.arange(BATCH))
    plane.push(unit(1)), plane.flush()
    assert ran == [0, UNIT]
    assert plane.stats().tables["experience"].inserted_items == 2 * UNIT


def test_a_hook_that_counts_on_the_device_is_let_in_by_the_most_it_may_bring() -> None:
    plane = plane_of(config_of(**QUEUE))
    plane.register_ingestion(lambda rollout: conduit.Records(rollout, jnp.int32(1)))
    plane.push(unit(0)), plane.push(unit(1))
    assert plane.stats().tables["experience"].inserted_items == 2 * LANES
    with pytest.raises(conduit.BackpressureError, match=r"16 > 12"):
        plane.push(unit(2))
    plane.pull(), plane.pull()
    assert not plane.ready()


def test_reset_empties_table_and_limiter_and_drops_what_was_drawn_ahead() -> None:
    plane = plane_of(config_of(**OLDEST), schedule="overlap")
    plane.push(unit(0)), plane.push(unit(1))
    old = plane.pull()
    plane.reset()
    assert not plane.ready()
    assert int(np.sum(plane.update_priorities(old.info, np.ones(BATCH, np.float32)))) == 0
    plane.push(unit(5))
    assert set(np.asarray(plane.pull().data["id"]).tolist()) <= set(range(5 * UNIT, 6 * UNIT))
    stats = plane.stats().tables["experience"]
    assert (stats.dropped_batches, stats.inserted_items, stats.live_items) == (1, 3 * UNIT, UNIT)


def test_a_ring_is_reset_too_and_its_count_of_inserts_goes_on() -> None:
    plane = plane_of(config_of(capacity=16))
    for number in range(3):
        plane.push(unit(number))
    plane.reset()
    with pytest.raises(conduit.NotReadyError, match="0 items"):
        plane.pull()
    plane.push(unit(7))
    assert set(np.asarray(plane.pull().data["id"]).tolist()) <= set(range(7 * UNIT, 8 * UNIT))
    assert plane.stats().tables["experience"].inserted_items == 4 * UNIT


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("config", "options", "match"),
    [
        ({"limiter": conduit.Queue(size=3)}, {}, r"never allow a whole batch[\s\S]*batch of at most 3"),
        ({"limiter": conduit.Stack(size=2)}, {}, r"never allow a whole batch"),
        ({**QUEUE, "limiter": RATIO}, {}, r"more samples per insert[\s\S]*1\.5, max_times_sampled=1"),
        (QUEUE, {"schedule": "overlap"}, r"sequential order[\s\S]*schedule=overlap[\s\S]*'auto'"),
        (QUEUE, {"schedule": "fused"}, r"sequential order"),
        (QUEUE, {"schedule": conduit.Schedule(g_ingestion=2)}, r"sequential order"),
        (QUEUE, {"schedule": [(0, conduit.Schedule()), (5, conduit.Schedule(g_delivery=2))]}, r"sequential order"),
        (QUEUE, {"algorithm": conduit.BoundedLag(batch_size=4, max_policy_lag=2)}, r"bounded lag[\s\S]*Queue"),
        ({"storage": "slots"}, {"algorithm": conduit.BoundedLag(batch_size=4, max_policy_lag=2)}, r"ring without"),
    ],
)  # fmt: skip
def test_a_table_that_can_never_work_is_refused_when_it_is_set(config: Any, options: Any, match: str) -> None:
    usual = {"algorithm": conduit.OffPolicy(batch_size=BATCH), "replay": config_of(**config)}
    with pytest.raises(conduit.ConfigError, match=match):
        conduit.ExperiencePlane(**usual | options)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"limiter": conduit.Queue(size=7)}, r"wait for each other[\s\S]*units of 8 items, batches of 4"),
        (
            {"limiter": conduit.SampleToInsertRatio(samples_per_insert=1, min_size=10, error_buffer=(-12, 8))},
            r"never add up to min_size",
        ),
        ({"storage": "slots", "growth": conduit.Growth(axes={"id": {0: 3}})}, r"Only a ring[\s\S]*grows"),
    ],
)
def test_rates_that_would_block_each_other_are_refused_when_the_unit_is_known(config: Any, match: str) -> None:
    plane = plane_of(config_of(**config))
    with pytest.raises(conduit.ConfigError, match=match):
        plane.push(unit(0))


@settings(max_examples=200)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 40), st.integers(1, 3), st.integers(1, 3), st.randoms())
def test_what_is_not_refused_never_blocks_itself_and_what_is_always_does(
    unit: int, batch: int, room: int, p: int, q: int, chance: Any
) -> None:
    gate = Gate(RateLimiter(p, q, 1, 0, room), 10**6, unit, batch)
    try:
        check_flow(gate)
        refused = False
    except conduit.ConfigError:
        refused = True
    account, stuck = Account(), False
    for _ in range(300):
        moves = [
            move for move, verdict in ((gate.inserted, gate.admits), (gate.sampled, gate.allows)) if verdict(account)
        ]
        if not moves:
            stuck = True
            break
        account = chance.choice(moves)(account)
    assert stuck == refused


def test_calls_that_do_not_fit_are_refused_and_nothing_changes() -> None:
    plane, ring = plane_of(config_of(**OLDEST)), plane_of(config_of(capacity=16))
    for one in (plane, ring):
        one.push(unit(0))
    sample = plane.pull()
    with pytest.raises(conduit.SpecError, match=r"info of a batch[\s\S]*plane\.delete\(sample\.info\)"):
        plane.delete(sample)  # type: ignore[arg-type]
    with pytest.raises(conduit.ConfigError, match=r'cannot delete single items[\s\S]*storage="slots"'):
        ring.delete(ring.pull().info)
    with pytest.raises(conduit.ConfigError, match="Only a ring"):
        plane.grow(capacity=50)
    lag = conduit.ExperiencePlane(algorithm=conduit.BoundedLag(batch_size=4, max_policy_lag=1))
    lag.push(unit(0))
    with pytest.raises(conduit.ConfigError, match="bounded lag is not reset"):
        lag.reset()
    on_policy = conduit.ExperiencePlane(algorithm=conduit.OnPolicy(num_minibatches=2))
    on_policy.push(unit(0))
    for call in (on_policy.reset, lambda: on_policy.delete(sample.info)):
        with pytest.raises(conduit.LifecycleError, match="replayed experience"):
            call()
    assert bool(np.asarray(plane.pull().valid).all())


@pytest.mark.parametrize("operation", ["insert", "sample"])
def test_a_table_where_nothing_can_go_on_says_so(operation: str) -> None:
    plane = plane_of(config_of(**QUEUE | {"storage": "slots"}))
    plane.push(unit(0))
    infos = [plane.pull().info]
    plane.push(unit(1))
    control = table_of(plane).state.control
    places = np.asarray(control.table.live.places)[0, 0, : UNIT + BATCH].astype(np.int32)
    generation = np.asarray(control.items.generation)[0][places]
    everything = jax.tree.map(np.asarray, infos[0])
    named = np.resize(places, 3 * BATCH)
    words = np.resize(everything.words, (3 * BATCH, everything.words.shape[1]))
    everything = conduit.SampleInfo.of_words(words, everything.present)._replace(
        slot=named, generation=np.resize(generation, 3 * BATCH)
    )
    assert int(np.sum(plane.delete(everything))) == UNIT + BATCH
    kind: Any = conduit.BackpressureError if operation == "insert" else conduit.NotReadyError
    with pytest.raises(kind, match=r"plane\.reset\(\)"):
        plane.push(unit(2)) if operation == "insert" else plane.pull()
    plane.reset()
    plane.push(unit(3))
    assert np.asarray(plane.pull().data["id"]).tolist() == list(range(3 * UNIT, 3 * UNIT + BATCH))
