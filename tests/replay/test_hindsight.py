"""Hindsight against a plain-Python list of steps: a goal comes from the step's own episode, and with the right probability."""

from __future__ import annotations

from dataclasses import dataclass, field
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
from conduit_jax.replay import episode_ends
from conduit_jax.replay.buffer import Replay, ReplayState, make_replay
from conduit_jax.replay.hindsight import STRATEGIES, Hindsight, relabel
from conduit_jax.types import Transition
from tests.replay.reference import chi_square_tail

LANES, LENGTH, BATCH = 2, 5, 16
SCALAR, FLAG = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)
ITEM = {
    "achieved": {"place": SCALAR, "speed": jax.ShapeDtypeStruct((2,), jnp.float32)},
    "desired": {"place": SCALAR, "speed": jax.ShapeDtypeStruct((2,), jnp.float32)},
    "reward": jax.ShapeDtypeStruct((), jnp.float32),
    "terminated": FLAG,
    "truncated": FLAG,
}


def reward_of(achieved: Any, desired: Any, item: Any) -> Any:
    return (achieved["place"] - desired["place"]).astype(jnp.float32) + jnp.sum(item["desired"]["speed"])


GOALS = Hindsight(achieved="achieved", desired=("desired",), recompute=(("reward", reward_of),))


@dataclass
class LaneModel:
    """One lane: ``steps`` (number, episode) of what lives, oldest first; ``episode`` is the one that runs."""

    steps: list[tuple[int, int]] = field(default_factory=list)
    episode: int = 0
    time: int = 0

    def write(self, number: int, ended: bool, length: int) -> None:
        self.steps = [*self.steps, (number, self.episode)][-length:]
        self.episode += ended
        self.time = (self.time + 1) % length

    def reset(self) -> None:
        self.steps, self.time, self.episode = [], 0, self.episode + 1

    def own(self, position: int) -> list[int]:
        """The positions that live of the episode of the step at ``position``."""
        return [other for other, (_, episode) in enumerate(self.steps) if episode == self.steps[position][1]]

    def sources(self, position: int, strategy: str) -> list[int]:
        """The numbers of the steps whose goals the step at ``position`` may get."""
        own = self.own(position)
        chosen = {"final": own[-1:], "future": [p for p in own if p >= position], "episode": own}[strategy]
        return [self.steps[other][0] for other in chosen]


def chunk_of(numbers: np.ndarray, ended: np.ndarray, terminated: np.ndarray) -> dict[str, Any]:
    """Steps whose achieved goals are their ``numbers``; desired goals are negative, rewards 1000 and more."""
    speed = np.stack([numbers, numbers + 0.5], -1).astype(np.float32)
    return {
        "achieved": {"place": numbers.astype(np.int32), "speed": speed},
        "desired": {"place": (-1 - numbers).astype(np.int32), "speed": -speed},
        "reward": (1000 + numbers).astype(np.float32),
        "terminated": ended & terminated,
        "truncated": ended & ~terminated,
    }


@cache
def replay_of(
    strategy: str = "future", ragged: bool = False, fraction: float = 1.0, batch: int = BATCH, length: int = LENGTH
) -> Replay:
    config = conduit.ReplayConfig(capacity=LANES * length, ragged=ragged, sampler=conduit.Prioritized())
    replay = make_replay(config, batch_size=batch, lanes=LANES)
    fields = {"achieved": GOALS.achieved, "desired": GOALS.desired, "recompute": GOALS.recompute}
    return relabel(replay, Hindsight(**fields, strategy=strategy, fraction=fraction))


@cache
def compiled(ragged: bool) -> tuple[Any, ReplayState, Any]:
    replay = replay_of("future", ragged)
    spans = jax.jit(
        lambda control: episode_ends.span(
            control.episodes, replay.geometry, control.ring, jnp.arange(replay.geometry.slots, dtype=jnp.int32)
        )
    )
    return jax.jit(replay.add), jax.jit(lambda: replay.init(ITEM))(), spans


@cache
def resetter(ragged: bool) -> Any:
    return jax.jit(replay_of("future", ragged).reset)


@cache
def sampler_of(strategy: str, ragged: bool) -> Any:
    return jax.jit(replay_of(strategy, ragged, 0.7).sample)


