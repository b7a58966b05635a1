"""Whether a table may take a unit or give a batch now, judged on the host: by program order alone where that decides.

A rate limiter, ``max_times_sampled`` and deletes make what may happen next depend on what happened, and so do items of
several steps: where episodes end decides how many there are. The account of a partition is four numbers, each known within
bounds ``(least, most)``, plain ints:

    live   its live items, or steps where an item is more than one of them
    debt   inserts * p - samples * q, of a limiter of p / q samples an insert
    left   draws its live items have left, under max_times_sampled
    found  items that may be drawn, where live steps are not

Where no hook counts its records on the device and nothing is deleted, both bounds are one number, unless items may be
drawn more than once and then leave. A queue is exact too: there each live item has one draw left. Elsewhere the device is
asked, where the bounds do not decide, and they close again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from conduit_jax.replay.rate_limiter import RateLimiter, explain_account
from conduit_jax.schedule.ledger import Ledger

Bounds = tuple[int, int]


class Account(NamedTuple):
    """What is known of a partition, or of the least and the most of several."""

    live: Bounds = (0, 0)
    debt: Bounds = (0, 0)
    left: Bounds = (0, 0)
    found: Bounds = (0, 0)


class Gate(NamedTuple):
    """The rules of one partition of ``capacity`` items, to which a unit brings ``unit`` items and a batch takes ``batch`` of.

    ``counted``: a hook says on the device how many of a unit's items are real. ``independent``: they stand in slots, not
    in a ring. Where items are more than single steps, ``least`` of them must be found before a draw, and a unit takes away at
    most ``loss``: so many units go in before the device has to be asked again.
    """

    limiter: RateLimiter
    capacity: int
    unit: int
    batch: int
    max_times_sampled: int = 0
    counted: bool = False
    independent: bool = True
    least: int = 0
    loss: int = 0
    noun: str = "items"

    @property
    def _p(self) -> int:
        """What an insert adds to the debt; a limiter that bounds no difference keeps none."""
        return 0 if self.limiter.max_debt is None else self.limiter.p

    @property
    def _q(self) -> int:
        return 0 if self.limiter.min_debt is None else self.limiter.q

    def inserted(self, account: Account) -> Account:
        """Return the account after a unit; the remover has taken what is over the capacity."""
        (least, most), times = account.live, self.max_times_sampled
        fewest = 0 if self.counted else self.unit
        evicted = max(0, least + fewest - self.capacity), max(0, most + self.unit - self.capacity)
        live = min(self.capacity, least + fewest), min(self.capacity, most + self.unit)
        debt = account.debt[0] + fewest * self._p, account.debt[1] + self.unit * self._p
        # An item that is evicted had between one and all of its draws left.
        left = account.left[0] + (fewest - evicted[1]) * times, account.left[1] + self.unit * times - evicted[0]
        found = (max(0, account.found[0] - self.loss), live[1]) if self.least else (0, 0)
        return self._closed(Account(live, debt, left, found))

    def sampled(self, account: Account) -> Account:
        """Return the account after a whole batch."""
        cost, times = self.batch * self._q, self.max_times_sampled
        debt = account.debt[0] - cost, account.debt[1] - cost
        if not times:
            return account._replace(debt=debt)
        left = account.left[0] - self.batch, account.left[1] - self.batch
        return self._closed(
            account._replace(live=(account.live[0] - self.batch, account.live[1]), debt=debt, left=left)
        )

    def deleted(self, account: Account, named: int) -> Account:
        """Return the account after a delete that named ``named`` items, none of which need have been there."""
        live = account.live[0] - named, account.live[1]
        left = account.left[0] - named * self.max_times_sampled, account.left[1]
        return self._closed(account._replace(live=live, left=left))

    def admits(self, account: Account) -> bool | None:
        """Return whether a unit may be inserted; ``None`` where the bounds do not tell."""
        if self.limiter.admits(account.live[1], account.debt[1], self.unit):
            return True
        return None if self.limiter.admits(account.live[0], account.debt[0], self.unit) else False

    def allows(self, account: Account) -> bool | None:
        """Return whether a whole batch may be drawn; ``None`` where the bounds do not tell."""
        if self._serves(account, 0):
            return True
        return None if self._serves(account, 1) else False

    def explain(self, account: Account, operation: str) -> str:
        """Return which inequality blocks ``"insert"`` or ``"sample"`` with its numbers, of an exact account; ``""`` if none."""
        live, count = account.live[0], self.unit if operation == "insert" else self.batch
        reason = explain_account(self.limiter, live, account.debt[0], count, operation)
        if reason or operation == "insert" or self._serves(account, 0):
            return reason
        if account.found[0] < self.least:
            return f"sampling {count}: {self.noun} that may be drawn >= min_size does not hold ({account.found[0]} < {self.least})"
        bound = f"max_times_sampled={self.max_times_sampled}"
        return f"sampling {count}: {live} live items have {account.left[0]} draws left in all ({bound})"

    def _serves(self, account: Account, end: int) -> bool:
        live, debt, left = account.live[end], account.debt[end], account.left[end]
        enough = not self.max_times_sampled or live >= self.batch or left >= self.batch
        return enough and account.found[end] >= self.least and self.limiter.allows(live, debt, self.batch)

    def sure_units(self, account: Account) -> int | None:
        """Return after how many units more a batch may still be drawn, whatever they hold; ``None``: after any number."""
        return (account.found[0] - self.least) // self.loss if self.least and self.loss else None

    def _closed(self, account: Account) -> Account:
        """Return the bounds as close as they imply each other: a live item has at least one draw left."""
        times, (least, most) = self.max_times_sampled, account.live
        least = max(0, least)
        if not times:
            return account._replace(live=(least, most), left=(0, 0))
        few, many = max(0, account.left[0]), account.left[1]
        live = max(least, -(-few // times)), min(most, many)
        return account._replace(live=live, left=(max(few, live[0]), min(many, live[1] * times)))


@dataclass(kw_only=True)
class GatedLedger(Ledger):
    """The account of a table that a ``Gate`` judges, of all its ``partitions``: the least and the most of any of them."""

    SETTINGS: ClassVar[tuple[str, ...]] = ("gate",)

    gate: Gate
    partitions: int
    live: Bounds = (0, 0)
    debt: Bounds = (0, 0)
    left: Bounds = (0, 0)
    found: Bounds = (0, 0)

    @property
    def capacity(self) -> int:
        """Items that fit."""
        return self.gate.capacity * self.partitions

    @property
    def account(self) -> Account:
        """What is known of any partition."""
        return Account(*((one[0], one[1]) for one in (self.live, self.debt, self.left, self.found)))

    @property
    def ready(self) -> bool:
        """Whether a batch may be drawn now, as far as the account goes."""
        return self.gate.allows(self.account) is True

    def insert(self, steps: int, version: int) -> None:
        """Enter one unit."""
        self.pushed_units += 1
        self._know(self.gate.inserted(self.account))

    def draw(self, batches: int) -> None:
        """Enter ``batches`` drawn, all of them whole."""
        super().draw(batches)
        for _ in range(batches):
            self._know(self.gate.sampled(self.account))

    def delete(self, named: int) -> None:
        """Enter a delete that named ``named`` items over all partitions."""
        self._know(self.gate.deleted(self.account, named // self.partitions))

    def empty(self, *, exact: bool) -> None:
        """Enter a reset."""
        super().empty(exact=exact)
        self._know(Account())

    def see(self, accounts: list[Account]) -> None:
        """Enter exact accounts, one a partition, read from the device."""
        fields = [tuple(zip(*bounds, strict=True)) for bounds in zip(*accounts, strict=True)]
        self._know(Account(*((min(least), max(most)) for least, most in fields)))

    def advance(self, units: int, steps: int, batches: int, updates: int) -> None:
        """Enter ``units``, and ``batches`` drawn and delivered with no update between."""
        for _ in range(units):
            self.insert(steps, 0)
        self.draw(batches)
        self.delivered_batches += batches
        self.priority_updates += updates
        self.staleness[0] += batches

    def _know(self, account: Account) -> None:
        self.live, self.debt, self.left, self.found = account
        self.size = self.live[1] * self.partitions
