"""torch learners on a plane: trees across the border, and training-ready batches of tensors.

for batch in plane.torch_batches():                # or torch_batches(plane)
    loss, error = td(network, batch.data, batch.weights)
    ...
    batch.update_priorities(error)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from conduit_jax.adapters.dlpack import HANDOVERS, Handovers, import_torch, leaf_from_torch, leaf_to_torch
from conduit_jax.config import DEFAULT_TABLE, OnPolicy
from conduit_jax.types import Sample, SampleInfo

PyTree = Any


def to_torch(tree: PyTree, device: Any = None, *, handovers: Handovers = HANDOVERS) -> PyTree:
    """Return ``tree`` with every array as a tensor, without a copy wherever that is safe (``Handovers`` counts the others).

    Tensors keep shape and dtype (JAX has no int64 without x64: ``tensor.long()`` where torch wants indices). They may share
    memory with the arrays: do not write to them in place. ``device``: where they are wanted, as they are unless given.
    """
    return jax.tree.map(lambda leaf: leaf_to_torch(leaf, device, handovers), tree)


def from_torch(tree: PyTree, *, handovers: Handovers = HANDOVERS) -> PyTree:
    """Return ``tree`` with every tensor as a JAX array, without a copy wherever that is safe; gradients are left behind.

    Do not write to the tensors before what reads the arrays has run: after ``plane.push(from_torch(rollout))`` that is
    ``plane.flush()``, or push ``clone()``s. ``SpecError`` for integers that JAX would wrap.
    """
    return jax.tree.map(lambda leaf: leaf_from_torch(leaf, handovers), tree)


class TorchBatch(NamedTuple):
    """A ``Sample`` for torch: ``data``, ``weights``, ``mask`` and ``valid`` are tensors, ``info`` stays with the plane."""

    data: PyTree
    info: SampleInfo
    weights: Any
    mask: Any
    valid: Any
    source: Any

    def update_priorities(self, priorities: Any) -> jax.Array:
        """Give the batch's items new priorities, a tensor ``(batch,)``; return how many were still there."""
        return self.source.update_priorities(self.info, priorities)


class TorchBatches:
    """Iterates a plane's batches as tensors: without end off-policy, one iteration's epochs on-policy.

    ``handovers`` counts how they got across. ``NotReadyError`` is raised by ``next`` as by ``plane.pull``.
    """

    def __init__(self, plane: Any, *, table: str = DEFAULT_TABLE, device: Any = None, context: PyTree = ()):
        import_torch()
        self.handovers = Handovers()
        self._plane, self._table, self._device, self._context = plane, table, device, context
        self._epochs: Iterator[Any] | None = None

    def __iter__(self) -> TorchBatches:
        return self

    def __next__(self) -> TorchBatch:
        sample = self._next()
        weights, valid = _weights_and_valid(sample)
        tensors = to_torch((sample.data, weights, sample.mask, valid), self._device, handovers=self.handovers)
        data, weights, mask, valid = tensors
        return TorchBatch(data, sample.info, weights, mask, valid, self)

    def _next(self) -> Any:
        if not isinstance(self._plane.algorithm, OnPolicy):
            return self._plane.pull(table=self._table, context=self._context)
        epochs = self._epochs or self._plane.epochs(table=self._table, context=self._context)
        self._epochs = epochs
        return next(epochs)

    def update_priorities(self, info: SampleInfo, priorities: Any) -> jax.Array:
        """Give the items of ``info`` new priorities, a tensor ``(batch,)``, copied before this returns."""
        torch = import_torch()
        if isinstance(priorities, torch.Tensor):
            priorities = priorities.detach().float().cpu().numpy()
        return self._plane.update_priorities(info, priorities, table=self._table)


@jax.jit
def _columns(info: SampleInfo) -> tuple[Any, Any]:
    return info.weight, info.valid


def _weights_and_valid(sample: Sample) -> tuple[Any, Any]:
    """Return both of a sample outside ``jit``, by one call where its ``info`` keeps them."""
    kept = isinstance(sample.info, SampleInfo) and {"weight", "valid"} <= {*sample.info.present}
    return (
        _columns(sample.info) if kept and isinstance(sample.info.words, jax.Array) else (sample.weights, sample.valid)
    )


def torch_batches(plane: Any, **options: Any) -> TorchBatches:
    """Return ``plane``'s batches as tensors; see ``TorchBatches``."""
    return TorchBatches(plane, **options)


__all__ = ["Handovers", "TorchBatch", "TorchBatches", "from_torch", "to_torch", "torch_batches"]
