"""What program order alone decides, as plain integers: how many items are live, were inserted, drawn and delivered.

Reading a counter from the device would stall the pipeline, so the plane keeps this account on the host. It is exact
wherever every push adds a number of items known when it is dispatched; a hook that counts its records on the device
(``Records.lengths``) makes it an upper bound until ``observe`` is given the device's numbers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass
class Ledger:
    """Counts of one table; ``length`` time steps of ``lanes`` lanes are its capacity, ``size`` its live items.

    ``inserted_elsewhere`` is what the ring's own count of inserts lacks since its length changed or it was reset;
    ``dropped_batches`` were drawn ahead of a reset. A checkpoint keeps all but ``SETTINGS``.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = ()

    length: int
    lanes: int
    min_size: int
    exact: bool = True
    size: int = 0
    pushed_units: int = 0
    drawn_batches: int = 0
    delivered_batches: int = 0
    priority_updates: int = 0
    inserted_elsewhere: int = 0
    dropped_batches: int = 0
    staleness: Counter[int] = field(default_factory=Counter)

    @property
    def capacity(self) -> int:
        """Items that fit."""
        return self.length * self.lanes

    @property
    def ready(self) -> bool:
        """Whether a batch may be drawn now, as far as the account goes."""
        return self.size >= self.min_size

    def insert(self, steps: int, version: int) -> None:
        """Enter one unit of ``steps`` steps a lane, made by policy ``version``."""
        self.pushed_units += 1
        size, most = self.size + steps * self.lanes, self.length * self.lanes
        self.size = size if size < most else most

    def draw(self, batches: int) -> None:
        """Enter ``batches`` drawn."""
        self.drawn_batches += batches

    def empty(self, *, exact: bool) -> None:
        """Enter a reset: no item is left. ``exact``: every push adds a number of items that the host knows."""
        self.size, self.exact = 0, exact

    def observe(self, live: int) -> None:
        """Enter the number of live items read from the device."""
        self.size = live

    def deliver(self, staleness: int) -> None:
        """Enter one batch handed over ``staleness`` updates after its draw."""
        self.delivered_batches += 1
        self.staleness[staleness] += 1

    def advance(self, units: int, steps: int, batches: int, updates: int) -> None:
        """Enter ``units`` of ``steps`` steps a lane in all, and ``batches`` drawn and delivered with no update between."""
        self.pushed_units += units
        self.size = min(self.capacity, self.size + steps * self.lanes)
        self.drawn_batches += batches
        self.delivered_batches += batches
        self.priority_updates += updates
        self.staleness[0] += batches