class Program:
    def __init__(self, ragged: bool, data: st.DataObject):
        self.ragged, self.draw = ragged, data.draw
        self.add_chunk, self.state, self.spans = compiled(ragged)
        self.lanes = [LaneModel() for _ in range(LANES)]
        self.count = 0

    def add(self) -> None:
        steps = self.draw(st.sampled_from([1, LENGTH]))
        shape = (steps, LANES)
        numbers = self.count + np.arange(steps * LANES).reshape(shape)
        self.count += steps * LANES
        bits = self.draw(st.integers(0, 2 ** (2 * steps * LANES) - 1))
        flags = (bits >> np.arange(2 * steps * LANES)).reshape(2, *shape) % 2 == 1
        lengths = [steps] * LANES
        if self.ragged:
            lengths = self.draw(st.lists(st.integers(-1, steps + 1), min_size=LANES, max_size=LANES))
        given_lengths = np.array(lengths, np.int32) if self.ragged else None
        self.state, _ = self.add_chunk(self.state, chunk_of(numbers, *flags), given_lengths)
        for index, lane in enumerate(self.lanes):
            for step in range(min(steps, lengths[index])):
                lane.write(int(numbers[step, index]), bool(flags[0, step, index]), LENGTH)

    def reset(self) -> None:
        self.state = self.state._replace(control=resetter(self.ragged)(self.state.control))
        for lane in self.lanes:
            lane.reset()

    def positions(self) -> dict[int, tuple[LaneModel, int]]:
        """The lane and position of what lives in every slot."""
        found = {}
        for index, lane in enumerate(self.lanes):
            for position in range(len(lane.steps)):
                time = (lane.time - len(lane.steps) + position) % LENGTH
                found[index * LENGTH + time] = (lane, position)
        return found

    def compare(self) -> None:
        before, after, known = (np.asarray(part) for part in self.spans(self.state.control))
        for slot, (lane, position) in self.positions().items():
            own = lane.own(position)
            assert before[slot] == position - own[0]
            assert after[slot] == own[-1] - position
            assert known[slot] == (lane.steps[position][1] != lane.episode)

    def sample(self) -> None:
        strategy = self.draw(st.sampled_from(STRATEGIES))
        key = jax.random.key(self.draw(st.integers(0, 2**31 - 1)))
        _, sample = sampler_of(strategy, self.ragged)(self.state.control, self.state.storage, key)
        positions = self.positions()
        if not positions:
            assert not np.asarray(sample.valid).any()
            return
        data = jax.tree.map(np.asarray, sample.data)
        for row, slot in enumerate(sample.info.slot.tolist()):
            lane, position = positions[slot]
            number, goal = lane.steps[position][0], int(data["desired"]["place"][row])
            assert data["achieved"]["place"][row] == number
            if goal < 0:  # as it was stored
                assert goal == -1 - number
                assert data["desired"]["speed"][row].tolist() == [-number, -number - 0.5]
                assert data["reward"][row] == 1000 + number
                continue
            assert goal in lane.sources(position, strategy)
            assert data["desired"]["speed"][row].tolist() == [goal, goal + 0.5]
            assert data["reward"][row] == number - goal + 2 * goal + 0.5


@pytest.mark.parametrize("ragged", [False, True])
@settings(max_examples=20)
@given(data=st.data())
def test_a_goal_comes_from_what_lives_of_the_steps_own_episode(ragged: bool, data: st.DataObject) -> None:
    program = Program(ragged, data)
    for step in data.draw(st.lists(st.sampled_from(["add"] * 6 + ["sample"] * 3 + ["reset"]), min_size=1, max_size=14)):
        getattr(program, step)()
        program.compare()


def story(length: int = 8) -> tuple[np.ndarray, np.ndarray, list[LaneModel]]:
    """Eleven steps of two lanes, three of them overwritten, with episodes of several lengths and one running in each."""
    numbers = np.arange(22).reshape(11, 2)
    ended = np.zeros((11, 2), bool)
    ended[[4, 5, 8], 0] = True
    ended[1, 1] = True
    lanes = [LaneModel(), LaneModel()]
    for index, lane in enumerate(lanes):
        for step in range(11):
            lane.write(int(numbers[step, index]), bool(ended[step, index]), length)
    return numbers, ended, lanes


@cache
def filler() -> Any:
    """``start -> state`` after the story, which comes in chunks of four steps; alike for all strategies and fractions."""
    numbers, ended, _ = story()
    replay, flags = replay_of(length=8), np.zeros((12, 2), bool)
    flags[:11] = ended
    chunk = chunk_of(np.pad(numbers, ((0, 1), (0, 0))), flags, flags)
    chunks = jax.tree.map(lambda leaf: leaf.reshape(3, 4, *leaf.shape[1:]), chunk)

    def body(state: ReplayState, given: Any) -> tuple[ReplayState, None]:
        return replay.add(state, *given)[0], None

    return jax.jit(lambda start: jax.lax.scan(body, start, (chunks, np.array([4, 4, 3], np.int32)))[0])


@cache
def empty() -> ReplayState:
    return jax.jit(lambda: replay_of(length=8).init(ITEM))()


