"""What every replay must do, whatever its configuration: transformations change nothing, and no call copies the storage."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conduit_jax as conduit
from conduit_jax.replay.buffer import Control, Replay, ReplayState, make_replay
from conduit_jax.testing import assert_in_place
from conduit_jax.types import Sample

LANES, STEPS, BATCH, SEEDS = 2, 3, 8, 3
ITEM = {
    "action": jax.ShapeDtypeStruct((), jnp.int32),
    "large": jax.ShapeDtypeStruct((300,), jnp.float32),
    "pixels": jax.ShapeDtypeStruct((5,), jnp.uint8),
}
CONFIGS = {
    "uniform": conduit.ReplayConfig(capacity=10, min_size=4),
    "uniform ragged": conduit.ReplayConfig(capacity=10, min_size=4, ragged=True),
    "prioritized": conduit.ReplayConfig(capacity=10, min_size=4, sampler=conduit.Prioritized()),
    "prioritized ragged": conduit.ReplayConfig(
        capacity=10, min_size=4, ragged=True, sampler=conduit.Prioritized(exponent=1.0, stratified=False)
    ),
}
every_config = pytest.mark.parametrize("name", CONFIGS)
ends = pytest.mark.parametrize("name", ["uniform", "prioritized ragged"])


class Step(NamedTuple):
    """The inputs of one step of the program."""

    chunk: dict[str, Any]
    lengths: Any
    key: Any
    priorities: Any


@cache
def replay_of(name: str) -> Replay:
    return make_replay(CONFIGS[name], batch_size=BATCH, lanes=LANES)


def inputs(name: str, seed: int) -> Step:
    rng = np.random.default_rng(seed)
    chunk = {
        "action": rng.integers(0, 2**31 - 1, (STEPS, LANES), np.int32),
        "large": rng.standard_normal((STEPS, LANES, 300), np.float32),
        "pixels": rng.integers(0, 256, (STEPS, LANES, 5), np.uint8),
    }
    lengths = rng.integers(0, STEPS + 1, LANES, np.int32) if CONFIGS[name].ragged else None
    key = np.asarray(jax.random.key_data(jax.random.key(seed)))
    return Step(chunk, lengths, key, rng.uniform(0, 3, BATCH).astype(np.float32))


def step_of(replay: Replay) -> Any:
    """One turn of a training loop: add, sample, give the sampled items new priorities."""

    def step(state: ReplayState, given: Step) -> tuple[ReplayState, Any]:
        state, added = replay.add(state, given.chunk, given.lengths, None, jnp.uint32(3))
        control, sample = replay.sample(state.control, state.storage, given.key)
        control, applied = replay.update_priorities(control, sample.info, given.priorities)
        return ReplayState(state.storage, control), (added, sample, applied)

    return step


TRACES: Counter[str] = Counter()


@cache
def jitted_step(name: str) -> Any:
    def counted(state: ReplayState, given: Step) -> Any:
        TRACES[name] += 1
        return step_of(replay_of(name))(state, given)

    return jax.jit(counted)


def start(name: str) -> ReplayState:
    return jax.jit(lambda: replay_of(name).init(ITEM))()


def run(step: Any, state: ReplayState, given: list[Step]) -> tuple[ReplayState, list[Any]]:
    outcomes = []
    for one in given:
        state, outcome = step(state, one)
        outcomes.append(jax.tree.map(np.asarray, outcome))
    return state, outcomes


def assert_equal(got: Any, wanted: Any) -> None:
    """The same tree with the same dtypes, shapes and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(
            np.asarray(one).reshape(-1).view(np.uint8), np.asarray(other).reshape(-1).view(np.uint8)
        )


def stacked(given: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *given)


@ends
def test_jit_changes_nothing(name: str) -> None:
    given = [inputs(name, seed) for seed in range(3)]
    assert_equal(run(jitted_step(name), start(name), given), run(step_of(replay_of(name)), start(name), given))


@every_config
def test_scan_equals_the_python_loop(name: str) -> None:
    given = [inputs(name, seed) for seed in range(6)]
    state, outcomes = run(jitted_step(name), start(name), given)
    assert_equal(
        jax.jit(lambda first, xs: jax.lax.scan(step_of(replay_of(name)), first, xs))(start(name), stacked(given)),
        (state, stacked(outcomes)),
    )


@every_config
def test_vmap_over_seeds_equals_a_loop_over_seeds(name: str) -> None:
    given = [[inputs(name, 10 * turn + seed) for seed in range(SEEDS)] for turn in range(4)]
    alone = [run(jitted_step(name), start(name), [turn[seed] for turn in given]) for seed in range(SEEDS)]
    mapped = jax.jit(jax.vmap(step_of(replay_of(name))))
    state, outcomes = run(mapped, stacked([start(name)] * SEEDS), [stacked(turn) for turn in given])
    assert_equal((state, outcomes), stacked(alone))


