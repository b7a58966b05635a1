"""The placement map M: what to do at which item size, decided ahead, looked up in a moment (paper, Algorithm 2).

    M = placement_map(lambda item_bytes: plan(item_bytes).placement, range(...))
    M(new_item_bytes)                    # a binary search

The planner is a pure function of the item's size, so its answers over all sizes are a few ranges with breakpoints between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from conduit_jax.errors import ConfigError, PlacementError, refuse


class PlacementMap(NamedTuple):
    """``choices[k]`` holds for sizes from ``starts[k]`` bytes on, up to the next start; ``None``: nothing fits.

    ``largest`` is the last size that was planned for; beyond it nothing is known.
    """

    starts: tuple[int, ...]
    choices: tuple[Any, ...]
    largest: int

    def __call__(self, item_bytes: int) -> Any:
        """Return what was planned for items of ``item_bytes``; ``None`` where nothing fits.

        Raises ``PlacementError`` for a size outside those that were planned for.
        """
        if not self.starts[0] <= item_bytes <= self.largest:
            want = f"{self.starts[0]} to {self.largest} bytes"
            refuse(PlacementError, "No placement was planned for items of this size.", got=item_bytes, want=want)
        return self.choices[bisect_right(self.starts, item_bytes) - 1]

    def __str__(self) -> str:
        ends = [*(start - 1 for start in self.starts[1:]), self.largest]
        rows = zip(self.starts, ends, self.choices, strict=True)
        return "\n".join(
            f"{first:>12,} .. {last:>12,} bytes  {choice or 'nothing fits'}" for first, last, choice in rows
        )


def placement_map(plan: Callable[[int], Any], sizes: Iterable[int]) -> PlacementMap:
    """Return the map of ``plan`` over item sizes from the smallest of ``sizes`` to the largest.

    Args:
        plan: item bytes -> the choice, compared by equality; ``PlacementError`` where nothing fits.
        sizes: the sweep, item sizes in bytes. Breakpoints between neighbours of it are found to the byte, as long as at
            most one lies between two of them.

    Source: paper section 5.3, the offline phase.
    """
    swept = sorted(set(sizes))
    if not swept or any(not isinstance(size, int) or size < 1 for size in swept):
        refuse(
            ConfigError, "A placement map needs sizes to be planned for.", got=swept[:3], want="bytes, integers >= 1"
        )
    starts, choices = [swept[0]], [_planned(plan, swept[0])]
    for size in swept[1:]:
        choice = _planned(plan, size)
        if choice != choices[-1]:
            starts.append(_breakpoint(plan, choice, starts[-1], size))
            choices.append(choice)
    return PlacementMap(tuple(starts), tuple(choices), swept[-1])


def _planned(plan: Callable[[int], Any], item_bytes: int) -> Any:
    try:
        return plan(item_bytes)
    except PlacementError:
        return None


def _breakpoint(plan: Callable[[int], Any], choice: Any, before: int, after: int) -> int:
    """Return the smallest size in ``(before, after]`` from which on ``choice`` is planned."""
    while after - before > 1:
        middle = (before + after) // 2
        if _planned(plan, middle) == choice:
            after = middle
        else:
            before = middle
    return after
