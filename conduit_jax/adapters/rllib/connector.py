"""Delivery into RLlib's learner: one connector piece that hands over columns which are ready already. Imports no JAX."""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from ray.rllib.connectors.connector_v2 import ConnectorV2

from conduit_jax.errors import LifecycleError, refuse

Columns = dict[str, Any]
torch: Any = importlib.import_module("torch")  # typed or not, as it may be missing where types are checked


class ReadyBatch:
    """One batch on its way through RLlib in the place of a list's only episode.

    ``columns``: by module, RLlib's columns as tensors ``(batch, ...)`` (observations and actions may be trees). ``len`` is
    the rows of a module, at most. For several learners RLlib parts it by slices, in order, so that what the learners return,
    one after the other, is in the order of the rows. Pickled as numpy arrays (bfloat16, which numpy lacks, as tensors).
    """

    agent_ids = ()  # no episode: RLlib's own pieces pass it over

    def __init__(self, columns: Mapping[str, Columns]):
        self.columns = dict(columns)

    def __len__(self) -> int:
        return max(len(module["rewards"]) for module in self.columns.values())

    def __getitem__(self, rows: slice) -> ReadyBatch:
        return ReadyBatch({name: _map(lambda leaf: leaf[rows], module) for name, module in self.columns.items()})

    def slice(self, slice_: slice, *, len_lookback_buffer: int | None = None) -> ReadyBatch:
        """Return the rows of ``slice_``; there is nothing to look back at."""
        return self[slice_]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, ({name: _map(_sendable, module) for name, module in self.columns.items()},)


def _sendable(leaf: Any) -> Any:
    # A tensor is pickled with all of its storage: only the rows sent are copied out.
    return leaf.cpu().clone() if leaf.dtype == torch.bfloat16 else leaf.cpu().numpy()


def _received(leaf: Any) -> Any:
    # Copied: Ray's shared memory is read-only, and torch knows no such thing.
    return leaf if isinstance(leaf, torch.Tensor) else torch.from_numpy(np.array(leaf))


def _unpickled(columns: dict[str, Columns]) -> ReadyBatch:
    return ReadyBatch({name: _map(_received, part) for name, part in columns.items()})


def _map(change: Callable[[Any], Any], tree: Any) -> Any:
    """Apply ``change`` to the tensors of a tree of dicts, tuples and lists."""
    if isinstance(tree, dict):
        return type(tree)((name, _map(change, part)) for name, part in tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(change, part) for part in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(_map(change, part) for part in tree)
    return change(tree)


class DeliverReadyColumns(ConnectorV2):
    """Unwraps the ``ReadyBatch`` and moves it to the module's device; the only piece of the learner's pipeline that works."""

    def __call__(self, *, rl_module: Any, batch: Any, episodes: Any, **unused: Any) -> dict[str, Columns]:
        """Return columns by module; ``LifecycleError`` for anything but a ready batch, or part of one."""
        if not episodes or not all(isinstance(part, ReadyBatch) for part in episodes):
            refuse(
                LifecycleError,
                "Conduit's learner connector got experience from elsewhere.",
                got=type(episodes[0]).__name__ if episodes else "no episodes",
                want="batches of conduit's replay",
                fix="build by config.build_algo(), not by RLlib's DQN or SAC",
            )
        columns = episodes[0].columns if len(episodes) == 1 else _joined([part.columns for part in episodes])
        device = self._device(rl_module)
        if device is None or device.type == "cpu":
            return columns
        return {name: _map(lambda leaf: leaf.to(device, non_blocking=True), part) for name, part in columns.items()}

    def _device(self, rl_module: Any) -> Any:
        """Return the module's device, looked for once: it takes longer than the delivery."""
        seen, device = getattr(self, "_found", (None, None))
        if seen is None or seen() is not rl_module:
            device = _device_of(rl_module)
            self._found = weakref.ref(rl_module), device
        return device

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was found: it belongs to this process."""
        return {name: value for name, value in self.__dict__.items() if name != "_found"}


class CastObservations(ConnectorV2):
    """Casts observations to float32 for the env runner's module, and leaves the episodes as they are: uint8 travels as uint8."""

    def __call__(self, *, rl_module: Any, batch: Any, episodes: Any, **unused: Any) -> dict[str, Any]:
        """Add each episode's newest observation to ``batch``, in the place of RLlib's own piece."""
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=True):
            observation = _map(lambda leaf: np.asarray(leaf, np.float32), episode.get_observations(-1))
            self.add_batch_item(batch, "obs", item_to_add=observation, single_agent_episode=episode)
        return batch


def cast_observations(env: Any = None, spaces: Any = None, device: Any = None) -> ConnectorV2:
    """Return a ``CastObservations``, for ``config.env_runners(env_to_module_connector=)``; attach with ``observation_dtype``."""
    return CastObservations()


def _device_of(rl_module: Any) -> Any:
    """Return the device of the first parameter of a module or a ``MultiRLModule``'s modules, ``None`` where there is none."""
    if hasattr(rl_module, "parameters"):
        return next(iter(rl_module.parameters())).device
    for name in rl_module.keys():  # noqa: SIM118 - it is no mapping
        for parameter in getattr(rl_module[name], "parameters", list)():
            return parameter.device
    return None


def _joined(parts: list[dict[str, Columns]]) -> dict[str, Columns]:
    return {name: _concatenated([part[name] for part in parts]) for name in parts[0]}


def _concatenated(trees: list[Any]) -> Any:
    first = trees[0]
    if isinstance(first, dict):
        return type(first)((name, _concatenated([tree[name] for tree in trees])) for name in first)
    if isinstance(first, tuple | list):
        made = [_concatenated(list(parts)) for parts in zip(*trees, strict=True)]
        return type(first)(*made) if hasattr(first, "_fields") else type(first)(made)
    return torch.cat(trees)


def deliver_ready_columns(observation_space: Any, action_space: Any) -> ConnectorV2:
    """Return the learner connector, for ``config.learners(learner_connector=)``."""
    return DeliverReadyColumns(observation_space, action_space)


__all__ = ["CastObservations", "DeliverReadyColumns", "ReadyBatch", "cast_observations", "deliver_ready_columns"]
