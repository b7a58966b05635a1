"""A plane in plain Python: one partition after the other through the core, in program order, on the default device.

What a real plane delivers, on any placement and with any delays, must be what this delivers, bit for bit.
"""

from __future__ import annotations

import zlib
from collections import deque
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import conduit_jax as conduit

LANES, STEPS, BATCH, CAPACITY = 8, 4, 16, 96
EXACT = ("slot", "generation", "table_size", "age", "policy_version")


def unit(number: int, steps: int = STEPS, lanes: int = LANES) -> dict[str, np.ndarray]:
    """The ``number``-th rollout unit: every item holds its own number, in several dtypes, small leaves and a large one."""
    ids = (number * steps * lanes + np.arange(steps * lanes, dtype=np.int32)).reshape(steps, lanes)
    return {
        "id": ids,
        "pixels": ((ids[..., None] * 7 + np.arange(5)) % 251).astype(np.uint8),
        "half": (ids[..., None] % 100 + np.arange(3)).astype(ml_dtypes.bfloat16),
        "large": (ids[..., None] * np.ones(260)).astype(np.float32),
    }


def as_pushed(ids: np.ndarray) -> dict[str, np.ndarray]:
    """What the items numbered ``ids`` must look like, wherever they come out."""
    return {
        "id": ids,
        "pixels": ((ids[:, None] * 7 + np.arange(5)) % 251).astype(np.uint8),
        "half": (ids[:, None] % 100 + np.arange(3)).astype(ml_dtypes.bfloat16),
        "large": (ids[:, None] * np.ones(260)).astype(np.float32),
    }


def assert_intact(data: dict[str, Any]) -> None:
    """Assert that every delivered row is a row that was pushed."""
    for name, want in as_pushed(np.asarray(data["id"])).items():
        np.testing.assert_array_equal(np.asarray(data[name]), want, err_msg=name)


def priorities_for(sample: conduit.Sample) -> np.ndarray:
    """New priorities that depend on the items and have a zero among them now and then."""
    return (np.asarray(sample.data["id"]) * 13 % 7).astype(np.float32)


@cache
def _compiled(config: conduit.ReplayConfig, partitions: int) -> tuple[conduit.Replay, Any, Any, Any]:
    replay = conduit.make_replay(config, batch_size=BATCH, lanes=LANES, partitions=partitions)
    return replay, jax.jit(replay.add), jax.jit(replay.sample), jax.jit(replay.update_priorities)


class ReferencePlane:
    """``g_delivery`` batches make a call, and the call of batch n is made when batch n - ``ahead`` * g is asked for.

    ``g_ingestion`` units go in together; with ``late_inserts`` behind the next draws.
    """

    def __init__(
        self,
        config: conduit.ReplayConfig,
        partitions: int,
        *,
        seed: int = 0,
        ahead: int = 0,
        late_inserts: bool = False,
        g_ingestion: int = 1,
        g_delivery: int = 1,
    ):
        self.replay, self._add, self._sample, self._update = _compiled(config, partitions)
        item = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), unit(0))
        self._states = [self.replay.init(item) for _ in range(partitions)]
        self._partitions, self._ahead, self._late = partitions, ahead, late_inserts
        self._g_ingestion, self._g_delivery, self._pulled = g_ingestion, g_delivery, 0
        self._key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), zlib.crc32(b"experience"))
        self._drawn: deque[conduit.Sample] = deque()
        self._waiting: list[tuple[Any, int]] = []
        self._number = 0

    def push(self, rollout: dict[str, np.ndarray], version: int = 0) -> None:
        if self._late:
            self._insert_groups()
        self._waiting.append((rollout, version))
        if not self._late:
            self._insert_groups()

    def pull(self) -> conduit.Sample:
        if self.size == 0:
            self._insert_waiting()
        g = self._g_delivery
        while (self._number // g - self._ahead) * g <= self._pulled:  # the number of the next call is number // g
            self._drawn.extend([self._draw() for _ in range(g)])
        if self._late:
            self._insert_groups()
        self._pulled += 1
        return self._drawn.popleft()

    @property
    def size(self) -> int:
        return int(sum(state.control.ring.filled for state in self._states)) * LANES // self._partitions

    def update_priorities(self, info: conduit.SampleInfo, priorities: np.ndarray) -> int:
        share, applied = BATCH // self._partitions, 0
        for number, state in enumerate(self._states):
            own = slice(number * share, (number + 1) * share)
            info_of_one = jax.tree.map(lambda leaf, own=own: leaf[own], info)
            local = info_of_one._replace(slot=info_of_one.slot - number * self.replay.geometry.slots)
            control, count = self._update(state.control, local, jnp.asarray(priorities[own]))
            self._states[number] = state._replace(control=control)
            applied += int(count)
        return applied

    def _insert_groups(self) -> None:
        while len(self._waiting) >= self._g_ingestion:
            group, self._waiting = self._waiting[: self._g_ingestion], self._waiting[self._g_ingestion :]
            for one in group:
                self._insert(*one)

    def _insert_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self._insert(*one)

    def _insert(self, rollout: dict[str, np.ndarray], version: int) -> None:
        share = LANES // self._partitions
        for number, state in enumerate(self._states):
            own = slice(number * share, (number + 1) * share)
            chunk = {name: jnp.array(leaf[:, own]) for name, leaf in rollout.items()}
            self._states[number], _ = self._add(state, chunk, None, None, jnp.uint32(version))

    def _draw(self) -> conduit.Sample:
        parts = []
        for number, state in enumerate(self._states):
            key = jax.random.fold_in(jax.random.fold_in(self._key, self._number), number)
            control, sample = self._sample(state.control, state.storage, key)
            self._states[number] = state._replace(control=control)
            info = sample.info._replace(
                slot=sample.info.slot + number * self.replay.geometry.slots,
                probability=sample.info.probability / self._partitions,
            )
            parts.append(sample._replace(info=info))
        self._number += 1
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def assert_same_batch(got: conduit.Sample, want: conduit.Sample) -> None:
    """Bytes and bookkeeping must be equal; probabilities and weights, which are computed, up to rounding."""
    assert got.data.keys() == want.data.keys()
    for name, leaf in want.data.items():
        assert got.data[name].dtype == leaf.dtype, name
        np.testing.assert_array_equal(np.asarray(got.data[name]), np.asarray(leaf), err_msg=name)
    for name in EXACT:
        np.testing.assert_array_equal(
            np.asarray(getattr(got.info, name)), np.asarray(getattr(want.info, name)), err_msg=name
        )
    np.testing.assert_array_equal(np.asarray(got.valid), np.asarray(want.valid))
    computed = [(batch.info.probability, batch.info.priority, batch.weights) for batch in (got, want)]
    for have, wanted in zip(*computed, strict=True):
        np.testing.assert_allclose(np.asarray(have), np.asarray(wanted), rtol=1e-5)


def run_program(plane: Any, rounds: int = 6, *, updates: bool = True) -> list[conduit.Sample]:
    """Drive a plane (real or reference) through pushes, pulls and updates that wrap the ring; return the batches on the host."""
    batches = []
    plane.push(unit(0), version=7)
    for number in range(1, rounds + 1):
        plane.push(unit(number), version=7 + number)
        sample = plane.pull()
        batches.append(jax.tree.map(np.asarray, sample))
        if updates:
            plane.update_priorities(sample.info, priorities_for(sample))
    return batches
