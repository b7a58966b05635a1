"""Transitions read from ring neighbours against slices of plain lists, and facts of the compiled program."""

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
from conduit_jax.replay.footprint import bytes_per_item, describe
from conduit_jax.replay.neighbours import (
    NStepRange,
    Step,
    TransitionView,
    make_transition_view,
    overwritten_finals,
    steps_of,
)
from tests.replay.reference import chi_square_tail
from tests.replay.reference_windows import TransitionModel
from tests.replay.start_programs import BATCH, Compiled, StartProgram, compile_starts, exponent_of, run_program


class Case(NamedTuple):
    view: TransitionView
    config: conduit.ReplayConfig
    lanes: int
    shape: tuple[int, ...] = (3,)  # of an observation, bfloat16: 600 of them are kept apart


def config_of(capacity: int, **options: Any) -> conduit.ReplayConfig:
    return conduit.ReplayConfig(capacity=capacity, **options)


PRIORITIZED = conduit.Prioritized(exponent=0.7)
CASES = {
    "one step": Case(TransitionView(discount=0.5, final_observations=3), config_of(14), 2),
    "one step, ragged": Case(
        TransitionView(discount=0.5, final_observations=2), config_of(15, ragged=True, sampler=PRIORITIZED), 3, (600,)
    ),
    "three steps": Case(TransitionView(discount=0.5, n=3, final_observations=4), config_of(14, sampler=PRIORITIZED), 2),
    "drawn steps, stacked": Case(
        TransitionView(discount=0.75, n=NStepRange(low=1, high=3), stack=3, final_observations=3),
        config_of(16, ragged=True),
        2,
        (600,),
    ),
    "steps by row, zero frames": Case(
        TransitionView(discount=0.5, n=(1, 3, 2), stack=4, padding="zero", final_observations=9), config_of(18), 2
    ),
    "as far as the ring": Case(TransitionView(discount=0.5, n=2, stack=3, final_observations=2), config_of(5), 1),
}
every_case = pytest.mark.parametrize("name", CASES)


def item_of(shape: tuple[int, ...]) -> Step:
    observation, flag = jax.ShapeDtypeStruct(shape, jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.bool_)
    return Step(
        observation,
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.float32),
        flag,
        flag,
        observation,
    )


@cache
def compiled(name: str) -> Compiled:
    case = CASES[name]
    replay = make_transition_view(case.config, case.view, batch_size=BATCH, lanes=case.lanes)
    return compile_starts(replay, item_of(case.shape))


def chunk_of(seed: int, shape: tuple[int, ...], ended: np.ndarray) -> Step:
    """Random bits in observations, NaNs included."""
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 2**16, (2, *ended.shape, *shape), np.uint16).view(jnp.bfloat16)
    actions = rng.integers(-(2**31), 2**31 - 1, ended.shape, np.int32)
    rewards = rng.integers(-8, 8, ended.shape).astype(np.float32)  # sums of them are exact
    return Step(frames[0], actions, rewards, ended == 1, ended == 2, frames[1])


class Program(StartProgram):
    def __init__(self, name: str, data: st.DataObject):
        self.case, real = CASES[name], compiled(name)
        room = self.case.view.final_capacity(real.replay.geometry.slots, 1)
        model = TransitionModel(*real.replay.geometry, self.case.view, room, exponent_of(self.case.config))
        super().__init__(self.case.config, real, model, data.draw)

    def chunk(self, seed: int, ended: np.ndarray) -> Step:
        return chunk_of(seed, self.case.shape, ended)

    def compare_item(self, sample: Any, index: int, slot: int) -> None:
        view, got = self.case.view, jax.tree.map(lambda leaf: leaf[index], sample.data)
        steps, start = self.model.drawable()[slot]
        ns = range(view.n.low, view.n.high + 1) if isinstance(view.n, NStepRange) else np.ravel(view.n)
        ns = ns if isinstance(view.n, NStepRange) else [ns[index % len(ns)]]
        assert sample.mask is None
        assert int(got.action) == steps[start].content["action"]
        assert any(self.is_transition(got, *self.model.transition(steps, start, int(n))) for n in ns)

    def is_transition(self, got: Any, now: np.ndarray, reward: float, discount: float, then: np.ndarray) -> bool:
        now, then = (now, then) if self.case.view.stack > 1 else (now[0], then[0])
        assert (got.observation.shape, got.observation.dtype) == (now.shape, now.dtype)
        assert got.observation.tobytes() == now.tobytes()
        return (got.reward, got.discount, got.next_observation.tobytes()) == (reward, discount, then.tobytes())

    def compare_finals(self) -> None:
        assert int(overwritten_finals(self.state.control)) == self.model.overwritten


