"""Independent slots: random programs against the plain-Python model, the rules one by one, and facts of the compiled program."""

from __future__ import annotations

from collections import Counter
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
from conduit_jax.replay import live_list, records, slot_table, slots
from conduit_jax.replay.buffer import Replay, ReplayState, make_replay, mutate
from conduit_jax.types import SampleInfo
from tests.replay.reference import chi_square_tail
from tests.replay.reference_slots import SlotsModel

LANES, STEPS, BATCH, CAPACITY = 2, 3, 4, 5
ITEM = {"name": jax.ShapeDtypeStruct((), jnp.int32), "large": jax.ShapeDtypeStruct((300,), jnp.float32)}
independent = conduit.Prioritized(exponent=0.5, stratified=False, importance_normalization="none")
ratio = conduit.SampleToInsertRatio(samples_per_insert=1.5, min_size=2, error_buffer=(-4.5, 12))


def config(**kwargs: Any) -> conduit.ReplayConfig:
    return conduit.ReplayConfig(**{"capacity": CAPACITY, "storage": "slots", **kwargs})


CASES = {
    "uniform, uniform": config(remover=conduit.Uniform(), min_size=3),
    "prioritized, min heap": config(sampler=independent, remover=conduit.MinHeap(), limiter=ratio),
    "min heap, max heap": config(sampler=conduit.MinHeap(), remover=conduit.MaxHeap()),
    "max heap, lifo": config(sampler=conduit.MaxHeap(), remover=conduit.Lifo(), max_times_sampled=3),
    "queue": config(sampler=conduit.Fifo(), max_times_sampled=1, limiter=conduit.Queue(size=CAPACITY)),
    "stack": config(sampler=conduit.Lifo(), remover=conduit.Lifo(), max_times_sampled=2, limiter=conduit.Stack(size=7)),
    "epochs, fifo": config(sampler=conduit.Epochs(), min_size=2),
    "epochs, prioritized": config(
        sampler=conduit.Epochs(), remover=conduit.Prioritized(exponent=1.0), max_times_sampled=2
    ),
    "prioritized twice": config(
        sampler=conduit.Prioritized(), remover=conduit.Prioritized(), max_times_sampled=3, limiter=ratio
    ),
}


class Compiled(NamedTuple):
    replay: Replay
    add: Any
    sample: Any
    update: Any
    delete: Any
    start: ReplayState


@cache
def compiled(name: str) -> Compiled:
    replay = make_replay(CASES[name], batch_size=BATCH, lanes=LANES)
    functions = (replay.add, replay.sample, replay.update_priorities, replay.delete)
    return Compiled(replay, *(jax.jit(one) for one in functions), jax.jit(lambda: replay.init(ITEM))())


def contents(names: Any) -> dict[str, Any]:
    """A chunk whose items are recognised by name, and whose large leaf repeats it."""
    names = np.asarray(names, np.int32)
    return {"name": names, "large": np.broadcast_to(names[..., None].astype(np.float32), (*names.shape, 300))}


def chunk_of(first: int, steps: int = STEPS, lanes: int = LANES) -> dict[str, Any]:
    return contents(first + np.arange(steps * lanes).reshape(steps, lanes))


def live_names(state: ReplayState) -> dict[int, int]:
    """The slot of every live item by name, and the check that its large leaf is whole."""
    live = state.control.table.live
    slots = np.asarray(live.places[0])[: int(live.size)]
    stored = records.unpack(state.storage.layout, state.storage.rows, state.storage.apart)
    names = np.asarray(stored["name"])[slots]
    assert (np.asarray(stored["large"])[slots] == names[:, None]).all()
    return dict(zip(names.tolist(), slots.tolist(), strict=True))


def info_of(pairs: list[tuple[int, int]]) -> SampleInfo:
    slots, generations = zip(*pairs, strict=True)
    empty = np.zeros(len(pairs), np.float32)
    return SampleInfo(np.array(slots, np.int32), np.array(generations, np.uint32), empty, empty, empty, empty, empty)


