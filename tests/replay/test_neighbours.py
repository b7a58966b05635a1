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
@settings(max_examples=30)
@given(data=st.data())
def test_any_program_of_operations_does_what_slices_of_lists_do(name: str, data: st.DataObject) -> None:
    program = Program(name, data)
    run_program(program, program.compare_finals)
