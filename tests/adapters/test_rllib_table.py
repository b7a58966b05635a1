"""Laws of the replay behind RLlib: every transition is one that happened, all that is live is drawn, priorities find their rows."""

from __future__ import annotations

from time import sleep
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conduit_jax as conduit
from tests.adapters.rllib_world import ENDS, Model, chunk

torch = pytest.importorskip("torch", reason="torch is not installed (extra: torch)")

import jax  # noqa: E402

from conduit_jax.adapters.rllib.options import Options, Settings  # noqa: E402
from conduit_jax.adapters.rllib.priorities import Priorities  # noqa: E402
from conduit_jax.adapters.rllib.table import Request, Table  # noqa: E402


def make_table(capacity: int = 64, alpha: float | None = 0.6, seed: int = 0, **options: Any) -> Table:
    settings = Settings(capacity=capacity, alpha=alpha, beta=0.4)
    return Table("policy", settings, Options(**options), np.array([seed, 0], np.uint32), jax.devices("cpu")[0])


def request(batch: int = 16, low: int = 1, high: int | None = None, gamma: float = 0.9, beta: float = 0.4) -> Request:
    return Request(batch, low, high or low, gamma, beta)


def names(columns: dict[str, Any]) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in columns["obs"].reshape(len(columns["obs"]), -1)[:, :2].tolist()]


def check(columns: dict[str, Any], model: Model, n: int, gamma: float) -> None:
    """Every row is the model's transition from where it starts."""
    for row, (episode, time) in enumerate(names(columns)):
        assert (episode, time) in model.drawable
        want = model.transition(episode, time, n, gamma)
        got = columns["new_obs"][row].reshape(-1)[:2].tolist()
        assert (int(got[0]), int(got[1])) == want["new_obs"]
        for name in ("actions", "n_step", "terminateds", "truncateds"):
            assert int(columns[name][row]) == int(want[name]), (name, episode, time)
        np.testing.assert_allclose(float(columns["rewards"][row]), want["rewards"], rtol=1e-6)


@st.composite
def histories(draw: Any) -> list[tuple[int, int, int, str]]:
    """Interleaved chunks ``(episode, start, stop, end)`` of several episodes at a time, cut anywhere."""
    at: dict[int, int] = {}
    number, pieces = 0, []
    for _ in range(draw(st.integers(1, 16))):
        lane = draw(st.integers(0, 2))
        episode = at.get(lane)
        if episode is None:
            number += 1
            at[lane], pieces_of = number, 0
            episode = number
        start = max((stop for name, _, stop, _ in pieces if name == episode), default=0)
        pieces_of = draw(st.integers(1, 5))
        end = draw(st.sampled_from(ENDS))
        pieces.append((episode, start, start + pieces_of, end))
        if end != "open":
            at[lane] = None
    return pieces


@settings(max_examples=15, deadline=None)
@given(history=histories(), alpha=st.sampled_from([None, 0.6]))
def test_every_transition_is_one_that_happened_however_episodes_are_cut(history: Any, alpha: Any) -> None:
    table, model = make_table(128, alpha, max_staleness=0), Model(128)
    for episode, start, stop, end in history:
        table.add(chunk(episode, start, stop, end, lookback=start % 3))
        model.add(episode, start, stop, end)
        assert table.live == len(model.drawable)
    check(table.next(request(low=3)), model, 3, 0.9)


def test_an_overfull_ring_keeps_the_newest_rows_and_draws_all_of_them() -> None:
    table, model = make_table(32, None, max_staleness=0), Model(32)
    for episode in range(12):
        for start in (0, 3, 6):
            end = "terminated" if start == 6 else "open"
            table.add(chunk(episode, start, start + 3, end))
            model.add(episode, start, start + 3, end)
            assert table.live == len(model.drawable)
            check(table.next(request()), model, 1, 0.9)
    seen = {name for _ in range(40) for name in names(table.next(request()))}
    assert seen == model.drawable


def test_an_episode_longer_than_the_ring_is_taken_in_pieces() -> None:
    table, model = make_table(32, max_staleness=0), Model(32)
    table.add(chunk(1, 0, 100, "truncated"))
    model.add(1, 0, 100, "truncated")
    assert table.live == len(model.drawable) == 31
    check(table.next(request(low=3)), model, 3, 0.9)