good_priorities = st.sampled_from([0.0, 0.25, 1.0, 2.5, 1e-3, 40.0])
any_priorities = good_priorities | st.sampled_from([float("nan"), float("inf"), -1.0])
seeds = st.integers(0, 2**31 - 1)


class Program:
    """Carries out each drawn operation on both and compares everything that can be seen."""

    def __init__(self, name: str, data: st.DataObject):
        self.config, self.draw, self.real = CASES[name], data.draw, compiled(name)
        self.model, self.state = SlotsModel(CASES[name]), self.real.start
        self.names: dict[tuple[int, int], int] = {}  # by (slot, generation), of all that was ever drawn
        self.next_name = 0

    def add(self) -> None:
        lengths = np.array(self.draw(st.lists(st.integers(-1, STEPS + 1), min_size=LANES, max_size=LANES)), np.int32)
        given = np.array(
            self.draw(st.lists(any_priorities, min_size=STEPS * LANES, max_size=STEPS * LANES)), np.float32
        )
        given = given.reshape(STEPS, LANES)
        chunk, key = chunk_of(self.next_name), jax.random.key_data(jax.random.key(self.draw(seeds)))
        self.next_name += STEPS * LANES
        real = [(step, lane) for step in range(STEPS) for lane in range(LANES) if step < lengths[lane]]
        names = [int(chunk["name"][place]) for place in real]
        before = set(self.model.names)
        self.state, info = self.real.add(self.state, chunk, lengths, given, np.uint32(1), key)
        after = set(live_names(self.state))
        assert after <= before | set(names)
        # What a remover that draws has chosen is read from the outcome; an item of the chunk goes after it came.
        gone = [name for name in (*self.model.names, *names) if name not in after]
        expected = self.model.add(names, [given[place] for place in real], lambda: self.pick(gone))
        assert tuple(int(count) for count in info) == expected

    def pick(self, gone: list[int]) -> int:
        return next(name for name in gone if name in self.model.names)

    def sample(self) -> None:
        model, key = self.model, jax.random.key(self.draw(seeds))
        control, sample = self.real.sample(self.state.control, self.state.storage, key)
        self.state = self.state._replace(control=control)
        data, info, weights, mask, valid = jax.tree.map(np.asarray, sample)
        assert mask is None
        for index, allowed in enumerate(model.allowed(BATCH)):
            allowed = allowed and bool(model.items)
            assert bool(valid[index]) == allowed
            if not allowed:
                continue
            name = int(data["name"][index])
            item, chances = model.named(name), model.probabilities(self.config.sampler)
            assert chances[name] > 0
            assert info.probability[index] == pytest.approx(chances[name], rel=1e-5)
            assert (data["large"][index] == name).all()
            assert info.table_size[index] == len(model.items)
            assert info.priority[index] == item.priority
            assert info.age[index] == model.inserts - item.number
            assert info.policy_version[index] == 1
            pair = (int(info.slot[index]), int(info.generation[index]))
            assert self.names.setdefault(pair, name) == name
            if self.config.sampler == independent:
                assert weights[index] == pytest.approx((len(model.items) * chances[name]) ** -0.4, rel=1e-5)
            assert info.times_sampled[index] == model.draw(name)

    def mentioned(self) -> list[tuple[int, int]]:
        """Names of items: live ones, those gone long ago, and made-up ones."""
        generation = np.asarray(self.state.control.items.generation)
        live = live_names(self.state)
        self.names |= {(slot, int(generation[slot])): name for name, slot in live.items()}
        made_up = st.tuples(st.integers(-2, CAPACITY + 3) | st.sampled_from([2**31 - 1, -(2**31)]), st.just(10**6))
        known = [st.sampled_from(sorted(self.names))] * bool(self.names)
        known += [st.sampled_from([(slot, int(generation[slot])) for slot in live.values()])] * bool(live)
        return self.draw(st.lists(st.one_of(*known, made_up), min_size=BATCH, max_size=BATCH))

    def update(self) -> None:
        pairs = self.mentioned()
        kind = self.draw(st.sampled_from([good_priorities, good_priorities, any_priorities]))
        priorities = self.draw(st.lists(kind, min_size=BATCH, max_size=BATCH))
        expected = self.model.update([self.names.get(pair) for pair in pairs], priorities)
        control, applied = self.real.update(self.state.control, info_of(pairs), np.array(priorities, np.float32))
        self.state = self.state._replace(control=control)
        assert int(applied) == expected

    def delete(self) -> None:
        pairs = self.mentioned()
        expected = self.model.delete([self.names.get(pair) for pair in pairs])
        control, deleted = self.real.delete(self.state.control, info_of(pairs))
        self.state = self.state._replace(control=control)
        assert int(deleted) == expected

    def reset(self) -> None:
        self.model.reset()
        self.state = self.state._replace(control=self.real.replay.reset(self.state.control))

    def compare(self) -> None:
        control, model, replay = self.state.control, self.model, self.real.replay
        live = live_names(self.state)
        assert sorted(live) == sorted(model.names)
        order, where = np.asarray(control.table.live.places)
        assert (order[where] == np.arange(CAPACITY + 1)).all()
        for item in model.items:
            assert control.items.priority[live[item.name]] == item.priority
            assert control.items.times_sampled[live[item.name]] == item.times
        assert control.max_priority == model.max_priority
        assert [int(count) for count in control.faults] == list(vars(model.faults).values())
        for n in (1, BATCH, 3 * CAPACITY):
            assert bool(replay.can_add(control, n)) == model.limiter.can_insert(n)
            assert bool(replay.can_sample(control, n)) == model.can_sample(n)
            assert bool(replay.explain_blocked(control, "insert", n)) != model.limiter.can_insert(n)
            assert bool(replay.explain_blocked(control, "sample", n)) != model.can_sample(n)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_program_of_operations_does_what_the_model_does(name: str, data: st.DataObject) -> None:
    program = Program(name, data)
    steps = ["add", "add", "add", "sample", "sample", "update", "delete", "reset"]
    for step in data.draw(st.lists(st.sampled_from(steps), min_size=1, max_size=14)):
        getattr(program, step)()
        program.compare()


