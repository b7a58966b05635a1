"""conduit_jax through its public functions, jitted, state and control donated.

Each stands beside the peer that does the same: items that stand alone, pairs of neighbouring steps (the next observation
is not stored), windows of 16 steps from 16 lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.replay_peers.jax_keys import keys_in_turn
from benchmarks.replay_peers.workloads import BATCH, KEYS, Rows, Workload, in_turn, priorities
from conduit_jax.config import Prioritized, ReplayConfig, Uniform
from conduit_jax.replay.buffer import Replay, ReplayState, make_replay
from conduit_jax.replay.windows import Windows, make_window_replay

Call = Callable[[], Any]


def as_chunk(rows: Rows, lanes: int = 1) -> dict[str, jax.Array]:
    """Return rows as a chunk ``(T, lanes, ...)`` on the device."""
    return jax.block_until_ready(
        {name: jnp.asarray(leaf.reshape(-1, lanes, *leaf.shape[1:])) for name, leaf in rows.items()}
    )


class Ours:
    """A replay of uniform draws."""

    name = "ours"
    sampler: Any = Uniform()
    lanes = 1

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.replay = self.make(ReplayConfig(capacity=workload.capacity, sampler=self.sampler))
        fields = self.kept(workload.fields)
        item = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in fields.items()}
        self.storage, self.control = jax.jit(lambda: self.replay.init(item))()
        self.jitted_add = jax.jit(self.replay.add, donate_argnums=0)
        rows, times = workload.fill_chunks()
        chunk, given = as_chunk(self.kept(rows), self.lanes), self.first_priorities(len(rows["reward"]))
        for _ in range(times):
            state, _ = self.jitted_add(ReplayState(self.storage, self.control), chunk, None, given)
            self.storage, self.control = jax.block_until_ready(state)

    def make(self, config: ReplayConfig) -> Replay:
        return make_replay(config, batch_size=BATCH)

    def kept(self, leaves: dict[str, Any]) -> dict[str, Any]:
        """Return the leaves that are stored."""
        return leaves

    def first_priorities(self, count: int) -> Any:
        """Return the priorities the buffer is filled with, or ``None``."""
        return None

    def add(self, rows: int) -> Call:
        """Return a call that adds ``rows`` transitions and waits."""
        chunk = as_chunk(self.kept(self.workload.rows(rows)), self.lanes)

        def call() -> None:
            state, _ = self.jitted_add(ReplayState(self.storage, self.control), chunk)
            self.storage, self.control = jax.block_until_ready(state)

        return call

    def draw(self, batches: int) -> Callable[..., Any]:
        """Return the jitted ``(control, storage, keys) -> (control, samples)`` that draws ``batches`` separate samples."""
        if batches == 1:
            return jax.jit(self.replay.sample, donate_argnums=0)

        def several(control: Any, storage: Any, keys: jax.Array) -> tuple[Any, list[Any]]:
            samples = []
            for number in range(batches):
                control, sample = self.replay.sample(control, storage, keys[number])
                samples.append(sample)
            return control, samples

        return jax.jit(several, donate_argnums=0)

    def sample(self, batches: int) -> Call:
        """Return a call that draws ``batches`` samples and waits for all of them."""
        draw, key = self.draw(batches), keys_in_turn(batches)

        def call() -> Any:
            self.control, sample = draw(self.control, self.storage, key())
            return jax.block_until_ready(sample)

        return call


class OursPrioritized(Ours):
    """A replay of prioritized draws."""

    name = "ours prioritized"
    sampler = Prioritized(exponent=0.6, importance_exponent=0.4)

    def first_priorities(self, count: int) -> Any:
        return jnp.asarray(priorities(count)[:, None])

    def sample_and_update(self, batches: int) -> Call:
        """Return a call that draws ``batches`` samples, waits, updates their priorities in one call and waits."""
        draw, key = self.draw(batches), keys_in_turn(batches)
        new = np.split(priorities(KEYS * BATCH * batches), KEYS)
        following = in_turn(jax.block_until_ready([jnp.asarray(one) for one in new]))

        def several(control: Any, infos: Any, given: jax.Array) -> Any:
            info = infos if batches == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *infos)
            return self.replay.update_priorities(control, info, given)[0]

        update = jax.jit(several, donate_argnums=0)

        def call() -> None:
            self.control, sample = draw(self.control, self.storage, key())
            jax.block_until_ready(sample)
            infos = sample.info if batches == 1 else [one.info for one in sample]
            self.control = jax.block_until_ready(update(self.control, infos, following()))

        return call


class OursPairs(Ours):
    """Two neighbouring steps an item; only the learner looks for ends of episodes, as with the peer."""

    name = "ours pairs"

    def make(self, config: ReplayConfig) -> Replay:
        return make_window_replay(config, Windows(length=2, boundary="cross"), batch_size=BATCH)

    def kept(self, leaves: dict[str, Any]) -> dict[str, Any]:
        return {name: leaf for name, leaf in leaves.items() if name != "next_observation"}


class OursWindows(Ours):
    """Windows of 16 steps from 16 lanes, 256 steps a batch."""

    name = "ours windows"
    lanes = 16

    def make(self, config: ReplayConfig) -> Replay:
        windows = Windows(length=16, boundary="cross")
        return make_window_replay(config, windows, batch_size=BATCH // windows.length, lanes=self.lanes)


UNIFORM, PRIORITIZED = (Ours, OursPairs, OursWindows), (OursPrioritized,)
