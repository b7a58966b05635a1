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
from conduit_jax.replay.windows import RecurrentWindow, Windows, make_window_replay, sequence_priorities
from tests.replay.reference import UINT32, chi_square_tail
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
    "cross": Case(Windows(length=3, boundary="cross"), config_of(14, min_size=3), 2, 7),
    "cross by twos, recurrent": Case(
        Windows(length=3, period=2, boundary="cross", burn_in=1, state=hidden_of), config_of(15), 3, 6
    ),
    "cross by threes, ragged": Case(Windows(length=5, period=3, boundary="cross"), config_of(20, ragged=True), 2, 12),
    "cross, prioritized": Case(Windows(length=2, boundary="cross"), config_of(10, sampler=PRIORITIZED), 2, 5),
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
@settings(max_examples=12)
@given(data=st.data())
def test_any_program_of_operations_does_what_slices_of_lists_do(name: str, data: st.DataObject) -> None:
    run_program(Program(name, data))


# The same laws one by one, so that what breaks is named.


def filled(name: str, seed: int = 0, rows: int = BATCH) -> tuple[Compiled, Any, WindowModel]:
    """A replay over a lap and a half, its episodes ended at random, and its model."""
    case, real = CASES[name], compiled(name, rows)
    model, state = WindowModel(case.lanes, case.length, case.windows, exponent_of(case.config)), real.start
    rng = np.random.default_rng(seed)
    for _ in range(3):
        steps = case.length - 1
        chunk = chunk_of(seed, model.counters, rng.choice(3, (steps, case.lanes), p=[0.8, 0.1, 0.1]))
        priorities = rng.choice([0.0, 0.5, 2.0], (steps, case.lanes)).astype(np.float32)
        model.add(chunk, [steps] * case.lanes, 0, priorities)
        lengths = jnp.full((case.lanes,), steps, jnp.int32) if case.config.ragged else None
        state, _ = real.add(state, chunk, lengths, priorities, np.uint32(0))
    return real, state, model


@pytest.mark.parametrize("name", ["never", "pad by twos, ragged", "pad", "recurrent", "cross"])
def test_every_window_is_drawn_as_often_as_its_probability_says_and_no_other_ever(name: str) -> None:
    real, state, model = filled(name, rows=4096)
    wanted = {slot: share for slot, share in model.probabilities().items() if share > 0}
    slots = [np.asarray(real.sample(state.control, state.storage, jax.random.key(i))[1].info.slot) for i in range(2)]
    drawn, counts = np.unique(np.concatenate(slots), return_counts=True)
    assert drawn.tolist() == sorted(wanted)
    expected = np.array([wanted[slot] for slot in sorted(wanted)]) * counts.sum()
    assert len(expected) > 3
    assert chi_square_tail(counts, expected) > 1e-3


@pytest.mark.parametrize("name", ["pad", "cross"])
@pytest.mark.parametrize("laps", [2**31 - 1, 2**32 - 1])
def test_windows_and_generations_are_right_where_the_lap_counter_wraps(laps: int, name: str) -> None:
    real, case = compiled(name), CASES[name]
    ring = real.start.control.ring._replace(laps=jnp.full_like(real.start.control.ring.laps, laps))
    state = real.start._replace(control=real.start.control._replace(ring=ring))
    for turn in range(3):
        chunk = chunk_of(turn, [7 * turn] * case.lanes, np.zeros((case.length, case.lanes), int))
        state, _ = real.add(state, chunk, None, None, np.uint32(0))
        control, sample = real.sample(state.control, state.storage, jax.random.key(turn))
        assert sample.info.generation.tolist() == [(laps + turn) % UINT32] * BATCH
        assert (np.diff(sample.data["counter"], axis=1) == 1).all()
        control, applied = real.update(control, sample.info, np.full(BATCH, 2.0, np.float32))
        assert int(applied) == BATCH
        assert (
            int(real.update(control, sample.info._replace(generation=sample.info.generation - 1), np.ones(BATCH))[1])
            == 0
        )


