"""A mixture does to each of its tables what would have been done to the table alone, and nothing to the others."""

from __future__ import annotations

from fractions import Fraction
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conduit_jax as conduit
from conduit_jax.errors import ConfigError, SpecError
from conduit_jax.replay import random_bits
from conduit_jax.replay.buffer import Replay, ReplayState, make_replay
from conduit_jax.replay.mixture import for_table, mix
from conduit_jax.replay.shares import fixed_shares
from conduit_jax.types import SampleInfo
from tests.replay.reference import chi_square_tail

ITEM = {"number": jax.ShapeDtypeStruct((), jnp.int32), "pixels": jax.ShapeDtypeStruct((3,), jnp.uint8)}
BATCH = 8
MAKERS = (
    partial(make_replay, conduit.ReplayConfig(capacity=6, sampler=conduit.Prioritized())),
    partial(make_replay, conduit.ReplayConfig(capacity=12, min_size=3, ragged=True), lanes=3),
    partial(make_replay, conduit.ReplayConfig(capacity=8, sampler=conduit.Prioritized(exponent=1.0)), lanes=2),
)
LANES, LENGTHS, OFFSETS = (1, 3, 2), (6, 4, 4), (0, 6, 18)
PROPORTIONS = (0.25, 0.5, 0.25)
SHARES = (2, 4, 2)


@cache
def mixture(shares: str = "fixed") -> Replay:
    return mix(MAKERS, proportions=PROPORTIONS, batch_size=BATCH, shares=shares)


@cache
def alone() -> tuple[Replay, ...]:
    return tuple(maker(batch_size=share) for maker, share in zip(MAKERS, SHARES, strict=True))


@cache
def compiled() -> dict[str, Any]:
    replay, tables = mixture(), alone()
    return {
        "add": [jax.jit(for_table(replay, table).add) for table in range(3)],
        "init": jax.jit(lambda: replay.init(ITEM)),
        "init alone": [jax.jit(lambda table=table: table.init(ITEM)) for table in tables],
        "reset": jax.jit(replay.reset),
        "reset alone": [jax.jit(table.reset) for table in tables],
        "can sample": jax.jit(lambda control: replay.can_sample(control, BATCH)),
        "sample": jax.jit(replay.sample),
        "update": jax.jit(replay.update_priorities),
        "add alone": [jax.jit(table.add) for table in tables],
        "sample alone": [jax.jit(table.sample) for table in tables],
        "update alone": [jax.jit(table.update_priorities) for table in tables],
    }


def chunk_of(seed: int, steps: int, lanes: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "number": rng.integers(0, 2**31 - 1, (steps, lanes), np.int32),
        "pixels": rng.integers(0, 256, (steps, lanes, 3), np.uint8),
    }


