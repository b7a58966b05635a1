"""One on-policy iteration behind RLlib's PPO: chunks packed once, advantages in one program, minibatches gathered ahead.

RLlib appends a step to each chunk, batches column by column, and copies every column again for each epoch and minibatch.
Here observations are packed with the one that follows each chunk's last step, steps refer to their rows, and a minibatch is
one gather, begun before the update that goes before it: XLA then works beside torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
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
_COLUMN_BYTES = 16 << 20


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
def _gather(observations: Any, row: Array, steps: Array, *, cast: str | None) -> Any:
    seen = jax.tree.map(lambda leaf: leaf.at[row[steps]].get(mode="promise_in_bounds"), observations)
    return seen if cast is None else jax.tree.map(lambda leaf: leaf.astype(cast), seen)


@jax.jit
def _gather_columns(columns: Any, steps: Array) -> Any:
    return jax.tree.map(lambda leaf: leaf.at[steps].get(mode="promise_in_bounds"), columns)


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
    def observation_bytes(self) -> int:
        """Bytes of one step's observation."""
        return sum(leaf.nbytes // len(leaf) for leaf in self.packed.observations)

    @property
    def column_bytes(self) -> int:
        """Bytes of one step's other columns."""
        return sum(leaf.nbytes // len(leaf) for leaf in jax.tree.leaves(self._columns))

    def observations(self, steps: np.ndarray) -> list[Any]:
        """Gather the observations of minibatches of ``steps``, int32 ``(minibatches, n)``: tensors ``(n, ...)`` by minibatch."""
        gathered = _gather(self._observations, self._row, steps, cast=self.cast)
        leaves = zip(*(self._parted(leaf) for leaf in gathered), strict=True)
        return [unflatten(self.packed.structures[0], one) for one in leaves]

    def columns(self, steps: np.ndarray) -> list[dict[str, Any]]:
        """Gather the other columns of minibatches of ``steps``, int32 ``(minibatches, n)``, by minibatch."""
        gathered = _gather_columns(self._columns, steps)
        parted = {name: [self._parted(leaf) for leaf in leaves] for name, leaves in gathered.items()}
        acted, acted_as = parted.pop("actions"), self.packed.structures[1]
        return [
            {name: leaves[0][number] for name, leaves in parted.items()}
            | {"actions": unflatten(acted_as, [leaf[number] for leaf in acted])}
            for number in range(len(acted[0]))
        ]

    def _parted(self, leaf: Any) -> Any:
        return leaf_to_torch(leaf, None, self.handovers).unbind(0)


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


def minibatches(
    rollouts: dict[str, Rollout], order: dict[str, np.ndarray], *, ahead: Executor | None = None
) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield columns by module; the next call that gathers is always under way on ``ahead``, or begins when needed.

    As many minibatches' observations are gathered a call as stay in a cache, and of the small columns nearly always all. XLA on
    CPU runs so small a program as a gather on the thread that calls it, however many bytes it moves: hence ``ahead``.
    """
    count, size = next(iter(order.values())).shape
    streams = {}
    for name, rollout in rollouts.items():
        groups = [
            max(1, min(count, most // max(size * each, 1)))
            for most, each in ((_GROUP_BYTES, rollout.observation_bytes), (_COLUMN_BYTES, rollout.column_bytes))
        ]
        seen = _gathered(order[name], groups[0], rollout.observations, ahead)
        columns = _gathered(order[name], groups[1], rollout.columns, ahead)
        streams[name] = zip(seen, columns, strict=True)
    for _ in range(count):
        ready = {name: next(stream) for name, stream in streams.items()}
        yield {name: columns | {"obs": seen} for name, (seen, columns) in ready.items()}


def _gathered(
    order: np.ndarray, group: int, gather: Callable[[np.ndarray], list[Any]], ahead: Executor | None
) -> Iterator[Any]:
    """Yield minibatch by minibatch what ``gather`` makes of ``group`` rows of ``order`` a call."""
    count = len(order)
    whole = np.resize(order, (-(-count // group) * group, order.shape[1]))
    following = ahead.submit(gather, whole[:group]) if ahead else None
    for at in range(0, count, group):
        current = following.result() if following else gather(whole[at : at + group])
        if ahead and at + group < count:
            following = ahead.submit(gather, whole[at + group : at + 2 * group])
        yield from current[: count - at]


__all__ = ["Packed", "Packing", "Rollout", "advantages", "minibatches", "orders", "pack"]
