"""What every replay is: a ``Replay`` of pure functions over ``ReplayState``, whatever storage serves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.config import Prioritized, Sampler
from conduit_jax.errors import ConfigError, SpecError, nearest_multiples, refuse
from conduit_jax.packed import Packed, packed
from conduit_jax.replay.storage import Experience
from conduit_jax.trees import tree_spec
from conduit_jax.types import AddInfo, Sample, SampleInfo

Array = jax.Array
PyTree = Any

MAX_SLOTS = 2**30  # int32 slots, the tree's node numbers up to twice as many, and room beyond for writes to be left out


@packed(counts=True, refused_updates=np.uint32, replaced_priorities=np.uint32, stale_updates=np.uint32)
class Faults(Packed):
    """What device-side values did wrong, counted (uint32) and raised by the shell at its next sync point.

    ``refused_updates``: calls with a NaN, infinite or negative priority, refused whole. ``replaced_priorities``: such
    values given at insertion, replaced by the maximum. ``stale_updates``: items overwritten before their update came.
    """

    __slots__ = ()
    refused_updates: Array
    replaced_priorities: Array
    stale_updates: Array


class ReplayState(NamedTuple):
    """``storage``, the gigabytes, written by ``add`` alone, and ``control``, everything small that changes with every call.

    ``storage`` is an ``Experience``, or a tuple of them where a replay keeps several.
    """

    storage: PyTree
    control: PyTree


class Replay(NamedTuple):
    """Pure functions over one static config; wrappers and placements turn a ``Replay`` into a ``Replay``.

    ``init(item) -> state``: ``item`` is one item's tree of arrays or ``ShapeDtypeStruct``.
    ``can_add(control, n) -> bool`` and ``can_sample(control, n) -> bool``: n items, static.
    ``add(state, chunk, lengths=None, priorities=None, version=None, key=None) -> (state, AddInfo)``: ``chunk`` leaves
    ``(T, lanes, ...)``, ``lengths`` int32, leading steps that are real (``()`` for all lanes alike, ``(lanes,)`` in a
    ragged replay), ``priorities`` float32 ``(T, lanes)``, ``version`` uint32 scalar of the policy that acted, ``key`` for
    removers that draw (``None``: a stream of the replay's own, alike in all). A chunk that the limiter blocks is left
    out whole: ``AddInfo.added`` is 0. Donate ``state``.
    ``sample(control, storage, key) -> (control, Sample)``. Donate ``control``; ``storage`` is only read and, on purpose,
    not returned: an output that is an undonated input is a copy of it.
    ``update_priorities(control, info, priorities) -> (control, applied)``. Donate ``control``.
    ``delete(control, info) -> (control, deleted)``: remove the items that still are what they were when drawn.
    ``reset(control) -> control``: empty, with generations that were never handed out. ``geometry``: one partition's shape.
    ``explain_blocked(control, operation, n) -> str``: for the host; which inequality blocks ``n`` items of ``"insert"``
    or ``"sample"``, with its numbers, or ``""``. ``size(control) -> int32``: how many items may be drawn.
    """

    init: Callable[..., ReplayState]
    can_add: Callable[..., Array]
    add: Callable[..., tuple[ReplayState, AddInfo]]
    can_sample: Callable[..., Array]
    sample: Callable[..., tuple[Any, Sample]]
    update_priorities: Callable[[Any, SampleInfo, Array], tuple[Any, Array]]
    delete: Callable[[Any, SampleInfo], tuple[Any, Array]]
    reset: Callable[[Any], Any]
    explain_blocked: Callable[..., str]
    size: Callable[[Any], Array]
    geometry: Any


def mutate(
    replay: Replay, control: PyTree, *, deletes: SampleInfo, updates: SampleInfo, priorities: Array
) -> tuple[PyTree, Array, Array]:
    """Delete items, then update priorities, as one call that a bad priority refuses whole.

    Returns ``(control, deleted, applied)``. Donate ``control``.
    """
    priorities = priorities.astype(jnp.float32)
    accepted = jnp.all(jnp.isfinite(priorities) & (priorities >= 0))
    named = deletes._replace(slot=jnp.where(accepted, deletes.slot, -1))
    control, deleted = replay.delete(control, named)
    control, applied = replay.update_priorities(control, updates, priorities)
    return control, deleted, applied


def no_faults() -> Faults:
    """Return counters at zero."""
    zero = jnp.zeros((), jnp.uint32)
    return Faults(zero, zero, zero)


def check_divides(lanes: int, batch_size: int, partitions: int) -> None:
    """Raise ``ConfigError`` where lanes or batch do not divide by ``partitions``."""
    for what, total in (("lanes", lanes), ("batch", batch_size)):
        if total % partitions:
            refuse(
                ConfigError,
                f"The {what} does not divide by the partitions.",
                got=f"{total} over {partitions}",
                want=nearest_multiples(total, partitions),
            )


def check_slots(slots: int, partitions: int) -> None:
    """Raise ``ConfigError`` where one partition would have more slots than their numbers allow."""
    if slots > MAX_SLOTS:
        refuse(
            ConfigError,
            "A partition can hold at most 2**30 items.",
            got=f"{slots} items in one partition",
            want=f"capacity <= {MAX_SLOTS * partitions}",
            fix="use more partitions",
        )


def check_chunk(experience: Experience, chunk: PyTree, lanes: int) -> int:
    """Return the chunk's number of steps; raise at trace time for items that can never be stored."""
    wanted, found = experience.layout.spec, tree_spec(chunk, drop=2)
    if found != wanted:
        refuse(
            SpecError,
            "The chunk's items differ from the item the replay was made for.",
            got=found.shapes(),
            want=wanted.shapes(),
        )
    lead = {leaf.shape[:2] for leaf in jax.tree.leaves(chunk)}
    if len(lead) != 1:
        refuse(SpecError, "The chunk's leaves disagree on (T, lanes).", got=sorted(lead), want="one leading shape")
    steps, found_lanes = lead.pop()
    if found_lanes != lanes:
        refuse(SpecError, "The chunk has another number of lanes than the replay.", got=found_lanes, want=lanes)
    return steps


def was_drawn(info: SampleInfo) -> Array:
    """Return True for every item that a sample reported, bool ``(n,)``.

    What a sample reports is never negative, but XLA does not know: in a fused step it then reads all of it before an update
    writes. Otherwise (jax 0.10.2) it copies all priorities, 4.2 MB at 2**20 items, for reads that might come later.
    """
    return (info.priority >= 0) & (info.probability >= 0) & (info.table_size >= 0)


def importance_weights(sampler: Sampler, probability: Array, size: Array, valid: Array | None = None) -> Array:
    """Return (N * P)**-beta, divided by the batch's largest where the sampler says so; ones for other samplers.

    Where ``valid`` bool ``(n,)`` is given, draws that are not valid count for nothing and weigh 0.
    """
    if not isinstance(sampler, Prioritized) or sampler.importance_exponent == 0:
        return jnp.ones_like(probability)
    scaled = jnp.maximum(probability * size.astype(jnp.float32), jnp.finfo(jnp.float32).tiny)
    if sampler.importance_normalization == "batch":
        counted = scaled if valid is None else jnp.where(valid, scaled, jnp.inf)
        scaled = scaled / jnp.min(counted)  # before the power: no inf
    weights = jnp.power(scaled, -jnp.float32(sampler.importance_exponent))
    return weights if valid is None else jnp.where(valid, weights, 0)
