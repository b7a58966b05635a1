"""Random programs of every operation run through ``make_episodes`` and through its plain-Python model."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conduit_jax as conduit
from conduit_jax.errors import ConfigError, SpecError
from conduit_jax.replay import packing, ring
from conduit_jax.replay.buffer import Replay, ReplayState
from conduit_jax.replay.episode_batches import Buckets, Packed, PackedEpisodes, Padded
from conduit_jax.replay.episode_config import ByLength, EpisodesConfig
from conduit_jax.replay.episodes import draw_bucket, for_bucket, make_episodes
from conduit_jax.types import SampleInfo
from tests.replay.reference import UINT32, chi_square_tail
from tests.replay.reference_episodes import EpisodesModel, first_fit

LANES, LENGTH, BATCH = 2, 12, 5
FLAG = jax.ShapeDtypeStruct((), jnp.bool_)
ITEM = {
    "large": jax.ShapeDtypeStruct((300,), jnp.float32),
    "number": jax.ShapeDtypeStruct((), jnp.int32),
    "terminated": FLAG,
    "truncated": FLAG,
}
seeds = st.integers(0, 2**31 - 1)


class Case(NamedTuple):
    config: EpisodesConfig
    delivery: Any = Padded()
    exponent: float | None = None
    room: int = LENGTH

    @property
    def bounds(self) -> tuple[int, ...]:
        return self.delivery.lengths if isinstance(self.delivery, Buckets) else (self.config.max_length,)

    def batch(self, bucket: int) -> int:
        return self.delivery.batch_sizes[bucket] if isinstance(self.delivery, Buckets) else BATCH

    def model(self) -> EpisodesModel:
        split = self.config.overlong == "split"
        return EpisodesModel(LANES, LENGTH, self.room, self.bounds, split=split, exponent=self.exponent)


LONG = {"capacity_steps": LANES * LENGTH}
CASES = {
    "padded, uniform": Case(EpisodesConfig(**LONG, max_length=5, min_episodes=2)),
    "as long as the ring, few entries, prioritized": Case(
        EpisodesConfig(**LONG, max_length=LENGTH, max_episodes=6, sampler=conduit.Prioritized()), exponent=0.6, room=3
    ),
    "split and packed, by length": Case(
        EpisodesConfig(**LONG, max_length=4, overlong="split", sampler=ByLength()),
        Packed(rows=2, row_length=6),
        exponent=1.0,
    ),
    "buckets, prioritized": Case(
        EpisodesConfig(**LONG, max_length=6, sampler=conduit.Prioritized(exponent=1.0, stratified=False)),
        Buckets(lengths=(2, 6), batch_sizes=(5, 2)),
        exponent=1.0,
    ),
}


class Compiled(NamedTuple):
    replay: Replay
    add: Any
    samples: list[Any]
    update: Any
    observe: Any
    reset: Any
    start: ReplayState


@cache
def compiled(name: str) -> Compiled:
    case = CASES[name]
    replay = make_episodes(case.config, batch_size=BATCH, lanes=LANES, delivery=case.delivery)

    def observe(state: ReplayState) -> list[Any]:
        """What the index holds, bucket by bucket: live, generation, priority a slot."""
        seen = []
        for own, geometry in zip(state.control.episodes.tables, replay.geometry.tables, strict=True):
            slots = jnp.arange(geometry.slots, dtype=jnp.int32)
            at, time = ring.at_lane(own.ring, slots // geometry.length), slots % geometry.length
            priority = own.selector.tree.priorities if own.selector else jnp.ones((geometry.slots,))
            seen.append((ring.is_live(at, geometry.length, time), ring.generation(at, time), priority))
        return seen

    samples = [jax.jit(for_bucket(replay, bucket).sample) for bucket in range(len(case.bounds))]
    update = jax.jit(replay.update_priorities)
    return Compiled(
        replay, jax.jit(replay.add), samples, update, jax.jit(observe), jax.jit(replay.reset), empty(replay)
    )


def chunk_of(numbers: np.ndarray, ended: np.ndarray, terminated: np.ndarray) -> dict[str, Any]:
    """Steps that can be told apart in every leaf; the numbers begin at 1, so that zeros are padding."""
    large = numbers[..., None] + np.arange(300, dtype=np.float32) / 512
    flags = {"terminated": ended & terminated, "truncated": ended & ~terminated}
    return {"large": large.astype(np.float32), "number": numbers.astype(np.int32), **flags}


class Program:
    def __init__(self, name: str, data: st.DataObject):
        self.case, self.draw, self.real = CASES[name], data.draw, compiled(name)
        self.model, self.state = self.case.model(), self.real.start
        self.count = 1
        self.seen = [(-1, 0), (0, 0), (3, 0), (10**6, 0), (2**31 - 1, 0)]

    @property
    def has_priorities(self) -> bool:
        return isinstance(self.case.config.sampler, conduit.Prioritized)

    def add(self) -> None:
        steps = LENGTH
        shape = (steps, LANES)
        numbers = self.count + np.arange(steps * LANES).reshape(shape)
        self.count += steps * LANES
        rng = np.random.default_rng(self.draw(seeds))
        ended = rng.random(shape) < self.draw(st.sampled_from([0.1, 0.3, 0.9]))
        lengths = self.draw(st.lists(st.integers(-1, steps + 1), min_size=LANES, max_size=LANES))
        priorities = None
        if self.has_priorities:
            values = np.array([0, 0.25, 1, 2.5, 40, np.nan, np.inf, -1], np.float32)
            priorities = rng.choice(values, shape, p=[0.2] * 4 + [0.05] * 4)
        version = self.draw(st.integers(0, UINT32 - 1))
        chunk = chunk_of(numbers, ended, rng.random(shape) < 0.5)
        self.state, info = self.real.add(self.state, chunk, np.array(lengths, np.int32), priorities, np.uint32(version))
        if isinstance(self.case.config.sampler, ByLength):
            priorities = None
        expected = self.model.add(numbers, ended, lengths, priorities, version)
        if isinstance(self.case.config.sampler, ByLength):
            for episode in self.model.episodes(0).values():
                episode.priority = float(len(episode.steps))
        assert tuple(int(count) for count in info) == expected

    def sample(self) -> None:
        bucket = self.draw(st.integers(0, len(self.case.bounds) - 1))
        key = jax.random.key(self.draw(seeds))
        control, sample = self.real.samples[bucket](self.state.control, self.state.storage, key)
        self.state = self.state._replace(control=control)
        live, probabilities = self.model.episodes(bucket), self.model.probabilities(bucket)
        ready = len(live) >= self.case.config.min_episodes
        data, info, _, mask, valid = jax.tree.map(np.asarray, sample)
        assert info.table_size.tolist() == [len(live)] * self.case.batch(bucket)
        if not ready:
            assert not valid.any()
            assert not mask.any()
            assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(self.steps_of(data)))
            return
        drawn = [live[slot] for slot in info.slot.tolist()]
        for row, (slot, episode) in enumerate(zip(info.slot.tolist(), drawn, strict=True)):
            assert probabilities[slot] > 0
            assert int(info.generation[row]) == episode.generation
            assert int(info.policy_version[row]) == episode.version
            assert info.probability[row] == pytest.approx(probabilities[slot], rel=1e-5)
            assert info.priority[row] == np.float32(episode.priority)
        self.seen += zip(info.slot.tolist(), info.generation.tolist(), strict=True)
        self.compare_data(data, mask, valid, [episode.steps for episode in drawn], bucket)

    @staticmethod
    def steps_of(data: Any) -> Any:
        return data.steps if isinstance(data, PackedEpisodes) else data

    def compare_data(self, data: Any, mask: np.ndarray, valid: np.ndarray, drawn: list[list[int]], bucket: int) -> None:
        if isinstance(self.case.delivery, Packed):
            width, lengths = self.case.delivery.row_length, [len(steps) for steps in drawn]
            rows = first_fit(lengths, self.case.delivery.rows, width)
            placed = {number for row in rows for number in row}
            assert valid.tolist() == [number in placed for number in range(len(drawn))]
        else:
            width, rows = self.case.bounds[bucket], [[number] for number in range(len(drawn))]
            assert valid.all()
        contents = [[(place, number) for place, number in enumerate(row, 1)] for row in rows]
        numbers = pad([[one for _, number in row for one in drawn[number]] for row in contents], width)
        steps = self.steps_of(data)
        assert steps["number"].tolist() == numbers.tolist()
        assert mask.tolist() == (numbers > 0).tolist()
        expected = np.where(numbers[..., None] > 0, chunk_of(numbers, mask, mask)["large"], 0)
        np.testing.assert_array_equal(steps["large"], expected)
        if isinstance(data, PackedEpisodes):
            segments = [[place for place, number in row for _ in drawn[number]] for row in contents]
            positions = [[step for _, number in row for step in range(len(drawn[number]))] for row in contents]
            episodes = [[number for _, number in row for _ in drawn[number]] for row in contents]
            assert data.segment_ids.tolist() == pad(segments, width).tolist()
            assert data.positions.tolist() == pad(positions, width).tolist()
            assert data.episodes.tolist() == pad(episodes, width, -1).tolist()

    def update(self) -> None:
        if not self.has_priorities:
            return
        names = self.draw(st.lists(st.sampled_from(self.seen), min_size=BATCH, max_size=BATCH))
        values = st.sampled_from([0.0, 0.25, 1.0, 2.5, 40.0])
        bad = st.sampled_from([float("nan"), float("inf"), -1.0])
        chosen = st.lists(values | bad if self.draw(st.integers(0, 3)) == 0 else values, min_size=BATCH, max_size=BATCH)
        slot, generation = (np.array(part) for part in zip(*names, strict=True))
        priorities = self.draw(chosen)
        expected = self.model.update(slot.tolist(), generation.tolist(), priorities)
        nothing = [np.zeros(BATCH, np.float32)] * 5
        info = SampleInfo(slot.astype(np.int32), generation.astype(np.uint32), *nothing)
        control, applied = self.real.update(self.state.control, info, np.array(priorities, np.float32))
        self.state = self.state._replace(control=control)
        assert int(applied) == expected

    def reset(self) -> None:
        self.model.reset()
        self.state = self.state._replace(control=self.real.reset(self.state.control))

    def compare(self) -> None:
        for bucket, observed in enumerate(self.real.observe(self.state)):
            live, generation, priority = (np.asarray(part) for part in observed)
            episodes, offset = self.model.episodes(bucket), self.model.offset(bucket)
            assert (np.flatnonzero(live) + offset).tolist() == sorted(episodes)
            for slot, episode in episodes.items():
                assert int(generation[slot - offset]) == episode.generation
                assert priority[slot - offset] == np.float32(episode.priority)
            if self.case.exponent is not None:
                assert not priority[~live].any()
        assert int(self.state.control.dropped) == self.model.dropped
        faults = self.state.control.faults
        assert int(faults.refused_updates) == self.model.refused
        assert int(faults.stale_updates) == self.model.stale
        assert int(faults.replaced_priorities) == self.model.replaced


def pad(rows: list[list[int]], width: int, value: int = 0) -> np.ndarray:
    return np.array([row + [value] * (width - len(row)) for row in rows])


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=15)
@given(data=st.data())
def test_any_program_of_operations_does_what_the_model_does(name: str, data: st.DataObject) -> None:
    program = Program(name, data)
    steps = ["add"] * 5 + ["sample"] * 3 + ["update", "reset"]
    for step in data.draw(st.lists(st.sampled_from(steps), min_size=1, max_size=16)):
        getattr(program, step)()
        program.compare()


@cache
def fitter(count: int, rows: int, row_length: int) -> Any:
    def pack(lengths: jax.Array) -> Any:
        fit = packing.first_fit(lengths, rows, row_length)
        return fit, packing.lay_out(fit, lengths, rows, row_length)

    return jax.jit(pack)


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(0, 8), min_size=9, max_size=9), shape=st.sampled_from([(1, 8), (3, 8), (9, 11)]))
def test_rows_are_packed_by_first_fit_and_every_place_says_what_stands_there(
    lengths: list[int], shape: tuple[int, int]
) -> None:
    fit, (segment, position, episode) = fitter(9, *shape)(np.array(lengths, np.int32))
    expected = first_fit(lengths, *shape)
    placed = {number for row in expected for number in row}
    assert np.asarray(fit.placed).tolist() == [number in placed for number in range(9)]
    if shape[0] == 9:
        assert placed == {number for number, length in enumerate(lengths) if length}
    contents = [[(place, number) for place, number in enumerate(row, 1)] for row in expected]
    wanted = [
        (segment, [[place for place, number in row for _ in range(lengths[number])] for row in contents], 0),
        (position, [[step for _, number in row for step in range(lengths[number])] for row in contents], 0),
        (episode, [[number for _, number in row for _ in range(lengths[number])] for row in contents], -1),
    ]
    for got, rows, nothing in wanted:
        assert got.tolist() == pad(rows, shape[1], nothing).tolist()


# How draws are distributed. The same story everywhere: episodes of 1, 2, 3, … steps, so that each has its own length.

STORY = (3, 1, 6, 2, 5, 1, 4, 6, 2, 3)


@cache
def filler(replay: Replay, cut: int = 7, priorities: tuple[float, ...] | None = None) -> Any:
    """``start -> state`` after one lane got ``STORY``'s episodes, numbered 1, 2, …, in chunks of ``cut`` steps."""
    ended = np.zeros((sum(STORY), 1), bool)
    ended[np.cumsum(STORY) - 1] = True
    numbers = np.repeat(np.arange(1, len(STORY) + 1), STORY)[:, None]
    given = None if priorities is None else np.array(priorities, np.float32)[numbers - 1]
    count, short = -(-len(numbers) // cut), -len(numbers) % cut

    def chunks(leaf: np.ndarray) -> np.ndarray:
        padded = np.pad(leaf, [(0, short)] + [(0, 0)] * (leaf.ndim - 1))
        return padded.reshape(count, cut, *leaf.shape[1:])

    lengths = np.clip(len(numbers) - cut * np.arange(count), 0, cut).astype(np.int32)
    xs = (*jax.tree.map(chunks, (chunk_of(numbers, ended, ended),)), lengths, None if given is None else chunks(given))

    def body(state: ReplayState, x: Any) -> tuple[ReplayState, None]:
        return replay.add(state, *x)[0], None

    return jax.jit(lambda start: jax.lax.scan(body, start, xs)[0])


def empty(replay: Replay) -> ReplayState:
    return jax.jit(lambda: replay.init(ITEM))()


def filled(replay: Replay, **story: Any) -> ReplayState:
    return filler(replay, **story)(empty(replay))


def counts_of(sample: Any) -> np.ndarray:
    return np.bincount(np.asarray(sample.data["number"])[:, 0], minlength=len(STORY) + 1)[1:]


PRIORITIES = (0, 1, 2, 0.5, 3, 1, 0, 2, 4, 0.1)


@pytest.mark.parametrize(
    ("sampler", "weights"),
    [
        (conduit.Uniform(), [1] * 10),
        (ByLength(), STORY),
        (conduit.Prioritized(exponent=0.6), [priority**0.6 if priority else 0 for priority in PRIORITIES]),
    ],
)
def test_draws_over_complete_episodes_follow_the_sampler_exactly(sampler: Any, weights: list[float]) -> None:
    draws = 20_000
    config = EpisodesConfig(capacity_steps=24, max_length=6, sampler=sampler)
    replay = make_episodes(config, batch_size=draws)
    priorities = PRIORITIES if isinstance(sampler, conduit.Prioritized) else None
    state = filled(replay, priorities=priorities)
    _, sample = jax.jit(replay.sample)(state.control, state.storage, jax.random.key(2))
    live = np.arange(10) >= 3  # 23 of the 33 steps: the third episode does not fit any more
    expected = np.where(live, weights, 0) / np.sum(np.array(weights)[live])
    counts = counts_of(sample)
    assert not counts[expected == 0].any()
    assert chi_square_tail(counts[expected > 0], draws * expected[expected > 0]) > 1e-3
    weights_wanted = np.ones(draws)
    if priorities is not None:
        probability = expected[np.asarray(sample.data["number"])[:, 0] - 1]
        weights_wanted = (7 * probability) ** -0.4
        weights_wanted /= weights_wanted.max()
    np.testing.assert_allclose(sample.weights, weights_wanted, rtol=1e-5)


def test_drawing_a_bucket_and_then_from_it_is_drawing_from_all_episodes() -> None:
    buckets = Buckets(lengths=(1, 3, 6), batch_sizes=(6, 2, 1))
    config = EpisodesConfig(capacity_steps=40, max_length=6, sampler=ByLength())
    replay, draws = make_episodes(config, batch_size=1, delivery=buckets), 20_000
    state = filled(replay)
    keys = jax.random.split(jax.random.key(5), draws)
    drawn = jax.jit(jax.vmap(lambda key: draw_bucket(replay, buckets, state.control, key)))(keys)
    of_bucket = [[length for length in STORY if low < length <= high] for low, high in ((0, 1), (1, 3), (3, 6))]
    expected = np.array([sum(lengths) for lengths in of_bucket]) / buckets.batch_sizes
    counts = np.bincount(drawn, minlength=3)
    assert chi_square_tail(counts, draws * expected / expected.sum()) > 1e-3


def test_a_bucket_that_cannot_be_sampled_is_not_drawn() -> None:
    buckets = Buckets(lengths=(1, 3, 6))
    config = EpisodesConfig(capacity_steps=40, max_length=6, min_episodes=3)
    replay = make_episodes(config, batch_size=1, delivery=buckets)
    state = filled(replay)  # two episodes of one step, four in each of the others
    keys = jax.random.split(jax.random.key(5), 500)
    draw = jax.jit(jax.vmap(lambda control, key: draw_bucket(replay, buckets, control, key), in_axes=(None, 0)))
    assert set(draw(state.control, keys).tolist()) == {1, 2}
    assert set(draw(jax.jit(replay.reset)(state.control), keys).tolist()) == {0}
    assert "min_size" in replay.explain_blocked(state.control, "sample", 1, bucket=0)
    assert replay.explain_blocked(state.control, "sample", 1, bucket=1) == ""


@cache
def small() -> tuple[Replay, Any]:
    replay = make_episodes(EpisodesConfig(capacity_steps=24, max_length=6), batch_size=64)
    return replay, jax.jit(lambda state: replay.sample(state.control, state.storage, jax.random.key(0))[1])


def test_nothing_changes_where_the_clock_of_a_lane_wraps() -> None:
    replay, sample = small()
    start = empty(replay)
    wanted = sample(filler(replay)(start))
    for clock in (2**31 - 5, 2**32 - 20):
        near = start._replace(control=start.control._replace(clock=start.control.clock + np.uint32(clock)))
        got = sample(filler(replay)(near))
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(one, other)


def test_where_chunks_are_cut_changes_nothing() -> None:
    replay, sample = small()
    wanted = sample(filled(replay))
    for cut in (1, 24):
        for one, other in zip(jax.tree.leaves(sample(filled(replay, cut=cut))), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(one, other)


# What can never work is refused when it is made or traced.


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EpisodesConfig(capacity_steps=0, max_length=1), "capacity_steps"),
        (lambda: EpisodesConfig(capacity_steps=8, max_length=1, max_episodes=0), "max_episodes"),
        (lambda: EpisodesConfig(capacity_steps=8, max_length=1, overlong="splits"), "did you mean 'split'"),
        (lambda: EpisodesConfig(capacity_steps=8, max_length=1, sampler=conduit.Fifo()), "ByLength"),
        (lambda: Packed(rows=0, row_length=3), "rows"),
        (lambda: Buckets(lengths=(3, 2)), "increasing"),
        (lambda: Buckets(lengths=()), "increasing"),
        (lambda: Buckets(lengths=(2, 3), batch_sizes=(1,)), "one a bucket"),
        (lambda: made(max_length=5), "at most 4"),
        (lambda: made(delivery=Packed(rows=2, row_length=3)), "at least max_length = 4"),
        (lambda: made(delivery=Buckets(lengths=(2, 3))), "a last length of 4"),
        (lambda: made(delivery=Packed(rows=3, row_length=4), partitions=2), "divide"),
        (lambda: made(min_episodes=9), "wait for ever"),
        (lambda: for_bucket(made(), 1), "0 to 0"),
    ],
)
def test_settings_that_could_never_work_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def made(delivery: Any = None, partitions: int = 1, **settings: Any) -> Replay:
    config = EpisodesConfig(**{"capacity_steps": 8, "max_length": 4, **settings})
    return make_episodes(config, batch_size=2, lanes=2, partitions=partitions, delivery=delivery)