@every_config
def test_x64_changes_neither_draws_nor_dtypes(name: str) -> None:
    given = [inputs(name, seed) for seed in range(4)]
    narrow = run(jitted_step(name), start(name), given)
    with jax.enable_x64(True):
        wide = run(jax.jit(step_of(make_replay(CONFIGS[name], batch_size=BATCH, lanes=LANES))), start(name), given)
        reset = replay_of(name).reset(wide[0].control)
    assert_equal(wide, narrow)
    assert_equal(reset, replay_of(name).reset(narrow[0].control))


@every_config
def test_calls_with_the_same_shapes_are_traced_once_and_equal_configs_give_equal_states(name: str) -> None:
    run(jitted_step(name), start(name), [inputs(name, seed) for seed in range(6)])
    assert TRACES[name] == 1
    twin = make_replay(CONFIGS[name], batch_size=BATCH, lanes=LANES)
    assert jax.tree.structure(jax.eval_shape(lambda: twin.init(ITEM))) == jax.tree.structure(start(name))


@every_config
def test_a_step_keeps_the_structure_shapes_and_dtypes_of_its_state(name: str) -> None:
    before = start(name)
    after, _ = jax.eval_shape(step_of(replay_of(name)), before, inputs(name, 0))
    reset = jax.eval_shape(replay_of(name).reset, before.control)
    for got, wanted in ((after, before), (reset, before.control)):
        assert jax.tree.structure(got) == jax.tree.structure(wanted)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)


@every_config
def test_a_replay_that_is_not_ready_says_so_on_every_item_and_invents_nothing(name: str) -> None:
    replay, state = replay_of(name), start(name)
    sample = jax.jit(replay.sample)
    control, empty = sample(state.control, state.storage, jax.random.key(0))
    assert empty.valid.tolist() == [False] * BATCH
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(empty.data))
    assert np.isfinite(empty.weights).all()
    assert np.isfinite(empty.info.probability).all()
    assert_equal(control, state.control)
    chunk = jax.tree.map(lambda leaf: leaf[:1], inputs(name, 1).chunk)
    add = jax.jit(replay.add)
    state, _ = add(state, chunk)  # two items where four are needed
    assert sample(state.control, state.storage, jax.random.key(0))[1].valid.tolist() == [False] * BATCH
    state, _ = add(state, chunk)
    ready = sample(state.control, state.storage, jax.random.key(0))[1]
    assert ready.valid.tolist() == [True] * BATCH
    assert set(ready.data["action"].tolist()) <= set(chunk["action"].reshape(-1).tolist())


def test_the_same_key_draws_the_same_batch_and_another_key_another() -> None:
    replay, (state, _) = replay_of("uniform"), run(jitted_step("uniform"), start("uniform"), [inputs("uniform", 0)])
    sample = jax.jit(replay.sample)
    once, again, other = (sample(state.control, state.storage, jax.random.key(seed))[1] for seed in (5, 5, 6))
    assert_equal(once, again)
    assert once.info.slot.tolist() != other.info.slot.tolist()


# Facts of the compiled program, on storage far larger than anything else: 4096 items of about 4 KiB, none allocated.

BIG_ITEM = {"frame": jax.ShapeDtypeStruct((4096,), jnp.uint8), "small": jax.ShapeDtypeStruct((7,), jnp.float32)}
SLACK = 1 << 20  # bytes; the storage is 16 MiB


@cache
def big(name: str) -> tuple[Replay, ReplayState, Any]:
    config = CONFIGS[name]
    config = conduit.ReplayConfig(capacity=4096, sampler=config.sampler, ragged=config.ragged)
    replay = make_replay(config, batch_size=16, lanes=4)
    state = jax.eval_shape(lambda: replay.init(BIG_ITEM))
    return replay, state, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, 4, *leaf.shape), leaf.dtype), BIG_ITEM)


def bytes_of(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


KEY, KEY_WORDS = jax.ShapeDtypeStruct((2,), jnp.uint32), np.array([0, 7], np.uint32)


def lengths_of(name: str) -> Any:
    return jax.ShapeDtypeStruct((4,), jnp.int32) if CONFIGS[name].ragged else None


@every_config
def test_a_donated_add_writes_in_place(name: str) -> None:
    replay, state, chunk = big(name)
    memory = jax.jit(replay.add, donate_argnums=0).lower(state, chunk, lengths_of(name)).compile().memory_analysis()
    assert bytes_of(state.storage) > 16 * SLACK
    assert memory.alias_size_in_bytes >= bytes_of(state.storage)
    assert memory.temp_size_in_bytes < SLACK


@every_config
def test_a_sample_returns_control_and_batch_but_no_storage(name: str) -> None:
    replay, state, _ = big(name)
    compiled = jax.jit(replay.sample, donate_argnums=0).lower(state.control, state.storage, KEY).compile()
    control, sample = compiled.out_info
    assert isinstance(control, Control)
    assert isinstance(sample, Sample)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(sample)} == {16}
    assert bytes_of(compiled.out_info) < SLACK
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= bytes_of(state.control)
    assert memory.temp_size_in_bytes < SLACK


