"""The compiled functions of one table, and what waits between them: units not yet inserted, batches not yet delivered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from conduit_jax.delivery import (
    compile_delete,
    compile_delivery,
    compile_group_delivery,
    compile_priority_update,
    compile_reset,
    compile_size,
)
from conduit_jax.errors import ValueRefusedError, refuse
from conduit_jax.hooks import Hook
from conduit_jax.ingestion import compile_group_ingestion, compile_ingestion
from conduit_jax.replay.interface import Replay
from conduit_jax.sharding.intake import Intake
from conduit_jax.sharding.memory import DEVICE
from conduit_jax.sharding.placement import Placement
from conduit_jax.sharding.staging import Ticket
from conduit_jax.types import Sample

PyTree = Any


class Programs(NamedTuple):
    """See ``ingestion`` and ``delivery``; ``batch_to_learner`` moves samples to the learner.

    ``ingest_group`` and ``deliver_group`` take tuples, and are compiled for each length they are called with.
    ``keeps_priorities`` is False where the sampler has no use for any, so that an update has nothing to change.
    ``mesh`` is theirs; ``one_site`` says that the buffer is in device memory where the learner computes.
    """

    ingest: Callable[..., tuple]
    ingest_group: Callable[..., tuple]
    deliver: Callable[..., tuple]
    deliver_group: Callable[..., tuple]
    update_priorities: Callable[..., tuple]
    delete: Callable[..., tuple]
    reset: Callable[..., tuple]
    size: Callable[..., tuple]
    batch_to_learner: Callable[[PyTree], PyTree]
    to_placement: Callable[[PyTree], PyTree]
    keeps_priorities: bool
    mesh: Mesh
    one_site: bool


class Drawn(NamedTuple):
    """A batch drawn and not yet delivered, with the number of batches delivered when it was drawn.

    ``versions`` counts its items by policy version, where the host knows them.
    """

    sample: Sample
    delivered_before: int
    versions: tuple[tuple[int, int], ...] = ()


class Unit(NamedTuple):
    """A rollout unit waiting to be inserted, brought to its placement by ``door``."""

    rollout: PyTree
    context: PyTree
    version: int
    ticket: Ticket | None
    door: Intake | None = None


def at_home(unit: Unit, door: Intake | None) -> Unit:
    """Return ``unit`` where ``door`` brings things: its thread may have come through the door of another placement.

    Its ticket stays: the insert is the last to read what it was staged in.
    """
    if unit.door is door or door is None:
        return unit
    rollout, _ = door(unit.rollout)
    return unit._replace(rollout=rollout, context=door.context(unit.context), door=door)


def compile_programs(
    ingestion: Hook,
    delivery: Hook,
    replay: Replay,
    placement: Placement,
    transfers: tuple[Callable[[PyTree], PyTree], Callable[[PyTree], PyTree]],
    keeps_priorities: bool,
    key: np.ndarray | None = None,
) -> Programs:
    """Return the programs of a replayed table; nothing is traced before its first call.

    ``transfers`` are to the learner and back; ``key`` is what a remover that draws is given.
    """
    to_learner, to_placement = transfers
    return Programs(
        ingest=compile_ingestion(ingestion, replay, placement, key=key),
        ingest_group=compile_group_ingestion(ingestion, replay, placement, key),
        deliver=compile_delivery(delivery, replay, placement),
        deliver_group=compile_group_delivery(delivery, replay, placement),
        update_priorities=compile_priority_update(replay, placement),
        delete=compile_delete(replay, placement),
        reset=compile_reset(replay, placement),
        size=compile_size(replay, placement),
        batch_to_learner=to_learner,
        to_placement=to_placement,
        keeps_priorities=keeps_priorities,
        mesh=placement.mesh,
        one_site=to_learner is stays and placement.memory_kinds == (DEVICE,),
    )


def stays(samples: PyTree) -> PyTree:
    """The transfer of batches that are where the learner takes them already."""
    return samples


def context_kind(context: PyTree) -> Any:
    """Return what a program is traced anew for in ``context``: its structure, shapes and dtypes."""
    if isinstance(context, tuple) and not context:  # most planes have none
        return ()
    leaves, structure = jax.tree.flatten(context)
    return structure, tuple((np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)


def checked_priorities(priorities: Any) -> np.ndarray:
    """Return host ``priorities`` as float32, copied; ``ValueRefusedError`` naming the first that may not be stored."""
    values = np.array(priorities, np.float32)  # a copy: the program may read it after the caller has written to its own
    bad = ~(np.isfinite(values) & (values >= 0))
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        refuse(
            ValueRefusedError,
            "Priorities must be finite and not negative; nothing of this update was applied.",
            got=f"{values.reshape(-1)[first]} at index {first} ({int(bad.sum())} bad of {values.size})",
            want="finite numbers >= 0",
            fix="take abs() of TD errors and check the loss for NaN",
        )
    return values