def test_chunks_and_calls_that_do_not_fit_are_refused() -> None:
    replay = made()
    state = jax.eval_shape(lambda: replay.init(ITEM))
    shapes = lambda steps, lanes: jax.tree.map(  # noqa: E731
        lambda leaf: jax.ShapeDtypeStruct((steps, lanes, *leaf.shape), leaf.dtype), ITEM
    )
    for chunk, words in ((shapes(5, 2), "at least 10"), (shapes(2, 3), "number of lanes")):
        with pytest.raises(SpecError, match=words):
            jax.eval_shape(replay.add, state, chunk)
    with pytest.raises(SpecError, match="'truncated'"):
        replay.init({"terminated": FLAG})
    sample = jax.eval_shape(replay.sample, state.control, state.storage, jax.random.key(0))[1]
    with pytest.raises(ConfigError, match="cannot delete"):
        jax.eval_shape(replay.delete, state.control, sample.info)
    by_length = made(sampler=ByLength())
    with pytest.raises(ConfigError, match="no priorities"):
        jax.eval_shape(by_length.update_priorities, state.control, sample.info, sample.weights)


# Compiled and transformed.


def fused(replay: Replay, state: ReplayState, given: Any) -> Any:
    chunk, key = given
    state, added = replay.add(state, chunk)
    control, sample = replay.sample(state.control, state.storage, key)
    control, applied = replay.update_priorities(control, sample.info, jnp.full(sample.weights.shape, 2.0))
    return ReplayState(state.storage, control), (added, sample, applied)


