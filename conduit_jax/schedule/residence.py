"""All of a table that is bound to where it lives, and replacing it as a whole while nothing else happens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from conduit_jax.replay.interface import ReplayState
from conduit_jax.schedule.ledger import Ledger
from conduit_jax.sharding.intake import Intake

if TYPE_CHECKING:
    from conduit_jax.schedule.pipeline import ReplayPipeline
    from conduit_jax.schedule.programs import Programs, Unit

Array = jax.Array
PyTree = Any


class Residence(NamedTuple):
    """What of a table is bound to its placement and to what its items look like; ``key`` is that of the draws."""

    programs: Programs
    state: ReplayState
    carry: PyTree
    key: Array
    ledger: Ledger
    door: Intake | None


def relocate(pipeline: ReplayPipeline, move: Callable[[Residence], Residence]) -> None:
    """Put what ``move`` returns in the place of what it is given: nobody pushes, pulls or updates meanwhile.

    Where ``move`` raises, all stays as it was. Batches that were drawn are with the learner already and stay as they are;
    units that wait are brought to the new door.
    """
    own = pipeline
    with own._lock:
        old = Residence(own._programs, own.state, own._carry, own._key, own.ledger, own._door)
        new = move(old)
        waiting = deque(at_home(unit, new.door) for unit in own._waiting)
        own._programs, (own._storage, own._control) = new.programs, new.state
        own._carry, own._key, own.ledger, own._door, own._waiting = new.carry, new.key, new.ledger, new.door, waiting
        own._shapes_of_ingest = getattr(new.programs.ingest, "shapes", None)
        own._known_contexts, own._none_applied = set(), None
        if own._recorder is not None:
            own.record(own._recorder)
        if own._submit is not None:
            own.deliver_by(own._submit)


def at_home(unit: Unit, door: Intake | None) -> Unit:
    """Return ``unit`` where ``door`` brings things: its thread may have come through the door of another placement.

    Its ticket stays: the insert is the last to read what it was staged in.
    """
    if unit.door is door or door is None:
        return unit
    rollout, _ = door(unit.rollout)
    return unit._replace(rollout=rollout, context=door.context(unit.context), door=door)
