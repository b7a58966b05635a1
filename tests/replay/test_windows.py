"""Windows against slices of plain lists: random programs of adds of every size over many laps, and facts of the program."""

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
from conduit_jax.replay.buffer import Replay, ReplayState
from conduit_jax.replay.windows import RecurrentWindow, Windows, make_window_replay, sequence_priorities
from conduit_jax.types import SampleInfo
from tests.replay.reference import UINT32, chi_square_tail
from tests.replay.reference_windows import WindowModel

BATCH = 6
ITEM = {
    "counter": jax.ShapeDtypeStruct((), jnp.int32),
    "half": jax.ShapeDtypeStruct((3,), jnp.bfloat16),
    "hidden": jax.ShapeDtypeStruct((2,), jnp.float32),
    "large": jax.ShapeDtypeStruct((600,), jnp.bfloat16),
    "large_hidden": jax.ShapeDtypeStruct((300,), jnp.float32),
    "terminated": jax.ShapeDtypeStruct((), jnp.bool_),
    "truncated": jax.ShapeDtypeStruct((), jnp.bool_),
}


def hidden_of(item: dict[str, Any]) -> dict[str, Any]:
    return {"small": item["hidden"], "large": item["large_hidden"]}


class Case(NamedTuple):
    windows: Windows
    config: conduit.ReplayConfig
    lanes: int
    length: int  # of a lane's ring

    @property
    def exponent(self) -> float | None:
        sampler = self.config.sampler
        return sampler.exponent if isinstance(sampler, conduit.Prioritized) else None


def config_of(capacity: int, **options: Any) -> conduit.ReplayConfig:
    return conduit.ReplayConfig(capacity=capacity, **options)


PRIORITIZED = conduit.Prioritized(exponent=0.7)
CASES = {
    "never": Case(Windows(length=3, boundary="never"), config_of(14), 2, 7),
    "never by threes, ragged": Case(
        Windows(length=5, period=3, boundary="never"), config_of(20, ragged=True, sampler=PRIORITIZED), 2, 12
    ),
    "never, as long as the ring": Case(Windows(length=5, boundary="never"), config_of(5), 1, 5),
    "pad": Case(Windows(length=4), config_of(14, sampler=PRIORITIZED, min_size=2), 2, 7),
    "pad by twos, ragged": Case(Windows(length=4, period=2), config_of(15, ragged=True), 3, 6),
    "recurrent": Case(
        Windows(length=4, burn_in=2, state=hidden_of),
        config_of(16, ragged=True, sampler=conduit.Prioritized(stratified=False)),
        2,
        8,
    ),
    "single steps": Case(Windows(length=1, period=2), config_of(8), 2, 4),
}
every_case = pytest.mark.parametrize("name", CASES)


class Compiled(NamedTuple):
    replay: Replay
    add: Any
    sample: Any
    update: Any
    start: ReplayState


@cache
def compiled(name: str, batch: int = BATCH) -> Compiled:
    case = CASES[name]
    replay = make_window_replay(case.config, case.windows, batch_size=batch, lanes=case.lanes)
    assert replay.geometry == (case.lanes, case.length)
    jitted = (jax.jit(function) for function in (replay.add, replay.sample, replay.update_priorities))
    return Compiled(replay, *jitted, jax.jit(lambda: replay.init(ITEM))())


def chunk_of(seed: int, steps: int, counters: list[int], ended: np.ndarray) -> dict[str, np.ndarray]:
    """Random bits, NaNs included, and each lane's running counter; ``ended`` ``(steps, lanes)``: 0 no, 1 and 2 how."""
    rng, lanes, chunk = np.random.default_rng(seed), len(counters), {}
    for name, leaf in ITEM.items():
        raw = rng.integers(0, 256, (steps, lanes, *leaf.shape, leaf.dtype.itemsize), np.uint8)
        chunk[name] = (raw % 2).view(bool)[..., 0] if leaf.dtype == bool else raw.view(leaf.dtype)[..., 0]
    chunk["counter"] = (np.arange(steps)[:, None] + np.array(counters)).astype(np.int32)
    return chunk | {"terminated": ended == 1, "truncated": ended == 2}


good_priorities = st.sampled_from([0.0, 0.25, 1.0, 2.5, 40.0])
any_priorities = good_priorities | st.sampled_from([float("nan"), float("inf"), -1.0])
seeds = st.integers(0, 2**31 - 1)