def test_scan_and_vmap_over_seeds_equal_python_loops() -> None:
    config = EpisodesConfig(capacity_steps=24, max_length=5, sampler=conduit.Prioritized())
    replay = make_episodes(config, batch_size=4, lanes=2, delivery=Packed(rows=2, row_length=6))
    traces = []

    def counted(state: ReplayState, given: Any) -> Any:
        traces.append(1)
        return fused(replay, state, given)

    step, start, rng = jax.jit(counted), empty(replay), np.random.default_rng(0)
    stack = partial(jax.tree.map, lambda *leaves: np.stack(leaves))
    expected, inputs = [], []
    for seed in range(2):
        state, outcomes, turns = start, [], []
        for turn in range(8):
            ended = rng.random((3, 2)) < 0.4
            chunk = chunk_of(1 + 6 * turn + np.arange(6).reshape(3, 2), ended, ended)
            turns.append((chunk, np.array([seed, turn], np.uint32)))
            state, outcome = step(state, turns[-1])
            outcomes.append(outcome)
        expected.append((state, stack(*outcomes)))
        inputs.append(stack(*turns))
    assert len(traces) == 1
    scanned = jax.jit(jax.vmap(lambda turns: jax.lax.scan(partial(fused, replay), start, turns)))(stack(*inputs))
    wanted = stack(*expected)
    assert jax.tree.structure(scanned) == jax.tree.structure(wanted)
    for got, one in zip(jax.tree.leaves(scanned), jax.tree.leaves(wanted), strict=True):
        assert got.dtype == one.dtype
        np.testing.assert_array_equal(got, one)


