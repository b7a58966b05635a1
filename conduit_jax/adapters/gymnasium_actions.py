"""Gymnasium's action spaces, brought to two kinds: numbered actions from 0, and float32 boxes with bounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from conduit_jax.errors import ConfigError, SpecError, ValueRefusedError, refuse


class Actions(NamedTuple):
    """What one lane's action is: ``number`` of them, from 0 (``None``: continuous), of ``shape`` and ``dtype``.

    ``first`` is the number the environment gives action 0; ``low`` and ``high`` bound continuous ones, one number a component.
    """

    number: int | None
    shape: tuple[int, ...]
    dtype: Any
    first: int = 0
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    def checked(self, action: Any, lanes: int) -> np.ndarray:
        """Return ``action`` as an array ``(lanes, *shape)`` of this dtype.

        ``SpecError`` for a wrong shape or kind, ``ValueRefusedError`` for an action that does not exist or is not finite.
        Continuous actions outside the bounds are clipped: a policy's Gaussian knows none.
        """
        action = np.asarray(action)
        kind, words = (np.floating, "floats") if self.number is None else (np.integer, "integers")
        if action.shape != (lanes, *self.shape) or not np.issubdtype(action.dtype, kind):
            wanted = f"{words} {(lanes, *self.shape)}"
            refuse(SpecError, "The policy's actions do not fit.", got=f"{action.dtype} {action.shape}", want=wanted)
        if self.number is None:
            if not np.isfinite(action).all():
                refuse(ValueRefusedError, "An action is not finite.", got=action, want="finite numbers")
            return action.astype(self.dtype)
        if action.min() < 0 or action.max() >= self.number:
            refuse(ValueRefusedError, "There is no such action.", got=action, want=f"0 to {self.number - 1}")
        return action.astype(self.dtype)

    def for_environment(self, action: np.ndarray) -> np.ndarray:
        """Return checked actions as the environment takes them."""
        if self.number is not None:
            return action.astype(np.int64) + self.first
        low, high = (np.array(bound, self.dtype).reshape(self.shape) for bound in (self.low, self.high))
        return np.clip(action, low, high)


def read_actions(env_id: str, space: Any) -> Actions:
    """Return what ``space`` holds; ``ConfigError`` unless it is ``Discrete`` or a bounded ``Box`` of floats."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return Actions(int(space.n), (), np.int32, int(space.start))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating) and space.is_bounded():
        low, high = (tuple(float(value) for value in bound.reshape(-1)) for bound in (space.low, space.high))
        return Actions(None, tuple(space.shape), np.float32, low=low, high=high)
    refuse(
        ConfigError,
        f"{env_id} has actions this actor cannot take.",
        got=space,
        want="Discrete(n), or a Box of floats with bounds",
    )
