"""Read windows from a ring: ``length`` neighbouring steps from each start, what follows an episode's end left out."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.replay.fields import fields, gather_fields, keep, numbered
from conduit_jax.replay.piecewise import piecewise
from conduit_jax.replay.selectors import Geometry
from conduit_jax.replay.storage import Experience, Storage
from conduit_jax.replay.window_starts import Windows, episode_ends

Array = jax.Array
PyTree = Any

STEPS = 8  # of windows whose slots are computed at a time


class RecurrentWindow(NamedTuple):
    """A window for a recurrent learner.

    ``steps`` ``(batch, length, ...)`` with ``None`` for the state's leaves; ``state`` ``(batch, ...)`` before the first
    step, ``None`` unless stored; ``loss_mask`` bool ``(batch, length)``: real steps after the burn-in.

    Source: Kapturowski et al. 2019 (R2D2), section 3: stored state with burn-in.
    """

    steps: PyTree
    state: PyTree
    loss_mask: Array


def check_item(windows: Windows, experience: Experience, geometry: Geometry) -> None:
    """Refuse, before anything is stored, an item that ``ended`` or ``state`` cannot be used with."""
    jax.eval_shape(lambda chunk: episode_ends(windows, chunk), experience.layout.spec.shapes(2, geometry.lanes))
    if windows.state is not None:
        fields(experience.layout, windows.state)


def read_windows(
    windows: Windows, geometry: Geometry, access: Storage, experience: Experience, slots: Array
) -> tuple[PyTree, Array, Array]:
    """Return the windows that begin in ``slots`` ``(n,)``, their mask ``(n, length)`` and the first steps' versions."""
    numbers = numbered(experience.layout.spec)
    state = set() if windows.state is None else set(jax.tree.leaves(windows.state(numbers)))
    within, mask = _within(windows.length, geometry, slots)

    def others(item: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf, number: None if number in state else leaf, item, numbers)

    steps, versions = gather_fields(access, experience, within, others)
    if windows.boundary == "pad":
        ended = windows.ended(steps).astype(jnp.int32)
        mask = jnp.cumsum(ended, axis=1, dtype=jnp.int32) - ended == 0
        steps = keep(mask, steps)
    if not windows.recurrent:
        return steps, mask, versions[:, 0]
    first = None if windows.state is None else gather_fields(access, experience, slots, windows.state)[0]
    trained = mask & (np.arange(windows.length) >= windows.burn_in)
    return RecurrentWindow(steps, first, trained), mask, versions[:, 0]


@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _within(length: int, geometry: Geometry, slots: Array) -> tuple[Array, Array]:
    """Return the slots int32 ``(n, length)`` of the steps from ``slots`` ``(n,)`` on, and True for each of them.

    The mask is computed with them: a constant would be copied for every draw of a program before any of them begins.
    """

    def few(_: Array, slot: Array) -> tuple[Array, Array]:
        first, time = slot[:, None], jax.lax.rem(slot[:, None], np.int32(geometry.length))
        moved = time - geometry.length + jnp.arange(length, dtype=jnp.int32)
        within = first - time + jnp.where(moved < 0, moved + geometry.length, moved)
        return within, jnp.broadcast_to(first >= 0, within.shape)

    return piecewise(few, slots, slots, count=slots.shape[0], piece=max(1, STEPS // length))
