"""Tables of windows, views and episodes in plain calls: each partition's replay driven by hand, with the plane's keys.

Whatever a plane of such a table delivers, wherever and however, ``ByHand`` expects bit for bit, given the same calls.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import conduit_jax as conduit
from conduit_jax.replay.windows import make_window_replay

LANES, STEPS, BATCH, CAPACITY = 8, 3, 16, 96  # 12 steps a lane: four units


def unit(number: int, lanes: int = LANES) -> dict[str, Any]:
    """The ``number``-th rollout unit; every lane has episodes of its own lengths, from 2 to 7 steps."""
    step = number * STEPS + np.arange(STEPS, dtype=np.int32)[:, None]
    lane = np.arange(lanes, dtype=np.int32)
    every = 2 + (lane * 5 + step // 11) % 6
    ended = step % every == every - 1
    ids = step * lanes + lane
    return {
        "id": ids,
        "hidden": (ids[..., None] * np.ones(3)).astype(np.float32),
        "pixels": (ids[..., None] * 7 + np.arange(300)).astype(np.uint8),
        "terminated": ended & (step % 2 == 0),
        "truncated": ended & (step % 2 == 1),
    }


def step_unit(number: int) -> conduit.Step:
    """The same rollout as steps of a transition view: observations of which a stack can be told apart from another."""
    plain = unit(number)
    seen = (plain["id"][..., None] * np.ones(2)).astype(np.float32)
    last = (-1 - plain["id"][..., None] * np.ones(2)).astype(np.float32)
    reward = (plain["id"] % 7).astype(np.float32)
    return conduit.Step(seen, plain["id"], reward, plain["terminated"], plain["truncated"], last)


def goal_unit(number: int) -> dict[str, Any]:
    """The same rollout with goals: what was achieved is the item's own number."""
    plain = unit(number)
    achieved = plain["id"].astype(np.float32)
    return plain | {"achieved": achieved, "desired": -achieved, "reward": np.zeros_like(achieved)}


def distance(achieved: Any, desired: Any, item: Any) -> Any:
    return -jnp.abs(achieved - desired)


GOALS = {"achieved": "achieved", "desired": ("desired",), "recompute": (("reward", distance),)}


def hidden_of(item: dict[str, Any]) -> Any:
    return item["hidden"]


def config_of(items: Any, **options: Any) -> conduit.ReplayConfig:
    return conduit.ReplayConfig(**{"capacity": CAPACITY, "min_size": 8, "items": items} | options)


PRIORITIZED = conduit.Prioritized(exponent=0.7)
TABLES: dict[str, conduit.ReplayConfig] = {
    "pad": config_of(conduit.Windows(length=4), sampler=PRIORITIZED),
    "pad by twos": config_of(conduit.Windows(length=5, period=2)),
    "never": config_of(conduit.Windows(length=3, boundary="never")),
    "cross": config_of(conduit.Windows(length=4, boundary="cross")),
    "cross by threes": config_of(conduit.Windows(length=4, period=3, boundary="cross"), sampler=PRIORITIZED),
    "recurrent": config_of(conduit.Windows(length=4, burn_in=1, state=hidden_of), sampler=PRIORITIZED),
    "one step": config_of(conduit.TransitionView(discount=0.5, final_observations=40)),
    "three steps": config_of(conduit.TransitionView(discount=0.5, n=3), sampler=PRIORITIZED),
    "stacked, n drawn": config_of(
        conduit.TransitionView(discount=0.5, n=conduit.NStepRange(low=1, high=3), stack=3, final_observations=24)
    ),
    "hindsight": config_of(conduit.Hindsight(**GOALS), sampler=PRIORITIZED),
    "hindsight, final": config_of(conduit.Hindsight(**GOALS, strategy="final", fraction=0.5)),
    "padded": config_of(conduit.Episodes(max_length=8), sampler=PRIORITIZED),
    "packed": config_of(conduit.Episodes(max_length=8, delivery=conduit.Packed(rows=BATCH, row_length=10))),
    "by length": config_of(conduit.Episodes(max_length=8, by_length=True, overlong="split")),
}


def made_by_hand(config: conduit.ReplayConfig, **shape: int) -> conduit.Replay:
    """The replay of ``config``, by the maker of its items: not by what a plane asks."""
    items, plain = config.items, conduit.ReplayConfig(**{**vars(config), "items": None})
    if isinstance(items, conduit.Windows):
        return make_window_replay(plain, items, **shape)
    if isinstance(items, conduit.TransitionView):
        return conduit.make_transition_view(plain, items, **shape)
    if isinstance(items, conduit.Hindsight):
        return conduit.relabel(conduit.make_replay(plain, **shape), items)
    assert isinstance(items, conduit.Episodes)
    episodes = conduit.EpisodesConfig(
        capacity_steps=config.capacity,
        max_length=items.max_length,
        min_episodes=config.min_size,
        sampler=conduit.ByLength() if items.by_length else config.sampler,
        overlong=items.overlong,
    )
    return conduit.make_episodes(episodes, delivery=items.delivery, **shape)


