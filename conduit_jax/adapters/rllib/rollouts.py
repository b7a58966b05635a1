"""One on-policy iteration behind RLlib's PPO: chunks packed once, advantages in one program, minibatches gathered ahead.

RLlib appends a step to each chunk, batches column by column, and copies every column again for each epoch and minibatch.
Here observations are packed with the one that follows each chunk's last step, steps refer to their rows, and a minibatch is
one gather, dispatched before the update that goes before it: XLA then works beside torch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.adapters.dlpack import Handovers, leaf_to_torch
from conduit_jax.adapters.rllib import chunks
from conduit_jax.adapters.rllib.chunks import Chunk
from conduit_jax.errors import SpecError, refuse
from conduit_jax.sharding.staging import aligned_empty
from conduit_jax.trees import leaf_dtype

Array = jax.Array
_LEAST_STD = 1e-4  # RLlib's own
_PIECE_BYTES = 16 << 20
_GROUP_BYTES = 1 << 20


class Packed(NamedTuple):
    """A module's iteration: ``observations`` ``(rows, ...)``, and for each of ``steps`` steps the ``row`` it starts from.

    ``columns`` has what the loss reads of a step, ``rewards``, ``going`` (the step did not end in a terminal state) and
    ``joined`` (the next step belongs to the same chunk) what advantages are made of; all padded to few sizes. ``used`` rows
    are real.
    """

    observations: tuple[np.ndarray, ...]
    columns: dict[str, tuple[np.ndarray, ...]]
    row: np.ndarray
    rewards: np.ndarray
    going: np.ndarray
    joined: np.ndarray
    steps: int
    used: int
    structures: tuple[Any, Any]


def pack(episodes: Sequence[Any], extras: Sequence[str]) -> Packed | None:
    """Pack ``SingleAgentEpisode`` chunks of one module; ``extras`` names outputs of the module to take along.

    ``None`` where there are no steps; ``SpecError`` where a chunk lacks an extra.
    """
    read = [(chunks.read(episode), episode) for episode in episodes if len(episode)]
    if not read:
        return None
    parts = [chunk for chunk, _ in read]
    count, used = sum(part.steps for part in parts), sum(part.steps + 1 for part in parts)
    observations = tuple(
        _slab([part.observations[n] for part in parts], used, f"observation {n}")
        for n in range(len(parts[0].observations))
    )
    columns = {"actions": _columns([part.actions for part in parts], count, "action")}
    for name in extras:
        columns[name] = _columns([[_extra(episode, name, chunk.steps)] for chunk, episode in read], count, name)
    row, going, joined = _places(parts, count)
    rewards = _slab([part.rewards for part in parts], count, "reward")
    return Packed(observations, columns, row, rewards, going, joined, count, used, parts[0].structures)


def _extra(episode: Any, name: str, steps: int) -> np.ndarray:
    found = episode.extra_model_outputs.get(name)
    if found is None:
        got, want = ", ".join(sorted(episode.extra_model_outputs)), name
        refuse(SpecError, "The env runner's module does not tell what the loss reads.", got=got, want=want)
    return np.asarray(found.data[found.lookback :][:steps])


def _columns(leaves: list[list[np.ndarray]], count: int, what: str) -> tuple[np.ndarray, ...]:
    return tuple(_slab(list(parts), count, what) for parts in zip(*leaves, strict=True))


def _slab(parts: list[np.ndarray], count: int, what: str) -> np.ndarray:
    """Return ``parts`` one behind the other in fresh memory that JAX and torch take as it is; zeros behind ``count``."""
    shape, dtype = parts[0].shape[1:], leaf_dtype(parts[0], what)
    whole, at = aligned_empty((_padded(count, dtype.itemsize * int(np.prod(shape))), *shape), dtype), 0
    for part in parts:
        if part.shape[1:] != shape:
            refuse(SpecError, f"An {what} has another shape than the first.", got=part.shape[1:], want=shape)
        whole[at : at + len(part)] = part
        at += len(part)
    whole[at:] = 0
    return whole


def _padded(count: int, item_bytes: int) -> int:
    """Round up so that few shapes are compiled, by at most ``_PIECE_BYTES``."""
    piece = 1 << max(5, min(10, (_PIECE_BYTES // max(item_bytes, 1)).bit_length() - 1))
    return -(-count // piece) * piece


def _places(parts: list[Chunk], count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    size = _padded(count, 4)
    row, going, joined = np.zeros(size, np.int32), np.zeros(size, np.float32), np.zeros(size, np.float32)
    at, behind = 0, 0
    for part in parts:
        end = at + part.steps
        row[at:end] = np.arange(at + behind, end + behind)
        going[at:end], joined[at : end - 1] = 1, 1
        going[end - 1] = not part.terminated
        at, behind = end, behind + 1
    return row, going, joined


@functools.partial(jax.jit, static_argnames=("gamma", "lambda_"))
def advantages(packed_steps: tuple[Array, ...], values: Array, count: Array, *, gamma: float, lambda_: float) -> Any:
    """Return ``(advantages, value_targets)`` of ``packed_steps`` ``(row, rewards, going, joined)``, float32 ``(steps,)``.

    A_t = r_t + gamma * going_t * V_(t+1) - V_t + gamma * lambda * joined_t * A_(t+1), standardized over the ``count`` real
    steps (Schulman et al. 2016, eq. 16); targets are A + V before that.
    """
    row, rewards, going, joined = packed_steps
    value = values[row]
    delta = rewards + gamma * going * values[row + 1] - value
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
    """A module's iteration on ``device``: values in, minibatches out."""

    def __init__(self, packed: Packed, device: Any, cast: str | None):
        self.packed, self.cast, self.handovers = packed, cast, Handovers()
        put = functools.partial(jax.device_put, device=device)
        self._observations, self._row = put(packed.observations), put(packed.row)
        self._columns: dict[str, Any] = put(packed.columns)

    def observations(self) -> Iterator[Any]:
        """Yield all real rows as tensors, for the value function: without a copy, in pieces that stay in a cache when cast."""
        used, leaves = self.packed.used, self.packed.observations
        rows = max(1, _GROUP_BYTES // max(1, sum(leaf[0].nbytes for leaf in leaves)))
        for at in range(0, used, rows):
            parts = [leaf_to_torch(leaf[at : min(at + rows, used)], None, self.handovers) for leaf in leaves]
            yield _unflatten(self.packed.structures[0], parts)

    def estimate(self, values: np.ndarray, gamma: float, lambda_: float) -> None:
        """Add advantages and value targets from ``values``, float32 ``(rows,)`` of the real rows."""
        whole = np.zeros(_padded(len(values) + 1, 4), np.float32)
        whole[: len(values)] = values
        steps = self._row, self.packed.rewards, self.packed.going, self.packed.joined
        gained, targets = advantages(steps, whole, np.float32(self.packed.steps), gamma=gamma, lambda_=lambda_)
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
        found["obs"] = _unflatten(seen_as, [leaf[number] for leaf in seen])
        return found | {"actions": _unflatten(acted_as, [leaf[number] for leaf in columns["actions"]])}


def _unflatten(structure: Any, leaves: Sequence[Any]) -> Any:
    return leaves[0] if structure is None else jax.tree.unflatten(structure, leaves)


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


__all__ = ["Packed", "Rollout", "advantages", "minibatches", "orders", "pack"]