# The rules one by one, so that what breaks is named.


def made(batch: int = BATCH, lanes: int = 1, **kwargs: Any) -> tuple[Replay, ReplayState]:
    replay = make_replay(config(**kwargs), batch_size=batch, lanes=lanes)
    return replay, replay.init(ITEM)


def filled(replay: Replay, state: ReplayState, count: int, priorities: Any = None) -> ReplayState:
    given = None if priorities is None else jnp.asarray(priorities, jnp.float32)[:, None]
    return jax.jit(replay.add)(state, chunk_of(0, count, 1), None, given)[0]


def sampled(replay: Replay, state: ReplayState, seed: int = 0) -> tuple[ReplayState, Any]:
    control, sample = jax.jit(replay.sample)(state.control, state.storage, jax.random.key(seed))
    return state._replace(control=control), sample


@pytest.mark.parametrize(
    ("remover", "stays"),
    [
        (conduit.Fifo(), [3, 4, 5, 6, 7]),
        (conduit.Lifo(), [0, 1, 2, 3, 4]),
        (conduit.MinHeap(), [0, 1, 2, 3, 5]),
        (conduit.MaxHeap(), [1, 3, 4, 6, 7]),
    ],
)
def test_the_newcomer_is_a_candidate_for_eviction(remover: Any, stays: list[int]) -> None:
    replay, state = made(remover=remover)
    state = filled(replay, state, 8, [3, 2, 3, 1, 0.5, 3, 0, 0.5])
    assert sorted(live_names(state)) == stays


