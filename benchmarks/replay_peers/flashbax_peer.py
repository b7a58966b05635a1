"""flashbax as its documentation says to use it: jitted, ``add`` donated. Keys are made ahead, as for ours.

The trajectory buffer holds the same transitions and delivers 16 windows of 16 steps, 256 transitions in all.
``set_priorities`` takes its CPU path on CPU and the other one elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flashbax
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.replay_peers.jax_keys import keys_in_turn
from benchmarks.replay_peers.workloads import BATCH, KEYS, Rows, Workload, in_turn, priorities

Call = Callable[[], Any]
WINDOW = 16


class FlashbaxItem:
    """Transitions that stand on their own."""

    name = "flashbax item"

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.buffer = self.make(workload.capacity)
        self.state = jax.block_until_ready(jax.jit(self.buffer.init)(self.item()))
        self.jitted_add = jax.jit(self.buffer.add, donate_argnums=0)
        rows, times = workload.fill_chunks()
        chunk = self.chunk(rows)
        for _ in range(times):
            self.state = jax.block_until_ready(self.jitted_add(self.state, chunk))

    def make(self, capacity: int) -> Any:
        return flashbax.make_item_buffer(max_length=capacity, min_length=1, sample_batch_size=BATCH, add_batches=True)

    def item(self) -> Any:
        fields = self.workload.fields
        return self.kept({name: jnp.zeros(shape, dtype) for name, (shape, dtype) in fields.items()})

    def kept(self, rows: Any) -> Any:
        """Return the leaves that this buffer stores."""
        return rows

    def chunk(self, rows: Rows) -> Any:
        """Return rows in the shape that ``add`` wants, on the device."""
        return jax.block_until_ready({name: jnp.asarray(leaf) for name, leaf in self.kept(rows).items()})

    def add(self, rows: int) -> Call:
        chunk = self.chunk(self.workload.rows(rows))

        def call() -> None:
            self.state = jax.block_until_ready(self.jitted_add(self.state, chunk))

        return call

    def draw(self, batches: int) -> Callable[..., Any]:
        """Return the jitted ``(state, keys) -> samples``, several in one program."""
        if batches == 1:
            return jax.jit(self.buffer.sample)
        return jax.jit(lambda state, keys: [self.buffer.sample(state, keys[number]) for number in range(batches)])

    def sample(self, batches: int) -> Call:
        draw, key = self.draw(batches), keys_in_turn(batches)
        return lambda: jax.block_until_ready(draw(self.state, key()))


class FlashbaxFlat(FlashbaxItem):
    """Pairs of neighbouring steps: the next observation is not stored."""

    name = "flashbax flat"

    def make(self, capacity: int) -> Any:
        return flashbax.make_flat_buffer(max_length=capacity, min_length=2, sample_batch_size=BATCH, add_sequences=True)

    def kept(self, rows: Any) -> Any:
        return {name: leaf for name, leaf in rows.items() if name != "next_observation"}


class FlashbaxTrajectory(FlashbaxItem):
    """Windows of steps from 16 lanes."""

    name = "flashbax trajectory"
    lanes = 16

    def make(self, capacity: int) -> Any:
        return flashbax.make_trajectory_buffer(
            add_batch_size=self.lanes,
            sample_batch_size=BATCH // WINDOW,
            sample_sequence_length=WINDOW,
            period=1,
            min_length_time_axis=WINDOW,
            max_length_time_axis=capacity // self.lanes,
        )

    def chunk(self, rows: Rows) -> Any:
        shaped = {name: leaf.reshape(self.lanes, -1, *leaf.shape[1:]) for name, leaf in rows.items()}
        return super().chunk(shaped)


class _Prioritised(FlashbaxItem):
    """What the prioritised buffers add: priorities at first, and draws that are updated."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        update = jax.jit(self.buffer.set_priorities, donate_argnums=0)
        slots = jnp.arange(workload.capacity, dtype=jnp.int32)
        self.state = jax.block_until_ready(update(self.state, slots, jnp.asarray(priorities(workload.capacity))))

    def sample_and_update(self, batches: int) -> Call:
        draw, key = self.draw(batches), keys_in_turn(batches)
        new = np.split(priorities(KEYS * BATCH * batches), KEYS)
        following = in_turn(jax.block_until_ready([jnp.asarray(one) for one in new]))

        def several(state: Any, slots: Any, given: jax.Array) -> Any:
            return self.buffer.set_priorities(state, slots if batches == 1 else jnp.concatenate(slots), given)

        update = jax.jit(several, donate_argnums=0)

        def call() -> None:
            sample = jax.block_until_ready(draw(self.state, key()))
            slots = sample.indices if batches == 1 else [one.indices for one in sample]
            self.state = jax.block_until_ready(update(self.state, slots, following()))

        return call


def _device() -> str:
    return jax.default_backend()


class FlashbaxPrioritisedFlat(_Prioritised, FlashbaxFlat):
    """Pairs by priority."""

    name = "flashbax prioritised flat"

    def make(self, capacity: int) -> Any:
        return flashbax.make_prioritised_flat_buffer(
            max_length=capacity,
            min_length=2,
            sample_batch_size=BATCH,
            add_sequences=True,
            priority_exponent=0.6,
            device=_device(),
        )


class FlashbaxPrioritisedTrajectory(_Prioritised):
    """Transitions by priority: windows of one step."""

    name = "flashbax prioritised trajectory"

    def make(self, capacity: int) -> Any:
        return flashbax.make_prioritised_trajectory_buffer(
            add_batch_size=1,
            sample_batch_size=BATCH,
            sample_sequence_length=1,
            period=1,
            min_length_time_axis=1,
            max_length_time_axis=capacity,
            priority_exponent=0.6,
            device=_device(),
        )

    def chunk(self, rows: Rows) -> Any:
        return super().chunk({name: leaf[None] for name, leaf in rows.items()})


UNIFORM = (FlashbaxItem, FlashbaxFlat, FlashbaxTrajectory)
PRIORITIZED = (FlashbaxPrioritisedFlat, FlashbaxPrioritisedTrajectory)
