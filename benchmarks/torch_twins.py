"""One torch DQN, three ways to keep its experience: a conduit plane, plain torch tensors, TorchRL's replay buffer.

    python -m benchmarks.torch_twins --json results/torch_twins.json

Learner, world and n-step transitions are the same; only where transitions wait between the two differs. Uniform draws. Runs
are interleaved by seed; ``path_us`` are spent in the source's calls an iteration (one rollout, several batches), in the
learner's thread: medians over the second half of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import torch

import conduit_jax as conduit
from benchmarks.harness import arguments, report
from conduit_jax.adapters.torch import TorchBatch, to_torch
from conduit_jax.examples.dqn import Settings, settings_for
from conduit_jax.examples.torch_learner import PlaneSource, train


class PlainSource:
    """Transitions in rings of torch tensors, indexed with random numbers: what one writes by hand."""

    def __init__(self, settings: Settings):
        self.settings, self._carry = settings, None
        kinds = {"n": settings.n_step, "discount": settings.discount}
        self._start = partial(conduit.n_step_carry, **kinds)
        self._windows = jax.jit(partial(conduit.n_step_transitions_carried, **kinds))
        self._rings: Any = None
        self._head, self._size = 0, 0

    def push(self, rollout: conduit.Rollout, version: int) -> None:
        """Store the rollout's n-step transitions that are complete."""
        rollout = jax.tree.map(jax.numpy.asarray, rollout)
        carry = self._start(rollout) if self._carry is None else self._carry
        self._carry, records = self._windows(carry, rollout)
        steps = self.settings.rollout_length if records.lengths is None else int(records.lengths)
        items = jax.tree.map(lambda leaf: leaf[:steps].reshape(-1, *leaf.shape[2:]), to_torch(records.items))
        if steps:
            self.store(items)

    def store(self, items: Any) -> None:
        """Write a batch of transitions behind the last ones, around the end."""
        count, capacity = items.reward.shape[0], self.settings.capacity
        if self._rings is None:
            self._rings = jax.tree.map(lambda leaf: torch.zeros((capacity, *leaf.shape[1:]), dtype=leaf.dtype), items)
        slots = (self._head + torch.arange(count)) % capacity
        jax.tree.map(lambda ring, leaf: ring.index_copy_(0, slots, leaf), self._rings, items)
        self._head, self._size = (self._head + count) % capacity, min(capacity, self._size + count)

    def ready(self) -> bool:
        """Whether there is enough for a batch."""
        return self._size >= self.settings.min_size

    def pull(self) -> TorchBatch:
        """Draw with replacement."""
        index = torch.randint(self._size, (self.settings.batch_size,))
        return self.batch(jax.tree.map(lambda ring: ring[index], self._rings))

    def batch(self, data: Any) -> TorchBatch:
        """Return transitions as the learner takes them."""
        ones: Any = torch.ones(self.settings.batch_size)
        return TorchBatch(data, None, ones, None, ones > 0, self)  # type: ignore[arg-type]

    def update(self, batch: TorchBatch, priorities: Any) -> None:
        """Draws are uniform."""

    def close(self) -> dict[str, Any]:
        """Return what is to be said about it: nothing."""
        return {}


class TorchrlSource(PlainSource):
    """The same in a TorchRL replay buffer over tensors in memory."""

    def __init__(self, settings: Settings):
        super().__init__(settings)
        from torchrl.data import LazyTensorStorage, ReplayBuffer

        storage = LazyTensorStorage(settings.capacity)
        self._buffer = ReplayBuffer(storage=storage, batch_size=settings.batch_size)

    def store(self, items: Any) -> None:
        """Extend the buffer."""
        from tensordict import TensorDict

        self._buffer.extend(TensorDict(items._asdict(), batch_size=[items.reward.shape[0]]))
        self._size = len(self._buffer)

    def pull(self) -> TorchBatch:
        """Sample."""
        drawn = self._buffer.sample()
        return self.batch(conduit.Transition(*(drawn[name] for name in conduit.Transition._fields)))


SOURCES: dict[str, Callable[[Settings], Any]] = {"conduit": PlaneSource, "plain": PlainSource, "torchrl": TorchrlSource}


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    steps, seeds = (2_000, 1) if options.quick else (40_000, 3)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for seed in range(seeds):
        for name, make in SOURCES.items() if seed % 2 == 0 else reversed(SOURCES.items()):
            settings = replace(settings_for("cartpole", steps=steps, seed=seed), evaluation_episodes=10)
            result = train(settings, source=make(settings))
            warm = len(result.path_s) // 2  # what compiles does so in the first half
            rows.append(
                {
                    "source": name,
                    "seed": seed,
                    "iteration_us": float(np.median(result.iteration_s[warm:])) * 1e6,
                    "path_us": float(np.median(result.path_s[warm:])) * 1e6,
                    "return": float(result.returns.mean()),
                    "updates": result.updates,
                }
            )
            print(rows[-1])
    summary = {}
    for name in SOURCES:
        own = [row for row in rows if row["source"] == name]
        summary[f"{name}_path_us"] = float(np.median([row["path_us"] for row in own]))
        summary[f"{name}_path_share"] = float(np.median([row["path_us"] / row["iteration_us"] for row in own]))
        summary[f"{name}_return"] = float(np.mean([row["return"] for row in own]))
    report(options.json, rows, summary)


if __name__ == "__main__":
    main()