def test_ties_of_a_heap_go_to_the_least_recently_touched_and_updates_touch() -> None:
    replay, state = made(batch=1, sampler=conduit.MinHeap(), remover=conduit.MaxHeap())
    state = filled(replay, state, 5, [1, 1, 1, 1, 1])
    order = []
    for _ in range(6):
        state, sample = sampled(replay, state)
        order.append(int(sample.data["name"][0]))
        control, _ = replay.update_priorities(state.control, sample.info, jnp.ones(1))
        state = state._replace(control=control)
    assert order == [0, 1, 2, 3, 4, 0]


@pytest.mark.parametrize(("sampler", "wanted"), [(conduit.Fifo(), 0), (conduit.Lifo(), 4)])
def test_updates_do_not_move_items_in_order_of_insertion(sampler: Any, wanted: int) -> None:
    replay, state = made(sampler=sampler)
    state = filled(replay, state, 5)
    state, sample = sampled(replay, state)
    control, _ = replay.update_priorities(state.control, sample.info, jnp.full(BATCH, 9.0))
    _, sample = sampled(replay, state._replace(control=control))
    assert sample.data["name"].tolist() == [wanted] * BATCH
    assert sample.info.probability.tolist() == [1.0] * BATCH
    assert sample.info.priority.tolist() == [9.0] * BATCH


def test_a_batch_of_two_from_one_item_that_may_be_drawn_once_gives_one() -> None:
    replay, state = made(batch=2, max_times_sampled=1)
    state = filled(replay, state, 1)
    assert bool(replay.can_sample(state.control, 1))
    assert not bool(replay.can_sample(state.control, 2))
    assert "1 live items have 1 draws left" in replay.explain_blocked(state.control, "sample", 2)
    state, sample = sampled(replay, state)
    assert sample.valid.tolist() == [True, False]
    assert (sample.info.times_sampled[0], sample.info.table_size[0]) == (1, 1)
    assert not live_names(state)


def test_two_items_that_may_be_drawn_once_cannot_serve_three() -> None:
    replay, state = made(batch=3, max_times_sampled=1, min_size=2)
    state = filled(replay, state, 2)
    assert [bool(replay.can_sample(state.control, n)) for n in (1, 2, 3)] == [True, True, False]
    state, sample = sampled(replay, state)
    assert sample.valid.tolist() == [True, True, False]
    assert sorted(sample.data["name"][:2].tolist()) == [0, 1]


def test_items_counted_as_drawn_in_a_batch_are_counted_one_by_one() -> None:
    replay, state = made(batch=6, sampler=conduit.Lifo())
    state = filled(replay, state, 2)
    state, sample = sampled(replay, state)
    assert sample.info.times_sampled.tolist() == [1, 2, 3, 4, 5, 6]
    _, sample = sampled(replay, state)
    assert sample.info.times_sampled.tolist() == [7, 8, 9, 10, 11, 12]


def test_an_epoch_draws_every_item_once_and_shuffles_anew() -> None:
    replay, state = made(batch=10, sampler=conduit.Epochs())
    state = filled(replay, state, 5)
    orders = []
    for seed in range(20):
        state, sample = sampled(replay, state, seed)
        names = sample.data["name"].tolist()
        orders += [tuple(names[:5]), tuple(names[5:])]
    assert all(sorted(order) == list(range(5)) for order in orders)
    assert len(set(orders)) > 25


def test_first_draws_of_epochs_are_uniform() -> None:
    replay, state = made(batch=5 * 400, sampler=conduit.Epochs())
    _, sample = sampled(replay, filled(replay, state, 5))
    names = np.asarray(sample.data["name"]).reshape(400, 5)
    for place in range(5):
        assert chi_square_tail(np.bincount(names[:, place], minlength=5), np.full(5, 80.0)) > 1e-4


