"""From what a table's items are to the replay that holds them: the one place that knows all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from conduit_jax.config import ReplayConfig
from conduit_jax.errors import ConfigError, refuse
from conduit_jax.items import Items
from conduit_jax.replay import buffer
from conduit_jax.replay.episode_items import Episodes, make_episode_table
from conduit_jax.replay.hindsight import Hindsight, relabel
from conduit_jax.replay.interface import Replay
from conduit_jax.replay.neighbours import TransitionView, make_transition_view
from conduit_jax.replay.storage import Storage, in_device_memory
from conduit_jax.replay.windows import Windows, make_window_replay


def _relabelled(config: ReplayConfig, goals: Hindsight, *, storage_access: Storage, **shape: Any) -> Replay:
    steps = buffer.make_replay(replace(config, items=None), storage_access=storage_access, **shape)
    return relabel(steps, goals, storage_access=storage_access)


_MAKERS: dict[type[Items], Callable[..., Replay]] = {
    Windows: make_window_replay,
    TransitionView: make_transition_view,
    Hindsight: _relabelled,
    Episodes: make_episode_table,
}


def make_replay(
    config: ReplayConfig,
    *,
    batch_size: int,
    lanes: int = 1,
    partitions: int = 1,
    storage_access: Storage = in_device_memory,
) -> Replay:
    """Return the replay of **one** of ``partitions`` partitions; ``batch_size`` and ``lanes`` are totals over all of them.

    It is one of single steps, or of ``config.items``. Raises ``ConfigError`` where lanes or batch do not divide by
    ``partitions``, the limiter would never allow a batch, or such items could never be drawn.
    """
    shape: dict[str, Any] = {"batch_size": batch_size, "lanes": lanes, "partitions": partitions}
    if config.items is None:
        return buffer.make_replay(config, **shape, storage_access=storage_access)
    maker = _MAKERS.get(type(config.items))
    if maker is None:
        known = ", ".join(kind.__name__ for kind in _MAKERS)
        refuse(ConfigError, "Nothing makes a replay of these items.", got=repr(config.items), want=known)
    return maker(config, config.items, **shape, storage_access=storage_access)


__all__ = ["make_replay"]
