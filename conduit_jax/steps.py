"""The user's learner and ``train_step`` as a loop takes them: copied before they are donated, checked before they are run.

Batches that were drawn in one call are updated with in one program: a small update takes less time than its dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.errors import ConduitError, ConfigError, explain, refuse
from conduit_jax.schedule.isolation import isolated
from conduit_jax.types import Sample

PyTree = Any
Function = Callable[..., Any]

TOGETHER_BYTES = 2**21  # a batch of more hides its own dispatch, and one program of several would hold a copy of them


class Updates:
    """``train_step`` as programs that donate the learner: ``one`` batch, or several one after the other with the same bits."""

    def __init__(self, train_step: Function, *, on_policy: bool):
        self.one = jax.jit(train_step, donate_argnums=0)
        self._several = jax.jit(_one_after_the_other(train_step), donate_argnums=0)
        self._on_policy, self._together, self._on_cpu, self._checked = on_policy, False, False, False

    def __call__(self, learner: PyTree, samples: Sequence[Sample], *, together: bool) -> tuple[PyTree, PyTree, list]:
        """Return the learner after an update with each of ``samples``, the last one's metrics, and each one's priorities, if any.

        ``together``: in one program, where they are small and on one device; it is compiled for each number of them.
        """
        self._check(learner, samples[0])
        if together and len(samples) > 1 and self._together and _small_and_alike(samples):
            on = np.bool_(True) if self._on_cpu else None
            learner, metrics, *priorities = explained(self._several, learner, tuple(samples), on)
            return learner, metrics, list(priorities[0]) if priorities else []
        metrics, priorities = None, []
        for sample in samples:
            learner, metrics, *one = explained(self.one, learner, sample)
            priorities += one
        return learner, metrics, priorities

    def _check(self, learner: PyTree, sample: Sample) -> None:
        if not self._checked:
            result = jax.eval_shape(self.one, learner, sample)
            check_step(result, on_policy=self._on_policy)
            stays = _kind(result[0]) == _kind(learner)  # or one update's learner could not be carried to the next
            arrays = [leaf for leaf in jax.tree.leaves((learner, sample)) if isinstance(leaf, jax.Array)]
            devices = {device for leaf in arrays for device in leaf.devices()}
            self._on_cpu = min(devices, key=lambda device: device.id).platform == "cpu"
            self._together = stays and len(devices) == 1
            self._checked = True


def _one_after_the_other(train_step: Function) -> Function:
    """Return ``(learner, samples, on) -> train_step``'s result: metrics are the last update's, priorities a tuple of each."""

    def several(learner: PyTree, samples: tuple[Sample, ...], on: Any) -> tuple:
        def update(learner: PyTree, sample: Sample) -> tuple[PyTree, list]:
            learner, *rest = isolated(on, train_step, learner, sample)
            return learner, rest

        learner, (metrics, *priorities) = jax.lax.scan(update, learner, jax.tree.map(_stacked, *samples))
        metrics = jax.tree.map(lambda leaf: leaf[-1], metrics)
        return learner, metrics, *(tuple(every[index] for index in range(len(samples))) for every in priorities)

    return several


def _small_and_alike(samples: Sequence[Sample]) -> bool:
    """Whether the items of all are small and of the same shapes: a table may have grown, also between two draws."""
    first, *others = (jax.tree.leaves(sample.data) for sample in samples)
    if sum(leaf.nbytes for leaf in first) > TOGETHER_BYTES:
        return False
    shapes = [leaf.shape for leaf in first]
    return all([leaf.shape for leaf in other] == shapes for other in others)


def _stacked(*leaves: Any) -> Any:
    return jnp.stack(leaves)


def _kind(learner: PyTree) -> tuple:
    leaves, structure = jax.tree.flatten(learner)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def own_copy(learner: PyTree) -> PyTree:
    """Return a copy of ``learner`` in which no two leaves share a buffer: one that may be donated.

    A target network that *is* the online one would otherwise be donated twice ("Attempt to donate the same buffer twice").
    """
    return _copied(jax.tree.map(jnp.asarray, learner))


@jax.jit  # once for all loops: a function of each call's own would be compiled in each
def _copied(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, tree)


def copy_arrays(tree: PyTree) -> PyTree:
    """Return ``tree`` with every JAX array copied and everything else (a host actor) as it is."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def check_step(result: Any, *, on_policy: bool) -> None:
    """Refuse, before anything is donated, a step that returns something else than the loop can take."""
    if type(result) is not tuple or len(result) not in (2, 3):  # a NamedTuple is one value
        want = "(learner, metrics) or (learner, metrics, priorities)"
        refuse(ConduitError, "train_step returned something else.", got=type(result).__name__, want=want)
    if on_policy and len(result) == 3:
        refuse(ConduitError, "On-policy experience has no priorities.", got="3 values", want="(learner, metrics)")


def explained(train_step: Function, learner: PyTree, *more: Any) -> tuple:
    """Return ``train_step(learner, *more)``; ``ConfigError`` naming the leaves where one buffer would be donated twice."""
    try:
        return train_step(learner, *more)
    except ValueError as error:
        if "donate the same buffer twice" not in str(error):
            raise
        message = explain(
            "The learner holds one buffer twice; an update donates it and cannot do so twice.",
            got=_aliases(learner),
            want="a buffer of its own for every leaf",
            fix="jax.tree.map(jnp.copy, ...)",
        )
        raise ConfigError(message) from error


def _aliases(learner: PyTree) -> str:
    """Return the paths of leaves that share a buffer."""
    seen: dict[int, str] = {}
    pairs = []
    for path, leaf in jax.tree.leaves_with_path(learner):
        name = jax.tree_util.keystr(path)
        if isinstance(leaf, jax.Array) and id(leaf) in seen:
            pairs.append(f"{seen[id(leaf)]} and {name}")
        seen.setdefault(id(leaf), name)
    return "; ".join(pairs) or "two of its leaves"