def assert_equal(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


seeds = st.integers(0, 2**31 - 1)
good_priorities = st.sampled_from([0.0, 0.25, 1.0, 2.5, 40.0])


class Program:
    """Carries out each operation on the mixture and on the tables by themselves."""

    def __init__(self, draw: Any):
        self.draw, self.call = draw, compiled()
        self.state = self.call["init"]()
        self.tables = [init() for init in self.call["init alone"]]
        self.seen = [(-1, 0), (0, 0), (25, 3), (26, 0), (2**31 - 1, 0)]
        self.refused = 0

    def add(self) -> None:
        table, seed = self.draw(st.integers(0, 2)), self.draw(seeds)
        chunk = chunk_of(seed, self.draw(st.just(3)), LANES[table])
        lengths = None
        if table == 1:
            lengths = np.array(self.draw(st.lists(st.integers(0, 3), min_size=3, max_size=3)), np.int32)
        self.state, info = self.call["add"][table](self.state, chunk, lengths, None, np.uint32(seed))
        self.tables[table], expected = self.call["add alone"][table](
            self.tables[table], chunk, lengths, None, np.uint32(seed)
        )
        assert_equal(info, expected)

    def sample(self) -> None:
        key = jax.random.key(self.draw(seeds))
        control, sample = self.call["sample"](self.state.control, self.state.storage, key)
        self.state = self.state._replace(control=control)
        parts = [
            self.call["sample alone"][number](table.control, table.storage, random_bits.fold(key, number))[1]
            for number, table in enumerate(self.tables)
        ]
        parts = [
            part._replace(
                info=part.info._replace(
                    slot=part.info.slot + offset, probability=part.info.probability * np.float32(share)
                )
            )
            for part, offset, share in zip(parts, OFFSETS, PROPORTIONS, strict=True)
        ]
        expected = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        ready = all(bool(part.valid.all()) for part in parts)
        assert_equal(sample, expected._replace(valid=np.full(BATCH, ready)))
        assert bool(self.call["can sample"](self.state.control)) == ready
        table = np.asarray(mixture().geometry.table_of(sample.info.slot))
        assert table.tolist() == [0] * 2 + [1] * 4 + [2] * 2
        self.seen += zip(sample.info.slot.tolist(), sample.info.generation.tolist(), strict=True)

    def update(self) -> None:
        names = self.draw(st.lists(st.sampled_from(self.seen), min_size=BATCH, max_size=BATCH))
        bad = st.sampled_from([float("nan"), float("inf"), -1.0])
        values = self.draw(st.lists(good_priorities, min_size=BATCH, max_size=BATCH))
        refused = self.draw(st.booleans()) and self.draw(st.booleans())
        if refused:
            values[self.draw(st.integers(0, BATCH - 1))] = self.draw(bad)
        slot, generation = (np.array(part) for part in zip(*names, strict=True))
        before = self.state.control
        info, values = info_of(slot, generation), np.array(values, np.float32)
        control, applied = self.call["update"](before, info, values)
        self.state = self.state._replace(control=control)
        if refused:
            self.refused += 1
            assert int(applied) == 0
            assert_equal(
                [(table.ring, table.selector) for table in control.tables],
                [(table.ring, table.selector) for table in before.tables],
            )
            return
        total = 0
        for number, offset in enumerate(OFFSETS):
            own = (slot >= offset) & (slot < [6, 18, 2**31][number]) if number else slot < 6
            padded = np.where(
                own, slot - offset, -1
            )  # what is another's must change nothing but the count of stale ones
            changed, count = self.call["update alone"][number](
                self.tables[number].control, info_of(padded, generation), values
            )
            stale = self.tables[number].control.faults.stale_updates + np.uint32(own.sum() - int(count))
            changed = changed._replace(faults=changed.faults._replace(stale_updates=stale))
            self.tables[number] = self.tables[number]._replace(control=changed)
            total += int(count)
        assert int(applied) == total

    def reset(self) -> None:
        self.state = self.state._replace(control=self.call["reset"](self.state.control))
        self.tables = [
            state._replace(control=reset(state.control))
            for reset, state in zip(self.call["reset alone"], self.tables, strict=True)
        ]

    def compare(self) -> None:
        for number, table in enumerate(self.tables):
            assert_equal(self.state.storage[number], table.storage)
            mixed = self.state.control.tables[number]
            assert_equal((mixed.ring, mixed.selector), (table.control.ring, table.control.selector))
        faults = self.state.control.faults
        assert int(faults.refused_updates) == self.refused
        assert int(faults.stale_updates) == sum(int(table.control.faults.stale_updates) for table in self.tables)


def info_of(slot: np.ndarray, generation: np.ndarray) -> SampleInfo:
    nothing = np.zeros(BATCH, np.float32)
    return SampleInfo(slot.astype(np.int32), generation.astype(np.uint32), *[nothing] * 5)


@settings(max_examples=15)
@given(data=st.data())
def test_any_program_does_to_each_table_what_it_would_alone(data: st.DataObject) -> None:
    program = Program(data.draw)
    steps = ["add", "add", "add", "sample", "sample", "update", "update", "reset"]
    for step in data.draw(st.lists(st.sampled_from(steps), min_size=1, max_size=14)):
        getattr(program, step)()
        program.compare()


def filled(replay: Replay, steps: int = 3) -> ReplayState:
    @jax.jit
    def fill() -> ReplayState:
        state = replay.init(ITEM)
        for table, lanes in enumerate(LANES[: len(replay.geometry.tables)]):
            state, _ = replay.add(state, chunk_of(table, steps, lanes), table=table)
        return state

    return fill()


def test_an_invalid_batch_says_so_in_every_row_even_where_other_tables_are_ready() -> None:
    replay = mixture()
    state = compiled()["init"]()
    for table in (0, 2):
        state, _ = compiled()["add"][table](state, chunk_of(0, 3, LANES[table]), None, None, np.uint32(0))
    _, sample = compiled()["sample"](state.control, state.storage, jax.random.key(0))
    assert sample.valid.tolist() == [False] * BATCH
    assert not bool(replay.can_sample(state.control, BATCH))


@given(
    proportions=st.lists(st.integers(1, 50) | st.sampled_from([0.1, 0.3, 2.5]), min_size=1, max_size=5),
    batch_size=st.integers(1, 300),
)
def test_fixed_shares_are_whole_add_up_and_are_the_nearest_there_are(proportions: list[float], batch_size: int) -> None:
    shares = fixed_shares(proportions, batch_size)
    parts = [Fraction(proportion).limit_denominator(10**6) for proportion in proportions]
    exact = [part * batch_size / sum(parts) for part in parts]
    assert sum(shares) == batch_size
    assert all(abs(share - wanted) < 1 for share, wanted in zip(shares, exact, strict=True))
    up = [wanted % 1 for share, wanted in zip(shares, exact, strict=True) if share > wanted]
    down = [wanted % 1 for share, wanted in zip(shares, exact, strict=True) if share <= wanted and wanted % 1]
    assert not up or not down or min(up) >= max(down)


@pytest.mark.parametrize(("proportions", "batch_size"), [((1, 2, 4), 5), ((0.1, 0.2, 0.7), 1)])
def test_random_shares_stay_next_to_the_exact_ones_and_meet_them_in_the_mean(
    proportions: tuple[float, ...], batch_size: int
) -> None:
    replay = mix(MAKERS, proportions=proportions, batch_size=batch_size, shares="random")
    state, turns = filled(replay), 4_000
    sample = jax.jit(jax.vmap(lambda key: replay.sample(state.control, state.storage, key)[1], in_axes=0))(
        jax.vmap(jax.random.key)(np.arange(turns))
    )
    table = np.asarray(replay.geometry.table_of(sample.info.slot))
    assert (np.diff(table, axis=1) >= 0).all()
    counts = np.stack([(table == number).sum(1) for number in range(3)], 1)
    exact = batch_size * np.array(proportions) / sum(proportions)
    assert (np.abs(counts - exact) < 1 + 1e-9).all()
    np.testing.assert_allclose(counts.mean(0), exact, atol=5 * 0.5 / turns**0.5)
    numbers = [
        np.concatenate([chunk_of(number, 3, lanes)["number"].T.reshape(-1)]) for number, lanes in enumerate(LANES)
    ]
    for number, owned in enumerate(numbers):  # every item of every table alike, strata or not
        drawn = np.asarray(sample.data["number"])[table == number]
        found = np.array([(drawn == value).sum() for value in owned])
        assert found.sum() == len(drawn)
        assert chi_square_tail(found, np.full(len(owned), len(drawn) / len(owned))) > 1e-3


def test_tables_draw_apart_from_each_other() -> None:
    maker = partial(make_replay, conduit.ReplayConfig(capacity=1000))
    replay = mix((maker, maker), proportions=(1, 1), batch_size=64)
    state = replay.init(ITEM)
    for table in (0, 1):
        state, _ = jax.jit(for_table(replay, table).add)(state, chunk_of(table, 1000, 1))
    _, sample = jax.jit(replay.sample)(state.control, state.storage, jax.random.key(0))
    slots = np.asarray(sample.info.slot)
    assert (slots[:32] != slots[32:] - 1000).any()


def test_a_batch_that_another_table_blocks_counts_as_no_draw() -> None:
    once = conduit.ReplayConfig(capacity=4, sampler=conduit.Fifo(), max_times_sampled=1)
    maker = partial(make_replay, once)
    replay = mix((maker, maker), proportions=(1, 1), batch_size=4)
    add = [jax.jit(for_table(replay, table).add) for table in (0, 1)]
    sample, state = jax.jit(replay.sample), replay.init(ITEM)
    state, _ = add[0](state, chunk_of(0, 4, 1))
    assert "table 1" in replay.explain_blocked(state.control, "sample", 4)
    control, batch = sample(state.control, state.storage, jax.random.key(0))
    assert batch.valid.tolist() == [False] * 4
    state, _ = add[1](state._replace(control=control), chunk_of(1, 3, 1))
    control, batch = sample(state.control, state.storage, jax.random.key(0))
    assert batch.valid.tolist() == [True] * 4
    expected = np.concatenate([chunk_of(0, 4, 1)["number"][:2, 0], chunk_of(1, 3, 1)["number"][:2, 0]])
    assert batch.data["number"].tolist() == expected.tolist()  # the blocked batch has taken nothing


def test_deletes_reach_their_own_table() -> None:
    maker = partial(make_replay, conduit.ReplayConfig(capacity=4, storage="slots"))
    replay = mix((maker, maker), proportions=(1, 1), batch_size=4)
    state = replay.init(ITEM)
    for table in (0, 1):
        state, _ = jax.jit(for_table(replay, table).add)(state, chunk_of(table, 4, 1))
    control, batch = jax.jit(replay.sample)(state.control, state.storage, jax.random.key(0))
    slots = np.asarray(batch.info.slot)
    begin = replay.geometry.offsets[1]
    second = batch.info._replace(slot=np.where(slots >= begin, slots, -1))
    control, deleted = jax.jit(replay.delete)(control, second)
    assert int(deleted) == len(set(slots[slots >= begin].tolist())) > 0
    sizes = jax.jit(replay.sample)(control, state.storage, jax.random.key(1))[1].info.table_size
    assert sizes.tolist() == [4, 4, 4 - int(deleted), 4 - int(deleted)]


def test_tables_may_hold_items_of_their_own_but_must_deliver_the_same() -> None:
    other = {**ITEM, "number": jax.ShapeDtypeStruct((), jnp.float32)}
    replay = mixture()
    state = jax.eval_shape(lambda: replay.init(ITEM, other, ITEM))
    with pytest.raises(SpecError, match=r"Tables 0 and 1 deliver different data: leaf .*number"):
        jax.eval_shape(replay.sample, state.control, state.storage, jax.random.key(0))
    more = {**ITEM, "extra": jax.ShapeDtypeStruct((), jnp.float32)}
    state = jax.eval_shape(lambda: replay.init(ITEM, ITEM, more))
    with pytest.raises(SpecError, match=r"Tables 0 and 2 .*extra"):
        jax.eval_shape(replay.sample, state.control, state.storage, jax.random.key(0))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"proportions": (1, 2)}, "one proportion a table"),
        ({"proportions": (1, 0, 1)}, "leave the table out"),
        ({"proportions": (1, float("nan"), 1)}, "out of range"),
        ({"proportions": (1, float("inf"), 1)}, "out of range"),
        ({"proportions": (1, 1000, 1)}, "no item in any batch"),
        ({"batch_size": 0}, "batch_size"),
        ({"shares": "randomly"}, "did you mean 'random'"),
    ],
)
def test_what_could_never_work_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        mix(MAKERS, **{"proportions": PROPORTIONS, "batch_size": BATCH, **arguments})


