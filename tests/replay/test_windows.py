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
from tests.replay.reference import chi_square_tail
from tests.replay.reference_windows import WindowModel
from tests.replay.start_programs import BATCH, Compiled, StartProgram, compile_starts, exponent_of, run_program

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


@cache
def compiled(name: str, batch: int = BATCH) -> Compiled:
    case = CASES[name]
    replay = make_window_replay(case.config, case.windows, batch_size=batch, lanes=case.lanes)
    assert replay.geometry == (case.lanes, case.length)
    return compile_starts(replay, ITEM)


def chunk_of(seed: int, counters: list[int], ended: np.ndarray) -> dict[str, np.ndarray]:
    """Random bits, NaNs included, and each lane's running counter; ``ended`` ``(steps, lanes)``: 0 no, 1 and 2 how."""
    rng, (steps, lanes), chunk = np.random.default_rng(seed), ended.shape, {}
    for name, leaf in ITEM.items():
        raw = rng.integers(0, 256, (steps, lanes, *leaf.shape, leaf.dtype.itemsize), np.uint8)
        chunk[name] = (raw % 2).view(bool)[..., 0] if leaf.dtype == bool else raw.view(leaf.dtype)[..., 0]
    chunk["counter"] = (np.arange(steps)[:, None] + np.array(counters)).astype(np.int32)
    return chunk | {"terminated": ended == 1, "truncated": ended == 2}


class Program(StartProgram):
    def __init__(self, name: str, data: st.DataObject):
        self.case = CASES[name]
        model = WindowModel(self.case.lanes, self.case.length, self.case.windows, exponent_of(self.case.config))
        super().__init__(self.case.config, compiled(name), model, data.draw, stride=self.case.windows.period)

    def chunk(self, seed: int, ended: np.ndarray) -> Any:
        return chunk_of(seed, self.model.counters, ended)

    def compare_item(self, sample: Any, index: int, slot: int) -> None:
        steps = self.model.drawable()[slot]
        self.compare_window(sample, index, [step.content for step in steps])

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


@every_case
@settings(max_examples=30)
@given(data=st.data())
def test_any_program_of_operations_does_what_slices_of_lists_do(name: str, data: st.DataObject) -> None:
    run_program(Program(name, data))