@every_case
@settings(max_examples=12)
@given(data=st.data())
def test_any_program_of_operations_does_what_slices_of_lists_do(name: str, data: st.DataObject) -> None:
    program = Program(name, data)
    run_program(program, program.compare_finals)


# The same laws one by one, so that what breaks is named.


def frames_of(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[..., None], 3, axis=-1).astype(np.float32).astype(jnp.bfloat16)


@pytest.mark.parametrize("name", ["three steps", "as far as the ring"])
def test_truncation_at_every_offset_yields_the_true_final_observation(name: str) -> None:
    """The step that ended is drawn with its own final observation, never with what the next episode began with."""
    case, real = CASES[name], compiled(name)
    length = real.replay.geometry.length
    for offset in range(length):
        state = real.start
        for turn in range(2):  # the second lap's chunk holds the end at this offset of the ring
            number = np.arange(length)[:, None] + np.zeros((1, case.lanes), int)
            ended = (number == offset) & (turn == 1)
            frames = frames_of(number % 100 + 100 * turn)
            zero = np.zeros_like(ended)
            chunk = Step(
                frames, number.astype(np.int32), number.astype(np.float32), zero, ended, frames_of(-number - 1)
            )
            state, _ = real.add(state, chunk, None, None, np.uint32(0))
        seen = {}
        for seed in range(20):
            sample = jax.tree.map(np.asarray, real.sample(state.control, state.storage, jax.random.key(seed))[1])
            newest = sample.data.next_observation.reshape(BATCH, -1, 3)[:, -1, 0].astype(np.float32)
            seen |= dict(zip(sample.data.action.tolist(), zip(newest, sample.data.discount, strict=True), strict=True))
        assert offset in seen or offset < case.view.stack - 1  # its frames have gone with the older lap
        for start, (newest, discount) in seen.items():
            steps = min(case.view.largest_n, offset - start + 1 if offset >= start else length)
            followed = -offset - 1 if start + steps - 1 == offset else start + steps + 100
            assert newest == frames_of(np.array(followed)).astype(np.float32)[0]
            assert discount == case.view.discount**steps  # truncation is not termination


def test_a_step_whose_final_observation_was_overwritten_is_counted_and_not_drawn() -> None:
    real = compiled("one step")  # room for three
    ended = np.zeros((7, 2), int)
    ended[[1, 3], :] = 1  # four ends
    state, _ = real.add(real.start, chunk_of(0, (3,), ended), None, None, np.uint32(0))
    assert int(overwritten_finals(state.control)) == 1
    drawable = set(np.flatnonzero(state.control.selector.starts.drawable[: real.replay.geometry.slots]).tolist())
    assert drawable == set(range(14)) - {1, 6, 13}  # the oldest end's, and each lane's newest step


def test_n_steps_when_sampled_equal_n_steps_at_ingestion() -> None:
    rng, steps, n = np.random.default_rng(0), 12, 3
    lead = (steps, 1)
    observations, finals = rng.standard_normal((2, *lead, 3), np.float32)
    terminated, truncated = rng.random((2, *lead)) < 0.2
    rollout = conduit.Rollout(
        observations,
        np.arange(steps, dtype=np.int32)[:, None],
        rng.standard_normal(lead, np.float32),
        terminated,
        truncated,
        finals,
        np.zeros((1, 3), np.float32),
    )
    view = TransitionView(discount=0.9, n=n)
    replay = make_transition_view(config_of(16, min_size=2), view, batch_size=64)
    chunk = steps_of(rollout)
    start = jax.jit(lambda: replay.init(jax.tree.map(lambda leaf: leaf[0, 0], chunk)))()
    state, _ = jax.jit(replay.add)(start, chunk)
    sample = jax.jit(replay.sample)(state.control, state.storage, jax.random.key(0))[1]
    wanted = jax.jit(lambda given: conduit.n_step_transitions(given, n=n, discount=0.9))(rollout)
    starts = np.asarray(sample.data.action)
    assert len(set(starts.tolist())) > 6
    for got, want in zip(sample.data, wanted, strict=True):
        np.testing.assert_allclose(got, np.asarray(want)[starts, 0], rtol=1e-6)


