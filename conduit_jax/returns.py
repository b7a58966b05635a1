"""Returns over time-major rollouts, termination kept apart from truncation: bootstrap through a time limit, never across it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.errors import ConfigError, SpecError, check_fraction, check_integer, refuse
from conduit_jax.types import Records, Rollout, Transition, next_observations

Array = jax.Array
PyTree = Any


class NStepCarry(NamedTuple):
    """The last n - 1 steps of every lane, ``(n - 1, lanes, ...)``, whose windows are not complete yet.

    ``missing`` (int32) of them were never seen.
    """

    steps: Transition
    ended: Array
    missing: Array


def one_step_transitions(rollout: Rollout, *, discount: float) -> Transition:
    """Return the ``(T, lanes)`` transitions of ``rollout``: ``n_step_transitions`` with n = 1.

    ``ConfigError`` for a rollout with ``lengths``: transitions alone would not say which of them are real.
    """
    if rollout.lengths is not None:
        fix = "n_step_transitions(rollout, n=1, discount=...), which returns Records with the lengths"
        refuse(ConfigError, "Transitions do not say which of them are real.", got="lengths", want="none", fix=fix)
    _check(1, discount)
    return _steps(rollout, discount)


def n_step_transitions(rollout: Rollout, *, n: int, discount: float) -> Any:
    """Return n-step transitions starting at every step of ``rollout``, ``(T, lanes)``.

    ``G_t = sum_{k < m} discount^k r_{t+k}`` with ``m`` the steps until n, the episode's end or the rollout's end,
    whichever is first; ``discount_t = discount^m``, or 0 where step t + m - 1 terminated; the next observation is the one
    that really followed step t + m - 1. Windows at the rollout's end are shorter, never wrong: to have all of them
    full, use ``n_step_carry`` and ``n_step_transitions_carried``. A rollout with ``lengths`` gives ``Records`` with them.

    Source: Sutton & Barto, section 7.1; truncation as in Pardo et al. 2018.
    """
    _check(n, discount)
    steps, ended = _steps(rollout, discount), rollout.terminated | rollout.truncated
    if rollout.lengths is None:
        return _windows(steps, ended, n, discount)
    last = jnp.arange(ended.shape[0])[:, None] == rollout.lengths - 1
    return Records(_windows(steps, ended | last, n, discount), rollout.lengths)


def n_step_carry(rollout: Rollout, *, n: int, discount: float) -> NStepCarry:
    """Return the empty carry for rollouts shaped like ``rollout`` (arrays or ``ShapeDtypeStruct``); an ``init_carry``."""
    _check(n, discount)
    steps = jax.eval_shape(lambda unit: _steps(unit, discount), rollout)
    empty = jax.tree.map(lambda leaf: jnp.zeros((n - 1, *leaf.shape[1:]), leaf.dtype), steps)
    return NStepCarry(empty, jnp.zeros((n - 1, steps.reward.shape[1]), bool), jnp.asarray(n - 1, jnp.int32))


def n_step_transitions_carried(
    carry: NStepCarry, rollout: Rollout, *, n: int, discount: float
) -> tuple[NStepCarry, Records]:
    """Return full n-step transitions across rollout boundaries: those that start n - 1 steps before this rollout and end in it.

    Every call yields ``T`` transitions a lane, n - 1 steps late; the first calls yield fewer (``lengths``), as nothing
    precedes them. For rollouts shorter than n, where windows cut at the rollout's end would never be full.
    """
    _check(n, discount)
    if rollout.lengths is not None:
        refuse(
            ConfigError,
            "n-step windows cannot be carried over ragged rollouts.",
            got="lengths",
            want="aligned lanes",
            fix="n_step_transitions",
        )
    new, ended = _steps(rollout, discount), rollout.terminated | rollout.truncated
    steps = jax.tree.map(lambda old, fresh: jnp.concatenate([old, fresh], axis=0), carry.steps, new)
    ended = jnp.concatenate([carry.ended, ended], axis=0)
    count = rollout.reward.shape[0]
    starts = jnp.minimum(jnp.arange(count) + carry.missing, count - 1)
    items = jax.tree.map(lambda leaf: leaf[starts], _windows(steps, ended, n, discount))
    kept, kept_ended = jax.tree.map(lambda leaf: leaf[count:], (steps, ended))
    missing = jnp.maximum(carry.missing - count, 0)
    return NStepCarry(kept, kept_ended, missing), Records(items, jnp.maximum(count - carry.missing, 0))


def generalized_advantages(
    reward: Array, value: Array, next_value: Array, terminated: Array, ended: Array, *, discount: float, trace: float
) -> Array:
    """Return the generalized advantage of every step, float ``(T, lanes)``.

    A_t = d_t + discount * trace * (1 - ended_t) * A_{t+1},  d_t = r_t + discount * (1 - terminated_t) * V(o'_t) - V(o_t).
    A time limit cuts the recursion and is bootstrapped through; a termination does neither.

    Args:
        reward, value, next_value: ``(T, lanes)``; ``next_value`` is that of what really followed the step, before a reset.
        terminated, ended: bool ``(T, lanes)``; ``ended`` holds where the episode was terminated or truncated.
        discount, trace: in [0, 1].

    Raises:
        ConfigError: ``discount`` or ``trace`` is outside [0, 1].

    Source: Schulman et al. 2016, equation 16; truncation as in Pardo et al. 2018.
    """
    check_fraction("discount", discount)
    check_fraction("trace", trace)
    delta = reward + discount * jnp.where(terminated, 0, next_value) - value

    def back(following: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        delta, ended = now
        advantage = delta + discount * trace * jnp.where(ended, 0, following)
        return advantage, advantage

    return jax.lax.scan(back, jnp.zeros_like(delta[0]), (delta, ended), reverse=True)[1]


def _check(n: int, discount: float) -> None:
    check_integer("n", n, 1)
    check_fraction("discount", discount)


def _check_flags(rollout: Rollout) -> None:
    """Raise ``SpecError`` unless both flags are bool: ``~1`` is -2 for an integer, which is true."""
    for name in ("terminated", "truncated"):
        dtype = getattr(getattr(rollout, name), "dtype", None)
        if dtype != jnp.dtype(bool):
            refuse(
                SpecError,
                f"Rollout({name}=) is not bool.",
                got=dtype or type(getattr(rollout, name)).__name__,
                want="a bool array (T, lanes)",
                fix=f"cast it where it is made: {name}.astype(bool)",
            )


def _steps(rollout: Rollout, discount: float) -> Transition:
    """Return the rollout's one-step transitions, discount 0 after termination only; returns are float32 or wider."""
    if rollout.bootstrap_observation is None or rollout.final_observation is None:
        refuse(
            ConfigError,
            "Transitions need what followed each step.",
            want="Rollout(final_observation=, bootstrap_observation=)",
        )
    _check_flags(rollout)
    dtype = jnp.promote_types(rollout.reward.dtype, jnp.float32)
    discounts = jnp.where(rollout.terminated, 0.0, discount).astype(dtype)
    rewards = rollout.reward.astype(dtype)
    return Transition(rollout.observation, rollout.action, rewards, discounts, next_observations(rollout))


def _windows(steps: Transition, ended: Array, n: int, discount: float) -> Transition:
    """Merge up to ``n`` one-step transitions from each start; windows stop at an end or at the last step."""
    count = steps.reward.shape[0]
    gamma = jnp.asarray(discount, steps.reward.dtype)
    start = jnp.arange(count)[:, None]
    last = jnp.broadcast_to(start, ended.shape)
    total, scale, running = steps.reward, jnp.ones_like(steps.reward), ~ended
    for k in range(1, n):
        step = jnp.minimum(start + k, count - 1)[:, 0]
        running = running & (start + k < count)
        scale = jnp.where(running, scale * gamma, scale)
        total = total + jnp.where(running, scale * steps.reward[step], 0)
        last = jnp.where(running, start + k, last)
        running = running & ~ended[step]
    lane = jnp.arange(ended.shape[1])[None, :]
    following = jax.tree.map(lambda leaf: leaf[last, lane], steps.next_observation)
    return Transition(steps.observation, steps.action, total, scale * steps.discount[last, lane], following)
