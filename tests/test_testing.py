"""Laws of the testing tools: each one tells a program that is right from one that is wrong."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import conduit_jax as conduit
from conduit_jax.testing import assert_in_place, compiled_facts, count_traces, delayed, live_buffer_bytes

REPLAY = conduit.make_replay(conduit.ReplayConfig(capacity=1 << 13), batch_size=8, lanes=2)
ITEM = {"small": jax.ShapeDtypeStruct((4,), jnp.float32), "large": jax.ShapeDtypeStruct((300,), jnp.float32)}
STATE = jax.eval_shape(REPLAY.init, ITEM)
CHUNK = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((4, 2, *leaf.shape), leaf.dtype), ITEM)
KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)


def add_then_sample(state: conduit.ReplayState, chunk: Any, key: Any) -> tuple:
    state, _ = REPLAY.add(state, chunk)
    control, sample = REPLAY.sample(state.control, state.storage, key)
    return state._replace(control=control), sample


def sample_then_add(state: conduit.ReplayState, chunk: Any, key: Any) -> tuple:
    control, sample = REPLAY.sample(state.control, state.storage, key)
    state, _ = REPLAY.add(state._replace(control=control), chunk)
    return state, sample


# ---------------------------------------------------------------- assert_in_place


@pytest.mark.parametrize("wrap", [lambda function: function, lambda function: jax.jit(function, donate_argnums=0)])
def test_adding_before_sampling_is_in_place_and_the_other_order_is_not(wrap: Any) -> None:
    assert_in_place(wrap(add_then_sample), STATE, CHUNK, KEY)
    with pytest.raises(
        AssertionError, match=r"works on a copy[\s\S]*f32\[8192,300\] \(9,830,400 bytes\)[\s\S]*add, then sample"
    ):
        assert_in_place(wrap(sample_then_add), STATE, CHUNK, KEY)


def test_leaves_that_no_output_takes_over_are_named_with_their_bytes() -> None:
    def keeps_only_control(state: conduit.ReplayState, key: Any) -> tuple:
        return REPLAY.sample(state.control, state.storage, key)

    with pytest.raises(AssertionError) as caught:
        assert_in_place(keeps_only_control, STATE, KEY)
    message = str(caught.value)
    assert "state.storage.apart[0] (9,830,400 bytes)" in message
    assert "state.storage.rows" in message
    assert "ring" not in message, "control is aliased and not to blame"


@pytest.mark.parametrize(
    ("function", "blamed"),
    [
        (lambda state: {"a": state["a"] + 1, "b": state["b"][:-1]}, "b"),
        (lambda state: {"a": state["a"].astype(jnp.int8), "b": state["b"] + 1}, "a"),
        (lambda state: {"a": state["a"] + 1}, "b"),
    ],
)
def test_a_changed_shape_dtype_or_tree_is_blamed_on_its_leaf(function: Any, blamed: str) -> None:
    state = {"a": jnp.ones(1000), "b": jnp.ones(2000)}
    with pytest.raises(AssertionError) as caught:
        assert_in_place(function, state)
    named = str(caught.value).splitlines()[1]
    assert named == f"  got:  state['{blamed}'] ({state[blamed].nbytes:,} bytes)"


def test_a_donated_leaf_the_program_does_not_read_is_found_too() -> None:
    function = jax.jit(lambda state: {"a": jnp.zeros(999), "b": state["b"] + 1}, donate_argnums=0)
    with pytest.raises(AssertionError, match=r"state\['a'\]"):
        assert_in_place(function, {"a": jnp.ones(1000), "b": jnp.ones(1000)})


def test_a_function_that_donates_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"donates nothing[\s\S]*donate_argnums=0"):
        assert_in_place(jax.jit(lambda state: state + 1), jnp.ones(8))


def test_several_arguments_may_be_donated_and_are_named_by_number() -> None:
    def step(left: Any, middle: Any, right: Any) -> tuple:
        return left + middle, right[:-1]

    assert_in_place(lambda left, right: (left + 1, right * 2), jnp.ones(100), jnp.ones(200), donate_argnums=(0, 1))
    with pytest.raises(AssertionError, match=r"argument 2 \(1,200 bytes\)"):
        assert_in_place(step, jnp.ones(100), jnp.ones(100), jnp.ones(300), donate_argnums=(0, 2))


def test_the_allowance_for_temporaries_is_the_callers() -> None:
    def sorts(state: jax.Array) -> jax.Array:
        return jnp.sort(state + 1) + state

    facts = compiled_facts(jax.jit(sorts, donate_argnums=0), jnp.ones(4096))
    assert facts.temp_bytes >= 4096 * 4
    with pytest.raises(AssertionError, match=r"at most 0\.1"):
        assert_in_place(sorts, jnp.ones(4096), max_temp_fraction=0.1)
    assert_in_place(sorts, jnp.ones(4096), max_temp_fraction=10)


def test_nothing_is_run_and_nothing_is_donated() -> None:
    state = jnp.ones(1000)
    assert_in_place(lambda value: value + 1, state)
    assert float(state.sum()) == 1000


def test_an_update_sharded_over_devices_is_judged_by_its_shards() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    state = jax.device_put(np.ones((8, 1000), np.float32), NamedSharding(mesh, PartitionSpec("data")))
    assert_in_place(lambda value: value * 2, state)
    assert compiled_facts(jax.jit(lambda value: value * 2, donate_argnums=0), state).alias_bytes == 4000


# ---------------------------------------------------------------- compiled_facts


def mesh_program(body: Any, out: Any) -> tuple[Any, jax.Array]:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    value = jax.device_put(np.arange(64, dtype=np.float32), NamedSharding(mesh, PartitionSpec("d")))
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=out, check_vma=False)), value


RING = [(number, (number + 1) % 8) for number in range(8)]


@pytest.mark.parametrize(
    ("body", "out", "want"),
    [
        (lambda x: x * 2, PartitionSpec("d"), {}),
        (lambda x: jax.lax.psum(x, "d"), PartitionSpec(), {"all-reduce": 1}),
        (lambda x: jax.lax.all_gather(x, "d"), PartitionSpec(), {"all-gather": 1}),
        (lambda x: jax.lax.ppermute(x, "d", RING), PartitionSpec("d"), {"collective-permute": 1}),
        (lambda x: jax.lax.all_to_all(x, "d", 0, 0), PartitionSpec("d"), {"all-to-all": 1}),
        (lambda x: jax.lax.psum_scatter(x, "d", tiled=True), PartitionSpec("d"), {"reduce-scatter": 1}),
        (
            lambda x: jax.lax.ppermute(jax.lax.psum(x, "d") + x, "d", RING),
            PartitionSpec("d"),
            {"all-reduce": 1, "collective-permute": 1},
        ),
    ],
)
def test_collectives_are_counted_by_kind(body: Any, out: Any, want: dict[str, int]) -> None:
    function, value = mesh_program(body, out)
    assert compiled_facts(function, value).collectives == Counter(want)


def test_asynchronous_forms_and_operand_names_are_read_correctly() -> None:
    class Program:
        """What a GPU compiler writes, reduced to the lines that matter."""

        def memory_analysis(self) -> Any:
            return jax.jit(lambda x: x).lower(jnp.ones(1)).compile().memory_analysis()

        def as_text(self) -> str:
            return """
  %all-reduce-start.1 = (f32[8]{0}, f32[]) all-reduce-start(%a, %b), replica_groups={}
  %all-reduce-done.1 = (f32[8]{0}, f32[]) all-reduce-done(%all-reduce-start.1)
  %all-gather.3 = f32[8]{0} all-gather(%c), dimensions={0}
  ROOT %fusion = f32[8]{0} fusion(%all-gather.3, %all-reduce-done.1), kind=kLoop