@pytest.mark.parametrize("sampler", [conduit.Uniform(), independent, conduit.Prioritized(exponent=1.0)])
@pytest.mark.parametrize("limit", [0, 60000])
def test_draws_follow_their_probabilities(sampler: Any, limit: int) -> None:
    replay, state = made(batch=3000, sampler=sampler, max_times_sampled=limit)
    state = filled(replay, state, 5, [0.5, 2.0, 0.0, 1.0, 4.0])
    _, sample = sampled(replay, state, 3)
    model = SlotsModel(config(sampler=sampler))
    model.add(range(5), [0.5, 2.0, 0.0, 1.0, 4.0])
    chances = model.probabilities(sampler)
    positive = [name for name in range(5) if chances[name] > 0]
    counts = np.bincount(sample.data["name"], minlength=5)
    assert counts.sum() == counts[positive].sum() == 3000
    assert chi_square_tail(counts[positive], 3000 * np.array([chances[name] for name in positive])) > 1e-4


@pytest.mark.parametrize("remover", [conduit.Uniform(), conduit.Prioritized(exponent=1.0)])
def test_removers_that_draw_follow_their_probabilities(remover: Any) -> None:
    replay, state = made(remover=remover)
    priorities = [0.5, 2.0, 0.0, 1.0, 4.0, 1.5]

    def survivors(key: jax.Array) -> jax.Array:
        given = jnp.array(priorities, jnp.float32)[:, None]
        after, _ = replay.add(state, chunk_of(0, 6, 1), None, given, None, key)
        return after.storage.rows[after.control.table.live.places[0, :5], 1]

    keys = jax.random.key_data(jax.random.split(jax.random.key(0), 2000))
    left = np.asarray(jax.jit(jax.vmap(survivors))(keys))
    evicted = Counter(15 - left.sum(axis=1))
    model = SlotsModel(config(capacity=6, remover=remover))
    model.add(range(6), priorities)
    chances = {name: chance for name, chance in model.probabilities(remover).items() if chance > 0}
    assert set(evicted) == set(chances)
    counts = np.array([evicted[name] for name in chances])
    assert chi_square_tail(counts, 2000 * np.array(list(chances.values()))) > 1e-4


def test_without_a_key_a_remover_draws_anew_in_every_add() -> None:
    replay, state = made(remover=conduit.Uniform())
    state, add = filled(replay, state, 5), jax.jit(replay.add)
    gone = []
    for number in range(40):
        before = live_names(state)
        state, _ = add(state, contents([[100 + number]]))
        gone.append(({**before, 100 + number: -1}.keys() - live_names(state).keys()).pop())
    assert len({number - name for number, name in enumerate(gone)}) > 5


def test_a_deleted_item_is_not_mistaken_for_its_successor() -> None:
    replay, state = made(batch=1, sampler=conduit.Lifo())
    state = filled(replay, state, 1)
    state, sample = sampled(replay, state)
    control, deleted = replay.delete(state.control, sample.info)
    assert int(deleted) == 1
    state, _ = replay.add(state._replace(control=control), contents([[7]]))
    control, deleted = replay.delete(state.control, sample.info)
    control, applied = replay.update_priorities(control, sample.info, jnp.full(1, 5.0))
    assert (int(deleted), int(applied), int(control.faults.stale_updates)) == (0, 0, 1)
    assert sorted(live_names(state._replace(control=control))) == [7]


def test_a_bad_priority_refuses_deletes_and_updates_alike_and_deletes_come_first() -> None:
    replay, state = made(batch=5, sampler=conduit.Epochs())
    state = filled(replay, state, 5)
    state, sample = sampled(replay, state)
    first = jax.tree.map(lambda leaf: leaf[:2], sample.info)
    change = jax.jit(lambda control, priorities: mutate(
        replay, control, deletes=first, updates=sample.info, priorities=priorities
    ))  # fmt: skip
    control, deleted, applied = change(state.control, jnp.array([1, 2, 3, jnp.nan, 5]))
    assert (int(deleted), int(applied)) == (0, 0)
    assert len(live_names(state._replace(control=control))) == 5
    control, deleted, applied = change(state.control, jnp.arange(5.0))
    assert (int(deleted), int(applied), int(control.faults.stale_updates)) == (2, 3, 2)


def test_a_chunk_longer_than_the_capacity_goes_through_it() -> None:
    replay, state = made()
    state, info = jax.jit(replay.add)(state, chunk_of(0, 12, 1))
    assert sorted(live_names(state)) == [7, 8, 9, 10, 11]
    assert [int(count) for count in info] == [12, 7, 0]