@every_config
def test_adding_then_sampling_in_one_donated_step_copies_no_storage(name: str) -> None:
    replay, state, chunk = big(name)

    def fused(state: ReplayState, chunk: Any, lengths: Any, key: Any) -> Any:
        state, added = replay.add(state, chunk, lengths)
        control, sample = replay.sample(state.control, state.storage, key)
        control, applied = replay.update_priorities(control, sample.info, jnp.ones((16,), jnp.float32))
        return ReplayState(state.storage, control), added, sample, applied

    memory = jax.jit(fused, donate_argnums=0).lower(state, chunk, lengths_of(name), KEY).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= bytes_of(state.storage)
    assert memory.temp_size_in_bytes < SLACK


@pytest.mark.parametrize(
    ("name", "kept"), [("prioritized", "ring"), ("prioritized ragged", "ring"), ("prioritized", "slots")]
)
def test_a_donated_step_copies_no_priorities(name: str, kept: str) -> None:
    """Of 2**17 items: half a megabyte of priorities, and as much again in the tree's levels."""
    config = dataclasses.replace(CONFIGS[name], capacity=2**17, storage=kept)
    replay = make_replay(config, batch_size=BATCH, lanes=LANES)
    state = jax.eval_shape(lambda: replay.init(ITEM))
    memory = jax.jit(step_of(replay), donate_argnums=0).lower(state, inputs(name, 0)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= bytes_of(state)
    assert memory.temp_size_in_bytes < 2**17


@pytest.mark.parametrize("kept", ["ring", "slots"])
def test_a_fused_step_over_a_million_prioritized_items_is_in_place(kept: str) -> None:
    """Only compiled: every leaf keeps its buffer, and temporaries are a small part of 2**20 items' state."""
    config = dataclasses.replace(CONFIGS["prioritized"], capacity=2**20, storage=kept)
    replay = make_replay(config, batch_size=256, lanes=LANES)
    item = {"action": ITEM["action"]}  # small, so that a copy of the priorities or of the tree would be seen
    state = jax.eval_shape(lambda: replay.init(item))

    def step(state: ReplayState, chunk: Any, key: Any, priorities: Any) -> Any:
        state, added = replay.add(state, chunk)
        control, sample = replay.sample(state.control, state.storage, key)
        control, applied = replay.update_priorities(control, sample.info, priorities)
        return ReplayState(state.storage, control), added, sample, applied

    chunk = {"action": jax.ShapeDtypeStruct((2, LANES), jnp.int32)}
    given = (chunk, KEY, jax.ShapeDtypeStruct((256,), jnp.float32))
    assert_in_place(step, state, *given, max_temp_fraction=2**-6)


@pytest.mark.parametrize("kept", ["ring", "slots"])
def test_an_update_that_names_slots_out_of_range_changes_nothing_and_counts_them(kept: str) -> None:
    config = dataclasses.replace(CONFIGS["prioritized"], storage=kept)
    replay = make_replay(config, batch_size=BATCH, lanes=LANES)
    state, _ = jax.jit(replay.add)(replay.init(ITEM), inputs("prioritized", 0).chunk)
    control, sample = jax.jit(replay.sample)(state.control, state.storage, KEY_WORDS)
    slots = replay.geometry.slots
    for bad in (-1, -slots, -(2**31), slots, 2**31 - 1):
        info = sample.info._replace(slot=jnp.full((BATCH,), bad, jnp.int32))
        after, applied = jax.jit(replay.update_priorities)(control, info, jnp.full((BATCH,), 99.0))
        assert int(applied) == 0
        assert int(after.faults.stale_updates) == BATCH
        assert_equal(after._replace(faults=control.faults), control)


def test_a_scanned_loop_copies_no_storage() -> None:
    name = "prioritized ragged"
    replay, state, chunk = big(name)

    def loop(state: ReplayState, chunks: Any, lengths: Any, keys: Any) -> Any:
        def body(state: ReplayState, given: Any) -> Any:
            state, _ = replay.add(state, given[0], lengths)
            control, sample = replay.sample(state.control, state.storage, given[1])
            return ReplayState(state.storage, control), jnp.sum(sample.data["small"])

        return jax.lax.scan(body, state, (chunks, keys))

    several = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((5, *leaf.shape), leaf.dtype), (chunk, KEY))
    memory = (
        jax.jit(loop, donate_argnums=0)
        .lower(state, several[0], lengths_of(name), several[1])
        .compile()
        .memory_analysis()
    )
    assert memory.alias_size_in_bytes >= bytes_of(state.storage)
    assert memory.temp_size_in_bytes < SLACK


def test_a_copied_storage_would_be_seen() -> None:
    """The measure itself: a sample before the add, and an add that is not donated, each need a copy."""
    replay, state, chunk = big("uniform")

    def sample_first(state: ReplayState, chunk: Any, key: Any) -> Any:
        control, sample = replay.sample(state.control, state.storage, key)
        return replay.add(state._replace(control=control), chunk)[0], sample

    memory = jax.jit(sample_first, donate_argnums=0).lower(state, chunk, KEY).compile().memory_analysis()
    assert memory.temp_size_in_bytes >= bytes_of(state.storage)
    memory = jax.jit(replay.add).lower(state, chunk).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 0
    assert memory.output_size_in_bytes >= bytes_of(state.storage)
