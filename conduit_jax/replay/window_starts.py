"""Where windows begin: what a window is, and which starts an add makes drawable or undrawable. Index arithmetic alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.errors import ConfigError, SpecError, check_choice, check_function, check_integer, refuse
from conduit_jax.items import Items
from conduit_jax.replay.ring import RingState
from conduit_jax.replay.selectors import Geometry
from conduit_jax.replay.starts import BEYOND

Array = jax.Array
PyTree = Any


def episode_ended(items: PyTree) -> Any:
    """Return ``terminated | truncated`` of items that have both, as attributes or keys."""
    names = ("terminated", "truncated")
    if all(hasattr(items, name) for name in names):
        return items.terminated | items.truncated
    if isinstance(items, dict) and all(name in items for name in names):
        return items["terminated"] | items["truncated"]
    return refuse(
        SpecError,
        "Nothing tells where an episode ended.",
        got=type(items).__name__,
        want="items with terminated and truncated, as attributes or keys",
        fix="Windows(ended=function): from items (T, lanes, ...) to bool (T, lanes)",
    )


@dataclass(frozen=True, kw_only=True)
class Windows(Items):
    """Windows of ``length`` steps that begin at every ``period``-th step of a lane (counted from its first or a reset).

    ``boundary``: where an episode ends inside a window the rest is masked and zero (``"pad"``), that window is never
    drawn (``"never"``: it may end with an episode's last step), or it goes on into the next episode (``"cross"``, for
    learners that are told of ends by the items; ``ended`` is then not asked, and uniform draws from aligned lanes keep no
    tree).
    ``ended(items) -> bool`` says of items with two leading axes where an episode ended; it may look at single steps only.

    For recurrent learners (R2D2): the first ``burn_in`` steps are for warming up, and ``state(item)`` picks the leaves of
    an item that hold the actor's recurrent state before it: they are delivered for a window's first step only. With
    either, ``Sample.data`` is a ``RecurrentWindow``.
    """

    noun: ClassVar[str] = "windows"
    slots_known: ClassVar[bool] = True

    length: int
    period: int = 1
    boundary: str = "pad"
    ended: Callable[[PyTree], Array] = episode_ended
    burn_in: int = 0
    state: Callable[[PyTree], PyTree] | None = None

    def __post_init__(self) -> None:
        check_integer("Windows(length=)", self.length, 1)
        check_integer("Windows(period=)", self.period, 1)
        check_choice("Windows(boundary=)", self.boundary, ("pad", "never", "cross"))
        check_integer("Windows(burn_in=)", self.burn_in, 0)
        check_function("Windows(ended=)", self.ended, "from items (T, lanes, ...) to bool (T, lanes)")
        if self.state is not None:
            check_function("Windows(state=)", self.state, "from an item to the leaves of it that are state")
        if self.burn_in >= self.length:
            refuse(
                ConfigError,
                "A window that is all burn-in trains nothing.",
                got=f"burn_in={self.burn_in}, length={self.length}",
                want="burn_in < length (which counts both)",
            )

    def whole_length(self, length: int) -> int:
        """Return ``length`` rounded up to whole periods, so that the same ring indices are starts in every lap."""
        return -(-length // self.period) * self.period

    def most_lost(self, steps: int) -> int:
        """Return how many starts are among so many steps: a window goes with its first step, which a new one overwrites."""
        return -(-steps // self.period)

    @property
    def recurrent(self) -> bool:
        """Whether ``Sample.data`` is a ``RecurrentWindow``."""
        return self.burn_in > 0 or self.state is not None


def episode_ends(windows: Windows, chunk: PyTree) -> Array:
    """Return where a chunk's episodes ended, bool ``(lanes, T)``."""
    lead = jax.tree.leaves(chunk)[0].shape[:2]
    if windows.boundary == "cross":
        return jnp.zeros(lead[::-1], bool)
    ended = windows.ended(chunk)
    if getattr(ended, "shape", None) != lead or ended.dtype != jnp.bool_:
        got = f"{ended.dtype} {ended.shape}" if hasattr(ended, "shape") else type(ended).__name__
        refuse(SpecError, "Windows(ended=) returns something else.", got=got, want=f"bool {lead}")
    return ended.T


