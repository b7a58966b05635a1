"""What every replay that reads ring neighbours must do: transformations change nothing, no call copies the storage."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conduit_jax as conduit
from conduit_jax.replay.buffer import Replay, ReplayState
from conduit_jax.replay.neighbours import NStepRange, Step, TransitionView, make_transition_view
from conduit_jax.replay.windows import Windows, make_window_replay
from conduit_jax.sharding.memory import storage_access
from conduit_jax.sharding.place import place
from conduit_jax.sharding.placement import learner_site, resolve_placement

BATCH, LANES, STEPS = 8, 2, 3
KINDS = ("windows", "crossing windows", "prioritized windows", "transitions", "prioritized stacks")
every_kind = pytest.mark.parametrize("kind", KINDS)
hardest = pytest.mark.parametrize("kind", ["crossing windows", "prioritized windows", "prioritized stacks"])


def hidden_of(item: Any) -> Any:
    return item.action


def make(kind: str, capacity: int, batch: int, lanes: int, **where: Any) -> Replay:
    sampler = conduit.Prioritized() if "prioritized" in kind else conduit.Uniform()
    config = conduit.ReplayConfig(capacity=capacity, sampler=sampler, ragged="prioritized" in kind)
    if "windows" in kind:
        options: dict[str, Any] = {"period": 2}
        if kind != "windows":
            options = {"burn_in": 1, "state": hidden_of, "boundary": "cross" if "crossing" in kind else "pad"}
        return make_window_replay(config, Windows(length=3, **options), batch_size=batch, lanes=lanes, **where)
    options = {"n": NStepRange(low=1, high=3), "stack": 4} if "stacks" in kind else {}
    return make_transition_view(config, TransitionView(discount=0.9, **options), batch_size=batch, lanes=lanes, **where)


def item_of(*shape: int) -> Step:
    observation, flag = jax.ShapeDtypeStruct(shape, jnp.uint8), jax.ShapeDtypeStruct((), jnp.bool_)
    number = jax.ShapeDtypeStruct((), jnp.float32)
    return Step(observation, jax.ShapeDtypeStruct((), jnp.int32), number, flag, flag, observation)


class Turn(NamedTuple):
    """The inputs of one turn of the program."""

    chunk: Step
    lengths: Any
    key: Any
    priorities: Any


def inputs(kind: str, seed: int) -> Turn:
    rng = np.random.default_rng(seed)
    lead = (STEPS, LANES)
    observations = rng.integers(0, 256, (2, *lead, 5), np.uint8)
    flags = rng.random((2, *lead)) < 0.2
    actions = rng.integers(0, 2**31 - 1, lead, np.int32)
    chunk = Step(observations[0], actions, rng.random(lead, np.float32), flags[0], flags[1], observations[1])
    lengths = rng.integers(0, STEPS + 1, LANES, np.int32) if "prioritized" in kind else None
    key = np.asarray(jax.random.key_data(jax.random.key(seed)))
    return Turn(chunk, lengths, key, rng.uniform(0, 3, BATCH).astype(np.float32))


def step_of(replay: Replay) -> Any:
    def step(state: ReplayState, given: Turn) -> tuple[ReplayState, Any]:
        state, added = replay.add(state, given.chunk, given.lengths, None, jnp.uint32(3))
        control, sample = replay.sample(state.control, state.storage, given.key)
        control, applied = replay.update_priorities(control, sample.info, given.priorities)
        return ReplayState(state.storage, control), (added, sample, applied)

    return step


TRACES: Counter[str] = Counter()


@cache
def small(kind: str) -> Replay:
    return make(kind, 20, BATCH, LANES)


@cache
def jitted_step(kind: str) -> Any:
    def counted(state: ReplayState, given: Turn) -> Any:
        TRACES[kind] += 1
        return step_of(small(kind))(state, given)

    return jax.jit(counted)


def start(kind: str) -> ReplayState:
    return jax.jit(lambda: small(kind).init(item_of(5)))()


def run(step: Any, state: ReplayState, given: list[Turn]) -> tuple[ReplayState, list[Any]]:
    outcomes = []
    for one in given:
        state, outcome = step(state, one)
        outcomes.append(jax.tree.map(np.asarray, outcome))
    return state, outcomes


def assert_equal(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)


def stacked(given: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *given)


@hardest
def test_scan_equals_the_python_loop_and_calls_are_traced_once(kind: str) -> None:
    given = [inputs(kind, seed) for seed in range(12)]
    state, outcomes = run(jitted_step(kind), start(kind), given)
    assert TRACES[kind] == 1
    scanned = jax.jit(lambda first, xs: jax.lax.scan(step_of(small(kind)), first, xs))(start(kind), stacked(given))
    assert_equal(scanned, (state, stacked(outcomes)))


@hardest
def test_vmap_over_seeds_equals_a_loop_over_seeds(kind: str) -> None:
    given = [[inputs(kind, 10 * turn + seed) for seed in range(2)] for turn in range(8)]
    alone = [run(jitted_step(kind), start(kind), [turn[seed] for turn in given]) for seed in range(2)]
    mapped = jax.jit(jax.vmap(step_of(small(kind))))
    got = run(mapped, stacked([start(kind)] * 2), [stacked(turn) for turn in given])
    assert_equal(got, stacked(alone))


@every_kind
def test_a_step_keeps_the_structure_shapes_and_dtypes_of_its_state_with_x64_too(kind: str) -> None:
    before = start(kind)
    for wide in (False, True):
        with jax.enable_x64(wide):
            after, _ = jax.eval_shape(step_of(small(kind)), before, inputs(kind, 0))
            reset = jax.eval_shape(small(kind).reset, before.control)
        for got, wanted in ((after, before), (reset, before.control)):
            assert jax.tree.structure(got) == jax.tree.structure(wanted)
            for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
                assert (one.shape, one.dtype) == (other.shape, other.dtype)


@every_kind
def test_an_empty_replay_says_so_on_every_row(kind: str) -> None:
    state = start(kind)
    _, sample = jax.jit(small(kind).sample)(state.control, state.storage, jax.random.key(0))
    assert sample.valid.tolist() == [False] * BATCH
    assert np.isfinite(sample.weights).all()
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(sample.data) if leaf.dtype == jnp.uint8)


# Facts of the compiled program: 2**17 items of about a kilobyte, none allocated.

SLACK = 2**18  # bytes; the leaves of a tree take twice as much, the storage more than a hundred times


def bytes_of(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@hardest
def test_a_donated_step_copies_neither_storage_nor_trees(kind: str) -> None:
    replay, item = make(kind, 2**17, 8, 4), item_of(1100)
    state = jax.eval_shape(lambda: replay.init(item))
    chunk = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, 4, *leaf.shape), leaf.dtype), item)
    lengths = jax.ShapeDtypeStruct((4,), jnp.int32) if "prioritized" in kind else None
    turn = Turn(chunk, lengths, jax.ShapeDtypeStruct((2,), jnp.uint32), jax.ShapeDtypeStruct((8,), jnp.float32))
    memory = jax.jit(step_of(replay), donate_argnums=0).lower(state, turn).compile().memory_analysis()
    assert bytes_of(state.storage) > 100 * SLACK
    assert memory.alias_size_in_bytes >= bytes_of(state)
    assert memory.temp_size_in_bytes < SLACK


@pytest.mark.slow
@hardest
def test_placements_of_equal_partitions_deliver_the_same_bits(kind: str) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    delivered = []
    for where, site in (("device", mesh), ("pinned_host", None)):
        placement = resolve_placement(where, learner_site(None, site, None), 2, 0)
        access = storage_access(placement.part.memory_kind)
        replay = place(make(kind, 40, BATCH, LANES, partitions=2, storage_access=access), placement)
        state = replay.init(item_of(5))
        for seed in range(6):
            given = inputs(kind, seed)
            state, _ = replay.add(state, given.chunk, given.lengths)
            control, sample = replay.sample(state.control, state.storage, given.key)
            delivered.append(jax.tree.map(np.asarray, sample))
            control, _ = replay.update_priorities(control, sample.info, given.priorities)
            state = ReplayState(state.storage, control)
    assert delivered[5].valid.all()
    assert_equal(delivered[:6], delivered[6:])