class Program:
    """Carries out each drawn operation on both and compares everything that can be seen."""

    def __init__(self, name: str, data: st.DataObject):
        self.case, self.draw, self.real = CASES[name], data.draw, compiled(name)
        self.model = WindowModel(self.case.lanes, self.case.length, self.case.windows, self.case.exponent)
        self.state, self.infos = self.real.start, []

    def add(self) -> None:
        lanes, length = self.case.lanes, self.case.length
        steps = self.draw(st.sampled_from([1, 2, length - 1, length]))
        ended = self.draw(st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=steps * lanes, max_size=steps * lanes))
        lengths = [steps] * lanes
        if self.case.config.ragged:
            lengths = self.draw(st.lists(st.integers(0, steps), min_size=lanes, max_size=lanes))
        chunk = chunk_of(self.draw(seeds), steps, self.model.counters, np.array(ended).reshape(steps, lanes))
        priorities, version = None, self.draw(st.integers(0, UINT32 - 1))
        if self.case.exponent is not None and self.draw(st.booleans()):
            values = self.draw(st.lists(any_priorities, min_size=steps * lanes, max_size=steps * lanes))
            priorities = np.array(values, np.float32).reshape(steps, lanes)
        expected = self.model.add(chunk, lengths, version, priorities)
        given_lengths = jnp.array(lengths, jnp.int32) if self.case.config.ragged else None
        self.state, info = self.real.add(self.state, chunk, given_lengths, priorities, np.uint32(version))
        assert tuple(int(count) for count in info) == expected

    def sample(self) -> None:
        control, sample = self.real.sample(self.state.control, self.state.storage, jax.random.key(self.draw(seeds)))
        self.state = self.state._replace(control=control)
        sample = jax.tree.map(np.asarray, sample)
        drawable, steps, probabilities = self.model.drawable(), self.model.steps, self.model.probabilities()
        assert sample.valid.tolist() == [len(drawable) >= self.case.config.min_size] * BATCH
        assert sample.info.table_size.tolist() == [len(drawable)] * BATCH
        if not drawable:
            return
        self.infos.append(sample.info)
        for index, slot in enumerate(sample.info.slot.tolist()):
            assert probabilities[slot] > 0
            assert sample.info.probability[index] == pytest.approx(probabilities[slot], rel=1e-5)
            assert int(sample.info.generation[index]) == steps[slot].generation
            assert int(sample.info.policy_version[index]) == steps[slot].version
            assert sample.info.priority[index] == (1 if self.case.exponent is None else steps[slot].priority)
            lane = self.model.lanes[slot // self.case.length]
            assert int(sample.info.age[index]) == len(lane.items) - 1 - lane.items.index(steps[slot])
            self.compare_window(sample, index, [step.content for step in drawable[slot]])

    def compare_window(self, sample: Any, index: int, wanted: list[dict[str, np.ndarray]]) -> None:
        windows, real = self.case.windows, len(wanted)
        assert sample.mask[index].tolist() == [step < real for step in range(windows.length)]
        window = sample.data
        names = set(ITEM)
        if windows.recurrent:
            assert isinstance(window, RecurrentWindow)
            trained = [windows.burn_in <= step < real for step in range(windows.length)]
            assert window.loss_mask[index].tolist() == trained
            assert any(trained)
            assert window.state["small"][index].tobytes() == wanted[0]["hidden"].tobytes()
            assert window.state["large"][index].tobytes() == wanted[0]["large_hidden"].tobytes()
            window, names = window.steps, names - {"hidden", "large_hidden"}
        assert {name for name in window if window[name] is not None} == names
        for name in names:
            assert window[name].shape == (BATCH, windows.length, *ITEM[name].shape)
            assert window[name][index, :real].tobytes() == np.stack([step[name] for step in wanted]).tobytes()
            assert not np.any(window[name][index, real:].astype(np.float32))
        counters = window["counter"][index, :real].tolist()
        assert counters == list(range(counters[0], counters[0] + real))
        assert counters[0] % windows.period == 0

    def update(self) -> None:
        """Mix entries of all samples so far with made-up ones: stale, not drawable, not even starts."""
        slots, names = st.integers(-2, self.case.lanes * self.case.length + 2), []
        made_up = st.tuples(slots, st.integers(0, 3))
        live = [(step.slot, step.generation) for step in self.model.steps.values()]
        for info in self.infos:
            names += zip(info.slot.tolist(), info.generation.tolist(), strict=True)
        pairs = st.one_of(*[st.sampled_from(known) for known in (names, names[-BATCH:], live) if known], made_up)
        slot, generation = zip(*self.draw(st.lists(pairs, min_size=BATCH, max_size=BATCH)), strict=True)
        priority = self.draw(
            st.one_of(*[st.lists(kind, min_size=BATCH, max_size=BATCH) for kind in (good_priorities, any_priorities)])
        )
        expected, empty = self.model.update(slot, generation, priority), np.zeros(BATCH, np.float32)
        info = SampleInfo(np.array(slot, np.int32), np.array(generation, np.uint32), *[empty] * 5)
        control, applied = self.real.update(self.state.control, info, np.array(priority, np.float32))
        self.state = self.state._replace(control=control)
        assert int(applied) == expected

    def reset(self) -> None:
        self.model.reset()
        self.state = self.state._replace(control=self.real.replay.reset(self.state.control))

    def compare(self) -> None:
        control, drawable, steps = self.state.control, self.model.drawable(), self.model.steps
        starts = control.selector.starts
        ones = np.asarray(starts.drawable[0])
        assert (np.flatnonzero(ones) * self.case.windows.period).tolist() == sorted(drawable)
        assert [int(count) for count in control.faults] == list(vars(self.model.faults).values())
        enough = len(drawable) >= self.case.config.min_size
        assert bool(self.real.replay.can_sample(control, BATCH)) == enough
        if self.case.exponent is not None:
            for slot in drawable:
                assert starts.priority.priorities[slot // self.case.windows.period] == steps[slot].priority
            assert starts.max_priority == self.model.max_priority
            assert (np.flatnonzero(starts.priority.levels[0]) * self.case.windows.period).tolist() == [
                slot for slot in sorted(drawable) if steps[slot].priority > 0
            ]


@every_case
@settings(max_examples=30)
@given(data=st.data())
def test_any_program_of_operations_does_what_slices_of_lists_do(name: str, data: st.DataObject) -> None:
    program = Program(name, data)
    steps = ["add", "add", "add", "sample", "sample", "update", "reset"]
    for step in data.draw(st.lists(st.sampled_from(steps), min_size=1, max_size=14)):
        getattr(program, step)()
        program.compare()