def test_a_range_of_steps_has_both_ends() -> None:
    table, model = make_table(max_staleness=0), Model(64)
    table.add(chunk(1, 0, 40))
    model.add(1, 0, 40, "open")
    columns = table.next(request(64, low=2, high=4))
    spans = {int(n) for (_, time), n in zip(names(columns), columns["n_step"], strict=True) if time < 36}
    assert spans == {2, 3, 4}
    for row, (episode, time) in enumerate(names(columns)):
        want = model.transition(episode, time, int(columns["n_step"][row]), 0.9)
        np.testing.assert_allclose(float(columns["rewards"][row]), want["rewards"], rtol=1e-6)


def test_chunks_with_steps_missing_between_are_not_joined_and_are_counted() -> None:
    table = make_table(max_staleness=0)
    table.add(chunk(1, 0, 3))
    table.add(chunk(1, 5, 8))
    table.add(chunk(2, 4, 6))
    assert table.broken == 2
    columns = table.next(request(low=3))
    for (episode, time), (_, after) in zip(names(columns), columns["new_obs"][:, :2].tolist(), strict=True):
        assert after == min(time + 3, 3 if time < 3 else 8) if episode == 1 else after == 6


def test_an_end_that_comes_too_late_for_its_step_is_counted() -> None:
    table = make_table(32, max_staleness=0)
    table.add(chunk(1, 0, 3))
    table.add(chunk(2, 0, 25, "terminated"))
    table.add(chunk(1, 3, 3, "terminated"))
    table.add(chunk(9, 3, 3, "terminated"))  # of an episode never seen: nothing is lost
    assert table.counts["lost_ends"] == 1


@pytest.mark.parametrize("flushed", [False, True])
def test_an_episode_may_end_with_a_chunk_that_has_no_steps(flushed: bool) -> None:
    table = make_table(max_staleness=0)
    table.add(chunk(1, 0, 3))
    if flushed:
        table.next(request())
    table.add(chunk(1, 3, 3, "terminated"))
    columns = table.next(request())
    for (_, time), ended in zip(names(columns), columns["terminateds"].tolist(), strict=True):
        assert ended == (time == 2)
    assert table.live == 3


def test_priorities_reach_the_rows_they_were_computed_for() -> None:
    table = make_table(alpha=1.0, max_staleness=3)
    for episode in range(5):
        table.add(chunk(episode, 0, 10, "terminated"))
    for _ in range(40):  # tiny for all but one, as soon as they are drawn
        chosen = [1e6 if name == (3, 4) else 1e-6 for name in names(table.next(request()))]
        table.update_priorities(np.array(chosen))
    for _ in range(4):
        table.next(request())
        table.update_priorities(np.full(16, 1e6))
    for _ in range(8):
        assert set(names(table.next(request()))) == {(3, 4)}
        table.update_priorities(np.full(16, 1e6))


def test_priorities_are_those_of_the_batch_given_out_last_also_where_one_got_none() -> None:
    table = make_table(alpha=1.0, max_staleness=0)
    table.add(chunk(1, 0, 40, "terminated"))
    for _ in range(12):
        table.next(request())  # looked at, or its module was not updated
        chosen = names(table.next(request()))
        table.update_priorities(np.array([1e6 if name == (1, 7) else 1e-6 for name in chosen]))
    with pytest.raises(conduit.ValueRefusedError, match="no batch is out"):
        table.update_priorities(np.ones(16))
    assert set(names(table.next(request()))) == {(1, 7)}


def test_priorities_for_rows_overwritten_since_are_left_out_and_counted() -> None:
    table = make_table(32, alpha=1.0, max_staleness=0)
    table.add(chunk(1, 0, 20, "terminated"))
    table.next(request())
    table.add(chunk(2, 0, 31, "terminated"))
    table._flush()
    table.update_priorities(np.full(16, 1e9))
    columns = table.next(request())
    assert table.priorities.stale > 0
    assert len({name for name in names(columns) if name[0] == 2}) > 5, "no newcomer inherited the priority"


@pytest.mark.parametrize("written", [20, 2**31 + 20, 2**40 + 20])
def test_rows_overwritten_are_told_however_many_have_been_written(written: int) -> None:
    priorities, slots = Priorities("one", 32), np.arange(32, dtype=np.int32)
    priorities.expect(slots, written)
    priorities.receive(np.ones(32))
    taken = priorities.take(32, written + 3)[:, 0].view(np.int32)
    gone = {(written + number) % 32 for number in range(3)}
    assert set(slots) - set(taken.tolist()) == gone
    assert priorities.stale == 3


