"""Gymnasium's spaces: actions brought to two kinds, numbered from 0 or float32 boxes with bounds; observations of one array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from conduit_jax.errors import ConfigError, SpecError, ValueRefusedError, refuse

if TYPE_CHECKING:
    from conduit_jax.envs import EnvironmentSpec


# JAX keeps 32 bits unless told otherwise; narrowing here makes the cast visible, and once instead of at each transfer.
NARROWED = {np.dtype(np.float64): np.dtype(np.float32), np.dtype(np.int64): np.dtype(np.int32)}


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

    def read_policy(self, output: Any, lanes: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the checked actions and the extras of what a policy returned: actions, or ``(actions, extras)``."""
        action, extras = output if isinstance(output, tuple) else (output, {})
        action = self.checked(action, lanes)
        # Copied: a policy may well refill the same array at its next step.
        extras = {name: np.array(value) for name, value in extras.items()}
        for name, value in extras.items():
            if value.shape[:1] != (lanes,):
                refuse(SpecError, f"extras[{name!r}] has no lane axis.", got=value.shape, want=(lanes, "..."))
        return action, extras

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


def read_observations(env_id: str, space: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and dtype of what one lane sees, 64 bits narrowed to 32; ``ConfigError`` unless it is one array."""
    from gymnasium import spaces

    if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        refuse(
            ConfigError,
            f"{env_id} has observations that are not one array.",
            got=space,
            want="a Box, Discrete, MultiDiscrete or MultiBinary space",
            fix="register the environment with gymnasium.wrappers.FlattenObservation around it",
        )
    dtype = np.dtype(space.dtype)
    return tuple(space.shape or ()), NARROWED.get(dtype, dtype)


def environment_spec(shape: tuple[int, ...], dtype: Any, actions: Actions, max_steps: int | None) -> EnvironmentSpec:
    """Return a lane's shapes and limits as the pure-JAX worlds give them."""
    import jax

    from conduit_jax.envs import EnvironmentSpec

    return EnvironmentSpec(
        observation=jax.ShapeDtypeStruct(shape, dtype),
        num_actions=actions.number,
        action=jax.ShapeDtypeStruct(actions.shape, actions.dtype),
        max_steps=max_steps,
        action_low=_one_or_each(actions.low),
        action_high=_one_or_each(actions.high),
    )


def _one_or_each(bounds: tuple[float, ...]) -> float | tuple[float, ...] | None:
    """Return one number where all bounds are equal, as the pure-JAX worlds do; ``None`` where there are none."""
    if not bounds:
        return None
    return bounds[0] if len(set(bounds)) == 1 else bounds
