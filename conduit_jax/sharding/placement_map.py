"""The placement map M: what to do at which item size, decided ahead, looked up in a moment (paper, Algorithm 2).

    M = placement_map(lambda item_bytes: plan(topology, workload.with_item_bytes(item_bytes)).layout, sizes)
    M(new_item_bytes)                    # a binary search

The planner is a pure function of the item's size, so its answers over all sizes are a few ranges with breakpoints between.
``ahead.turning_sizes`` are the sizes to sweep; ``conduit_jax.outlook`` keeps the map of a table whose items may grow.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import pairwise
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

    @property
    def rows(self) -> list[tuple[int, int, str]]:
        """(first size, last size, name of the choice) of each range; an empty name where nothing fits."""
        ends = [*(start - 1 for start in self.starts[1:]), self.largest]
        names = ["" if choice is None else str(getattr(choice, "name", choice)) for choice in self.choices]
        return list(zip(self.starts, ends, names, strict=True))

    def lines(self, where_none: str = "nothing fits") -> list[str]:
        """Return a line a range; ``where_none`` says what becomes of sizes that no choice holds for."""
        return [f"{first:>12,} .. {last:>12,} bytes  {name or where_none}" for first, last, name in self.rows]

    def as_dict(self) -> list[dict[str, Any]]:
        """Return plain data for JSON; ``None`` where nothing fits."""
        return [
            {"first_bytes": first, "last_bytes": last, "placement": name or None} for first, last, name in self.rows
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def placement_map(plan: Callable[[int], Any], sizes: Iterable[int]) -> PlacementMap:
    """Return the map of ``plan`` over item sizes from the smallest of ``sizes`` to the largest.

    Args:
        plan: item bytes -> the choice, compared by equality; ``PlacementError`` where nothing fits.
        sizes: the sweep, item sizes in bytes. The map is exact to the byte where a choice that holds at two sizes between
            neighbours of it holds at all between these: so it is with ``ahead.turning_sizes``.

    Source: paper section 5.3, the offline phase.
    """
    swept = sorted(set(sizes))
    if not swept or any(not isinstance(size, int) or size < 1 for size in swept):
        refuse(
            ConfigError, "A placement map needs sizes to be planned for.", got=swept[:3], want="bytes, integers >= 1"
        )
    known: dict[int, Any] = {}

    def planned(item_bytes: int) -> Any:
        if item_bytes not in known:
            known[item_bytes] = _planned(plan, item_bytes)
        return known[item_bytes]

    starts, choices = [swept[0]], [planned(swept[0])]
    for before, after in pairwise(swept):
        while planned(after) != choices[-1]:
            starts.append(_end_of(choices[-1], planned, max(before, starts[-1]), after))
            choices.append(planned(starts[-1]))
    return PlacementMap(tuple(starts), tuple(choices), swept[-1])


def _planned(plan: Callable[[int], Any], item_bytes: int) -> Any:
    try:
        return plan(item_bytes)
    except PlacementError:
        return None


def _end_of(choice: Any, planned: Callable[[int], Any], before: int, after: int) -> int:
    """Return the smallest size in ``(before, after]`` at which ``choice`` is planned no more."""
    while after - before > 1:
        middle = (before + after) // 2
        if planned(middle) == choice:
            before = middle
        else:
            after = middle
    return after