@pytest.mark.parametrize("name", ["drawn steps, stacked", "one step"])
def test_every_start_is_drawn_equally_often_and_no_other_ever(name: str) -> None:
    case = CASES[name]
    replay = make_transition_view(case.config, case.view, batch_size=4096, lanes=case.lanes)
    real = compiled(name)
    state, lengths = real.start, jnp.full((case.lanes,), real.replay.geometry.length, jnp.int32)
    for seed in range(2):
        ended = np.random.default_rng(seed).choice(3, (real.replay.geometry.length, case.lanes), p=[0.8, 0.1, 0.1])
        state, _ = real.add(
            state, chunk_of(seed, case.shape, ended), lengths if case.config.ragged else None, None, np.uint32(0)
        )
    info = jax.jit(replay.sample)(state.control, state.storage, jax.random.key(3))[1].info
    drawn, counts = np.unique(info.slot, return_counts=True)
    assert drawn.tolist() == np.flatnonzero(state.control.selector.starts.drawable[: replay.geometry.slots]).tolist()
    assert chi_square_tail(counts, np.full(len(counts), 4096 / len(counts))) > 1e-3


def test_views_that_can_never_work_are_refused_when_they_are_made() -> None:
    for options in ({"n": 0}, {"n": ()}, {"n": (1, 0)}, {"stack": 0}, {"padding": "mirror"}, {"final_observations": 0}):
        with pytest.raises(ConfigError):
            TransitionView(discount=0.9, **options)
    with pytest.raises(ConfigError):
        NStepRange(low=3, high=2)
    for options, wanted in (
        ({"stack": 8}, "further than a lane's ring"),
        ({"n": 7}, "further than a lane's ring"),
        ({"n": (1, 2, 3)}, "in turn"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            make_transition_view(config_of(14), TransitionView(discount=0.9, **options), batch_size=8, lanes=2)
    with pytest.raises(ConfigError, match="wait for ever"):
        make_transition_view(config_of(14, min_size=13), TransitionView(discount=0.9), batch_size=8, lanes=2)


def test_items_that_transitions_cannot_be_made_of_are_refused_by_name() -> None:
    replay, item = compiled("one step").replay, item_of((3,))
    with pytest.raises(SpecError, match="stores steps"):
        replay.init({"observation": 1.0})
    for bad, wanted in (
        (item._replace(final_observation=None), "Final observations"),
        (item._replace(reward=jax.ShapeDtypeStruct((), jnp.int32)), "reward"),
        (item._replace(truncated=jax.ShapeDtypeStruct((), jnp.int32)), "truncated"),
    ):
        with pytest.raises(SpecError, match=wanted):
            replay.init(bad)


def test_a_footprint_tells_what_is_stored_and_what_the_naive_layout_would_take() -> None:
    frame, flag = jax.ShapeDtypeStruct((84, 84), jnp.uint8), jax.ShapeDtypeStruct((), jnp.bool_)
    number = jax.ShapeDtypeStruct((), jnp.float32)
    item = Step(frame, jax.ShapeDtypeStruct((), jnp.int32), number, flag, flag, frame)
    view = TransitionView(discount=0.99, stack=4, final_observations=100)
    found = describe(item, view, capacity=1000)
    replay = make_transition_view(config_of(1000), view, batch_size=1)
    storage = jax.eval_shape(lambda: replay.init(item)).storage
    assert found.stored * 1000 == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(storage))
    assert (
        found.stored
        == pytest.approx(sum(size for _, size, _ in found.leaves))
        == bytes_per_item(item, view, capacity=1000)
    )
    assert found.naive == 8 * 84 * 84 + 9
    assert found.naive / found.stored > 7
    assert "observation" in str(found)
    assert describe({"x": number}).naive == 4