class Reached(NamedTuple):
    """The starts whose windows an add reaches, ``(lanes * k,)``.

    ``start`` int32 (``BEYOND``: none), whether it may be ``drawable`` now, whether the add has ``written`` it, and as
    which ``step`` of which ``lane``.
    """

    start: Array
    drawable: Array
    written: Array
    step: Array
    lane: Array


def reached_by_add(
    windows: Windows, geometry: Geometry, before: RingState, after: RingState, recent: Array, ended: Array
) -> tuple[Reached, Array]:
    """Return what an add reaches and the new ``recent``.

    Position ``p`` of a lane counts its ``length - 1`` newest steps before the add (``recent``), then the chunk's.
    """
    old, steps = recent.shape[1], ended.shape[1]
    head, filled, count = (
        jnp.broadcast_to(field, (geometry.lanes,))[:, None]
        for field in (before.head, after.filled, added_steps(before, after, geometry.length))
    )
    ended, newest = jnp.concatenate([recent, ended], axis=1), old + count - 1
    drawable = _drawable(windows, ended, newest) & (newest - jnp.arange(old + steps, dtype=jnp.int32) < filled)
    position = _start_positions(windows, steps, head)
    age = newest - position
    time = jnp.mod(head - geometry.length + position - old, geometry.length)
    lane = jnp.broadcast_to(jnp.arange(geometry.lanes, dtype=jnp.int32)[:, None], position.shape)
    start = (lane * geometry.length + time) // windows.period
    start = jnp.where((age >= 0) & (age < geometry.length) & (position < old + steps), start, BEYOND)
    may = jnp.take_along_axis(drawable, jnp.minimum(position, old + steps - 1), axis=1)
    reached = Reached(start, may, position >= old, position - old, lane)
    kept = jnp.take_along_axis(ended, count + jnp.arange(old, dtype=jnp.int32), axis=1)
    return Reached(*(field.reshape(-1) for field in reached)), kept


def added_steps(before: RingState, after: RingState, length: int) -> Array:
    """Return how many steps an add has written to each lane, int32, from what it did to the ring."""
    return after.head - before.head + length * (after.laps - before.laps).astype(jnp.int32)


def _drawable(windows: Windows, ended: Array, newest: Array) -> Array:
    """Return which positions ``(lanes, n)`` begin a window, given where episodes ended and each lane's newest position."""
    position = jnp.arange(ended.shape[1], dtype=jnp.int32)
    known = ended & (position <= newest)
    first_end = jax.lax.cummin(jnp.where(known, position, BEYOND), axis=1, reverse=True)
    until_end, complete = first_end - position, newest - position >= windows.length - 1
    if windows.boundary == "cross":
        return complete
    if windows.boundary == "never":
        return complete & (until_end >= windows.length - 1)
    return (complete | (until_end < windows.length)) & (until_end >= windows.burn_in)


def _start_positions(windows: Windows, steps: int, head: Array) -> Array:
    """Return the positions ``(lanes, k)`` of starts that adding ``steps`` may touch, out of range where there are fewer.

    Those written, and those whose window may have become drawable: with ``"pad"`` an episode's end anywhere in it does
    that, otherwise it takes its last step, so they are at most ``steps`` of the older ones.
    """
    old, period = windows.length - 1, windows.period
    apart = windows.boundary != "pad" and steps < old
    ranges = ((0, steps), (old, old + steps)) if apart else ((0, old + steps),)
    found = []
    for begin, end in ranges:
        offset = jnp.mod(old - begin - head, period)
        position = begin + offset + period * np.arange(-(-(end - begin) // period), dtype=np.int32)
        found.append(jnp.where(position < end, position, old + steps))
    return jnp.concatenate(found, axis=1)
