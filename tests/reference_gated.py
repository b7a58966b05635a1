"""Planes over slots and under limiters, and the same in plain calls: the pure replay of each partition, driven by hand.

Whatever a plane does, ``Both`` expects of it what the replay by hand does, given the same calls and keys.
"""

from __future__ import annotations

import zlib
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conduit_jax as conduit
from conduit_jax.build import _REMOVER_STREAM
from conduit_jax.schedule.gated import GatedPipeline

LANES, STEPS, BATCH, CAPACITY = 4, 2, 4, 12
UNIT = LANES * STEPS
SCHEDULE = "sequential"
QUEUE = {
    "sampler": conduit.Fifo(), "remover": conduit.Fifo(), "max_times_sampled": 1, "limiter": conduit.Queue(size=CAPACITY)
}  # fmt: skip
STACK = {
    "sampler": conduit.Lifo(), "remover": conduit.Lifo(), "max_times_sampled": 2, "limiter": conduit.Stack(size=CAPACITY)
}  # fmt: skip
OLDEST = {"sampler": conduit.Fifo(), "storage": "slots", "min_size": UNIT}  # no limiter: every schedule runs it
RATIO = conduit.SampleToInsertRatio(samples_per_insert=1.5, min_size=3, error_buffer=(-4.5, 12))
TABLES: dict[str, dict[str, Any]] = {
    "queue": QUEUE,
    "stack": STACK,
    "min heap, max heap": {"sampler": conduit.MinHeap(), "remover": conduit.MaxHeap(), "limiter": RATIO},
    "uniform twice": {"sampler": conduit.Uniform(), "remover": conduit.Uniform(), "max_times_sampled": 3},
    "max heap, uniform": {"sampler": conduit.MaxHeap(), "remover": conduit.Uniform(), "max_times_sampled": 3},
    "uniform, min heap": {"sampler": conduit.Uniform(), "remover": conduit.MinHeap(), "min_size": 5},
    "prioritized twice": {"sampler": conduit.Prioritized(), "remover": conduit.Prioritized(exponent=1.0)},
    "epochs, lifo": {"sampler": conduit.Epochs(), "remover": conduit.Lifo(), "min_size": 2},
    "ring, ratio": {"sampler": conduit.Prioritized(), "limiter": RATIO},
}


def config_of(**options: Any) -> conduit.ReplayConfig:
    return conduit.ReplayConfig(**{"capacity": CAPACITY} | options)


def plane_of(config: conduit.ReplayConfig, batch_size: int = BATCH, **options: Any) -> conduit.ExperiencePlane:
    algorithm = conduit.OffPolicy(batch_size=batch_size)
    return conduit.ExperiencePlane(algorithm=algorithm, replay=config, **({"schedule": SCHEDULE} | options))


def unit(number: int, steps: int = STEPS, lanes: int = LANES) -> dict[str, np.ndarray]:
    ids = number * steps * lanes + np.arange(steps * lanes, dtype=np.int32)
    return {"id": ids.reshape(steps, lanes)}


@cache
def pure(config: conduit.ReplayConfig, partitions: int) -> tuple[Any, ...]:
    replay = conduit.make_replay(config, batch_size=BATCH, lanes=LANES, partitions=partitions)
    functions = (replay.add, replay.sample, replay.update_priorities, replay.delete, replay.reset)
    asked = {"insert": jax.jit(replay.can_add), "sample": jax.jit(replay.can_sample)}
    start = jax.jit(lambda: replay.init({"id": jax.ShapeDtypeStruct((), jnp.int32)}))()
    return (replay, start, asked, *map(jax.jit, functions))