def test_a_table_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 to 2"):
        for_table(mixture(), 3)


# Compiled and transformed.


def fused(replay: Replay, table: int) -> Any:
    def step(state: ReplayState, given: Any) -> Any:
        chunk, key = given
        state, _ = replay.add(state, chunk, table=table)
        control, sample = replay.sample(state.control, state.storage, key)
        control, applied = replay.update_priorities(control, sample.info, jnp.full((sample.valid.size,), 2.0))
        return ReplayState(state.storage, control), (sample, applied)

    return step


def test_scan_and_vmap_over_seeds_equal_python_loops() -> None:
    replay = mix(MAKERS[:2], proportions=(1, 2), batch_size=8, shares="random")  # what "fixed" does, and more
    step, start = jax.jit(fused(replay, 1)), filled(replay)
    given = [
        [(chunk_of(turn + 7 * seed, 2, 3), np.array([turn, seed], np.uint32)) for turn in range(4)] for seed in range(2)
    ]
    stack = partial(jax.tree.map, lambda *leaves: np.stack(leaves))
    ends, outcomes = [], []
    for turns in given:
        state, seen = start, []
        for turn in turns:
            state, outcome = step(state, turn)
            seen.append(jax.tree.map(np.asarray, outcome))
        ends.append(state)
        outcomes.append(stack(*seen))
    stacked = stack(*[stack(*turns) for turns in given])
    mapped = jax.jit(jax.vmap(lambda turns: jax.lax.scan(fused(replay, 1), start, turns)))(stacked)
    assert_equal(mapped, (stack(*ends), stack(*outcomes)))


def test_a_fused_step_writes_in_place_and_copies_no_table() -> None:
    item = {"frame": jax.ShapeDtypeStruct((4096,), jnp.uint8), "small": jax.ShapeDtypeStruct((7,), jnp.float32)}
    makers = [
        partial(make_replay, conduit.ReplayConfig(capacity=4096, sampler=sampler), lanes=4)
        for sampler in (conduit.Uniform(), conduit.Prioritized())
    ]
    replay = mix(makers, proportions=(1, 2), batch_size=16, shares="random")
    state = jax.eval_shape(lambda: replay.init(item))
    chunk = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, 4, *leaf.shape), leaf.dtype), item)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    memory = jax.jit(fused(replay, 1), donate_argnums=0).lower(state, (chunk, key)).compile().memory_analysis()
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.storage))
    assert memory.alias_size_in_bytes >= stored > 1 << 25
    assert memory.temp_size_in_bytes < 1 << 20