def unit_of(config: conduit.ReplayConfig) -> Callable[[int], Any]:
    """What makes the rollout units of a table."""
    kinds = {conduit.TransitionView: step_unit, conduit.Hindsight: goal_unit}
    return kinds.get(type(config.items), unit)


@cache
def compiled(config: conduit.ReplayConfig, partitions: int) -> tuple[conduit.Replay, Any, Any, Any]:
    replay = made_by_hand(config, batch_size=BATCH, lanes=LANES, partitions=partitions)
    return replay, jax.jit(replay.add), jax.jit(replay.sample), jax.jit(replay.update_priorities)


class ByHand:
    """A table in plain calls; ``g`` batches make a call, the call of batch n is made when batch n - ``ahead`` * g is asked for."""

    def __init__(self, config: conduit.ReplayConfig, partitions: int = 1, *, seed: int = 0, ahead: int = 0, g: int = 1):
        self.config = config
        self.replay, self._add, self._sample, self._update = compiled(config, partitions)
        item = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), unit_of(config)(0))
        self.states = [self.replay.init(item) for _ in range(partitions)]
        self._partitions, self._ahead, self._g, self._number, self._pulled = partitions, ahead, g, 0, 0
        self._key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), zlib.crc32(b"experience"))
        self._drawn: deque[conduit.Sample] = deque()

    def push(self, rollout: Any, version: int = 0) -> None:
        share = LANES // self._partitions
        for number, state in enumerate(self.states):
            chunk = jax.tree.map(lambda leaf, at=number: jnp.array(leaf[:, at * share : (at + 1) * share]), rollout)
            self.states[number], _ = self._add(state, chunk, None, None, jnp.uint32(version))

    def ready(self) -> bool:
        return all(bool(self.replay.can_sample(state.control, BATCH // self._partitions)) for state in self.states)

    def pull(self) -> conduit.Sample:
        while (self._number // self._g - self._ahead) * self._g <= self._pulled:
            self._drawn.extend([self._draw() for _ in range(self._g)])
        self._pulled += 1
        return self._drawn.popleft()

    def update_priorities(self, info: conduit.SampleInfo, priorities: np.ndarray) -> int:
        share, applied = BATCH // self._partitions, 0
        for number, state in enumerate(self.states):
            own = slice(number * share, (number + 1) * share)
            info_of_one = jax.tree.map(lambda leaf, own=own: leaf[own], info)
            local = info_of_one._replace(slot=info_of_one.slot - number * self.replay.geometry.slots)
            control, count = self._update(state.control, local, jnp.asarray(priorities[own]))
            self.states[number] = state._replace(control=control)
            applied += int(count)
        return applied

    def _draw(self) -> conduit.Sample:
        parts = []
        for number, state in enumerate(self.states):
            key = jax.random.fold_in(jax.random.fold_in(self._key, self._number), number)
            control, sample = self._sample(state.control, state.storage, key)
            self.states[number] = state._replace(control=control)
            info = sample.info._replace(
                slot=sample.info.slot + number * self.replay.geometry.slots,
                probability=sample.info.probability / self._partitions,
            )
            parts.append(sample._replace(info=info))
        self._number += 1
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def plane_of(config: conduit.ReplayConfig, **options: Any) -> conduit.ExperiencePlane:
    options = {"schedule": "sequential"} | options
    return conduit.ExperiencePlane(algorithm=conduit.OffPolicy(batch_size=BATCH), replay=config, **options)


def priorities_for(sample: conduit.Sample) -> np.ndarray:
    """New priorities that differ between items and are zero now and then."""
    return (np.asarray(sample.info.slot) * 13 % 7).astype(np.float32)


def run(table: Any, rounds: int = 8, start: int = 0) -> list[conduit.Sample]:
    """Push and pull through several laps of the ring, give new priorities, and return the batches on the host."""
    batches, config = [], table.config if isinstance(table, ByHand) else table.replay["experience"]
    unit = unit_of(config)
    for number in range(start, start + rounds):
        table.push(unit(number), version=number)
        if not table.ready():
            continue
        sample = table.pull()
        batches.append(jax.tree.map(np.asarray, sample))
        if isinstance(config.sampler, conduit.Prioritized):
            table.update_priorities(sample.info, priorities_for(sample))
    return batches


def assert_same(got: list[conduit.Sample], wanted: list[conduit.Sample]) -> None:
    """The same batches: data, masks and bookkeeping bit for bit, probabilities and weights up to rounding."""
    assert len(got) == len(wanted) > 0
    for one, other in zip(got, wanted, strict=True):
        exact = [
            (b.data, b.mask, b.valid, b.info.slot, b.info.generation, b.info.age, b.info.table_size)
            for b in (one, other)
        ]
        assert jax.tree.structure(exact[0]) == jax.tree.structure(exact[1])
        for have, want in zip(*map(jax.tree.leaves, exact), strict=True):
            assert (have.dtype, have.shape) == (want.dtype, want.shape)
            assert np.asarray(have).tobytes() == np.asarray(want).tobytes()
        computed = [(batch.info.probability, batch.info.priority, batch.weights) for batch in (one, other)]
        for have, want in zip(*computed, strict=True):
            np.testing.assert_allclose(np.asarray(have), np.asarray(want), rtol=1e-5)