def test_weights_correct_for_the_probability_and_are_ones_where_draws_are_uniform() -> None:
    table = make_table(alpha=0.5, max_staleness=0)
    table.add(chunk(1, 0, 20))
    given_to: dict[tuple[int, int], float] = {}
    for _ in range(20):
        drawn = names(table.next(request()))
        given_to |= {name: float(1 + name[1]) for name in drawn}
        table.update_priorities(np.array([1.0 + time for _, time in drawn]))
    columns = table.next(request())
    priority = np.array([given_to.get(name, 20.0) for name in names(columns)])
    least = min(given_to.get((1, time), 20.0) for time in range(20))  # of all items, drawn or not
    np.testing.assert_allclose(columns["weights"].numpy(), (priority / least) ** (0.5 * -0.4), rtol=1e-4)
    uniform = make_table(alpha=None, max_staleness=0)
    uniform.add(chunk(1, 0, 20))
    assert uniform.next(request())["weights"].tolist() == [1.0] * 16
    uniform.update_priorities(np.ones(16))  # RLlib sends them whatever the buffer


@pytest.mark.parametrize("schedule", [{"granularity": 3, "prefetch": 0}, {"granularity": 2, "prefetch": 1}])
def test_no_batch_is_staler_than_allowed_and_every_group_is_fresh_again(schedule: dict[str, int]) -> None:
    table = make_table(**schedule)
    table.add(chunk(0, 0, 3, "terminated"))
    newest = []
    for number in range(1, 13):
        columns = table.next(request())
        assert table.staleness <= (schedule["prefetch"] + 1) * schedule["granularity"] - 1
        newest.append(max(episode for episode, _ in names(columns)))
        table.update_priorities(np.full(16, 1e-9))
        table.add(chunk(number, 0, 3, "terminated"))
    staleness = [number - seen for number, seen in enumerate(newest)]
    assert max(staleness) <= (schedule["prefetch"] + 1) * schedule["granularity"]
    if not schedule["prefetch"]:
        assert newest[::3] == [0, 3, 6, 9]


