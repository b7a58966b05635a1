"""Read transitions from single steps: sum n rewards, find the observation that followed, stack frames."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.replay.fields import gather_fields, keep, on_bits, select
from conduit_jax.replay.neighbour_starts import slots_after
from conduit_jax.replay.selectors import Geometry
from conduit_jax.replay.storage import Experience, Storage, gather
from conduit_jax.replay.transition_view import TransitionView
from conduit_jax.types import Transition

Array = jax.Array
PyTree = Any


class StoredStep(NamedTuple):
    """A step as it stands in the ring: ``final_entry`` int32 says where its final observation is, if it ended an episode."""

    observation: PyTree
    action: PyTree
    reward: Array
    terminated: Array
    truncated: Array
    final_entry: Array


class StepStorage(NamedTuple):
    """The gigabytes: ``steps`` and, beside them, the ``finals`` of ended episodes."""

    steps: Experience
    finals: Experience


class Jump(NamedTuple):
    """What an n-step transition comes to, ``(batch,)``: the return, the discount behind it and its ``steps`` int32.

    ``ended`` says whether an episode ended with its last step, whose final observation then is in ``final_entry``.
    """

    reward: Array
    discount: Array
    steps: Array
    ended: Array
    final_entry: Array


def read_transitions(
    view: TransitionView,
    geometry: Geometry,
    access: Storage,
    kept: StepStorage,
    slots: Array,
    depth: Array | None,
    n: Array,
) -> tuple[Transition, Array]:
    """Return the transitions that begin at ``slots`` int32 ``(batch,)`` and the policy versions of their first steps.

    ``n`` int32 ``(batch,)`` is how many steps each may span; ``depth`` int32 ``(batch,)`` how many frames of its episode
    precede it, ``None`` without a stack.
    """
    ahead = jnp.arange(view.largest_n, dtype=jnp.int32)
    window, _ = gather_fields(
        access,
        kept.steps,
        slots_after(geometry, slots[:, None], ahead),
        lambda item: item._replace(observation=None, action=None),
    )
    jump = n_step_jump(window, n, view.discount)
    action, versions = gather_fields(access, kept.steps, slots, lambda item: item.action)
    following = slots_after(geometry, slots, jump.steps)
    final, _ = gather(access, kept.finals, jump.final_entry)
    if depth is None:
        now, _ = gather_fields(access, kept.steps, slots, lambda item: item.observation)
        then, _ = gather_fields(access, kept.steps, following, lambda item: item.observation)
        then = select(jump.ended, final, then)
        return Transition(now, action, jump.reward, jump.discount, then), versions
    back = np.arange(view.stack - 1, -1, -1, dtype=np.int32)
    now = _frames(view, geometry, access, kept.steps, slots, depth, back)
    newest, _ = gather_fields(access, kept.steps, following[:, None], lambda item: item.observation)
    newest = select(jump.ended[:, None], jax.tree.map(lambda leaf: leaf[:, None], final), newest)
    older = _frames(view, geometry, access, kept.steps, following, depth + jump.steps, back[:-1])
    then = on_bits(lambda *frames: jnp.concatenate(frames, axis=1), older, newest)
    return Transition(now, action, jump.reward, jump.discount, then), versions


def n_step_jump(window: StoredStep, n: Array, discount: float) -> Jump:
    """Return the jump over up to ``n`` int32 ``(batch,)`` of a window's steps ``(batch, N)``: it stops where an episode ends.

    ``G = sum_{k < m} discount^k r_k``, then ``discount^m``, or 0 where the last of the ``m`` steps terminated.
    """
    reward, ended = window.reward, window.terminated | window.truncated
    gamma = jnp.asarray(discount, reward.dtype)
    total, scale, running = reward[:, 0], jnp.ones_like(reward[:, 0]), ~ended[:, 0]
    steps = jnp.ones(n.shape, jnp.int32)
    for k in range(1, reward.shape[1]):  # in the order of the n-step returns at ingestion, whose bits these are
        running = running & (k < n)
        scale = jnp.where(running, scale * gamma, scale)
        total = total + jnp.where(running, scale * reward[:, k], 0)
        steps = steps + running.astype(jnp.int32)
        running = running & ~ended[:, k]

    def last(field: Array) -> Array:
        return jnp.take_along_axis(field, steps[:, None] - 1, axis=1)[:, 0]

    after = jnp.where(last(window.terminated), 0.0, discount).astype(reward.dtype)
    return Jump(total, scale * after, steps, last(ended), jnp.where(last(ended), last(window.final_entry), 0))


def _frames(
    view: TransitionView,
    geometry: Geometry,
    access: Storage,
    steps: Experience,
    slots: Array,
    depth: Array,
    back: np.ndarray,
) -> PyTree:
    """Return the frames ``back`` int32 ``(k,)`` steps before ``slots``, ``(batch, k, ...)``.

    ``depth`` int32 ``(batch,)`` of them are the same episode's; what is further back is padding.
    """
    within = jnp.minimum(back, depth[:, None])
    frames, _ = gather_fields(
        access, steps, slots_after(geometry, slots[:, None], -within), lambda item: item.observation
    )
    if view.padding == "repeat":
        return frames
    return keep(jnp.asarray(back) <= depth[:, None], frames)
