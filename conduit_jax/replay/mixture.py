"""Several tables as one ``Replay``: demonstrations and online experience, say, in given proportions of every batch.

    demonstrations = partial(make_replay, ReplayConfig(capacity=10_000))
    online = partial(make_replay, ReplayConfig(capacity=1_000_000), lanes=16)
    replay = mix((demonstrations, online), proportions=(1, 3), batch_size=256)
    state = replay.init(item)
    state, _ = replay.add(state, chunk, table=1)
    control, sample = replay.sample(state.control, state.storage, key)
    table = replay.geometry.table_of(sample.info.slot)           # 0 or 1 for every row

A slot of the mixture is the table's own slot plus the slots of all tables before it, so a plain ``SampleInfo`` says where
an item came from and a priority update finds its table. Importance weights are those of each table by itself: the
proportions are what the user wants, not a bias to be corrected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.errors import ConfigError, SpecError, check_at_least, check_choice, check_integer, refuse
from conduit_jax.replay import random_bits
from conduit_jax.replay.buffer import MAX_SLOTS, Faults, Replay, ReplayState
from conduit_jax.replay.selectors import usable
from conduit_jax.trees import tree_spec
from conduit_jax.types import AddInfo, Sample, SampleInfo

Array = jax.Array
PyTree = Any

_SHARES = 0x5A4E5  # what the key is folded with for the shares; tables fold it with their number


class MixtureGeometry(NamedTuple):
    """The geometries of ``tables``, whose slots are counted one table after the other."""

    tables: tuple[Any, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first slot of every table."""
        return tuple(accumulate((table.slots for table in self.tables[:-1]), initial=0))

    @property
    def slots(self) -> int:
        return sum(table.slots for table in self.tables)

    def table_of(self, slots: Array) -> Array:
        """Return the table number, int32, of each of the mixture's ``slots``."""
        return sum((slots >= offset for offset in self.offsets[1:]), jnp.zeros(slots.shape, jnp.int32))


class MixtureControl(NamedTuple):
    """The tables' controls. ``foreign`` uint32: entries of updates that a table saw as stale because they were another's."""

    tables: tuple[Any, ...]
    foreign: Array

    @property
    def faults(self) -> Faults:
        """The tables' faults together; an update that was refused is counted once."""
        total = jax.tree.map(lambda *counts: sum(counts[1:], counts[0]), *(table.faults for table in self.tables))
        return total._replace(stale_updates=total.stale_updates - self.foreign)


def fixed_shares(proportions: Sequence[float], batch_size: int) -> tuple[int, ...]:
    """Return whole shares of ``batch_size`` by largest remainder; of equal remainders the first table's is the larger."""
    exact = _exact_shares(proportions, batch_size)
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda table: shares[table] - exact[table])
    for table in by_remainder[: batch_size - sum(shares)]:
        shares[table] += 1
    return tuple(shares)


def _exact_shares(proportions: Sequence[float], batch_size: int) -> list[Fraction]:
    parts = [Fraction(proportion).limit_denominator(10**6) for proportion in proportions]  # 0.1 is a tenth
    return [part * batch_size / sum(parts) for part in parts]


