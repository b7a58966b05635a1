"""Windows, transitions and frame stacks in plain Python: slices of the list of steps a lane still holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.replay.reference import Faults, LaneModel, is_usable, priority_probabilities


@dataclass
class Step:
    """One stored step; ``counter`` counts its lane's steps since the first or a reset, ``in_episode`` its episode's."""

    slot: int
    generation: int
    counter: int
    in_episode: int
    terminated: bool
    truncated: bool
    content: dict[str, np.ndarray]
    version: int
    priority: np.float32

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated


class StartModel:
    """Steps of some lanes, of which some may be drawn; ``drawable`` says which, by slot. To be derived from."""

    def __init__(self, lanes: int, length: int, *, period: int = 1, exponent: float | None = None):
        self.lanes = [LaneModel(length) for _ in range(lanes)]
        self.counters, self.in_episode = [0] * lanes, [0] * lanes
        self.length, self.period, self.exponent = length, period, exponent
        self.max_priority = np.float32(1)
        self.faults = Faults()

    def drawable(self) -> dict[int, Any]:
        raise NotImplementedError

    def add(self, chunk: Any, lengths: Sequence[int], version: int, priorities: np.ndarray | None) -> tuple[int, ...]:
        """Write ``lengths[lane]`` leading steps of a chunk ``(T, lanes, ...)``; return added, evicted, replaced."""
        highest, added, evictions, replaced = self.max_priority, 0, 0, 0
        for number, (lane, length) in enumerate(zip(self.lanes, lengths, strict=True)):
            for index in range(length):
                content = {name: leaf[index, number] for name, leaf in chunk.items()}
                priority, is_start = highest, self.counters[number] % self.period == 0
                if priorities is not None and is_start and self.exponent is not None:
                    priority = priorities[index, number]
                    if not is_usable(priority):
                        priority, replaced = highest, replaced + 1
                    self.max_priority = max(self.max_priority, np.float32(priority))
                time, generation, evicted = lane.write()
                step = Step(
                    number * self.length + time,
                    generation,
                    self.counters[number],
                    self.in_episode[number],
                    bool(content["terminated"]),
                    bool(content["truncated"]),
                    content,
                    version,
                    np.float32(priority),
                )
                lane.items.append(step)
                self.counters[number] += 1
                self.in_episode[number] = 0 if step.ended else self.in_episode[number] + 1
                added, evictions = added + 1, evictions + evicted
        self.faults.replaced_priorities += replaced
        return added, evictions, replaced

    def reset(self) -> None:
        for lane in self.lanes:
            lane.reset()
        self.counters, self.in_episode = [0] * len(self.lanes), [0] * len(self.lanes)
        self.max_priority = np.float32(1)

    @property
    def steps(self) -> dict[int, Step]:
        return {step.slot: step for lane in self.lanes for step in lane.items}

    def update(self, slots: Sequence[int], generations: Sequence[int], priorities: Sequence[float]) -> int:
        if not all(is_usable(priority) for priority in priorities):
            self.faults.refused_updates += 1
            return 0
        steps, drawable, applied = self.steps, self.drawable(), 0
        for slot, generation, priority in zip(slots, generations, priorities, strict=True):
            if slot not in drawable or steps[slot].generation != generation:
                self.faults.stale_updates += 1
                continue
            applied += 1
            if self.exponent is not None:
                steps[slot].priority = np.float32(priority)
                self.max_priority = max(self.max_priority, np.float32(priority))
        return applied

    def probabilities(self) -> dict[int, float]:
        steps, drawable = self.steps, self.drawable()
        if not drawable:
            return {}
        if self.exponent is None:
            return dict.fromkeys(drawable, 1 / len(drawable))
        return priority_probabilities({slot: float(steps[slot].priority) for slot in drawable}, self.exponent)


class WindowModel(StartModel):
    """``drawable``: the real steps of each window that may be drawn."""

    def __init__(self, lanes: int, length: int, windows: Any, exponent: float | None = None):
        super().__init__(lanes, length, period=windows.period, exponent=exponent)
        self.windows = windows

    def drawable(self) -> dict[int, list[Step]]:
        found = {}
        for lane in self.lanes:
            for index, first in enumerate(lane.items):
                real = self.real_steps(lane.items[index : index + self.windows.length])
                if first.counter % self.period == 0 and len(real) > self.windows.burn_in:
                    found[first.slot] = real
        return found

    def real_steps(self, steps: list[Step]) -> list[Step]:
        """The steps of the window that ``steps`` begin with, none if there is no such window."""
        ends = [index for index, step in enumerate(steps) if step.ended]
        full = len(steps) == self.windows.length
        if self.windows.boundary == "cross":
            return steps if full else []
        if self.windows.boundary == "never":
            return steps if full and all(index == len(steps) - 1 for index in ends) else []
        if ends:
            return steps[: ends[0] + 1]
        return steps if full else []


class TransitionModel(StartModel):
    """``drawable``: by slot the lane's steps and where among them the transition begins."""

    def __init__(self, lanes: int, length: int, view: Any, room: int, exponent: float | None = None):
        super().__init__(lanes, length, exponent=exponent)
        self.view, self.room, self.overwritten = view, room, 0
        self.finals: list[Step] = []  # the steps whose final observation is kept, oldest first

    def add(self, chunk: Any, lengths: Sequence[int], version: int, priorities: np.ndarray | None) -> tuple[int, ...]:
        counts = super().add(chunk, lengths, version, priorities)
        for lane, length in zip(self.lanes, lengths, strict=True):
            self.finals += [step for step in lane.items[len(lane.items) - length :] if step.ended]
        gone, self.finals = self.finals[: -self.room], self.finals[-self.room :]
        self.overwritten += sum(any(step is live for live in self.steps.values()) for step in gone)
        return counts

    def drawable(self) -> dict[int, tuple[list[Step], int]]:
        found = {}
        for lane in self.lanes:
            for index, first in enumerate(lane.items):
                ahead, last = lane.items[index:], self.jump(lane.items, index, self.view.largest_n)[-1]
                followed = any(last is step for step in self.finals) if last.ended else len(ahead) > self.view.largest_n
                if followed and index >= min(self.view.stack - 1, first.in_episode):
                    found[first.slot] = (lane.items, index)
        return found

    def jump(self, steps: list[Step], index: int, n: int) -> list[Step]:
        """The steps a transition over at most ``n`` steps spans."""
        spanned: list[Step] = []
        for step in steps[index : index + n]:
            spanned.append(step)
            if step.ended:
                break
        return spanned

    def transition(self, steps: list[Step], index: int, n: int) -> tuple[np.ndarray, float, float, np.ndarray]:
        """Observation, return, discount and next observation; with frames on the first axis."""
        spanned, gamma = self.jump(steps, index, n), self.view.discount
        total = sum(gamma**k * float(step.content["reward"]) for k, step in enumerate(spanned))
        discount = 0.0 if spanned[-1].terminated else gamma ** len(spanned)
        first = steps[index].in_episode
        frames = [step.content["observation"] for step in steps[max(0, index - first) : index + len(spanned)]]
        end = spanned[-1]
        following = end.content["final_observation"] if end.ended else None
        last = steps[index + len(spanned)].content["observation"] if following is None else following
        now = self.stack(frames[: len(frames) - len(spanned) + 1])
        return now, total, discount, self.stack([*frames, last])

    def stack(self, frames: list[np.ndarray]) -> np.ndarray:
        missing = self.view.stack - len(frames)
        before = frames[0] if self.view.padding == "repeat" else np.zeros_like(frames[0])
        return np.stack([before] * missing + frames[-self.view.stack :])