@pytest.mark.parametrize("name", ["pad", "cross"])
def test_an_update_never_makes_a_start_drawable(name: str) -> None:
    real, state, model = filled(name)
    steps, drawable = model.steps, model.drawable()
    others = [step for slot, step in steps.items() if slot not in drawable][:BATCH]
    assert others
    names = (others * BATCH)[:BATCH]
    info = real.sample(state.control, state.storage, jax.random.key(0))[1].info
    info = info._replace(
        slot=np.array([step.slot for step in names], np.int32),
        generation=np.array([step.generation for step in names], np.uint32),
    )
    control, applied = real.update(state.control, info, np.full(BATCH, 9.0, np.float32))
    assert int(applied) == 0
    assert int(control.faults.stale_updates) == BATCH
    for before, after in zip(jax.tree.leaves(state.control.selector), jax.tree.leaves(control.selector), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("name", ["never", "pad", "cross"])
def test_a_priority_too_large_for_float32_is_refused_with_x64_too(name: str) -> None:
    real, state, _ = filled(name)
    info = real.sample(state.control, state.storage, jax.random.key(0))[1].info
    with jax.enable_x64(True):
        control, applied = real.replay.update_priorities(state.control, info, jnp.full(BATCH, 1e300, jnp.float64))
    assert (int(applied), int(control.faults.refused_updates)) == (0, 1)


def test_sequence_priorities_mix_the_largest_and_the_mean_error_of_real_steps() -> None:
    errors = jnp.array([[1.0, -3.0, 100.0], [2.0, 4.0, 6.0], [5.0, 5.0, 5.0]])
    mask = jnp.array([[True, True, False], [True, True, True], [False, False, False]])
    mixed = sequence_priorities(errors, mask, 0.9)
    np.testing.assert_allclose(mixed, [0.9 * 3 + 0.1 * 2, 0.9 * 6 + 0.1 * 4, 0], rtol=1e-6)
    with pytest.raises(ConfigError, match="eta"):
        sequence_priorities(errors, mask, 1.5)


def test_windows_that_can_never_work_are_refused_when_they_are_made() -> None:
    for options in ({"length": 0}, {"length": 2, "period": 0}, {"length": 2, "boundary": "cut"}):
        with pytest.raises(ConfigError):
            Windows(**options)
    with pytest.raises(ConfigError, match="burn-in"):
        Windows(length=3, burn_in=3)
    with pytest.raises(ConfigError, match="longer than a lane's ring"):
        make_window_replay(config_of(8), Windows(length=5), batch_size=1, lanes=2)
    with pytest.raises(ConfigError, match="wait for ever"):
        make_window_replay(config_of(8, min_size=3), Windows(length=4), batch_size=1, lanes=2)
    replay = make_window_replay(config_of(8), Windows(length=2), batch_size=1)
    with pytest.raises(SpecError, match="where an episode ended"):
        replay.init({"x": jnp.zeros(())})
    odd = make_window_replay(config_of(8), Windows(length=2, ended=lambda item: item["x"]), batch_size=1)
    with pytest.raises(SpecError, match="something else"):
        odd.init({"x": jnp.zeros(())})
    computed = Windows(length=2, state=lambda item: item["terminated"] * 0.5)
    with pytest.raises(SpecError, match="leaves of the item"):
        make_window_replay(config_of(8), computed, batch_size=1).init(ITEM)


def test_a_limiter_is_paid_for_the_windows_drawn_and_blocks_inserts_until_then() -> None:
    limiter = conduit.SampleToInsertRatio(samples_per_insert=1, min_size=6, error_buffer=4)  # debt in [2, 10]
    real = compile_starts(
        make_window_replay(config_of(24, limiter=limiter), Windows(length=3), batch_size=4, lanes=2), ITEM
    )
    state, counters = real.start, [0, 0]
    assert not real.can_sample(state.control, 4)
    assert "min_size" in real.replay.explain_blocked(state.control, "sample", 4)
    for steps, added in ((1, 2), (4, 8), (1, 0)):
        state, info = real.add(state, chunk_of(0, counters, np.zeros((steps, 2), int)), None, None, np.uint32(0))
        assert int(info.added) == added
        counters = [counter + int(info.added) // 2 for counter in counters]
    assert int(real.sample(state.control, state.storage, jax.random.key(0))[1].info.table_size[0]) == 6
    for valid in (True, True, False):  # the debt goes from 10 to 6 to 2
        control, sample = real.sample(state.control, state.storage, jax.random.key(0))
        assert sample.valid.tolist() == [valid] * 4
        state = state._replace(control=control)
    assert "min_diff" in real.replay.explain_blocked(state.control, "sample", 4)
    state, info = real.add(state, chunk_of(0, counters, np.zeros((4, 2), int)), None, None, np.uint32(0))
    assert int(info.added) == 8
    assert real.replay.explain_blocked(state.control, "sample", 4) == ""
    with pytest.raises(ConfigError, match="would deadlock"):
        make_window_replay(config_of(24, limiter=limiter), Windows(length=6), batch_size=4, lanes=2)


def test_what_needs_its_neighbours_cannot_be_deleted_nor_kept_in_slots() -> None:
    real = compiled("pad")
    info = real.sample(real.start.control, real.start.storage, jax.random.key(0))[1].info
    with pytest.raises(ConfigError, match="cannot be deleted"):
        real.replay.delete(real.start.control, info)
    with pytest.raises(ConfigError, match="time order"):
        make_window_replay(config_of(24, storage="slots"), Windows(length=3), batch_size=4, lanes=2)


def test_a_lanes_ring_is_rounded_up_to_whole_periods() -> None:
    replay = make_window_replay(config_of(21), Windows(length=4, period=4), batch_size=1, lanes=2)
    assert replay.geometry == (2, 12)