def mix(
    tables: Sequence[Callable[..., Replay]],
    *,
    proportions: Sequence[float],
    batch_size: int,
    shares: str = "fixed",
) -> Replay:
    """Return one ``Replay`` over several tables; its states are those of a ``Replay`` with one entry a table.

    Every batch holds ``proportions`` (any positive numbers, relative to each other) of each table, rows in the order of
    the tables. ``shares="fixed"`` rounds by largest remainder, alike in every batch. ``"random"`` rounds up or down by the
    key, so that a table's expected share is exact even where it is a fraction of an item; one item more than that may
    then be drawn, and counted as sampled, than is delivered.

    ``add`` and ``can_add`` take a static ``table=0``; ``for_table`` fixes it. ``init(item)`` gives all tables the same
    item, ``init(item, item, ...)`` one each. A batch is valid when every table can serve its share; otherwise nothing
    counts as sampled. A bad priority anywhere refuses an update in all tables. ``SampleInfo.probability`` includes the
    table's part of the batch.

    Args:
      tables: functions that take ``batch_size=`` and return a table's ``Replay``.

    Raises:
      ConfigError: for proportions that leave a table no row of any batch, or too many slots together.
      SpecError: when a sample is traced and the tables deliver different data; names the leaf.
    """
    drawn = _check(tables, proportions, batch_size, shares)
    replays = tuple(table(batch_size=count) for table, count in zip(tables, drawn, strict=True))
    geometry = MixtureGeometry(tuple(replay.geometry for replay in replays))
    if geometry.slots > MAX_SLOTS:
        refuse(ConfigError, "The tables hold too many items together.", got=geometry.slots, want=f"at most {MAX_SLOTS}")
    exact = _exact_shares(proportions, batch_size)

    def init(*items: PyTree) -> ReplayState:
        one_each = items * len(replays) if len(items) == 1 else items
        states = [replay.init(item) for replay, item in zip(replays, one_each, strict=True)]
        control = MixtureControl(tuple(state.control for state in states), jnp.zeros((), jnp.uint32))
        return ReplayState(tuple(state.storage for state in states), control)

    def can_add(control: MixtureControl, n: int, table: int = 0) -> Array:
        return replays[table].can_add(control.tables[table], n)

    def add(state: ReplayState, *chunk: PyTree, table: int = 0, **rest: PyTree) -> tuple[ReplayState, AddInfo]:
        own = ReplayState(state.storage[table], state.control.tables[table])
        own, info = replays[table].add(own, *chunk, **rest)
        control = state.control._replace(tables=_replaced(state.control.tables, table, own.control))
        return ReplayState(_replaced(state.storage, table, own.storage), control), info

    def can_sample(control: MixtureControl, n: int) -> Array:
        return _all_ready(replays, control, _drawn(proportions, n, shares))

    def sample(control: MixtureControl, storage: tuple, key: Array) -> tuple[MixtureControl, Sample]:
        ready = _all_ready(replays, control, drawn)
        kept, samples = [], []
        for number, replay in enumerate(replays):
            before = control.tables[number]
            after, batch = replay.sample(before, storage[number], random_bits.fold(key, number))
            kept.append(jax.tree.map(lambda new, old: new if new is old else jnp.where(ready, new, old), after, before))
            samples.append(_as_part(batch, geometry.offsets[number], exact[number] / batch_size))
        _check_same_data(samples)
        samples = _all_counted(samples)
        together = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *samples)
        if shares == "random":
            rows = _random_rows(exact, random_bits.fold(key, _SHARES))
            together = jax.tree.map(lambda leaf: leaf.at[rows].get(mode="promise_in_bounds"), together)
        together = together._replace(valid=together.valid & ready)
        return control._replace(tables=tuple(kept)), together

    def update_priorities(control: MixtureControl, info: SampleInfo, priorities: Array) -> tuple[MixtureControl, Array]:
        return update_tables(replays, geometry, control, info, priorities)

    def reset(control: MixtureControl) -> MixtureControl:
        pairs = zip(replays, control.tables, strict=True)
        return control._replace(tables=tuple(replay.reset(own) for replay, own in pairs))

    return Replay(init, can_add, add, can_sample, sample, update_priorities, reset, geometry)


def for_table(mixture: Replay, table: int) -> Replay:
    """Return ``mixture`` with ``add`` and ``can_add`` of one table: what wrappers and placements can take as it is."""
    tables = len(mixture.geometry.tables)
    if not 0 <= table < tables:
        refuse(ConfigError, "The mixture has no such table.", got=table, want=f"0 to {tables - 1}")
    return mixture._replace(add=partial(mixture.add, table=table), can_add=partial(mixture.can_add, table=table))


def update_tables(
    replays: Sequence[Replay], geometry: MixtureGeometry, control: MixtureControl, info: SampleInfo, priorities: Array
) -> tuple[MixtureControl, Array]:
    """Give every table the priorities of its own items and return ``(control, applied)``; a bad one refuses all of them.

    To a table the others' items have the slot -1, which it counts as stale and never touches. A refused update is shown to
    the first table alone, so that it is counted once.
    """
    accepted, table = jnp.all(usable(priorities.astype(jnp.float32))), geometry.table_of(info.slot)
    kept, applied = [], jnp.zeros((), jnp.int32)
    for number, (replay, offset) in enumerate(zip(replays, geometry.offsets, strict=True)):
        own = info._replace(slot=jnp.where((table == number) & accepted, info.slot - offset, -1))
        shown = jnp.where(accepted | (number == 0), priorities, 0)
        after, count = replay.update_priorities(control.tables[number], own, shown)
        kept.append(after)
        applied = applied + count
    # All but one table see each entry as foreign; where it was refused, all but the first see it as stale.
    foreign = jnp.uint32((len(replays) - 1) * info.slot.shape[0])
    return MixtureControl(tuple(kept), control.foreign + foreign), applied


