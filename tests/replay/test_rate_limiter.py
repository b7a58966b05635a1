"""The rate limiter: its inequalities against counters without end, in a ring, near 2**31 and beyond, and what it refuses."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conduit_jax as conduit
from conduit_jax.config import RateLimits
from conduit_jax.errors import ConfigError
from conduit_jax.replay import rate_limiter
from conduit_jax.replay.buffer import make_replay
from conduit_jax.replay.rate_limiter import LimiterState, explain_blocked, make_limiter, to_int, wide
from tests.replay.reference_slots import LimiterModel

INT64 = st.integers(-(2**63), 2**63 - 1)
LIMITERS = {
    "min size": conduit.MinSize(min_size=3),
    "ratio": conduit.SampleToInsertRatio(samples_per_insert=2, min_size=3, error_buffer=5),
    "fraction": conduit.SampleToInsertRatio(samples_per_insert=0.3, min_size=4, error_buffer=1.5),
    "third": conduit.SampleToInsertRatio(samples_per_insert=1 / 3, min_size=2, error_buffer=(-3.25, 2.1)),
    "many": conduit.SampleToInsertRatio(samples_per_insert=Fraction(97, 7), min_size=1, error_buffer=40),
    "queue": conduit.Queue(size=5),
    "queue of one": conduit.Queue(size=1),
    "stack": conduit.Stack(size=3),
}


def signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


@settings(max_examples=200, deadline=None)
@given(
    one=INT64, other=INT64, count=st.integers(0, 2**31 - 1), factor=st.integers(0, 2**31 - 1), near=st.integers(-1, 1)
)
def test_two_words_count_as_64_bits_do(one: int, other: int, count: int, factor: int, near: int) -> None:
    assert to_int(wide(one)) == one
    assert to_int(rate_limiter.add(wide(one), wide(other))) == signed(one + other)
    assert to_int(rate_limiter.subtract(wide(one), wide(other))) == signed(one - other)
    assert to_int(rate_limiter.multiply(jnp.int32(count), factor)) == count * factor
    for bound in (other, signed(one + near)):
        assert bool(rate_limiter.at_least(wide(one), bound)) == (one >= bound)


@cache
def compiled(name: str) -> Any:
    limiter = make_limiter(LIMITERS[name].limits)

    def step(state: LimiterState, size: Any, inserted: Any, sampled: Any, n: Any) -> Any:
        state = limiter.sampled(limiter.inserted(state, inserted), sampled)
        return state, limiter.can_insert(state, size, n), limiter.can_sample(state, size, n)

    return limiter, jax.jit(step)


@pytest.mark.parametrize("name", LIMITERS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_program_allows_what_the_inequalities_allow(name: str, data: st.DataObject) -> None:
    limiter, step = compiled(name)
    model, state = LimiterModel(LIMITERS[name].limits), limiter.init()
    for _ in range(data.draw(st.integers(1, 15))):
        before = (model.inserts, model.samples)
        kind, count = data.draw(st.sampled_from(["insert", "sample", "delete"])), data.draw(st.integers(0, 9))
        if kind == "insert" and model.can_insert(count):
            model.inserts += count
        elif kind == "sample" and model.can_sample(count):
            model.samples += count
        elif kind == "delete":
            model.deletes += min(count, model.inserts - model.deletes)
        size, n = model.inserts - model.deletes, data.draw(st.integers(0, 12))
        state, insert, sample = step(state, size, model.inserts - before[0], model.samples - before[1], n)
        assert (bool(insert), bool(sample)) == (model.can_insert(n), model.can_sample(n))
        assert bool(explain_blocked(limiter, state, size, n, "insert")) != bool(insert)
        assert bool(explain_blocked(limiter, state, size, n, "sample")) != bool(sample)


@pytest.mark.parametrize("name", ["ratio", "fraction", "many"])
@pytest.mark.parametrize("inserts", [2**31 - 2, 2**32 - 3, 2**40])
def test_counts_beyond_2_to_the_31_decide_as_small_ones_do(name: str, inserts: int) -> None:
    """A table that was drained by deletes lets inserts run ahead without bound: the debt stays exact."""
    limits = LIMITERS[name].limits
    _, step = compiled(name)
    p, q = limits.samples_per_insert.numerator, limits.samples_per_insert.denominator
    for ahead in (-3, 0, 3):
        samples = inserts * p // q + ahead
        model = LimiterModel(limits, inserts, samples, inserts - 50)
        state = LimiterState(wide(inserts * p - samples * q))
        for _ in range(3):
            for n in range(0, 120, 7):
                _, insert, sample = step(state, 50, 0, 0, n)
                assert (bool(insert), bool(sample)) == (model.can_insert(n), model.can_sample(n))
            state, _, _ = step(state, 50, 1, 2, 0)
            model.inserts, model.samples, model.deletes = model.inserts + 1, model.samples + 2, model.deletes + 1
    far = LimiterState(wide(inserts * p))  # never sampled: the debt itself is beyond 2**31
    state, insert, sample = step(far, 50, 2**31 - 1, 2**31 - 1, 1)
    assert to_int(state.debt) == inserts * p + (2**31 - 1) * (p - q)
    model = LimiterModel(limits, inserts + 2**31 - 1, 2**31 - 1, inserts + 2**31 - 51)
    assert (bool(insert), bool(sample)) == (model.can_insert(1), model.can_sample(1))


def test_a_limiter_without_bounds_keeps_nothing() -> None:
    limiter = make_limiter(conduit.MinSize(min_size=3).limits)
    assert not jax.tree.leaves(limiter.init())
    assert not limiter.gates_inserts


ITEM = jax.ShapeDtypeStruct((), jnp.int32)


@pytest.mark.parametrize("storage", ["ring", "slots"])
def test_both_storages_gate_whole_chunks_and_batches(storage: str) -> None:
    limiter = conduit.SampleToInsertRatio(samples_per_insert=2, min_size=3, error_buffer=(0, 12))
    replay = make_replay(conduit.ReplayConfig(capacity=8, limiter=limiter, storage=storage), batch_size=4, lanes=2)
    state, model = replay.init(ITEM), LimiterModel(limiter.limits)
    add, draw = jax.jit(replay.add), jax.jit(replay.sample)
    for turn, operation in enumerate("ssaasaaassssaasasa"):
        if operation == "a":
            allowed, live = model.can_insert(4), model.inserts - model.deletes
            assert bool(replay.can_add(state.control, 4)) == allowed
            state, info = add(state, jnp.full((2, 2), turn, jnp.int32))
            assert int(info.added) == (4 if allowed else 0)
            model.inserts += int(info.added)
            model.deletes += max(0, live + int(info.added) - 8)
            assert int(info.evicted) == max(0, live + int(info.added) - 8)
        else:
            allowed = model.can_sample(4)
            control, sample = draw(state.control, state.storage, jax.random.key(turn))
            state = state._replace(control=control)
            assert sample.valid.tolist() == [allowed] * 4
            model.samples += 4 * allowed
        for n in (1, 4, 9):
            assert bool(replay.explain_blocked(state.control, "sample", n)) != model.can_sample(n)
            assert bool(replay.explain_blocked(state.control, "insert", n)) != model.can_insert(n)
    state = state._replace(control=replay.reset(state.control))
    assert bool(replay.can_add(state.control, 3))
    assert to_int(state.control.limiter.debt) == 0


def test_a_block_names_its_inequality_with_the_numbers() -> None:
    limiter = make_limiter(LIMITERS["ratio"].limits)  # min_size 3, differences within [1, 11]
    state = limiter.sampled(limiter.inserted(limiter.init(), jnp.int32(5)), jnp.int32(2))
    assert "8 - 8 = 0 < 1" in explain_blocked(limiter, state, 5, 8, "sample")
    assert "2 < 3" in explain_blocked(limiter, state, 2, 1, "sample")
    assert "8 + 2 * 2 = 12 > 11" in explain_blocked(limiter, state, 5, 2, "insert")
    assert explain_blocked(limiter, state, 5, 7, "sample") == ""
    assert explain_blocked(limiter, state, 5, 1, "insert") == ""


def ratio(**kwargs: Any) -> conduit.SampleToInsertRatio:
    return conduit.SampleToInsertRatio(**{"samples_per_insert": 2, "min_size": 10, "error_buffer": 20, **kwargs})


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: ratio(samples_per_insert=0), "samples_per_insert"),
        (lambda: ratio(samples_per_insert=-1.0), "samples_per_insert"),
        (lambda: ratio(samples_per_insert=float("nan")), "samples_per_insert"),
        (lambda: ratio(samples_per_insert=1e-9), "samples_per_insert"),
        (lambda: ratio(min_size=0), "min_size"),
        (lambda: ratio(error_buffer=float("inf")), "error_buffer"),
        (lambda: ratio(error_buffer="wide"), "error_buffer"),
        (lambda: ratio(error_buffer=(1, 2, 3)), "no pair"),
        (lambda: ratio(error_buffer=1.9), "max_diff - min_diff >= 4"),
        (lambda: ratio(error_buffer=-5), "max_diff - min_diff >= 4"),
        (lambda: ratio(error_buffer=(21, 30)), "at once"),
        (lambda: conduit.Queue(size=0), "Queue"),
        (lambda: conduit.Stack(size=2.5), "Stack"),
        (lambda: conduit.MinSize(min_size=0), "MinSize"),
        (lambda: make_limiter(ratio(error_buffer=2).limits, batch_size=5), "a batch of at most 4"),
        (lambda: make_limiter(ratio(error_buffer=2).limits, partitions=4), "in one of 4 partitions"),
        (lambda: make_limiter(conduit.Queue(size=4).limits, batch_size=5), "a batch of at most 4"),
    ],
)
def test_what_would_deadlock_or_means_nothing_is_refused_when_it_is_set(made: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made()


def test_partitions_share_a_limiter_equally() -> None:
    limits = ratio(samples_per_insert=0.5).limits
    assert limits == RateLimits(Fraction(1, 2), 10, Fraction(-15), Fraction(25))
    share = make_limiter(limits, partitions=4)
    assert share == rate_limiter.RateLimiter(1, 2, 3, -7, 12)
