"""Random programs of operations on a replay whose items need their neighbours, and on the model it is held against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import conduit_jax as conduit
from conduit_jax.replay.buffer import Replay, ReplayState
from conduit_jax.types import SampleInfo
from tests.replay.reference import UINT32
from tests.replay.reference_windows import StartModel

BATCH = 6


class Compiled(NamedTuple):
    replay: Replay
    add: Any
    sample: Any
    update: Any
    reset: Any
    can_sample: Any
    start: ReplayState


def compile_starts(replay: Replay, item: Any) -> Compiled:
    quickly = {"xla_backend_optimization_level": 0}  # compiling is what takes the time
    functions = (replay.add, replay.sample, replay.update_priorities, replay.reset)
    jitted = [jax.jit(function, compiler_options=quickly) for function in functions]
    can_sample = jax.jit(replay.can_sample, static_argnums=1, compiler_options=quickly)
    return Compiled(replay, *jitted, can_sample, jax.jit(lambda: replay.init(item))())


def exponent_of(config: conduit.ReplayConfig) -> float | None:
    return config.sampler.exponent if isinstance(config.sampler, conduit.Prioritized) else None


good_priorities = st.sampled_from([0.0, 0.25, 1.0, 2.5, 40.0])
any_priorities = good_priorities | st.sampled_from([float("nan"), float("inf"), -1.0])
seeds = st.integers(0, 2**31 - 1)


class StartProgram:
    """Carries out each drawn operation on both and compares everything that can be seen. To be derived from."""

    def __init__(self, config: conduit.ReplayConfig, real: Compiled, model: StartModel, draw: Any, stride: int = 1):
        self.config, self.real, self.model, self.draw, self.stride = config, real, model, draw, stride
        self.state, self.infos = real.start, []
        self.lanes, self.length = real.replay.geometry

    def chunk(self, seed: int, ended: np.ndarray) -> Any:
        """A chunk with episodes ended as ``ended`` ``(T, lanes)`` says: 0 not, 1 terminated, 2 truncated."""
        raise NotImplementedError

    def compare_item(self, sample: Any, index: int, slot: int) -> None:
        raise NotImplementedError

    def add(self) -> None:
        lanes, length, draw = self.lanes, self.length, self.draw
        steps = draw(st.sampled_from([length] if self.config.ragged else [1, length - 1]))
        ended = draw(st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=steps * lanes, max_size=steps * lanes))
        lengths, priorities, version = [steps] * lanes, None, draw(st.integers(0, UINT32 - 1))
        if self.config.ragged:
            lengths = draw(st.lists(st.integers(0, steps), min_size=lanes, max_size=lanes))
        chunk = self.chunk(draw(seeds), np.array(ended).reshape(steps, lanes))
        if exponent_of(self.config) is not None and steps > 1 and draw(st.booleans()):
            values = draw(st.lists(any_priorities, min_size=steps * lanes, max_size=steps * lanes))
            priorities = np.array(values, np.float32).reshape(steps, lanes)
        named = chunk if isinstance(chunk, dict) else chunk._asdict()
        expected = self.model.add(named, lengths, version, priorities)
        given_lengths = jnp.array(lengths, jnp.int32) if self.config.ragged else None
        self.state, info = self.real.add(self.state, chunk, given_lengths, priorities, np.uint32(version))
        assert tuple(int(count) for count in info) == expected

    def sample(self) -> None:
        control, sample = self.real.sample(self.state.control, self.state.storage, jax.random.key(self.draw(seeds)))
        self.state = self.state._replace(control=control)
        sample = jax.tree.map(np.asarray, sample)
        drawable, steps, probabilities = self.model.drawable(), self.model.steps, self.model.probabilities()
        assert sample.valid.tolist() == [len(drawable) >= self.config.min_size] * BATCH
        assert sample.info.table_size.tolist() == [len(drawable)] * BATCH
        if not drawable:
            return
        self.infos.append(sample.info)
        for index, slot in enumerate(sample.info.slot.tolist()):
            assert probabilities[slot] > 0
            assert sample.info.probability[index] == pytest.approx(probabilities[slot], rel=1e-5)
            assert int(sample.info.generation[index]) == steps[slot].generation
            assert int(sample.info.policy_version[index]) == steps[slot].version
            assert sample.info.priority[index] == (1 if exponent_of(self.config) is None else steps[slot].priority)
            lane = self.model.lanes[slot // self.length]
            assert int(sample.info.age[index]) == len(lane.items) - 1 - lane.items.index(steps[slot])
            self.compare_item(sample, index, slot)

    def update(self) -> None:
        """Mix entries of all samples so far with made-up ones: stale, not drawable, not even starts."""
        slots, names = st.integers(-2, self.lanes * self.length + 2), []
        made_up = st.tuples(slots, st.integers(0, 3))
        live = [(step.slot, step.generation) for step in self.model.steps.values()]
        for info in self.infos:
            names += zip(info.slot.tolist(), info.generation.tolist(), strict=True)
        pairs = st.one_of(*[st.sampled_from(known) for known in (names, names[-BATCH:], live) if known], made_up)
        slot, generation = zip(*self.draw(st.lists(pairs, min_size=BATCH, max_size=BATCH)), strict=True)
        kinds = [st.lists(kind, min_size=BATCH, max_size=BATCH) for kind in (good_priorities, any_priorities)]
        priority = self.draw(st.one_of(*kinds))
        expected, empty = self.model.update(slot, generation, priority), np.zeros(BATCH, np.float32)
        info = SampleInfo(np.array(slot, np.int32), np.array(generation, np.uint32), *[empty] * 5)
        control, applied = self.real.update(self.state.control, info, np.array(priority, np.float32))
        self.state = self.state._replace(control=control)
        assert int(applied) == expected

    def reset(self) -> None:
        self.model.reset()
        self.state = self.state._replace(control=self.real.reset(self.state.control))

    def compare(self) -> None:
        control, drawable, steps = self.state.control, self.model.drawable(), self.model.steps
        starts, count = getattr(control.selector, "starts", None), self.lanes * self.length // self.stride
        if starts is not None:  # otherwise they are arithmetic, and samples alone tell
            assert (np.flatnonzero(starts.drawable[:count]) * self.stride).tolist() == sorted(drawable)
        assert [int(count) for count in control.faults] == list(vars(self.model.faults).values())
        assert bool(self.real.can_sample(control, BATCH)) == (len(drawable) >= self.config.min_size)
        if starts is not None and starts.priority is not None:
            priorities = np.asarray(starts.priority.priorities)
            assert all(priorities[slot // self.stride] == steps[slot].priority for slot in drawable)
            assert starts.max_priority == self.model.max_priority
            weighty = [slot for slot in sorted(drawable) if steps[slot].priority > 0]
            assert (np.flatnonzero(starts.priority.levels[:count]) * self.stride).tolist() == weighty


def run_program(program: StartProgram, more: Callable[[], None] = lambda: None) -> None:
    """Draw up to 14 operations and compare after each; ``more`` compares what only this kind of replay has."""
    steps = ["add", "add", "add", "sample", "sample", "update", "reset"]
    for step in program.draw(st.lists(st.sampled_from(steps), min_size=1, max_size=14)):
        getattr(program, step)()
        program.compare()
        more()