def run(table: Table, updates: int, begin: int = 0, delays: Any = None) -> list[bytes]:
    """Return the bytes of ``updates`` batches of a made-up training run, with random ``delays`` up to 2 ms."""
    found = []
    for number in range(begin, begin + updates):
        if delays is not None:
            sleep(delays.uniform(0, 2e-3))
        table.add(
            chunk(number // 4, 4 * (number % 4), 4 * (number % 4) + 4, "terminated" if number % 4 == 3 else "open")
        )
        columns = table.next(request(low=3))
        found.append(b"".join(columns[name].numpy().tobytes() for name in sorted(columns)))
        table.update_priorities(np.abs(columns["rewards"].numpy()) + 0.1)
    return found


@pytest.mark.parametrize("options", [{"max_staleness": 0}, {"granularity": 3}, {"granularity": 2, "prefetch": 1}])
def test_equal_seeds_give_equal_bits_and_a_restored_table_goes_on_as_if_nothing_had_been(options: Any) -> None:
    whole, other = make_table(64, **options), make_table(64, **options)
    want = run(whole, 30)
    assert run(other, 13) == want[:13]
    third = make_table(64, **options)
    third.set_state(other.get_state())
    assert run(third, 17, 13) == want[13:]
    assert run(other, 17, 13) == want[13:], "saving changes nothing"
    assert run(make_table(64, seed=1, **options), 30) != want


def test_200_updates_with_random_delays_are_200_updates_without() -> None:
    kinds = {"granularity": 2, "prefetch": 1}
    delays = np.random.default_rng(0)
    assert run(make_table(64, **kinds), 200, delays=delays) == run(make_table(64, **kinds), 200)


@pytest.mark.parametrize("shape", [(3,), (16, 16, 3)])
def test_images_stay_bytes_and_are_cast_at_delivery_where_asked(shape: tuple[int, ...]) -> None:
    form = {"shape": shape, "dtype": "uint8"}
    table, cast = (make_table(max_staleness=0, observation_dtype=dtype) for dtype in (None, "float32"))
    for one in (table, cast):
        one.add(chunk(1, 0, 6, **form))
        one.add(chunk(1, 6, 9, "terminated", **form))
    columns, floats = table.next(request()), cast.next(request())
    assert columns["obs"].dtype == columns["new_obs"].dtype == torch.uint8
    assert table.layout is not None
    assert table.layout.row_bytes < 2 * np.prod(shape) + 64
    assert floats["obs"].dtype == torch.float32
    assert columns["obs"].shape == (16, *shape)
    for name in ("obs", "new_obs"):
        assert torch.equal(columns[name].float(), floats[name])
        assert (columns[name].reshape(16, -1)[:, 2:] == 7).all()


def test_chunks_that_are_lists_and_trees_of_observations_are_understood() -> None:
    table = make_table(max_staleness=0)
    table.add(chunk(1, 0, 5, listed=True))
    table.add(chunk(1, 5, 8, "terminated"))
    model = Model(64)
    model.add(1, 0, 8, "terminated")
    check(table.next(request(low=3)), model, 3, 0.9)
    tree = make_table(max_staleness=0)
    made = chunk(1, 0, 5)
    made.observations.data = {"b": made.observations.data, "a": (np.arange(6, dtype=np.uint8), np.zeros((6, 2)))}
    tree.add(made)
    columns = tree.next(request())
    assert columns["obs"]["a"][0].tolist() == columns["obs"]["b"][:, 1].tolist()
    assert columns["new_obs"]["a"][0].tolist() == [time + 1 for time in columns["obs"]["a"][0].tolist()]
    assert columns["obs"]["a"][1].dtype == torch.float32


def test_tensors_are_shared_and_hold_no_view_of_the_storage() -> None:
    table = make_table(max_staleness=0)
    table.add(chunk(1, 0, 20))
    held = [table.next(request())]
    before = table.state.rows.unsafe_buffer_pointer()
    for number in range(2, 6):
        table.add(chunk(number, 0, 4, "terminated"))
        held.append(table.next(request()))
        table.update_priorities(np.ones(16))
    assert table.state.rows.unsafe_buffer_pointer() == before, "inserts stay in place"
    assert not table.handovers.copied


@pytest.mark.parametrize("options", [{"max_staleness": 0}, {"granularity": 2, "prefetch": 1}])
def test_large_batches_are_drawn_into_memory_of_old_ones_unless_a_tensor_still_looks_at_it(options: Any) -> None:
    form = {"shape": (128, 128, 3), "dtype": "uint8"}
    table, other = (make_table(alpha=None, observation_dtype="float32", **options) for _ in range(2))
    for one in (table, other):
        one.add(chunk(1, 0, 20, **form))
    held, places = [], []
    for number in range(12):
        columns = table.next(request())
        if number == 7:
            held = [columns["obs"], columns["obs"].clone()]
        places.append({columns[name].data_ptr() for name in ("obs", "new_obs")})
        assert torch.equal(columns["obs"], other.next(request())["obs"])
        del columns  # as RLlib does before it asks for the next
    assert torch.equal(*held), "what is looked at stays"
    before = set().union(*places[:6])
    assert set().union(*places[4:7]) <= before, "no fresh memory"
    assert not set().union(*places[-4:]) & {held[0].data_ptr()}


HELD = {
    "a row's view": lambda obs: obs[3].permute(2, 1, 0),
    "numpy": lambda obs: obs.numpy(),
    "the storage": lambda obs: obs.untyped_storage(),
    "a graph": lambda obs: (obs * torch.ones(1, requires_grad=True)).sum(),
    "JAX": lambda obs: jax.dlpack.from_dlpack(obs),
}


@pytest.mark.parametrize("kind", HELD)
def test_whatever_looks_at_an_old_batch_keeps_its_memory(kind: str) -> None:
    table = make_table(alpha=None, observation_dtype="float32", max_staleness=0)
    table.add(chunk(1, 0, 20, shape=(128, 128, 3), dtype="uint8"))
    for _ in range(4):
        columns = table.next(request())
    place, held = columns["obs"].data_ptr(), HELD[kind](columns["obs"])
    del columns
    for _ in range(6):
        assert table.next(request())["obs"].data_ptr() != place
    del held


def test_what_cannot_be_stored_is_refused_by_name() -> None:
    table = make_table(max_staleness=0)
    with pytest.raises(conduit.NotReadyError, match="Nothing to sample"):
        table.next(request())
    table.add(chunk(1, 0, 4))
    with pytest.raises(conduit.SpecError, match="another shape"):
        table.add(chunk(2, 0, 4, shape=(5,)))
    with pytest.raises(conduit.SpecError, match="another dtype"):
        table.add(chunk(2, 0, 4, dtype="uint8"))
    wild = chunk(2, 0, 4)
    wild.actions.data[0] = 2**40
    with pytest.raises(conduit.SpecError, match="would wrap"):
        table.add(wild)
    table.next(request())
    with pytest.raises(conduit.ValueRefusedError, match="do not belong"):
        table.update_priorities(np.ones(3))
    with pytest.raises(conduit.ValueRefusedError, match="not finite"):
        table.update_priorities(np.array([np.nan] * 16))
    with pytest.raises(conduit.PlacementError, match="does not fit"):
        make_table(2**40).add(chunk(1, 0, 4))
