"""Trajectory windows: an item is a start step, and a sample the ``length`` steps from there on.

    windows = Windows(length=80, period=40, boundary="pad")
    replay = make_window_replay(ReplayConfig(capacity=100_000), windows, batch_size=64, lanes=16)
    sample.data                                   # leaves (batch, 80, ...); sample.mask (batch, 80) marks real steps

A window never reaches across the write head. At an episode's end it is padded, or the start is not drawn at all, or it
goes on where that is asked for. Which starts may be drawn changes with adds only, and an add looks only at the steps whose
windows it reaches, so its cost does not depend on the capacity.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.config import ReplayConfig, Uniform
from conduit_jax.errors import ConfigError, check_fraction, refuse
from conduit_jax.replay import interface
from conduit_jax.replay import starts as startable
from conduit_jax.replay.buffer import Control, Replay, ReplayState, make_replay, replay_geometry
from conduit_jax.replay.crossing import make_crossing
from conduit_jax.replay.selectors import Selection, Table, describe
from conduit_jax.replay.starts import BEYOND, Starts
from conduit_jax.replay.storage import Experience, Storage, in_device_memory
from conduit_jax.replay.turns import in_turn, waiting
from conduit_jax.replay.window_reads import RecurrentWindow, check_item, read_windows
from conduit_jax.replay.window_starts import Windows, episode_ended, episode_ends, reached_by_add
from conduit_jax.types import AddInfo, Sample, SampleInfo

Array = jax.Array
PyTree = Any


class WindowState(NamedTuple):
    """``recent`` bool ``(lanes, length - 1)``: which of the newest steps ended an episode; ``starts``: what may be drawn.

    ``plain`` is the selector state of the ring below.
    """

    plain: PyTree
    starts: Starts
    recent: Array


def make_window_replay(
    config: ReplayConfig,
    windows: Windows,
    *,
    batch_size: int,
    lanes: int = 1,
    partitions: int = 1,
    storage_access: Storage = in_device_memory,
) -> Replay:
    """Return the replay of windows of **one** of ``partitions`` partitions; ``batch_size`` and ``lanes`` are totals.

    ``config.capacity`` counts steps, rounded up to whole periods in every lane; ``min_size`` and ``SampleInfo.table_size``
    count windows that may be drawn; a limiter counts steps inserted and windows drawn. A prioritized sampler keeps one
    priority a window, given at its start step. ``AddInfo`` counts steps, ``replaced`` the windows whose priority was bad.
    Raises ``ConfigError`` where a window is longer than a lane's ring, ``min_size`` windows would not fit, or the limiter
    would stop inserts before they are there.
    """
    config = _whole_periods(config, windows, lanes, partitions)
    plain = startable.ring_below(config)
    base = make_replay(plain, batch_size=batch_size, lanes=lanes, partitions=partitions, storage_access=storage_access)
    geometry, draws, least = base.geometry, batch_size // partitions, -(-config.min_size // partitions)
    count, sampler = geometry.slots // windows.period, config.sampler
    steps = windows.length + (-(-least // geometry.lanes) - 1) * windows.period
    limiter = startable.make_limiter(config, geometry, partitions, draws, steps)
    if windows.boundary == "cross" and isinstance(config.sampler, Uniform) and not config.ragged:
        return make_crossing(base, windows, limiter, draws, least, storage_access)

    def init(item: PyTree) -> ReplayState:
        state = base.init(item)
        check_item(windows, state.storage, geometry)
        recent = jnp.zeros((geometry.lanes, windows.length - 1), bool)
        held = WindowState(state.control.selector, startable.init(sampler, count), recent)
        return state._replace(control=state.control._replace(selector=held))

    def below(control: Control) -> Control:
        return control._replace(selector=control.selector.plain)

    def add(
        state: ReplayState,
        chunk: PyTree,
        lengths: Array | None = None,
        priorities: Array | None = None,
        version: Array | None = None,
        key: Array | None = None,  # a ring removes its oldest steps, never drawn ones
    ) -> tuple[ReplayState, AddInfo]:
        held, before = state.control.selector, state.control.ring
        state, info = base.add(state._replace(control=below(state.control)), chunk, lengths, None, version)
        control = state.control
        reached, recent = reached_by_add(
            windows, geometry, before, control.ring, held.recent, episode_ends(windows, chunk)
        )
        given = None if priorities is None else priorities.T.at[reached.lane, reached.step].get(mode="clip")
        kept, replaced = startable.record(held.starts, jnp.where(reached.written, reached.start, BEYOND), given)
        kept = startable.mark(sampler, kept, count, reached.start, reached.drawable)
        faults = control.faults
        faults = faults._replace(replaced_priorities=faults.replaced_priorities + replaced)
        control = control._replace(selector=WindowState(control.selector, kept, recent), faults=faults)
        return state._replace(control=control), info._replace(replaced=replaced)

    def size(control: Control) -> Array:
        return startable.drawable_count(control.selector.starts, count)

    def can_sample(control: Control, n: int) -> Array:
        return base.can_sample(below(control), n) & (size(control) >= least)

    def sample(control: Control, experience: Experience, key: Array) -> tuple[Control, Sample]:
        key = waiting(key, control)
        kept, total = control.selector.starts, size(control)
        selection = startable.select(sampler, kept, count, key, draws)
        slots = selection.drawn * windows.period
        data, mask, versions = read_windows(windows, geometry, storage_access, experience, slots)
        weights, ready = interface.importance_weights(sampler, selection.probability, total), can_sample(control, draws)
        selection = Selection(slots, selection.probability, selection.priority)
        info = describe(control.ring, geometry, selection, Table(total, ready), versions, weights)
        paid = limiter.sampled(control.limiter, jnp.where(ready, draws, 0))
        return in_turn(control._replace(limiter=paid), info, data), Sample.described(data, info, mask)

    def update_priorities(control: Control, info: SampleInfo, priorities: Array) -> tuple[Control, Array]:
        priorities, held = priorities.astype(jnp.float32), control.selector
        control, index, applied = startable.accepted_update(
            control, geometry, partial(startable.may_be_drawn, held.starts), info, priorities, windows.period
        )
        kept = startable.update(sampler, held.starts, index, priorities)
        return control._replace(selector=held._replace(starts=kept)), applied

    def reset(control: Control) -> Control:
        empty = base.reset(below(control))
        return empty._replace(
            selector=WindowState(empty.selector, startable.init(sampler, count), control.selector.recent)
        )

    def explain_blocked(control: Control, operation: str, n: int) -> str:
        reason = base.explain_blocked(below(control), operation, n)
        return reason if reason or operation != "sample" else startable.explain_too_few(int(size(control)), least, n)

    return base._replace(
        init=init,
        can_add=lambda control, n: base.can_add(below(control), n),
        add=add,
        can_sample=can_sample,
        sample=sample,
        update_priorities=update_priorities,
        delete=startable.refuse_delete,
        reset=reset,
        explain_blocked=explain_blocked,
        size=size,
    )


def _whole_periods(config: ReplayConfig, windows: Windows, lanes: int, partitions: int) -> ReplayConfig:
    """Return ``config`` with whole periods in each lane."""
    length = replay_geometry(config, lanes, partitions).length
    length = windows.whole_length(length)
    if windows.length > length:
        refuse(
            ConfigError,
            "A window is longer than a lane's ring.",
            got=f"Windows(length={windows.length}) over {length} steps a lane",
            want=f"length <= {length}",
            fix=f"raise capacity to at least {windows.length * lanes}",
        )
    sure = lanes * -(-(length - windows.length + 1) // windows.period)
    if config.min_size > sure:
        refuse(
            ConfigError,
            "A replay that may hold fewer windows than it needs before sampling would wait for ever.",
            got=f"min_size={config.min_size} windows, at most {sure} that are complete",
            want=f"min_size <= {sure}",
            fix="min_size counts windows; raise capacity, which counts steps, or lower it",
        )
    return replace(config, capacity=length * lanes)


def sequence_priorities(td_errors: Array, mask: Array, eta: float) -> Array:
    """Return one priority a window: ``eta * max_t |delta_t| + (1 - eta) * mean_t |delta_t|`` over its real steps.

    Args:
        td_errors: ``(batch, length)``.
        mask: bool ``(batch, length)``, the steps that count (``Sample.mask``, or ``RecurrentWindow.loss_mask``).
        eta: how much the largest counts, in [0, 1]; 0.9 in the source.

    Returns:
        float32 ``(batch,)``, 0 where no step counts.

    Source: Kapturowski et al. 2019 (R2D2), section 2.3.
    """
    check_fraction("eta", eta)
    errors = jnp.where(mask, jnp.abs(td_errors).astype(jnp.float32), 0)
    steps = jnp.maximum(jnp.sum(mask, axis=1, dtype=jnp.int32), 1).astype(jnp.float32)
    eta32 = jnp.float32(eta)
    return eta32 * jnp.max(errors, axis=1) + (1 - eta32) * jnp.sum(errors, axis=1) / steps


__all__ = ["RecurrentWindow", "WindowState", "Windows", "episode_ended", "make_window_replay", "sequence_priorities"]
