"""Random programs of every operation run through ``make_replay`` and through its plain-Python model."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conduit_jax as conduit
from conduit_jax.errors import ConfigError, SpecError
from conduit_jax.replay import records, ring
from conduit_jax.replay.buffer import Replay, ReplayState, make_replay, replay_geometry
from conduit_jax.types import SampleInfo
from tests.replay.reference import UINT32, ReplayModel, chi_square_tail

BATCH = 6
ITEM = {
    "flag": jax.ShapeDtypeStruct((), jnp.bool_),
    "large": jax.ShapeDtypeStruct((300,), jnp.float32),
    "nothing": jax.ShapeDtypeStruct((0,), jnp.float32),
    "pixels": jax.ShapeDtypeStruct((5,), jnp.uint8),
    "reward": jax.ShapeDtypeStruct((), jnp.float32),
}


class Case(NamedTuple):
    """One configuration of the suite; ``capacity`` is deliberately not always a multiple of ``lanes``."""

    config: conduit.ReplayConfig
    lanes: int

    @property
    def exponent(self) -> float | None:
        sampler = self.config.sampler
        return sampler.exponent if isinstance(sampler, conduit.Prioritized) else None

    @property
    def length(self) -> int:
        return -(-self.config.capacity // self.lanes)

    def model(self) -> ReplayModel:
        return ReplayModel(self.lanes, self.length, min_size=self.config.min_size, exponent=self.exponent)


CASES = {
    "uniform aligned": Case(conduit.ReplayConfig(capacity=9, min_size=4), lanes=2),
    "uniform ragged": Case(conduit.ReplayConfig(capacity=12, min_size=5, ragged=True), lanes=3),
    "prioritized aligned": Case(conduit.ReplayConfig(capacity=7, sampler=conduit.Prioritized()), lanes=1),
    "prioritized ragged": Case(
        conduit.ReplayConfig(
            capacity=12,
            min_size=2,
            ragged=True,
            sampler=conduit.Prioritized(exponent=1.0, importance_normalization="none", stratified=False),
        ),
        lanes=3,
    ),
    "prioritized by existence": Case(
        conduit.ReplayConfig(capacity=8, sampler=conduit.Prioritized(exponent=0.0)), lanes=2
    ),
}


class Compiled(NamedTuple):
    replay: Replay
    add: Any
    sample: Any
    update: Any
    observe: Any
    start: ReplayState


@cache
def compiled(name: str) -> Compiled:
    case = CASES[name]
    replay = make_replay(case.config, batch_size=BATCH, lanes=case.lanes)
    geometry = replay.geometry

    def observe(state: ReplayState):
        """What stands in every slot, ``(slots, ...)``: live, generation, age, contents and versions; and the size."""
        slots = jnp.arange(geometry.slots, dtype=jnp.int32)
        lane, time = slots // geometry.length, slots % geometry.length
        own = ring.at_lane(state.control.ring, lane)
        about = (
            ring.is_live(own, geometry.length, time),
            ring.generation(own, time),
            ring.age(own, geometry.length, time),
        )
        storage = state.storage
        contents = records.unpack(storage.layout, storage.rows, storage.apart)
        return about, contents, records.row_versions(storage.rows), ring.live_items(state.control.ring, geometry.lanes)

    jitted = (jax.jit(function) for function in (replay.add, replay.sample, replay.update_priorities, observe))
    return Compiled(replay, *jitted, jax.jit(lambda: replay.init(ITEM))())


def chunk_of(seed: int, steps: int, lanes: int) -> dict[str, np.ndarray]:
    """Random bits in every leaf, NaN payloads included, and no two items alike."""
    rng, chunk = np.random.default_rng(seed), {}
    for name, leaf in ITEM.items():
        raw = rng.integers(0, 256, (steps, lanes, *leaf.shape, leaf.dtype.itemsize), np.uint8)
        chunk[name] = (
            (raw % 2 if leaf.dtype == bool else raw).reshape(-1).view(leaf.dtype).reshape(steps, lanes, *leaf.shape)
        )
    return chunk


def bits_of(tree: dict[str, Any]) -> dict[str, bytes]:
    return {name: np.asarray(leaf).tobytes() for name, leaf in tree.items()}


good_priorities = st.sampled_from([0.0, 0.25, 1.0, 2.5, 1e-3, 40.0])
any_priorities = st.sampled_from([0.0, 0.25, 1.0, 2.5, 1e-3, 40.0, float("nan"), float("inf"), -1.0])
seeds = st.integers(0, 2**31 - 1)


class Program:
    """Carries out each drawn operation on both and compares everything that can be seen."""

    def __init__(self, name: str, data: st.DataObject):
        self.case, self.draw = CASES[name], data.draw
        self.real = compiled(name)
        self.model, self.state = self.case.model(), self.real.start
        self.infos: list[SampleInfo] = []

    def add(self) -> None:
        steps = self.draw(st.sampled_from([1, self.case.length - 1, self.case.length]))
        seed, version = self.draw(seeds), self.draw(st.integers(0, UINT32 - 1))
        chunk = chunk_of(seed, steps, self.case.lanes)
        lengths = [steps] * self.case.lanes
        if self.case.config.ragged:
            lengths = self.draw(
                st.lists(st.integers(-1, steps + 1), min_size=self.case.lanes, max_size=self.case.lanes)
            )
        priorities = None
        if self.case.exponent is not None and self.draw(st.booleans()):
            values = st.lists(any_priorities, min_size=steps * self.case.lanes, max_size=steps * self.case.lanes)
            priorities = np.array(self.draw(values), np.float32).reshape(steps, self.case.lanes)
        contents = [
            [
                bits_of({name: leaf[step, lane] for name, leaf in chunk.items()})
                for step in range(min(steps, lengths[lane]))
            ]
            for lane in range(self.case.lanes)
        ]
        expected = self.model.add(contents, version, priorities)
        given_lengths = jnp.array(lengths, jnp.int32) if self.case.config.ragged else None
        self.state, info = self.real.add(self.state, chunk, given_lengths, priorities, np.uint32(version))
        assert tuple(int(count) for count in info) == expected

    def sample(self) -> None:
        control, sample = self.real.sample(self.state.control, self.state.storage, jax.random.key(self.draw(seeds)))
        self.state = self.state._replace(control=control)
        data, info, weights, mask, valid = jax.tree.map(np.asarray, sample)
        self.infos.append(info)
        size, items, probabilities = self.model.size, self.model.items, self.model.probabilities()
        assert mask is None
        assert info.times_sampled is None
        assert valid.tolist() == [size >= self.case.config.min_size] * BATCH
        assert info.table_size.tolist() == [size] * BATCH
        if not size:
            return
        for index, slot in enumerate(info.slot.tolist()):
            item = items[slot]
            assert int(info.generation[index]) == item.generation
            assert info.probability[index] == pytest.approx(probabilities[slot], rel=1e-5)
            assert info.priority[index] == (1 if self.case.exponent is None else item.priority)
            assert int(info.age[index]) == self.model.age(slot)
            assert int(info.policy_version[index]) == item.version
            assert bits_of({name: leaf[index] for name, leaf in data.items()}) == item.content
        assert all(probabilities[slot] > 0 for slot in info.slot.tolist())
        np.testing.assert_allclose(
            weights, self.weights([probabilities[slot] for slot in info.slot.tolist()]), rtol=1e-5
        )

    def weights(self, probabilities: list[float]) -> np.ndarray:
        sampler = self.case.config.sampler
        if not isinstance(sampler, conduit.Prioritized):
            return np.ones(BATCH)
        weights = (self.model.size * np.array(probabilities)) ** -sampler.importance_exponent
        return weights / weights.max() if sampler.importance_normalization == "batch" else weights

    def update(self) -> None:
        """Mix entries of all samples so far, so that many are stale and some are twice there, with made-up ones."""
        slots = st.integers(-2, self.case.lanes * self.case.length + 2) | st.sampled_from([2**31 - 1, -(2**31)])
        names = st.tuples(slots, st.integers(0, 3) | st.just(UINT32 - 1))
        if self.infos:
            drawn = [
                pair for info in self.infos for pair in zip(info.slot.tolist(), info.generation.tolist(), strict=True)
            ]
            names = st.sampled_from(drawn) | st.sampled_from(drawn[-BATCH:]) | names
        slot, generation = zip(*self.draw(st.lists(names, min_size=BATCH, max_size=BATCH)), strict=True)
        priority = self.draw(
            st.one_of(*[st.lists(kind, min_size=BATCH, max_size=BATCH) for kind in (good_priorities, any_priorities)])
        )
        before = self.state.control
        refused = self.model.faults.refused_updates
        expected = self.model.update(slot, generation, priority)
        empty = np.zeros(BATCH, np.float32)
        info = SampleInfo(np.array(slot, np.int32), np.array(generation, np.uint32), empty, empty, empty, empty, empty)
        control, applied = self.real.update(before, info, np.array(priority, np.float32))
        self.state = self.state._replace(control=control)
        assert int(applied) == expected
        if self.model.faults.refused_updates > refused:
            assert expected == 0
            assert same_bits((before.ring, before.selector), (control.ring, control.selector))
            assert same_bits(before.faults._replace(refused_updates=control.faults.refused_updates), control.faults)

    def reset(self) -> None:
        self.model.reset()
        self.state = self.state._replace(control=self.real.replay.reset(self.state.control))

    def compare(self) -> None:
        (live, generation, age), contents, versions, size = jax.tree.map(np.asarray, self.real.observe(self.state))
        items, control = self.model.items, self.state.control
        assert np.flatnonzero(live).tolist() == sorted(items)
        assert int(size) == self.model.size == len(items)
        for slot, item in items.items():
            assert int(generation[slot]) == item.generation
            assert int(age[slot]) == self.model.age(slot)
            assert int(versions[slot]) == item.version
            assert bits_of({name: leaf[slot] for name, leaf in contents.items()}) == item.content
        assert [int(count) for count in control.faults] == list(vars(self.model.faults).values())
        for n in (1, BATCH):
            assert bool(self.real.replay.can_sample(control, n)) == (self.model.size >= self.case.config.min_size)
            assert bool(self.real.replay.can_add(control, n))
        if self.case.exponent is not None:
            priorities = np.zeros(self.case.lanes * self.case.length, np.float32)
            for slot, item in items.items():
                priorities[slot] = item.priority
            np.testing.assert_array_equal(control.selector.tree.priorities, priorities)
            assert control.selector.max_priority == self.model.max_priority


def same_bits(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=15)
@given(data=st.data())
def test_any_program_of_operations_does_what_the_model_does(name: str, data: st.DataObject) -> None:
    program = Program(name, data)
    steps = ["add", "add", "add", "sample", "sample", "update", "update", "reset"]
    for step in data.draw(st.lists(st.sampled_from(steps), min_size=1, max_size=14)):
        getattr(program, step)()
        program.compare()


# The same laws one by one, so that what breaks is named.


def filled(name: str, *, seed: int = 0) -> ReplayState:
    case, real = CASES[name], compiled(name)
    lengths = jnp.full((case.lanes,), case.length, jnp.int32) if case.config.ragged else None
    return real.add(real.start, chunk_of(seed, case.length, case.lanes), lengths, None, np.uint32(0))[0]


def drawn_from(name: str, state: ReplayState) -> SampleInfo:
    return compiled(name).sample(state.control, state.storage, jax.random.key(0))[1].info


PRIORITIZED = [name for name in CASES if name.startswith("prioritized")]


@pytest.mark.parametrize("name", PRIORITIZED)
def test_an_update_for_an_overwritten_item_is_counted_and_never_reaches_the_newcomer(name: str) -> None:
    state = filled(name)
    info = drawn_from(name, state)
    for _ in range(2):  # overwrite every slot
        state = compiled(name).add(
            state, chunk_of(1, CASES[name].length, CASES[name].lanes), full_lengths(name), None, np.uint32(1)
        )[0]
    control, applied = compiled(name).update(state.control, info, jnp.full((BATCH,), 99.0))
    assert int(applied) == 0
    assert int(control.faults.stale_updates) == BATCH
    assert same_bits(control.selector, state.control.selector)


@pytest.mark.parametrize("name", PRIORITIZED)
def test_after_a_reset_old_updates_are_stale_even_in_slots_that_live_again(name: str) -> None:
    state = filled(name)
    info = drawn_from(name, state)
    control = compiled(name).replay.reset(state.control)
    state = compiled(name).add(
        state._replace(control=control),
        chunk_of(1, CASES[name].length, CASES[name].lanes),
        full_lengths(name),
        None,
        np.uint32(1),
    )[0]
    control, applied = compiled(name).update(state.control, info, jnp.full((BATCH,), 99.0))
    assert int(applied) == 0
    assert int(control.faults.stale_updates) == BATCH


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), -1e-30])
def test_one_bad_priority_refuses_the_whole_update(name: str, bad: float) -> None:
    state = filled(name)
    info = drawn_from(name, state)
    control, applied = compiled(name).update(state.control, info, jnp.array([5.0] * (BATCH - 1) + [bad]))
    assert int(applied) == 0
    assert int(control.faults.refused_updates) == 1
    assert int(control.faults.stale_updates) == 0
    assert same_bits((control.ring, control.selector), (state.control.ring, state.control.selector))


def test_a_new_item_gets_the_highest_priority_ever_given() -> None:
    name = "prioritized aligned"
    state = filled(name)
    control, applied = compiled(name).update(state.control, drawn_from(name, state), jnp.full((BATCH,), 7.0))
    assert int(applied) == BATCH
    state, _ = compiled(name).add(state._replace(control=control), chunk_of(2, 1, 1), None, None, np.uint32(0))
    assert float(state.control.selector.tree.priorities[0]) == 7.0


@pytest.mark.parametrize("laps", [2**31 - 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("name", ["prioritized aligned", "prioritized ragged"])
def test_generations_stay_apart_where_the_lap_counter_wraps(name: str, laps: int) -> None:
    case, real = CASES[name], compiled(name)
    start = real.start.control
    near = start.ring._replace(laps=jnp.full_like(start.ring.laps, laps))
    state = real.start._replace(control=start._replace(ring=near))
    everything = None
    for lap in range(3):
        seed = 10 + lap
        state = real.add(state, chunk_of(seed, case.length, case.lanes), full_lengths(name), None, np.uint32(lap))[0]
        if everything is not None:
            control, applied = real.update(state.control, everything, jnp.full((BATCH,), 3.0))
            assert (int(applied), int(control.faults.stale_updates)) == (0, BATCH)
        everything = drawn_from(name, state)
        assert everything.generation.tolist() == [(laps + lap) % UINT32] * BATCH
        assert int(real.update(state.control, everything, jnp.full((BATCH,), 3.0))[1]) == BATCH


def full_lengths(name: str) -> jax.Array | None:
    case = CASES[name]
    return jnp.full((case.lanes,), case.length, jnp.int32) if case.config.ragged else None


@pytest.mark.parametrize("name", ["uniform aligned", "uniform ragged"])
def test_one_length_for_all_lanes_writes_that_many_steps_of_each(name: str) -> None:
    case, real = CASES[name], compiled(name)
    chunk = chunk_of(3, 3, case.lanes)
    state, info = jax.jit(real.replay.add)(real.start, chunk, jnp.int32(2))
    assert int(info.added) == 2 * case.lanes
    (live, _, _), contents, _, _ = real.observe(state)
    assert np.asarray(live).reshape(case.lanes, -1)[:, :3].tolist() == [[True, True, False]] * case.lanes
    rewards = np.asarray(contents["reward"]).reshape(case.lanes, -1)[:, :2]
    assert rewards.tobytes() == np.ascontiguousarray(chunk["reward"][:2].T).tobytes()


# How draws are distributed.


@pytest.mark.parametrize("ragged", [False, True])
def test_uniform_draws_reach_every_live_item_alike(ragged: bool) -> None:
    draws, lanes, length = 20_000, 3, 8
    replay = make_replay(conduit.ReplayConfig(capacity=lanes * length, ragged=ragged), batch_size=draws, lanes=lanes)
    state = replay.init({"x": jax.ShapeDtypeStruct((), jnp.float32)})
    live = [8, 0, 5] if ragged else [6, 6, 6]
    for _ in range(2) if ragged else range(1):
        lengths = jnp.array(live, jnp.int32)
        state, _ = jax.jit(replay.add)(state, {"x": jnp.zeros((max(live), lanes))}, lengths if ragged else None)
        live = [8, 2, 3] if ragged else live
    slots = np.asarray(jax.jit(replay.sample)(state.control, state.storage, jax.random.key(1))[1].info.slot)
    filled_lengths = [8, 2, 8] if ragged else [6, 6, 6]
    alive = [lane * length + time for lane, count in enumerate(filled_lengths) for time in range(count)]
    counts = np.bincount(slots, minlength=lanes * length)
    assert counts.sum() == counts[alive].sum() == draws
    assert chi_square_tail(counts[alive], np.full(len(alive), draws / len(alive))) > 1e-3


@pytest.mark.parametrize(("exponent", "stratified"), [(0.0, True), (0.6, False), (1.0, True)])
def test_prioritized_draws_follow_the_probabilities_they_report(exponent: float, stratified: bool) -> None:
    draws, length = 20_000, 11
    sampler = conduit.Prioritized(exponent=exponent, stratified=stratified)
    replay = make_replay(conduit.ReplayConfig(capacity=length, sampler=sampler), batch_size=draws)
    state = replay.init({"x": jax.ShapeDtypeStruct((), jnp.float32)})
    priorities = np.array([[0], [1], [2], [0], [0.5], [8], [1], [3], [0.1]], np.float32)
    state, _ = jax.jit(replay.add)(state, {"x": jnp.zeros((9, 1))}, None, jnp.asarray(priorities))
    info = jax.jit(replay.sample)(state.control, state.storage, jax.random.key(4))[1].info
    counts = np.bincount(info.slot, minlength=length)
    weights = np.where(priorities[:, 0] > 0, priorities[:, 0].astype(float) ** exponent, 0)
    expected = draws * weights / weights.sum()
    assert counts[[0, 3, 9, 10]].tolist() == [0, 0, 0, 0]
    alive = weights > 0
    assert chi_square_tail(counts[:9][alive], expected[alive]) > 1e-3


def test_where_all_priorities_are_zero_draws_are_uniform_over_the_live_items() -> None:
    draws = 5_000
    config = conduit.ReplayConfig(capacity=8, ragged=True, sampler=conduit.Prioritized())
    replay = make_replay(config, batch_size=draws, lanes=2)
    state = replay.init({"x": jax.ShapeDtypeStruct((), jnp.float32)})
    state, _ = jax.jit(replay.add)(state, {"x": jnp.zeros((3, 2))}, jnp.array([3, 1], jnp.int32), jnp.zeros((3, 2)))
    sample = jax.jit(replay.sample)(state.control, state.storage, jax.random.key(4))[1]
    counts = np.bincount(sample.info.slot, minlength=8)
    alive = [0, 1, 2, 4]
    assert counts[alive].sum() == draws
    assert chi_square_tail(counts[alive], np.full(4, draws / 4)) > 1e-3
    assert np.asarray(sample.info.probability).tolist() == [0.25] * draws
    assert np.asarray(sample.weights).tolist() == [1.0] * draws


def test_priorities_near_the_end_of_float32_still_give_live_items_and_finite_numbers() -> None:
    config = conduit.ReplayConfig(capacity=8, sampler=conduit.Prioritized(exponent=1.0))
    replay = make_replay(config, batch_size=64)
    state = replay.init({"x": jax.ShapeDtypeStruct((), jnp.float32)})
    priorities = jnp.array([0, 3e38, 0, 3e38, 3e38, 0, 0], jnp.float32)[:, None]
    state, _ = jax.jit(replay.add)(state, {"x": jnp.zeros((7, 1))}, None, priorities)
    sample = jax.jit(replay.sample)(state.control, state.storage, jax.random.key(0))[1]
    assert set(sample.info.slot.tolist()) == {1, 3, 4}
    np.testing.assert_allclose(sample.info.probability, 1 / 3, rtol=1e-5)
    assert np.isfinite(sample.weights).all()


# What can never work is refused when it is made or traced.

SCALAR = {"x": jax.ShapeDtypeStruct((), jnp.float32)}


def small(ragged: bool = False) -> tuple[Replay, ReplayState]:
    replay = make_replay(conduit.ReplayConfig(capacity=8, ragged=ragged), batch_size=4, lanes=2)
    return replay, jax.eval_shape(lambda: replay.init(SCALAR))


def chunk_shape(*shape: int, dtype: Any = jnp.float32, name: str = "x") -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(shape, dtype)}


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        (chunk_shape(3, 2, dtype=jnp.int32), "int32"),
        (chunk_shape(3, 2, 1), "items differ"),
        (chunk_shape(3, 2, name="y"), "items differ"),
        (chunk_shape(3, 3), "number of lanes"),
        (chunk_shape(5, 2), "longer than a lane's ring"),
        (chunk_shape(3), "'x'"),
    ],
)
def test_a_chunk_that_does_not_fit_is_refused_by_name(chunk: Any, words: str) -> None:
    replay, state = small()
    with pytest.raises(SpecError, match=words):
        jax.eval_shape(replay.add, state, chunk)


def test_leaves_that_disagree_on_their_length_are_refused() -> None:
    replay = make_replay(conduit.ReplayConfig(capacity=8), batch_size=4, lanes=2)
    state = jax.eval_shape(lambda: replay.init({**SCALAR, "y": SCALAR["x"]}))
    with pytest.raises(SpecError, match="disagree"):
        jax.eval_shape(replay.add, state, {**chunk_shape(3, 2), **chunk_shape(2, 2, name="y")})


def test_a_chunk_too_long_says_which_capacity_would_do() -> None:
    replay, state = small()
    with pytest.raises(SpecError, match="at least 10"):
        jax.eval_shape(replay.add, state, chunk_shape(5, 2))


def test_lengths_a_lane_need_a_ragged_replay() -> None:
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    replay, state = small()
    with pytest.raises(ConfigError, match="ragged=True"):
        jax.eval_shape(replay.add, state, chunk_shape(3, 2), lengths)
    replay, state = small(ragged=True)
    jax.eval_shape(replay.add, state, chunk_shape(3, 2), lengths)


@pytest.mark.parametrize(("batch_size", "lanes"), [(7, 4), (8, 3), (8, 1), (1, 4)])
def test_a_batch_or_lanes_that_do_not_divide_by_the_partitions_are_refused(batch_size: int, lanes: int) -> None:
    with pytest.raises(ConfigError, match="divide"):
        make_replay(conduit.ReplayConfig(capacity=64), batch_size=batch_size, lanes=lanes, partitions=2)


@given(capacity=st.integers(1, 10**6), per_partition=st.integers(1, 50), partitions=st.integers(1, 8))
def test_capacity_is_rounded_up_by_less_than_one_item_a_lane(
    capacity: int, per_partition: int, partitions: int
) -> None:
    lanes = per_partition * partitions
    geometry = replay_geometry(conduit.ReplayConfig(capacity=capacity), lanes, partitions)
    assert geometry.lanes == per_partition
    assert 0 <= geometry.slots * partitions - capacity < lanes


def test_a_partition_too_large_for_its_index_is_refused_and_two_of_half_the_size_are_not() -> None:
    config = conduit.ReplayConfig(capacity=2**30 + 2)
    with pytest.raises(ConfigError, match="use more partitions"):
        replay_geometry(config, 2)
    assert replay_geometry(config, 2, 2).slots == 2**29 + 1
    assert replay_geometry(conduit.ReplayConfig(capacity=2**30), 1).slots == 2**30


@pytest.mark.parametrize("sampler", [conduit.Uniform(), conduit.Prioritized()], ids=["uniform", "prioritized"])
def test_a_chunk_of_no_steps_adds_nothing(sampler: Any) -> None:
    replay = make_replay(conduit.ReplayConfig(capacity=8, sampler=sampler), batch_size=2, lanes=2)
    state = replay.init(ITEM)
    chunk = jax.tree.map(lambda leaf: jnp.zeros((0, 2, *leaf.shape), leaf.dtype), ITEM)
    after, info = replay.add(state, chunk)
    assert int(info.added) == 0
    assert jax.tree.all(jax.tree.map(np.array_equal, after, state))


def test_a_loss_may_add_draw_and_update_on_the_way_and_be_differentiated() -> None:
    config = conduit.ReplayConfig(capacity=16, sampler=conduit.Prioritized(exponent=0.6))
    replay = make_replay(config, batch_size=4, lanes=2)
    start = replay.init({"apart": jnp.zeros((300,)), "small": jnp.zeros(())})

    def loss(weight: jax.Array) -> tuple[jax.Array, Any]:
        chunk = {"apart": jnp.full((3, 2, 300), weight), "small": jnp.full((3, 2), weight)}
        state, _ = replay.add(start, chunk)
        control, sample = replay.sample(state.control, state.storage, jax.random.key(0))
        error = weight * sample.data["small"]
        control, _ = replay.update_priorities(control, sample.info, jnp.abs(error))
        return state.storage.apart[0].sum() + error.sum(), (state.storage, control)

    weight = jnp.float32(2.0)
    total, after = jax.jit(loss)(weight)
    (same, state), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(weight)
    assert same == total
    assert jax.tree.all(jax.tree.map(np.array_equal, state, after))
    assert gradient == 6 * 300 + 4 * 2.0  # rows apart are differentiated through, packed ones are bits


def test_what_an_add_stores_may_be_differentiated_twice() -> None:
    replay = make_replay(conduit.ReplayConfig(capacity=16, sampler=conduit.Prioritized()), batch_size=4, lanes=2)
    start = replay.init({"apart": jnp.zeros((300,))})

    def squares(weight: jax.Array) -> jax.Array:
        state, _ = replay.add(start, {"apart": jnp.full((3, 2, 300), weight)})
        return (state.storage.apart[0] ** 2).sum()

    assert jax.jit(jax.hessian(squares))(2.0) == 2 * 6 * 300
