"""What a placement of several parts means for arrays: which memory each stored leaf is in, and the shardings that follow."""

from __future__ import annotations

from typing import Any

import jax

from conduit_jax.errors import PlacementError, refuse
from conduit_jax.replay.storage import Experience
from conduit_jax.sharding.placement import Placement, leaf_parts

PyTree = Any


def storage_shardings(placement: Placement, storage: PyTree) -> PyTree:
    """Return the tree of the shardings of ``storage`` (arrays or shapes) on ``placement``, within reach.

    Raises ``PlacementError`` for several parts of what is no ring's storage: only there leaves have names.
    """
    if len(placement.parts) == 1 and placement.parts[0].leaves is None:
        sharding = placement.sharding(placement.axis, memory_kind=placement.part.memory_kind)
        return jax.tree.map(lambda _: sharding, storage)
    parts = leaf_parts(placement, stored_names(storage))
    shardings = [placement.sharding(placement.axis, memory_kind=part.memory_kind) for part in parts.values()]
    return jax.tree.unflatten(jax.tree.structure(storage), shardings)


def stored_names(storage: PyTree) -> tuple[str, ...]:
    """Return the names of the leaves of a ring's storage, in the order of its arrays."""
    if not isinstance(storage, Experience):
        want = "one part with all leaves"
        refuse(PlacementError, "Only a ring's leaves live in several places.", got=type(storage).__name__, want=want)
    return tuple(name for name, _ in storage.layout.stored)
