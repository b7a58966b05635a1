"""How often a prioritized draw returns an item that can never be drawn: an empty slot, or one of priority zero.

A third of 2^20 slots is filled, one item in ten has priority zero; every batch's priorities are then updated, two in a
thousand to zero. The truth is kept beside the buffer: what the buffer itself says of its priorities is not asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.replay_peers.workloads import BATCH, priorities
from conduit_jax.config import Prioritized, ReplayConfig
from conduit_jax.replay.buffer import make_replay

BATCHES_A_CALL = 1000
TABLE = 65_521  # new priorities are a function of slot and step, so that duplicates in a batch agree
Step = Callable[[Any, jax.Array, Callable[[jax.Array], jax.Array]], tuple[Any, jax.Array]]


class Subject(NamedTuple):
    """``state``, and ``step(state, key, new) -> (state, slots)``: draw a batch and give each slot ``new(slots)``."""

    state: Any
    step: Step


def first_priorities(filled: int) -> np.ndarray:
    first = priorities(filled, seed=4)
    first[np.random.default_rng(5).random(filled) < 0.1] = 0
    return first


def ours(capacity: int, filled: int) -> Subject:
    replay = make_replay(ReplayConfig(capacity=capacity, sampler=Prioritized()), batch_size=BATCH)
    state = jax.jit(lambda: replay.init({"reward": jax.ShapeDtypeStruct((), jnp.float32)}))()
    chunk = {"reward": jnp.zeros((filled, 1))}
    state, _ = jax.jit(replay.add)(state, chunk, None, jnp.asarray(first_priorities(filled)[:, None]))

    def step(control: Any, key: jax.Array, new: Any) -> tuple[Any, jax.Array]:
        control, sample = replay.sample(control, state.storage, key)
        control, _ = replay.update_priorities(control, sample.info, new(sample.info.slot))
        return control, sample.info.slot

    return Subject(state.control, step)


def flashbax(capacity: int, filled: int) -> Subject:
    import flashbax

    buffer = flashbax.make_prioritised_trajectory_buffer(
        add_batch_size=1,
        sample_batch_size=BATCH,
        sample_sequence_length=1,
        period=1,
        min_length_time_axis=1,
        max_length_time_axis=capacity,
        device=jax.default_backend(),
    )
    state = jax.jit(buffer.add)(buffer.init({"reward": jnp.zeros(())}), {"reward": jnp.zeros((1, filled))})
    slots = jnp.arange(filled, dtype=jnp.int32)
    state = jax.jit(buffer.set_priorities)(state, slots, jnp.asarray(first_priorities(filled)))

    def step(state: Any, key: jax.Array, new: Any) -> tuple[Any, jax.Array]:
        slots = buffer.sample(state, key).indices
        return buffer.set_priorities(state, slots, new(slots)), slots

    return Subject(state, step)


def count_dead(make: Callable[[int, int], Subject], capacity: int, draws: int) -> tuple[int, int]:
    """Return how many of how many draws were dead; ``draws`` is rounded up to whole calls."""
    filled = capacity // 3
    subject = make(capacity, filled)
    table = priorities(TABLE, seed=6)
    table[np.random.default_rng(7).random(TABLE) < 0.002] = 0
    table = jnp.asarray(table)
    truth = jnp.zeros((capacity,), jnp.float32).at[:filled].set(first_priorities(filled))

    def one(carry: Any, number: jax.Array) -> tuple[Any, jax.Array]:
        state, truth = carry
        key = jax.random.fold_in(jax.random.key(8, impl="threefry2x32"), number)

        def new(slots: jax.Array) -> jax.Array:
            return table[(slots + 7919 * number.astype(jnp.int32)) % TABLE]

        state, slots = subject.step(state, key, new)
        return (state, truth.at[slots].set(new(slots))), jnp.sum(truth[slots] <= 0, dtype=jnp.int32)

    @jax.jit
    def run(carry: Any, start: jax.Array) -> tuple[Any, jax.Array]:
        carry, dead = jax.lax.scan(one, carry, start + jnp.arange(BATCHES_A_CALL))
        return carry, jnp.sum(dead)

    carry, dead, calls = (subject.state, truth), 0, -(-draws // (BATCHES_A_CALL * BATCH))
    for call in range(calls):
        carry, found = run(carry, jnp.int32(call * BATCHES_A_CALL))
        dead += int(found)
    return dead, calls * BATCHES_A_CALL * BATCH