def test_a_blocked_chunk_is_left_out_whole_and_can_come_again() -> None:
    replay, state = made(batch=1, sampler=conduit.Fifo(), max_times_sampled=1, limiter=conduit.Queue(size=3))
    add = jax.jit(replay.add)
    state, _ = add(state, chunk_of(0, 2, 1))
    state, info = add(state, chunk_of(2, 2, 1))
    assert [int(count) for count in info] == [0, 0, 0]
    assert "4 > 3" in replay.explain_blocked(state.control, "insert", 2)
    state, sample = sampled(replay, state)
    assert sample.data["name"].tolist() == [0]
    state, info = add(state, chunk_of(2, 2, 1))
    assert int(info.added) == 2
    assert sorted(live_names(state)) == [1, 2, 3]


def test_generations_and_insert_numbers_pass_2_to_the_32() -> None:
    replay, state = made(batch=2, max_times_sampled=3)
    items = state.control.items
    items = items._replace(generation=jnp.full_like(items.generation, 2**32 - 1))
    state = state._replace(control=state.control._replace(inserts=jnp.uint32(2**32 - 2), items=items))
    state = filled(replay, state, 5)
    state, sample = sampled(replay, state)
    assert sample.info.age.tolist() == [4 - name for name in sample.data["name"].tolist()]
    assert sample.info.generation.tolist() == [0, 0]
    assert int(state.control.draws_left) == 13


@pytest.mark.parametrize("name", ["queue", "prioritized, min heap"])
def test_scan_and_vmap_equal_python_loops(name: str) -> None:
    real = compiled(name)

    def step(state: ReplayState, given: tuple[Any, Any]) -> tuple[ReplayState, Any]:
        state, added = real.replay.add(state, given[0])
        control, sample = real.replay.sample(state.control, state.storage, given[1])
        control, applied = real.replay.update_priorities(control, sample.info, jnp.arange(4.0))
        first = jax.tree.map(lambda leaf: leaf[:1], sample.info)
        control, deleted = real.replay.delete(control, first)
        return ReplayState(state.storage, control), (added, sample, applied, deleted)

    chunks = [chunk_of(10 * turn) for turn in range(5)]
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(1), 5)))
    jitted, state, outcomes = jax.jit(step), real.start, []
    for chunk, key in zip(chunks, keys, strict=True):
        state, outcome = jitted(state, (chunk, key))
        outcomes.append(outcome)
    given = (jax.tree.map(lambda *leaves: np.stack(leaves), *chunks), keys)
    loop = jax.jit(lambda first, xs: jax.lax.scan(step, first, xs))
    wanted = (state, jax.tree.map(lambda *leaves: np.stack(leaves), *outcomes))
    assert_same(loop(real.start, given), wanted)
    mapped, states, outcomes = (
        jax.jit(jax.vmap(step)),
        jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), real.start),
        [],
    )
    for chunk, key in zip(chunks, keys, strict=True):
        states, outcome = mapped(states, jax.tree.map(lambda leaf: np.stack([leaf, leaf]), (chunk, key)))
        outcomes.append(outcome)
    both = (states, jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *outcomes))
    for index in (0, 1):
        assert_same(jax.tree.map(lambda leaf, one=index: leaf[one], both), wanted)


def assert_same(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["queue", "prioritized, min heap"])
def test_room_for_all_at_once_gives_what_one_by_one_gives(name: str) -> None:
    rules = slots.slot_rules(CASES[name])
    words = (jnp.zeros(6, jnp.uint32),) * 2

    def both(priorities: jax.Array, present: jax.Array) -> Any:
        given = (rules, slot_table.init_table(rules), priorities, present)
        outcomes = slot_table._insert_at_once(*given), slot_table._insert_in_turn(*given, words)
        return [
            (inserted, table, rules.remover.select(table.remover, table.live, *words)) for table, inserted in outcomes
        ]

    present = jnp.array([True, False, True, True, False, True])
    one, two = jax.jit(both)(jnp.array([1.0, 2, 0, 3, 4, 3]), present)
    assert_same(one[0], two[0])
    assert_same(one[1].live.places[0, :4], two[1].live.places[0, :4])
    assert_same(one[2], two[2])