def _check(tables: Sequence[Any], proportions: Sequence[float], batch_size: int, shares: str) -> tuple[int, ...]:
    """Return how many items to draw from each table."""
    check_choice("mix(shares=)", shares, ("fixed", "random"))
    check_integer("mix(batch_size=)", batch_size, 1)
    if not tables or len(tables) != len(proportions):
        got = f"{len(tables)} tables, {len(proportions)} proportions"
        refuse(ConfigError, "A mixture needs one proportion a table.", got=got, want="as many of one as of the other")
    for number, proportion in enumerate(proportions):
        check_at_least(f"mix(proportions=)[{number}]", proportion, 1e-6, fix="leave the table out")
        if proportion > 1e6:
            refuse(ConfigError, f"mix(proportions=)[{number}] is out of range.", got=proportion, want="at most 10**6")
    drawn = _drawn(proportions, batch_size, shares)
    if 0 in drawn:
        refuse(
            ConfigError,
            "A table would have no item in any batch.",
            got=f"shares {drawn} of a batch of {batch_size}",
            want="at least 1 each",
            fix='mix(shares="random"), or a larger batch',
        )
    return drawn


def _drawn(proportions: Sequence[float], batch_size: int, shares: str) -> tuple[int, ...]:
    """Return how many items each table is asked for: its share, or the larger of the two that it may have."""
    if shares == "fixed":
        return fixed_shares(proportions, batch_size)
    return tuple(math.ceil(share) for share in _exact_shares(proportions, batch_size))


def _random_rows(exact: Sequence[Fraction], key: Array) -> Array:
    """Return which of the drawn items, table after table, are delivered: int32 ``(sum(exact),)``.

    Table k gets the rows from floor(c_k + u) to floor(c_k+1 + u), where c are cumulated exact shares and u is uniform:
    a number of rows next to its exact share, which it has in the mean. What is left out is not always the last item
    drawn, for that may be a stratum of its own.
    """
    words = random_bits.bits(key, 1 + len(exact))
    drawn = [math.ceil(share) for share in exact]
    row = jnp.arange(int(sum(exact)), dtype=jnp.int32)
    where, block, cumulated = row, 0, Fraction(0)
    for number, (share, count) in enumerate(zip(exact, drawn, strict=True)):
        begin = jnp.int32(int(cumulated)) + _rounds_up(words[0], cumulated % 1)
        turned = row - begin + random_bits.below(words[1 + number], jnp.int32(count))
        where = jnp.where(row >= begin, block + jnp.where(turned < count, turned, turned - count), where)
        block, cumulated = block + count, cumulated + share
    return where


def _rounds_up(word: Array, fraction: Fraction) -> Array:
    """Return 1 with probability ``fraction`` (to 2**-32), else 0, int32, for a uniform uint32 ``word``."""
    bound = math.ceil((1 - fraction) * 2**32)
    return jnp.zeros((), jnp.int32) if bound >= 2**32 else (word >= jnp.uint32(bound)).astype(jnp.int32)


def _all_ready(replays: Sequence[Replay], control: MixtureControl, counts: Sequence[int]) -> Array:
    ready = jnp.ones((), bool)
    for replay, own, count in zip(replays, control.tables, counts, strict=True):
        ready = ready & replay.can_sample(own, count)
    return ready


def _as_part(sample: Sample, offset: int, part: Fraction) -> Sample:
    """Return a table's sample in the mixture's terms: slots from ``offset`` on, probabilities of a draw of the whole batch."""
    info = sample.info
    info = info._replace(slot=info.slot + offset, probability=info.probability * jnp.float32(float(part)))
    return sample._replace(info=info)


def _check_same_data(samples: Sequence[Sample]) -> None:
    """Refuse tables whose batches cannot stand in one, naming the first leaf that differs."""
    specs = [tree_spec(Sample(sample.data, None, None, sample.mask, None), drop=1) for sample in samples]
    wanted = specs[0]
    for number, found in enumerate(specs[1:], 1):
        if found == wanted:
            continue
        one, two = (dict(zip(spec.paths, spec.leaves, strict=True)) for spec in (wanted, found))
        differing = [path for path in {**one, **two} if one.get(path) != two.get(path)]
        refuse(
            SpecError,
            f"Tables 0 and {number} deliver different data" + (f": leaf {differing[0]}." if differing else "."),
            got=two.get(differing[0], "no such leaf") if differing else found.treedef,
            want=one.get(differing[0], "no such leaf") if differing else wanted.treedef,
            fix="store the same item in all tables, or wrap the tables so that they deliver the same",
        )


def _all_counted(samples: Sequence[Sample]) -> list[Sample]:
    """Leave out how often items were sampled unless every table counts it."""
    if all(sample.info.times_sampled is not None for sample in samples):
        return list(samples)
    return [sample._replace(info=sample.info._replace(times_sampled=None)) for sample in samples]


def _replaced(entries: tuple, number: int, value: Any) -> tuple:
    return (*entries[:number], value, *entries[number + 1 :])