"""

    assert compiled_facts(Program()).collectives == Counter({"all-reduce": 1, "all-gather": 1})


def test_bytes_are_those_of_arguments_outputs_and_aliases() -> None:
    jitted = jax.jit(lambda state, x: (state + 1, x[:10]), donate_argnums=0)
    facts = compiled_facts(jitted, jnp.ones(1000), jnp.ones(100))
    assert (facts.argument_bytes, facts.alias_bytes) == (4400, 4000)
    assert 4040 <= facts.output_bytes < 4100
    assert compiled_facts(jitted.lower(jnp.ones(1000), jnp.ones(100)).compile()) == facts
    assert compiled_facts(lambda state: state + 1, jnp.ones(1000)).alias_bytes == 0


# ---------------------------------------------------------------- steady states


def test_traces_are_counted_inside_the_block_only() -> None:
    function = jax.jit(lambda x: x * 3)
    small, large = jnp.ones(3), jnp.ones(4)
    with count_traces() as first:
        function(small)
        function(small)
    with count_traces() as again:
        function(small)
    with count_traces() as retraced:
        function(large)
    function(jnp.ones(5))
    assert (first.count, first.compiled) == (1, 1)
    assert (again.count, again.compiled) == (0, 0)
    assert (retraced.count, retraced.compiled) == (1, 1)


def test_counting_ends_with_the_block_even_if_it_raises() -> None:
    with pytest.raises(ZeroDivisionError), count_traces() as counted:
        _ = 1 / 0
    jax.jit(lambda x: x - 7)(jnp.ones(3))
    assert counted.count == 0


def test_live_bytes_grow_with_an_array_and_shrink_with_its_end() -> None:
    before = live_buffer_bytes()
    array = jax.device_put(np.ones(1000, np.float32)) + 1
    assert live_buffer_bytes() - before >= 4000
    del array
    assert live_buffer_bytes() - before < 4000


# ---------------------------------------------------------------- delays


def delayed_run(seed: int) -> list[float]:
    pauses: list[float] = []
    plane = conduit.ExperiencePlane(algorithm=conduit.OffPolicy(batch_size=8), replay=conduit.ReplayConfig(capacity=64))
    plane.push({"x": jnp.ones((2, 4))})
    with delayed(plane, pause=pauses.append, seed=seed, longest_s=0.5):
        for _ in range(20):
            plane.push({"x": jnp.ones((2, 4))})
            plane.pull()
    return pauses


def test_delays_are_random_bounded_and_repeat_with_their_seed() -> None:
    first, again, other = delayed_run(1), delayed_run(1), delayed_run(2)
    assert first == again != other
    assert len(first) > 5
    assert all(0 <= pause <= 0.5 for pause in first)
    assert len(set(first)) == len(first)


@pytest.mark.parametrize("algorithm", [conduit.OffPolicy(batch_size=8), conduit.OnPolicy(num_minibatches=1)])
def test_a_plane_is_as_it_was_after_the_block_even_if_it_raises(algorithm: Any) -> None:
    replay = None if isinstance(algorithm, conduit.OnPolicy) else conduit.ReplayConfig(capacity=64)
    plane = conduit.ExperiencePlane(algorithm=algorithm, replay=replay)
    plane.build({"x": jnp.ones((2, 4))})
    pipeline = plane._tables["experience"].pipeline
    own, inner = dict(vars(plane)), dict(vars(pipeline))

    def fail_inside() -> None:
        with delayed(plane, pause=time.sleep):
            assert vars(plane).keys() - own.keys() == {"push", "pull", "update_priorities", "flush"}
            assert any(vars(pipeline)[name] is not value for name, value in inner.items())
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert vars(plane) == own
    assert all(vars(pipeline)[name] is value for name, value in inner.items())
