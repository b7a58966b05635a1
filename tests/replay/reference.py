"""The replay in plain Python: one item at a time, no index arithmetic, no vectors. Slow, short and plainly right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

UINT32 = 2**32


@dataclass
class Item:
    """One stored item: where it stands, its generation, its bits, the version that acted and its priority."""

    slot: int
    generation: int
    content: dict[str, bytes]
    version: int
    priority: np.float32


@dataclass
class LaneModel:
    """One lane's ring, written step by step; ``items`` is oldest first."""

    length: int
    time: int = 0
    laps: int = 0
    items: list[Any] = field(default_factory=list)

    def write(self) -> tuple[int, int, bool]:
        """Return the ``(time, generation)`` of the next write and whether a live item had to go for it."""
        time, generation = self.time, self.laps % UINT32
        evicted = len(self.items) == self.length
        if evicted:
            self.items.pop(0)
        self.time += 1
        if self.time == self.length:
            self.time, self.laps = 0, self.laps + 1
        return time, generation, evicted

    def reset(self) -> None:
        self.time, self.laps, self.items = 0, self.laps + 1, []


@dataclass
class Faults:
    refused_updates: int = 0
    replaced_priorities: int = 0
    stale_updates: int = 0


class ReplayModel:
    """What ``make_replay`` promises, for one partition."""

    def __init__(self, lanes: int, length: int, *, min_size: int = 1, exponent: float | None = None):
        self.lanes = [LaneModel(length) for _ in range(lanes)]
        self.length, self.min_size, self.exponent = length, min_size, exponent
        self.max_priority = np.float32(1)
        self.faults = Faults()

    @property
    def size(self) -> int:
        return sum(len(lane.items) for lane in self.lanes)

    @property
    def items(self) -> dict[int, Item]:
        return {item.slot: item for lane in self.lanes for item in lane.items}

    def age(self, slot: int) -> int:
        """How many newer items the lane of ``slot`` holds."""
        items = self.lanes[slot // self.length].items
        return len(items) - 1 - [item.slot for item in items].index(slot)

    def add(
        self, contents: Sequence[Sequence[dict[str, bytes]]], version: int, priorities: np.ndarray | None = None
    ) -> tuple[int, int, int]:
        """Write ``contents[lane][step]``; ``priorities`` is ``(steps, lanes)``. Return added, evicted and replaced."""
        highest, added, evictions, replaced = self.max_priority, 0, 0, 0
        for index, (lane, steps) in enumerate(zip(self.lanes, contents, strict=True)):
            for step, content in enumerate(steps):
                priority = highest if priorities is None else priorities[step, index]
                if not is_usable(priority):
                    priority, replaced = highest, replaced + 1
                time, generation, evicted = lane.write()
                lane.items.append(Item(index * self.length + time, generation, content, version, np.float32(priority)))
                self.max_priority = max(self.max_priority, np.float32(priority))
                added, evictions = added + 1, evictions + evicted
        if self.exponent is None:
            replaced = 0
        self.faults.replaced_priorities += replaced
        return added, evictions, replaced

    def update(self, slots: Sequence[int], generations: Sequence[int], priorities: Sequence[float]) -> int:
        """Apply an update, in order, to the items that still are what they were; return to how many entries it applied."""
        if not all(is_usable(priority) for priority in priorities):
            self.faults.refused_updates += 1
            return 0
        items, applied = self.items, 0
        for slot, generation, priority in zip(slots, generations, priorities, strict=True):
            item = items.get(slot)
            if item is None or item.generation != generation:
                self.faults.stale_updates += 1
                continue
            item.priority = np.float32(priority)
            self.max_priority = max(self.max_priority, item.priority)
            applied += 1
        return applied

    def reset(self) -> None:
        for lane in self.lanes:
            lane.reset()
        self.max_priority = np.float32(1)

    def probabilities(self) -> dict[int, float]:
        """The exact probability of one draw by slot."""
        items = self.items
        if self.exponent is None:
            return dict.fromkeys(items, 1 / len(items)) if items else {}
        return priority_probabilities({slot: float(item.priority) for slot, item in items.items()}, self.exponent)


def is_usable(priority: float) -> bool:
    return math.isfinite(priority) and priority >= 0


def priority_probabilities(priorities: dict[int, float], exponent: float) -> dict[int, float]:
    """P_i = w_i / sum w with w = p**exponent, but 0 for p = 0; uniform where no weight is positive."""
    weights = {slot: priority**exponent if priority > 0 else 0.0 for slot, priority in priorities.items()}
    total = math.fsum(weights.values())
    return {slot: weight / total if total > 0 else 1 / len(weights) for slot, weight in weights.items()}


def n_step_windows(
    rewards: Sequence[float], terminated: Sequence[bool], truncated: Sequence[bool], n: int, gamma: float
) -> list[tuple[float, float, int]]:
    """``(return, discount, last step)`` of the window from each step of one lane, by looping."""
    windows = []
    for start in range(len(rewards)):
        total, scale, step = 0.0, 1.0, start
        while True:
            total += scale * rewards[step]
            scale = 0.0 if terminated[step] else scale * gamma
            if terminated[step] or truncated[step] or step - start + 1 == n or step + 1 == len(rewards):
                break
            step += 1
        windows.append((total, scale, step))
    return windows


def chi_square_tail(observed: np.ndarray, expected: np.ndarray) -> float:
    """The probability of a chi-square at least this large if ``observed`` counts came from ``expected`` ones."""
    from scipy.special import chdtrc

    statistic = float(np.sum((observed - expected) ** 2 / expected))
    return float(chdtrc(len(expected) - 1, statistic))