class ByHand:
    """The pure replay of every partition, driven in program order with the keys a plane says it draws from."""

    def __init__(self, config: conduit.ReplayConfig, partitions: int = 1, seed: int = 0):
        self.replay, start, self._asked, *functions = pure(config, partitions)
        self._add, self._sample, self._update, self._delete, self._reset = functions
        table = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), zlib.crc32(b"experience"))
        self._key, self._keys = (
            table,
            [jax.random.fold_in(jax.random.fold_in(table, _REMOVER_STREAM), n) for n in range(partitions)],
        )
        self.states = [start] * partitions
        self.partitions, self._number = partitions, 0

    def can(self, operation: str, count: int) -> bool:
        asked, share = self._asked[operation], count // self.partitions
        return all(bool(asked(state.control, share)) for state in self.states)

    def push(self, rollout: dict[str, np.ndarray], version: int = 0) -> None:
        share = LANES // self.partitions
        for number, state in enumerate(self.states):
            chunk = {
                name: jnp.asarray(leaf[:, number * share : (number + 1) * share]) for name, leaf in rollout.items()
            }
            key = jax.random.key_data(self._keys[number])
            self.states[number], info = self._add(state, chunk, None, None, np.uint32(version), key)
            assert int(info.added) == UNIT // self.partitions

    def pull(self) -> conduit.Sample:
        parts, draw = [], jax.random.fold_in(self._key, self._number)
        for number, state in enumerate(self.states):
            control, sample = self._sample(state.control, state.storage, jax.random.fold_in(draw, number))
            self.states[number] = state._replace(control=control)
            slot = sample.info.slot + number * self.replay.geometry.slots
            info = sample.info._replace(slot=slot, probability=sample.info.probability / self.partitions)
            parts.append(sample._replace(info=info))
        self._number += 1
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    def _each(self, info: conduit.SampleInfo) -> list[conduit.SampleInfo]:
        share = info.shape[0] // self.partitions
        own = [jax.tree.map(lambda leaf, n=n: leaf[n * share : (n + 1) * share], info) for n in range(self.partitions)]
        return [one._replace(slot=one.slot - n * self.replay.geometry.slots) for n, one in enumerate(own)]

    def update_priorities(self, info: conduit.SampleInfo, priorities: np.ndarray) -> int:
        share, applied = len(priorities) // self.partitions, 0
        for number, own in enumerate(self._each(info)):
            state = self.states[number]
            given = jnp.asarray(priorities[number * share : (number + 1) * share])
            control, count = self._update(state.control, own, given)
            self.states[number], applied = state._replace(control=control), applied + int(count)
        return applied

    def delete(self, info: conduit.SampleInfo) -> int:
        deleted = 0
        for number, own in enumerate(self._each(info)):
            control, count = self._delete(self.states[number].control, own)
            self.states[number], deleted = self.states[number]._replace(control=control), deleted + int(count)
        return deleted

    def reset(self) -> None:
        self.states = [state._replace(control=self._reset(state.control)) for state in self.states]


def assert_same(got: conduit.Sample, want: conduit.Sample) -> None:
    assert bool(np.asarray(got.valid).all())
    np.testing.assert_array_equal(np.asarray(got.data["id"]), want.data["id"])
    for name in ("slot", "generation", "priority", "table_size", "age", "policy_version", "times_sampled"):
        have, wanted = getattr(got.info, name), getattr(want.info, name)
        assert (have is None) == (wanted is None)
        np.testing.assert_array_equal(np.asarray(have), np.asarray(wanted), err_msg=name)
    np.testing.assert_allclose(np.asarray(got.info.probability), want.info.probability, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(got.weights), want.weights, rtol=1e-5)


def priorities_for(sample: conduit.Sample) -> np.ndarray:
    return (np.asarray(sample.data["id"]) * 13 % 7).astype(np.float32)


def table_of(plane: conduit.ExperiencePlane) -> GatedPipeline:
    pipeline = plane.running()
    assert isinstance(pipeline, GatedPipeline)
    return pipeline


def assert_account_holds(plane: conduit.ExperiencePlane) -> None:
    """The device's numbers lie within the account's bounds, in every partition."""
    pipeline = table_of(plane)
    for one in pipeline._accounts():
        for (least, most), (exact, _) in zip(pipeline.ledger.account, one, strict=True):
            assert least <= exact <= most, (pipeline.ledger.account, one)


class Both:
    """A plane and the pure replay by hand, given the same calls; whatever one does the other must do."""

    def __init__(self, config: conduit.ReplayConfig, partitions: int = 1, plane: conduit.ExperiencePlane | None = None):
        self.plane, self.model = plane or plane_of(config), ByHand(config, partitions)
        self.plane.build(unit(0))
        self.ring, self.pushed, self.last = config.resolved_storage == "ring", 0, None

    def push(self) -> None:
        if not self.model.can("insert", UNIT):
            with pytest.raises(conduit.BackpressureError, match=r"nothing was pushed[\s\S]*samples_per_insert"):
                self.plane.push(unit(self.pushed))
            return
        info = self.plane.push(unit(self.pushed), version=self.pushed)
        assert info is not None
        assert info.added.sum() == UNIT
        self.model.push(unit(self.pushed), self.pushed)
        self.pushed += 1

    def pull(self) -> None:
        allowed = self.model.can("sample", BATCH)
        assert self.plane.ready() == allowed
        if not allowed:
            with pytest.raises(conduit.NotReadyError, match="whole batch"):
                self.plane.pull()
            return
        self.last = self.plane.pull()
        assert_same(self.last, self.model.pull())

    def update(self) -> None:
        if self.last is not None:
            given = priorities_for(self.last)
            info = jax.tree.map(np.asarray, self.last.info)
            applied = self.plane.update_priorities(self.last.info, given)
            assert int(np.sum(applied)) == self.model.update_priorities(info, given)

    def delete(self) -> None:
        if self.last is not None and not self.ring:
            slot = np.where(np.arange(BATCH) % 2, -1, np.asarray(self.last.info.slot))
            info = jax.tree.map(np.asarray, self.last.info)._replace(slot=slot.astype(np.int32))
            assert int(np.sum(self.plane.delete(info))) == self.model.delete(info)

    def reset(self) -> None:
        self.plane.reset(), self.model.reset()

    def run(self, program: list[str]) -> None:
        for step in program:
            getattr(self, step)()
            assert_account_holds(self.plane)


STEADY = ["push", "pull", "update", "push", "pull", "pull", "update", "pull", "push", "push", "pull", "update", "pull"]
