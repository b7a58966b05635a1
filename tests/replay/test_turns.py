"""Several draws in one program take turns: XLA on CPU never has more than a few of their kernels ready at once."""

from __future__ import annotations

import re
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conduit_jax import Prioritized, ReplayConfig, Uniform
from conduit_jax.replay.buffer import Replay, make_replay
from conduit_jax.replay.random_bits import bits, shared_bits
from conduit_jax.replay.windows import Windows, make_window_replay

FEW = 8  # with more ready, XLA on CPU wakes another thread (thunk_executor.cc)
NO_KERNELS = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple"}
OPERATION = re.compile(
    r"^\s*(?:ROOT )?%(?P<name>[\w.-]+) = .*?[\s)}](?P<opcode>[a-z][\w-]*)\((?P<operands>[^=]*?)\)(?:, \w+=|$)"
)


def most_ready(compiled: str) -> int:
    """Return how many kernels of a compiled program wait at most, run first come, first served, as XLA on CPU does."""
    needs: dict[str, set[str]] = {}
    stands_for: dict[str, set[str]] = {}
    for line in compiled[compiled.index("ENTRY") :].splitlines()[1:]:
        found = OPERATION.match(re.sub(r"/\*.*?\*/", "", line.split(", metadata=")[0]))
        if found is None:
            continue
        operands = re.findall(r"%([\w.-]+)", found["operands"])
        before = set().union(*(stands_for.get(operand, set()) for operand in operands))
        if found["opcode"] in NO_KERNELS:
            stands_for[found["name"]] = before
        else:
            stands_for[found["name"]], needs[found["name"]] = {found["name"]}, before
    ready, most = deque(name for name, before in needs.items() if not before), 0
    waiting = {name: set(before) for name, before in needs.items() if before}
    while ready:
        done = ready.popleft()
        most = max(most, len(ready))
        for name in [name for name, before in waiting.items() if done in before]:
            waiting[name].remove(done)
            if not waiting[name]:
                ready.append(name)
                del waiting[name]
    assert not waiting, "the program was not read in full"
    return most


def make(kind: str) -> Replay:
    config = ReplayConfig(capacity=100_000, sampler=Prioritized() if kind == "prioritized" else Uniform())
    if kind == "windows":
        return make_window_replay(config, Windows(length=4, boundary="cross"), batch_size=64, lanes=4)
    return make_replay(config, batch_size=256)


def compiled_draws(replay: Replay, draws: int, width: int = 4) -> str:
    """Return a compiled program of ``draws`` draws of items with observations of ``width`` floats."""
    scalar, vector = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((width,), jnp.float32)
    item = {"x": vector, "action": scalar, "reward": scalar, "discount": scalar, "next_x": vector}
    state = jax.eval_shape(lambda: replay.init(item))

    def several(control: Any, storage: Any, keys: jax.Array) -> Any:
        samples = []
        for number in range(draws):
            control, sample = replay.sample(control, storage, keys[number])
            samples.append(sample)
        return control, samples

    keys = jax.ShapeDtypeStruct((draws, 2), jnp.uint32)
    return jax.jit(several, donate_argnums=0).lower(state.control, state.storage, keys).compile().as_text()


@pytest.mark.parametrize("draws", [1, 2, 8])
@pytest.mark.parametrize("kind", ["items", "windows", "prioritized"])
def test_small_draws_of_one_program_take_turns(kind: str, draws: int) -> None:
    assert most_ready(compiled_draws(make(kind), draws)) <= FEW


@pytest.mark.parametrize("steps", [32, 256])
@pytest.mark.parametrize("kind", ["items", "windows", "prioritized"])
def test_little_of_an_insert_is_ready_at_once(kind: str, steps: int) -> None:
    replay = make(kind)
    state = jax.eval_shape(
        lambda: replay.init({"x": jnp.zeros((128,)), "action": jnp.int32(0), "reward": jnp.zeros(())})
    )
    lanes = replay.geometry.lanes
    shape = jax.ShapeDtypeStruct((steps // lanes, lanes), jnp.float32)
    wide = jax.ShapeDtypeStruct((*shape.shape, 128), jnp.float32)
    chunk = {"x": wide, "action": jax.ShapeDtypeStruct(shape.shape, jnp.int32), "reward": shape}
    assert most_ready(jax.jit(replay.add, donate_argnums=0).lower(state, chunk).compile().as_text()) <= FEW


def test_large_draws_of_one_program_run_side_by_side() -> None:
    assert most_ready(compiled_draws(make("items"), 8, width=128)) > FEW


def test_a_draw_counts_no_fault() -> None:
    replay = make_replay(ReplayConfig(capacity=512), batch_size=64)
    state = jax.jit(lambda: replay.init({"x": jnp.zeros(())}))()
    state, _ = jax.jit(replay.add)(state, {"x": jnp.ones((100, 1))})
    before = state.control.faults.words
    control, _ = jax.jit(replay.sample)(state.control, state.storage, jax.random.key(0))
    np.testing.assert_array_equal(np.asarray(control.faults.words), np.asarray(before))


def test_bits_that_wait_are_the_same_bits() -> None:
    for seed in range(5):
        key = jax.random.key(seed, impl="threefry2x32")
        made = jax.jit(shared_bits, static_argnums=1)(key, 300)
        np.testing.assert_array_equal(np.asarray(made), np.asarray(bits(key, 300)))