def test_no_two_items_of_a_chunk_are_written_to_one_slot() -> None:
    """Slots are given up and taken again within the chunk; which of two writes a backend keeps is open."""
    for remover in (conduit.Lifo(), conduit.Fifo(), conduit.MaxHeap()):
        rules = slots.slot_rules(config(capacity=2, remover=remover))
        words = (jnp.zeros(9, jnp.uint32), jnp.zeros(9, jnp.uint32))
        table, inserted = slot_table.insert_chunk(
            rules, slot_table.init_table(rules), jnp.arange(9.0), jnp.ones(9, bool), words
        )
        there = [slot for slot in inserted.slots.tolist() if slot != slot_table.BEYOND]
        assert len(inserted.taken.tolist()) > len(set(inserted.taken.tolist()))
        assert sorted(there) == sorted(table.live.places[0, :2].tolist())


def test_partitions_on_a_mesh_evict_and_delete_each_for_itself() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    part = conduit.Part(tuple(jax.devices()[:2]), "device", 2)
    placement = conduit.Placement("two", (part,), mesh, "data")
    replay = make_replay(config(capacity=10, remover=conduit.Uniform()), batch_size=8, lanes=2, partitions=2)
    placed = conduit.place(replay, placement)
    state = placed.init(ITEM)
    for turn in range(4):
        state, info = placed.add(state, chunk_of(10 * turn, 4, 2))
    assert info.added.tolist() == info.evicted.tolist() == [4, 4]
    places = np.asarray(state.control.table.live.places)
    assert (places[0] != places[1]).any()
    control, sample = placed.sample(state.control, state.storage, jax.random.key_data(jax.random.key(0)))
    assert sample.info.slot.max() >= CAPACITY + 1
    control, deleted = placed.delete(control, sample.info)
    gone = [len(set(half)) for half in np.asarray(sample.info.slot).reshape(2, 4).tolist()]
    assert deleted.tolist() == gone
    assert control.table.live.size.tolist() == [5 - gone[0], 5 - gone[1]]
    assert placed.explain_blocked(control, "sample", 2) == ""
    assert "0 < 1" in placed.explain_blocked(placed.reset(control), "sample", 2)


# Facts of the compiled program: nothing of the storage's size is copied, and loops copy no control either.

BIG = {"frame": jax.ShapeDtypeStruct((4096,), jnp.uint8), "small": jax.ShapeDtypeStruct((7,), jnp.float32)}
BIG_CASES = {
    "uniform": {"remover": conduit.Uniform()},
    "prioritized": {"sampler": conduit.Prioritized(), "remover": conduit.MinHeap()},
    "queue": {"sampler": conduit.Fifo(), "max_times_sampled": 1, "limiter": conduit.Queue(size=4096)},
    "epochs": {"sampler": conduit.Epochs()},
}


def bytes_of(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", BIG_CASES)
def test_a_donated_step_in_a_scan_copies_neither_storage_nor_control(name: str) -> None:
    replay = make_replay(config(capacity=100_000, **BIG_CASES[name]), batch_size=16, lanes=4)
    state = jax.eval_shape(lambda: replay.init(BIG))
    chunks = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((5, 2, 4, *leaf.shape), leaf.dtype), BIG)

    def loop(state: ReplayState, chunks: Any, keys: Any) -> Any:
        def body(state: ReplayState, given: Any) -> Any:
            state, _ = replay.add(state, given[0])
            control, sample = replay.sample(state.control, state.storage, given[1])
            control, _, _ = mutate(replay, control, deletes=sample.info, updates=sample.info, priorities=jnp.ones(16))
            return ReplayState(state.storage, control), jnp.sum(sample.data["small"])

        return jax.lax.scan(body, state, (chunks, keys))

    keys = jax.ShapeDtypeStruct((5, 2), jnp.uint32)
    memory = jax.jit(loop, donate_argnums=0).lower(state, chunks, keys).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= bytes_of(state)
    # One array of the control has 400,000 bytes, the storage 400 MB. The tree's levels (458,000 bytes) are still copied in
    # this loop where draws are prioritized: a fault of the order XLA puts reads and writes in, not yet found.
    allowed = 480_000 if name == "prioritized" else 300_000
    assert memory.temp_size_in_bytes < allowed


