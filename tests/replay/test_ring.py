"""The ring's index arithmetic against a lane written step by step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit_jax.replay import ring
from conduit_jax.replay.ring import RingState
from tests.replay.reference import UINT32, LaneModel

LENGTH, LANES = 5, 3
LARGEST = 2**31 - 1
lap_counts = st.integers(0, 2**32 - 1) | st.sampled_from([0, 2**31 - 2, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])

advance = jax.jit(ring.advance, static_argnums=1)


@jax.jit
def observe(state: RingState):
    """Everything the ring says about each (lane, time), ``(lanes, LENGTH)``; and the rank-th live items in order."""
    ragged = state.head.ndim == 1
    lanes = LANES if ragged else 1
    lane, time = (
        axis.reshape(-1) for axis in jnp.meshgrid(jnp.arange(lanes), jnp.arange(LENGTH, dtype=jnp.int32), indexing="ij")
    )
    own = ring.at_lane(state, lane)
    about = ring.is_live(own, LENGTH, time), ring.age(own, LENGTH, time), ring.generation(own, time)
    ranked = ring.nth_live(state, LENGTH, lanes, jnp.arange(lanes * LENGTH, dtype=jnp.int32))
    return tuple(value.reshape(lanes, LENGTH) for value in about), ranked, ring.live_items(state, lanes)


def write(model: LaneModel, count: int) -> list[int]:
    times = []
    for _ in range(count):
        time, generation, _ = model.write()
        model.items.append((time, generation))
        times.append(time)
    return times


def check_against(models: list[LaneModel], state: RingState) -> None:
    (live, age, generation), (rank_lane, rank_time), size = jax.tree.map(np.asarray, observe(state))
    for lane, model in enumerate(models):
        times = [time for time, _ in model.items]
        assert np.flatnonzero(live[lane]).tolist() == sorted(times)
        assert [int(age[lane, time]) for time in times] == list(range(len(times)))[::-1]
        assert [int(generation[lane, time]) for time in times] == [number for _, number in model.items]
    oldest_first = [(lane, time) for lane, model in enumerate(models) for time, _ in model.items]
    assert int(size) == len(oldest_first)
    assert list(zip(rank_lane.tolist(), rank_time.tolist(), strict=True))[: len(oldest_first)] == oldest_first
    assert all(0 <= lane < len(models) and 0 <= time < LENGTH for lane, time in zip(rank_lane, rank_time, strict=True))


@given(laps=lap_counts, counts=st.lists(st.integers(0, LENGTH) | st.none(), max_size=12))
def test_aligned_lanes_follow_the_deque_through_any_writes_resets_and_wrapping_laps(
    laps: int, counts: list[int | None]
) -> None:
    model, state = LaneModel(LENGTH, laps=laps), ring.init()._replace(laps=jnp.uint32(laps))
    for count in counts:
        if count is None:
            model.reset()
            state = ring.reset(state)
        else:
            expected = write(model, count)
            assert ring.write_times(state, LENGTH, LENGTH)[:count].tolist() == expected
            state = advance(state, LENGTH, jnp.int32(count))
        check_against([model], state)
    assert (state.head.dtype, state.laps.dtype, state.filled.dtype) == (jnp.int32, jnp.uint32, jnp.int32)


@given(laps=lap_counts, counts=st.lists(st.tuples(*[st.integers(0, LENGTH)] * LANES) | st.none(), max_size=12))
def test_ragged_lanes_each_follow_a_deque_of_their_own(laps: int, counts: list[tuple[int, ...] | None]) -> None:
    models = [LaneModel(LENGTH, laps=laps) for _ in range(LANES)]
    state = ring.init(LANES)._replace(laps=jnp.full((LANES,), laps, jnp.uint32))
    for count in counts:
        if count is None:
            for model in models:
                model.reset()
            state = ring.reset(state)
        else:
            planned = ring.write_times(state, LENGTH, LENGTH)
            for lane, model in enumerate(models):
                assert planned[lane, : count[lane]].tolist() == write(model, count[lane])
            state = advance(state, LENGTH, jnp.array(count, jnp.int32))
        check_against(models, state)


@given(laps=lap_counts, before=st.integers(0, 2 * LENGTH), after=st.integers(0, 2 * LENGTH))
def test_after_a_reset_no_slot_has_a_generation_it_has_had(laps: int, before: int, after: int) -> None:
    state = ring.init()._replace(laps=jnp.uint32(laps))
    seen: set[tuple[int, int]] = set()

    def write_one(state: RingState) -> RingState:
        time = int(state.head)
        state = advance(state, LENGTH, jnp.int32(1))
        name = (time, int(ring.generation(state, jnp.int32(time))))
        assert name not in seen
        seen.add(name)
        return state

    for _ in range(before):
        state = write_one(state)
    state = ring.reset(state)
    for _ in range(after):
        state = write_one(state)
    assert len(seen) == before + after


@pytest.mark.parametrize("length", [LARGEST, 2**30 + 1, 2**30])
@given(data=st.data())
def test_the_longest_lanes_never_overflow(length: int, data: st.DataObject) -> None:
    near_end = st.integers(0, length - 1) | st.integers(length - 8, length - 1)
    head, chunk = data.draw(near_end), data.draw(st.integers(0, 8))
    full = data.draw(st.booleans())
    filled, laps = (length if full else head), data.draw(lap_counts)
    state = RingState(jnp.int32(head), jnp.uint32(laps), jnp.int32(filled))
    assert ring.write_times(state, length, 8).tolist() == [(head + step) % length for step in range(8)]
    after = advance(state, length, jnp.int32(chunk))
    assert int(after.head) == (head + chunk) % length
    assert int(after.laps) == (laps + (head + chunk) // length) % UINT32
    assert int(after.filled) == min(filled + chunk, length)
    if filled:
        oldest, youngest = (head - filled) % length, (head - 1) % length
        assert int(ring.nth_oldest(state, length, jnp.int32(0))) == oldest
        assert int(ring.nth_oldest(state, length, jnp.int32(filled - 1))) == youngest
        assert int(ring.age(state, length, jnp.int32(oldest))) == filled - 1
        assert int(ring.age(state, length, jnp.int32(youngest))) == 0
        assert bool(ring.is_live(state, length, jnp.int32(oldest)))


@pytest.mark.parametrize("length", [LARGEST, 2**30])
def test_filling_the_longest_lane_at_once_fills_it(length: int) -> None:
    state = RingState(jnp.int32(length - 1), jnp.uint32(0), jnp.int32(length))
    after = advance(state, length, jnp.int32(length))
    assert (int(after.head), int(after.laps), int(after.filled)) == (length - 1, 1, length)


def test_an_empty_ring_has_no_live_item_and_still_gives_legal_indices() -> None:
    for state in (ring.init(), ring.init(LANES), ring.reset(advance(ring.init(), LENGTH, jnp.int32(3)))):
        (live, _, _), (lane, time), size = observe(state)
        assert not live.any()
        assert int(size) == 0
        assert (lane >= 0).all()
        assert (time >= 0).all()
        assert (time < LENGTH).all()