def filled() -> ReplayState:
    return filler()(empty())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_goals_are_uniform_over_those_the_strategy_allows(strategy: str) -> None:
    replay = replay_of(strategy, batch=20_000, length=8)
    state, (_, _, lanes) = filled(), story()
    _, sample = jax.jit(replay.sample)(state.control, state.storage, jax.random.key(3))
    number, goal = np.asarray(sample.data["achieved"]["place"]), np.asarray(sample.data["desired"]["place"])
    observed, expected, cells = [], [], set()
    for lane in lanes:
        for position, (own, _) in enumerate(lane.steps):
            allowed = lane.sources(position, strategy)
            drawn = goal[number == own]
            observed += [(drawn == other).sum() for other in allowed]
            expected += [len(drawn) / len(allowed)] * len(allowed)
            cells |= {(own, other) for other in allowed}
    assert set(zip(number.tolist(), goal.tolist(), strict=True)) == cells
    if strategy != "final":
        assert chi_square_tail(np.array(observed), np.array(expected)) > 1e-3


@cache
def plain_sample(rows: int) -> Any:
    config = conduit.ReplayConfig(capacity=16, sampler=conduit.Prioritized())
    return jax.jit(make_replay(config, batch_size=rows, lanes=LANES).sample)


@pytest.mark.parametrize("fraction", [0.0, 0.8, 1.0])
def test_the_named_fraction_is_relabelled_each_row_by_itself_and_the_draws_stay_the_same(fraction: float) -> None:
    rows = 20_000
    replay = replay_of("final", fraction=fraction, batch=rows, length=8)
    state, key = filled(), jax.random.key(0)
    _, sample = jax.jit(replay.sample)(state.control, state.storage, key)
    _, original = plain_sample(rows)(state.control.inner, state.storage, key)
    for got, wanted in zip(jax.tree.leaves(sample[1:]), jax.tree.leaves(original[1:]), strict=True):
        np.testing.assert_array_equal(got, wanted)
    share = (np.asarray(sample.data["desired"]["place"]) >= 0).mean()
    assert share == fraction if fraction in (0.0, 1.0) else abs(share - fraction) < 5 * (0.16 / rows) ** 0.5
    for name in ("achieved", "terminated", "truncated"):
        for got, wanted in zip(*(jax.tree.leaves(one.data[name]) for one in (sample, original)), strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_nothing_changes_where_the_clock_wraps() -> None:
    geometry, slots = replay_of(length=8).geometry, jnp.arange(16, dtype=jnp.int32)
    span = jax.jit(lambda control: episode_ends.span(control.episodes, geometry, control.ring, slots))
    wanted, start = span(filled().control), empty()
    for clock in (2**31 - 3, 2**32 - 6):
        episodes = start.control.episodes
        near = episodes._replace(
            clock=episodes.clock + np.uint32(clock), ends=episodes.ends + np.uint32(clock), running=episodes.running + 8
        )
        late = filler()(start._replace(control=start.control._replace(episodes=near)))
        for got, one in zip(span(late.control), wanted, strict=True):
            np.testing.assert_array_equal(got, one)


def test_fields_are_found_in_tuples_dicts_and_sequences_and_discounts_can_be_recomputed() -> None:
    def observation(*lead: int) -> dict[str, Any]:
        return {"state": (jnp.zeros((*lead, 3)), jnp.ones((*lead, 2))), "goal": jnp.zeros((*lead, 2))}

    def step(*lead: int) -> dict[str, Any]:
        one = Transition(observation(*lead), jnp.zeros(lead), jnp.zeros(lead), jnp.ones(lead), observation(*lead))
        return {"step": one, "ended": jnp.zeros(lead, bool)}

    goals = Hindsight(
        achieved="step.next_observation.state.1",
        desired=("step.observation.goal", "step.next_observation.goal"),
        recompute=(
            ("step.reward", lambda achieved, desired, item: jnp.float32(jnp.all(achieved == desired))),
            ("step.discount", lambda achieved, desired, item: 1 - jnp.float32(jnp.all(achieved == desired))),
        ),
        ended=("ended",),
        fraction=1.0,
    )
    replay = relabel(make_replay(conduit.ReplayConfig(capacity=4), batch_size=4), goals)
    state, _ = jax.jit(lambda chunk: replay.add(replay.init(step()), chunk))(step(3, 1))
    data = jax.jit(replay.sample)(state.control, state.storage, jax.random.key(0))[1].data["step"]
    assert data.reward.tolist() == [1.0] * 4
    assert data.discount.tolist() == [0.0] * 4
    assert data.observation["goal"].tolist() == data.next_observation["goal"].tolist() == [[1.0, 1.0]] * 4
    assert isinstance(data.observation["state"], tuple)


def test_a_chunk_that_a_limiter_leaves_out_ends_no_episode() -> None:
    config = conduit.ReplayConfig(capacity=8, limiter=conduit.Queue(size=3))
    replay = relabel(make_replay(config, batch_size=1), GOALS)
    add, state = jax.jit(replay.add), jax.jit(lambda: replay.init(ITEM))()
    numbers, ended = np.arange(3)[:, None], np.array([[False], [True], [False]])
    state, info = add(state, chunk_of(numbers, ended, ended))
    after, blocked = add(state, chunk_of(numbers, ended, ended))
    assert (int(info.added), int(blocked.added)) == (3, 0)
    for got, wanted in zip(*(jax.tree.leaves(one.control.episodes) for one in (after, state)), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert "max_diff" in replay.explain_blocked(after.control, "insert", 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"strategy": "futures"}, "did you mean 'future'"),
        ({"fraction": 1.5}, r"\[0, 1\]"),
        ({"fraction": float("nan")}, r"\[0, 1\]"),
        ({"desired": ()}, "names nothing"),
        ({"desired": "desired"}, "a tuple of paths"),
    ],
)
def test_settings_that_cannot_work_are_refused(change: dict[str, Any], words: str) -> None:
    fields = {"achieved": "achieved", "desired": ("desired",), "recompute": ()}
    with pytest.raises(ConfigError, match=words):
        Hindsight(**{**fields, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"achieved": "achieved.plaice"}, "one of place, speed"),
        ({"desired": ("desired.place",)}, "differs in tree, shape or dtype"),
        ({"ended": ("reward",)}, "a bool a step"),
        ({"ended": ("terminated.now",)}, "one of nothing"),
        ({"recompute": (("rewards", reward_of),)}, "no 'rewards'"),
    ],
)
def test_paths_that_do_not_fit_the_item_are_refused_when_the_state_is_made(change: dict[str, Any], words: str) -> None:
    fields = {"achieved": "achieved", "desired": ("desired",), "recompute": ()}
    replay = relabel(make_replay(conduit.ReplayConfig(capacity=4), batch_size=2), Hindsight(**{**fields, **change}))
    with pytest.raises(SpecError, match=words):
        jax.eval_shape(lambda: replay.init(ITEM))


