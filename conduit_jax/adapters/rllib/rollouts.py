"""One on-policy iteration behind RLlib's PPO: chunks packed once, advantages in one program, minibatches gathered ahead.

RLlib appends a step to each chunk, batches column by column, and copies every column again for each epoch and minibatch.
Here observations are packed with the one that follows each chunk's last step, steps refer to their rows, and a minibatch is
one gather, dispatched before the update that goes before it: XLA then works beside torch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.adapters.dlpack import Handovers, leaf_to_torch
from conduit_jax.adapters.rllib.chunks import unflatten
from conduit_jax.adapters.rllib.packing import Packed, Packing

Array = jax.Array
_LEAST_STD = 1e-4  # RLlib's own
_GROUP_BYTES = 1 << 20


def pack(episodes: Sequence[Any], extras: Sequence[str]) -> Packing:
    """Take in ``SingleAgentEpisode`` chunks of one module, each by itself; ``extras`` names outputs of the module to take along."""
    packing = Packing(extras, sum(len(episode) for episode in episodes))
    for number, episode in enumerate(episodes):
        packing.add(episode, number)
    return packing


@functools.partial(jax.jit, static_argnames=("gamma", "lambda_"))
def advantages(packed_steps: tuple[Array, ...], values: Array, count: Array, *, gamma: float, lambda_: float) -> Any:
    """Return ``(advantages, value_targets)`` of ``packed_steps`` ``(row, after, rewards, going, joined)``, float32 ``(steps,)``.

    A_t = r_t + gamma * going_t * V_(t+1) - V_t + gamma * lambda * joined_t * A_(t+1), standardized over the ``count`` real
    steps (Schulman et al. 2016, eq. 16); targets are A + V before that.
    """
    row, after, rewards, going, joined = packed_steps
    value = values[row]
    delta = rewards + gamma * going * values[after] - value
    decay = gamma * lambda_ * joined

    def join(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
        return later[0] * earlier[0], earlier[1] + earlier[0] * later[1]

    _, found = jax.lax.associative_scan(join, (decay, delta), reverse=True)
    real = jnp.arange(len(row)) < count
    mean = jnp.sum(found, where=real) / count
    std = jnp.sqrt(jnp.sum((found - mean) ** 2, where=real) / count)
    return (found - mean) / jnp.maximum(std, _LEAST_STD), found + value


@functools.partial(jax.jit, static_argnames=("cast",))
def _gather(observations: Any, row: Array, columns: Any, steps: Array, *, cast: str | None) -> Any:
    seen = jax.tree.map(lambda leaf: leaf.at[row[steps]].get(mode="promise_in_bounds"), observations)
    seen = seen if cast is None else jax.tree.map(lambda leaf: leaf.astype(cast), seen)
    return seen, jax.tree.map(lambda leaf: leaf.at[steps].get(mode="promise_in_bounds"), columns)


class Rollout:
    """A module's iteration on ``device``, advantages estimated: minibatches come out."""

    def __init__(self, packed: Packed, device: Any, cast: str | None, *, gamma: float, lambda_: float):
        self.packed, self.cast, self.handovers = packed, cast, Handovers()
        put = functools.partial(jax.device_put, device=device)
        self._observations, self._row = put(packed.observations), put(packed.row)
        self._columns: dict[str, Any] = put(packed.columns)
        steps = self._row, packed.after, packed.rewards, packed.going, packed.joined
        count = np.float32(packed.steps)
        gained, targets = advantages(steps, packed.values, count, gamma=gamma, lambda_=lambda_)
        self._columns |= {"advantages": (gained,), "value_targets": (targets,)}

    @property
    def step_bytes(self) -> int:
        """Bytes one step has in a minibatch."""
        packed = self.packed
        kept = jax.tree.leaves((packed.observations, packed.columns))
        return sum(leaf.nbytes // len(leaf) for leaf in kept)

    def dispatch(self, steps: np.ndarray) -> Any:
        """Begin to gather the minibatches of ``steps``, int32 ``(minibatches, n)``."""
        return _gather(self._observations, self._row, self._columns, steps, cast=self.cast)

    def deliver(self, gathered: Any) -> list[dict[str, Any]]:
        """Return what ``dispatch`` began, by minibatch: RLlib's columns, tensors ``(n, ...)``."""
        seen, columns = jax.tree.map(lambda leaf: leaf_to_torch(leaf, None, self.handovers).unbind(0), gathered)
        return [self._minibatch(number, seen, columns) for number in range(len(seen[0]))]

    def _minibatch(self, number: int, seen: Any, columns: dict[str, Any]) -> dict[str, Any]:
        seen_as, acted_as = self.packed.structures
        found = {name: leaves[0][number] for name, leaves in columns.items() if name != "actions"}
        found["obs"] = unflatten(seen_as, [leaf[number] for leaf in seen])
        return found | {"actions": unflatten(acted_as, [leaf[number] for leaf in columns["actions"]])}


def orders(counts: dict[str, int], size: int, epochs: int, total: int, draws: np.random.Generator | None) -> Any:
    """Return each module's steps minibatch by minibatch, int32 ``(minibatches, size)``: epoch after epoch, shuffled by ``draws``.

    As many minibatches as ``epochs`` passes of the largest module take, or ``total`` where that is not 0; an epoch's rest
    shares a minibatch with the next epoch's beginning.
    """
    wanted = total or max(-(-count * epochs // size) for count in counts.values())
    found = {}
    for name, count in counts.items():
        passes = -(-wanted * size // count)
        each = [draws.permutation(count) if draws is not None else np.arange(count) for _ in range(passes)]
        found[name] = np.concatenate(each)[: wanted * size].astype(np.int32).reshape(wanted, size)
    return found


def minibatches(rollouts: dict[str, Rollout], order: dict[str, np.ndarray]) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield columns by module. Small minibatches are gathered several a call, and the next call is always under way."""
    count, size = next(iter(order.values())).shape
    each = max(size * sum(rollout.step_bytes for rollout in rollouts.values()), 1)
    group = max(1, min(count, _GROUP_BYTES // each))
    whole = {name: np.resize(steps, (-(-count // group) * group, size)) for name, steps in order.items()}

    def begin(at: int) -> dict[str, Any]:
        return {name: rollout.dispatch(whole[name][at : at + group]) for name, rollout in rollouts.items()}

    ahead = begin(0)
    for at in range(0, count, group):
        current, ahead = ahead, begin(at + group) if at + group < count else {}
        ready = {name: rollouts[name].deliver(gathered) for name, gathered in current.items()}
        for number in range(min(group, count - at)):
            yield {name: parts[number] for name, parts in ready.items()}


__all__ = ["Packed", "Packing", "Rollout", "advantages", "minibatches", "orders", "pack"]
