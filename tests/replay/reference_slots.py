"""Independent slots, the rate limiter and the ordered tree in plain Python: lists, fractions and `min`. Slow, short and plainly right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

import conduit_jax as conduit
from conduit_jax.config import RateLimits
from tests.replay.reference import Faults, is_usable, priority_probabilities


@dataclass
class LimiterModel:
    """The inequalities as they are written, over counters that have no end."""

    limits: RateLimits
    inserts: int = 0
    samples: int = 0
    deletes: int = 0

    def can_insert(self, n: int) -> bool:
        limits, after = self.limits, self.inserts + n
        if limits.max_diff is None or after - self.deletes <= limits.min_size:
            return True
        return after * limits.samples_per_insert - self.samples <= limits.max_diff

    def can_sample(self, n: int) -> bool:
        return self.inserts - self.deletes >= self.limits.min_size and self.affords(n)

    def affords(self, n: int) -> bool:
        limits = self.limits
        return limits.min_diff is None or self.inserts * limits.samples_per_insert - self.samples - n >= limits.min_diff


@dataclass
class SlotItem:
    """One item: its number of insertion, its priority, when it was last touched and how often it was drawn."""

    name: int
    number: int
    priority: np.float32
    touched: int
    times: int = 0


@dataclass
class SlotsModel:
    """What ``make_replay`` promises of ``storage="slots"``, for one partition; ``items`` is oldest first."""

    config: conduit.ReplayConfig
    items: list[SlotItem] = field(default_factory=list)
    drawn: set[int] = field(default_factory=set)  # in this epoch
    clock: int = 0
    inserts: int = 0
    max_priority: np.float32 = field(default_factory=lambda: np.float32(1))
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        self.limiter = LimiterModel(self.config.limits)

    @property
    def names(self) -> list[int]:
        return [item.name for item in self.items]

    def named(self, name: int) -> SlotItem:
        return next(item for item in self.items if item.name == name)

    def touch(self) -> int:
        self.clock += 1
        return self.clock

    def add(
        self, names: Sequence[int], priorities: Sequence[float], evict: Callable[[], int] | None = None
    ) -> tuple[int, int, int]:
        """Insert one by one; ``evict`` names the victim of a remover that draws. Return added, evicted, replaced."""
        if not self.limiter.can_insert(len(names)):
            return 0, 0, 0
        highest, evicted, replaced = self.max_priority, 0, 0
        for name, given in zip(names, priorities, strict=True):
            good = is_usable(given)
            priority = np.float32(given) if good else highest
            replaced += not good
            self.max_priority = max(self.max_priority, priority)
            self.inserts += 1
            self.limiter.inserts += 1
            self.items.append(SlotItem(name, self.inserts, priority, self.touch()))
            if len(self.items) > self.config.capacity:
                first = self.first(self.config.remover)
                self.remove(evict() if first is None and evict else first)
                evicted += 1
        self.faults.replaced_priorities += replaced
        return len(names), evicted, replaced

    def remove(self, name: int) -> None:
        self.items.remove(self.named(name))
        self.drawn.discard(name)
        self.limiter.deletes += 1

    def first(self, selector: object) -> int | None:
        """The item that a selector which draws nothing names."""
        match selector:
            case conduit.Fifo():
                return self.items[0].name
            case conduit.Lifo():
                return self.items[-1].name
            case conduit.MinHeap():
                return min(self.items, key=lambda item: (item.priority, item.touched)).name
            case conduit.MaxHeap():
                return min(self.items, key=lambda item: (-item.priority, item.touched)).name
        return None

    def probabilities(self, selector: object) -> dict[int, float]:
        """The probability of the next draw by name."""
        match selector:
            case conduit.Uniform():
                return dict.fromkeys(self.names, 1 / len(self.items))
            case conduit.Prioritized(exponent=exponent):
                return priority_probabilities({item.name: float(item.priority) for item in self.items}, exponent)
            case conduit.Epochs():
                left = [name for name in self.names if name not in self.drawn] or self.names
                return dict.fromkeys(left, 1 / len(left))
        return {self.first(selector): 1.0}

    def draws_left(self) -> int:
        return sum(self.config.max_times_sampled - item.times for item in self.items)

    def can_sample(self, n: int) -> bool:
        enough = not self.config.max_times_sampled or self.draws_left() >= n
        return self.limiter.can_sample(n) and enough

    def allowed(self, n: int) -> list[bool]:
        """Which of ``n`` draws the limiter lets through: all or none, or with ``max_times_sampled`` as many as it can."""
        if not self.config.max_times_sampled:
            return [self.can_sample(n)] * n
        return [self.limiter.can_sample(number) for number in range(1, n + 1)]

    def draw(self, name: int) -> int:
        """Count one draw of ``name``; return how often it has been drawn."""
        if isinstance(self.config.sampler, conduit.Epochs):
            self.drawn = set() if len(self.drawn) == len(self.items) else self.drawn
            self.drawn.add(name)
        item = self.named(name)
        item.times += 1
        self.limiter.samples += 1
        if item.times == self.config.max_times_sampled:
            self.remove(name)
        return item.times

    def update(self, names: Sequence[int | None], priorities: Sequence[float]) -> int:
        if not all(is_usable(priority) for priority in priorities):
            self.faults.refused_updates += 1
            return 0
        pairs = [(name, np.float32(value)) for name, value in zip(names, priorities, strict=True) if name in self.names]
        self.faults.stale_updates += len(names) - len(pairs)
        last = {name: index for index, (name, _) in enumerate(pairs)}
        for index, (name, value) in enumerate(pairs):
            self.max_priority = max(self.max_priority, value)
            if last[name] == index:
                self.named(name).priority, self.named(name).touched = value, self.touch()
        return len(pairs)

    def delete(self, names: Sequence[int | None]) -> int:
        gone = {name for name in names if name in self.names}
        for name in gone:
            self.remove(name)
        return len(gone)

    def reset(self) -> None:
        self.items, self.drawn, self.limiter = [], set(), LimiterModel(self.config.limits)
        self.max_priority = np.float32(1)


def exact(value: float) -> Fraction:
    return Fraction(value).limit_denominator(10**6)
