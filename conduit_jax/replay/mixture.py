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

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.errors import ConfigError, check_at_least, check_choice, check_integer, refuse
from conduit_jax.replay import random_bits
from conduit_jax.replay.interface import MAX_SLOTS, Replay, ReplayState
from conduit_jax.replay.joining import joined
from conduit_jax.replay.shares import asked_for, exact_shares, random_rows
from conduit_jax.replay.tables import TablesControl, TablesGeometry, delete_from_tables, update_tables
from conduit_jax.types import AddInfo, Sample, SampleInfo

Array = jax.Array
PyTree = Any

_SHARES = np.uint32(0x5A4E5)  # what the key is folded with for the shares; tables fold it with their number


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

    ``add``, ``can_add`` and ``explain_blocked`` take a static ``table=0``; ``for_table`` fixes it. ``init(item)`` gives all tables the same
    item, ``init(item, item, ...)`` one each. A batch is valid when every table can serve its share; otherwise nothing
    counts as sampled. A bad priority anywhere refuses an update in all tables. ``SampleInfo.probability`` includes the
    table's part of the batch.

    Args:
      tables: functions that take ``batch_size=`` and return a table's ``Replay``, wrapped or not. Over several partitions
        ``batch_size`` here is that of one, and these functions are to multiply what they hand on by their number.

    Raises:
      ConfigError: for proportions that leave a table no row of any batch, or too many slots together.
      SpecError: when a sample is traced and the tables deliver different data; names the leaf.
    """
    drawn = _check(tables, proportions, batch_size, shares)
    replays = tuple(table(batch_size=count) for table, count in zip(tables, drawn, strict=True))
    geometry = TablesGeometry(tuple(replay.geometry for replay in replays))
    if geometry.slots > MAX_SLOTS:
        refuse(ConfigError, "The tables hold too many items together.", got=geometry.slots, want=f"at most {MAX_SLOTS}")
    exact = exact_shares(proportions, batch_size)

    def init(*items: PyTree) -> ReplayState:
        one_each = items * len(replays) if len(items) == 1 else items
        states = [replay.init(item) for replay, item in zip(replays, one_each, strict=True)]
        control = TablesControl(tuple(state.control for state in states), jnp.zeros((), jnp.uint32))
        return ReplayState(tuple(state.storage for state in states), control)

    def can_add(control: TablesControl, n: int, table: int = 0) -> Array:
        return replays[table].can_add(control.tables[table], n)

    def add(state: ReplayState, *chunk: PyTree, table: int = 0, **rest: PyTree) -> tuple[ReplayState, AddInfo]:
        own = ReplayState(state.storage[table], state.control.tables[table])
        own, info = replays[table].add(own, *chunk, **rest)
        control = state.control._replace(tables=_replaced(state.control.tables, table, own.control))
        return ReplayState(_replaced(state.storage, table, own.storage), control), info

    def can_sample(control: TablesControl, n: int) -> Array:
        return _all_ready(replays, control, asked_for(proportions, n, shares))

    def sample(control: TablesControl, storage: tuple, key: Array) -> tuple[TablesControl, Sample]:
        ready = _all_ready(replays, control, drawn)
        kept, samples = [], []
        for number, replay in enumerate(replays):
            before = control.tables[number]
            after, batch = replay.sample(before, storage[number], random_bits.fold(key, np.uint32(number)))
            kept.append(jax.tree.map(lambda new, old: new if new is old else jnp.where(ready, new, old), after, before))
            samples.append(_as_part(batch, geometry.offsets[number], exact[number] / batch_size))
        together = joined(samples, range(len(samples)))
        if shares == "random":
            rows = random_rows(exact, random_bits.fold(key, _SHARES))
            together = jax.tree.map(lambda leaf: leaf.at[rows].get(mode="promise_in_bounds"), together)
        together = together._replace(valid=together.valid & ready)
        return control._replace(tables=tuple(kept)), together

    def update_priorities(control: TablesControl, info: SampleInfo, priorities: Array) -> tuple[TablesControl, Array]:
        return update_tables(replays, geometry, control, info, priorities)

    def delete(control: TablesControl, info: SampleInfo) -> tuple[TablesControl, Array]:
        return delete_from_tables(replays, geometry, control, info)

    def reset(control: TablesControl) -> TablesControl:
        pairs = zip(replays, control.tables, strict=True)
        return control._replace(tables=tuple(replay.reset(own) for replay, own in pairs))

    def explain_blocked(control: TablesControl, operation: str, n: int, table: int = 0) -> str:
        if operation == "insert":
            return replays[table].explain_blocked(control.tables[table], operation, n)
        counts = asked_for(proportions, n, shares)
        reasons = [
            replay.explain_blocked(own, operation, count)
            for replay, own, count in zip(replays, control.tables, counts, strict=True)
        ]
        return "; ".join(f"table {number}: {reason}" for number, reason in enumerate(reasons) if reason)

    def size(control: TablesControl) -> Array:
        return sum((replay.size(own) for replay, own in zip(replays, control.tables, strict=True)), jnp.int32(0))

    return Replay(
        init, can_add, add, can_sample, sample, update_priorities, delete, reset, explain_blocked, size, geometry
    )


def for_table(mixture: Replay, table: int) -> Replay:
    """Return ``mixture`` with ``add`` and ``can_add`` of one table: what wrappers and placements can take as it is."""
    tables = len(mixture.geometry.tables)
    if not 0 <= table < tables:
        refuse(ConfigError, "The mixture has no such table.", got=table, want=f"0 to {tables - 1}")
    functions = {name: getattr(mixture, name) for name in ("add", "can_add", "explain_blocked")}
    return mixture._replace(**{name: partial(function, table=table) for name, function in functions.items()})


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
    drawn = asked_for(proportions, batch_size, shares)
    if 0 in drawn:
        refuse(
            ConfigError,
            "A table would have no item in any batch.",
            got=f"shares {drawn} of a batch of {batch_size}",
            want="at least 1 each",
            fix='mix(shares="random"), or a larger batch',
        )
    return drawn


def _all_ready(replays: Sequence[Replay], control: TablesControl, counts: Sequence[int]) -> Array:
    ready = jnp.ones((), bool)
    for replay, own, count in zip(replays, control.tables, counts, strict=True):
        ready = ready & replay.can_sample(own, count)
    return ready


def _as_part(sample: Sample, offset: int, part: Fraction) -> Sample:
    """Return a table's sample in the mixture's terms: slots from ``offset`` on, probabilities of a draw of the whole batch."""
    info = sample.info
    info = info._replace(slot=info.slot + offset, probability=info.probability * jnp.float32(float(part)))
    return sample._replace(info=info)


def _replaced(entries: tuple, number: int, value: Any) -> tuple:
    return (*entries[:number], value, *entries[number + 1 :])