def test_x64_changes_no_dtype_of_state_or_batch() -> None:
    config = EpisodesConfig(capacity_steps=24, max_length=5, sampler=conduit.Prioritized())
    replay = make_episodes(config, batch_size=4, delivery=Packed(rows=2, row_length=6))
    chunk = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((3, 1, *leaf.shape), leaf.dtype), ITEM)
    given = (chunk, jax.ShapeDtypeStruct((2,), jnp.uint32))

    def shapes() -> Any:
        return jax.eval_shape(partial(fused, replay), jax.eval_shape(lambda: replay.init(ITEM)), given)

    narrow = shapes()
    with jax.enable_x64(True):
        wide = shapes()
    assert jax.tree.leaves(narrow) == jax.tree.leaves(wide)


def test_a_fused_step_writes_in_place_and_copies_neither_steps_nor_index() -> None:
    item = {**ITEM, "frame": jax.ShapeDtypeStruct((2048,), jnp.uint8)}
    config = EpisodesConfig(capacity_steps=2**15, max_length=8, sampler=conduit.Prioritized())
    replay = make_episodes(config, batch_size=8, lanes=4)
    state = jax.eval_shape(lambda: replay.init(item))
    chunk = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, 4, *leaf.shape), leaf.dtype), item)
    given = (chunk, jax.ShapeDtypeStruct((2,), jnp.uint32))
    memory = jax.jit(partial(fused, replay), donate_argnums=0).lower(state, given).compile().memory_analysis()
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.storage))
    assert stored > 2**26
    assert memory.alias_size_in_bytes >= stored
    assert memory.temp_size_in_bytes < 2**20