def test_a_reward_of_another_dtype_and_a_replay_out_of_order_are_refused() -> None:
    goals = Hindsight(
        achieved="achieved", desired=("desired",), recompute=(("reward", lambda *_: jnp.zeros((), jnp.int32)),)
    )
    replay = relabel(make_replay(conduit.ReplayConfig(capacity=4), batch_size=2), goals)
    state = jax.eval_shape(lambda: replay.init(ITEM))
    with pytest.raises(SpecError, match="'reward' differs"):
        jax.eval_shape(replay.sample, state.control, state.storage, jax.random.key(0))
    unordered = make_replay(conduit.ReplayConfig(capacity=4, storage="slots"), batch_size=2)
    with pytest.raises(ConfigError, match="time order"):
        jax.eval_shape(lambda: relabel(unordered, GOALS).init(ITEM))


# Compiled and transformed.


def fused(replay: Replay, state: ReplayState, given: Any) -> Any:
    chunk, key = given
    state, _ = replay.add(state, chunk)
    control, sample = replay.sample(state.control, state.storage, key)
    control, applied = replay.update_priorities(control, sample.info, jnp.full(sample.valid.shape, 2.0))
    return ReplayState(state.storage, control), (sample, applied)


def test_scan_and_vmap_over_seeds_equal_python_loops() -> None:
    replay, traces = replay_of("future", fraction=0.5), []

    def counted(state: ReplayState, given: Any) -> Any:
        traces.append(1)
        return fused(replay, state, given)

    step, start = jax.jit(counted), jax.jit(lambda: replay.init(ITEM))()
    stack = partial(jax.tree.map, lambda *leaves: np.stack(leaves))
    rng, expected, inputs = np.random.default_rng(0), [], []
    for seed in range(2):
        state, outcomes, turns = start, [], []
        for turn in range(6):
            ended = rng.random((2, LANES)) < 0.4
            numbers = 4 * turn + np.arange(4).reshape(2, LANES)
            turns.append((chunk_of(numbers, ended, ended), np.array([seed, turn], np.uint32)))
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


def test_a_fused_step_writes_in_place_and_copies_neither_storage_nor_episode_ends() -> None:
    item = {**ITEM, "frame": jax.ShapeDtypeStruct((512,), jnp.float32)}
    replay = relabel(make_replay(conduit.ReplayConfig(capacity=2**16), batch_size=16, lanes=4), GOALS)
    state = jax.eval_shape(lambda: replay.init(item))
    chunk = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, 4, *leaf.shape), leaf.dtype), item)
    given = (chunk, jax.ShapeDtypeStruct((2,), jnp.uint32))
    memory = jax.jit(partial(fused, replay), donate_argnums=0).lower(state, given).compile().memory_analysis()
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= stored
    assert memory.temp_size_in_bytes < 2**18  # either array of episodes is that large
