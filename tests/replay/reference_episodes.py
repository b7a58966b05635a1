"""A replay of whole episodes in plain Python: lists of steps, cut and counted one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.replay.reference import LaneModel, is_usable, priority_probabilities


@dataclass
class Episode:
    """One complete episode: its place in the index, the numbers of its steps and when its first one was written."""

    slot: int
    generation: int
    steps: list[int]
    start: int
    priority: float
    version: int


@dataclass
class Lane:
    """``clock`` steps have been written; ``steps`` is what the running episode has so far, or ``None`` if it is broken."""

    indices: list[LaneModel]
    clock: int = 0
    steps: list[int] | None = field(default_factory=list)
    start: int = 0


class EpisodesModel:
    """What ``make_episodes`` promises, for one partition of ``lanes`` rings of ``length`` steps and ``room`` index entries a bucket."""

    def __init__(
        self, lanes: int, length: int, room: int, buckets: Sequence[int], *, split: bool, exponent: float | None
    ):
        self.lanes = [Lane([LaneModel(room) for _ in buckets]) for _ in range(lanes)]
        self.length, self.room, self.buckets = length, room, list(buckets)
        self.split, self.exponent = split, exponent
        self.highest = [1.0] * len(self.buckets)
        self.dropped = self.stale = self.refused = self.replaced = 0

    def add(
        self,
        numbers: np.ndarray,
        ended: np.ndarray,
        lengths: Sequence[int],
        priorities: np.ndarray | None,
        version: int,
    ) -> tuple[int, int, int]:
        """Write a chunk ``(T, lanes)``; return added, evicted and replaced."""
        new: list[list[list[tuple]]] = [[[] for _ in self.lanes] for _ in self.buckets]
        for index, lane in enumerate(self.lanes):
            for step in range(min(len(numbers), lengths[index])):
                for steps, start in self._write(lane, int(numbers[step, index]), bool(ended[step, index])):
                    bucket = next(b for b, bound in enumerate(self.buckets) if len(steps) <= bound)
                    priority = None if priorities is None else float(priorities[step, index])
                    new[bucket][index].append((steps, start, priority))
        outcomes = [self._insert(bucket, entries, version) for bucket, entries in enumerate(new)]
        added, evicted, replaced = (sum(counts) for counts in zip(*outcomes, strict=True))
        for index in (index for lane in self.lanes for index in [(lane, own) for own in lane.indices]):
            lane, own = index
            while own.items and lane.clock - own.items[0].start > self.length:
                own.items.pop(0)
                evicted += 1
        self.replaced += replaced
        return added, evicted, replaced

    def _write(self, lane: Lane, number: int, ended: bool) -> list[tuple[list[int], int]]:
        """Write one step; return the episodes to be kept that it completes: none or one."""
        if lane.steps == []:
            lane.start = lane.clock
        lane.clock += 1
        longest = self.buckets[-1]
        if lane.steps is not None:
            lane.steps.append(number)
            if len(lane.steps) > longest:
                lane.steps = None
        steps = lane.steps
        if steps is None:
            if ended:
                self.dropped += 1
                lane.steps = []
            return []
        if not ended and not (self.split and len(steps) == longest):
            return []
        lane.steps = []
        return [(steps, lane.start)]

    def _insert(self, bucket: int, entries: list[list[tuple]], version: int) -> tuple[int, int, int]:
        highest, added, evicted, replaced = self.highest[bucket], 0, 0, 0
        for index, episodes in enumerate(entries):
            crowded = max(len(episodes) - self.room, 0)
            added, evicted = added + crowded, evicted + crowded
            own = self.lanes[index].indices[bucket]
            for steps, start, priority in episodes[crowded:]:
                if self.exponent is None:
                    priority = 1.0
                elif priority is None or not is_usable(priority):
                    replaced += priority is not None
                    priority = highest
                self.highest[bucket] = max(self.highest[bucket], priority)
                time, generation, full = own.write()
                slot = self.offset(bucket) + index * self.room + time
                own.items.append(Episode(slot, generation, steps, start, priority, version))
                added, evicted = added + 1, evicted + full
        return added, evicted, replaced

    def offset(self, bucket: int) -> int:
        return bucket * len(self.lanes) * self.room

    def episodes(self, bucket: int) -> dict[int, Episode]:
        return {episode.slot: episode for lane in self.lanes for episode in lane.indices[bucket].items}

    def probabilities(self, bucket: int) -> dict[int, float]:
        live = self.episodes(bucket)
        if self.exponent is None:
            return {slot: 1 / len(live) for slot in live}
        return priority_probabilities({slot: one.priority for slot, one in live.items()}, self.exponent)

    def update(self, slots: Sequence[int], generations: Sequence[int], priorities: Sequence[float]) -> int:
        if not all(is_usable(priority) for priority in priorities):
            self.refused += 1
            return 0
        applied = 0
        for slot, generation, priority in zip(slots, generations, priorities, strict=True):
            for bucket in range(len(self.buckets)):
                episode = self.episodes(bucket).get(slot)
                if episode is not None and episode.generation == generation:
                    episode.priority = priority
                    self.highest[bucket] = max(self.highest[bucket], priority)
                    applied += 1
        self.stale += len(slots) - applied
        return applied

    def reset(self) -> None:
        for lane in self.lanes:
            for index in lane.indices:
                index.reset()
            lane.steps = [] if lane.steps == [] else None
        self.highest = [1.0] * len(self.buckets)


def first_fit(lengths: Sequence[int], rows: int, row_length: int) -> list[list[int]]:
    """Return which episodes stand in each row, in order."""
    contents: list[list[int]] = [[] for _ in range(rows)]
    for number, length in enumerate(lengths):
        for row in contents:
            if length and sum(lengths[other] for other in row) + length <= row_length:
                row.append(number)
                break
    return contents