# What can never work is refused.


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"storage": "ring", "remover": conduit.Lifo()}, "remover=Lifo"),
        ({"storage": "ring", "sampler": conduit.Epochs()}, "sampler=Epochs"),
        ({"storage": "ring", "max_times_sampled": 1}, "max_times_sampled=1"),
        ({"storage": "disk"}, "storage"),
        ({"remover": conduit.Epochs()}, "Unknown remover"),
        ({"sampler": "fifo"}, "Unknown sampler"),
        ({"limiter": 3}, "Unknown limiter"),
        ({"max_times_sampled": -1}, "max_times_sampled"),
        ({"max_times_sampled": 2**17}, "max_times_sampled"),
        ({"limiter": conduit.MinSize(min_size=9)}, "min_size=9, capacity=5"),
        ({"limiter": conduit.MinSize(min_size=3), "min_size": 2}, "two minimum sizes"),
    ],
)
def test_a_replay_that_cannot_be_is_refused_when_it_is_set(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**kwargs)


def test_what_forces_slots_gets_them() -> None:
    assert conduit.ReplayConfig(capacity=5).resolved_storage == "ring"
    for kwargs in ({"remover": conduit.Lifo()}, {"sampler": conduit.Fifo()}, {"max_times_sampled": 2}):
        assert conduit.ReplayConfig(capacity=5, **kwargs).resolved_storage == "slots"


def test_a_ring_says_that_it_cannot_delete() -> None:
    replay = make_replay(conduit.ReplayConfig(capacity=5), batch_size=2)
    state = replay.init(ITEM)
    with pytest.raises(ConfigError, match='storage="slots"'):
        replay.delete(state.control, info_of([(0, 0)]))


def test_a_chunk_of_another_item_or_number_of_lanes_is_refused() -> None:
    replay, state = made(lanes=2)
    with pytest.raises(SpecError, match="lanes"):
        replay.add(state, chunk_of(0, 2, 3))
    with pytest.raises(SpecError, match="differ"):
        replay.add(state, {"name": jnp.zeros((2, 2), jnp.int32)})


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_the_live_list_stays_a_permutation_in_three_stretches(data: st.DataObject) -> None:
    live, alive, drawn = live_list.init(6), [], set()
    yes = jnp.asarray(True)
    for step in data.draw(st.lists(st.sampled_from(["insert", "remove", "draw"]), max_size=20)):
        if step == "insert" and len(alive) < 6:
            alive.append(int(live_list.nth(live, live.size)))
            live = live_list.insert(live, jnp.int32(1))
        elif step == "remove" and alive:
            slot = data.draw(st.sampled_from(alive))
            alive.remove(slot)
            drawn.discard(slot)
            live = live_list.remove(live, jnp.int32(slot), yes)
        elif step == "draw" and set(alive) - drawn:
            slot = data.draw(st.sampled_from(sorted(set(alive) - drawn)))
            drawn.add(slot)
            live = live_list.mark_drawn(live, jnp.int32(slot), yes)
        order, where = np.asarray(live.places)
        assert (order[where] == np.arange(6)).all()
        assert set(order[: int(live.drawn)].tolist()) == drawn
        assert set(order[: int(live.size)].tolist()) == set(alive)
        for other in (live_list.remove(live, jnp.int32(0), ~yes), live_list.mark_drawn(live, jnp.int32(0), ~yes)):
            assert_same(other, live)
