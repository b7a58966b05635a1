"""What a placement of several parts means for arrays: which memory each stored leaf is in, and the shardings that follow."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from conduit_jax.errors import PlacementError, refuse
from conduit_jax.replay.storage import Experience
from conduit_jax.sharding.placement import Placement, part_bytes

PyTree = Any


def storage_shardings(placement: Placement, storage: PyTree) -> PyTree:
    """Return the tree of the shardings of ``storage`` (arrays or shapes) on ``placement``.

    Raises ``PlacementError`` for several parts of what is no ring's storage: only there leaves have names.
    """
    if len(placement.parts) == 1:
        sharding = placement.sharding(placement.axis, memory_kind=placement.part.memory_kind)
        return jax.tree.map(lambda _: sharding, storage)
    if not isinstance(storage, Experience):
        want = "one part with all leaves"
        refuse(PlacementError, "Only a ring's leaves live in several memories.", got=type(storage).__name__, want=want)
    return jax.tree.unflatten(jax.tree.structure(storage), _by_leaf(placement, storage))


def _by_leaf(placement: Placement, storage: Experience) -> list[NamedSharding]:
    stored = dict(storage.layout.stored)
    part_bytes(placement, stored)  # refuses names that do not go with what is stored
    kinds = {leaf: part.memory_kind for part in placement.parts for leaf in part.leaves or ()}
    rest = next((part.memory_kind for part in placement.parts if part.leaves is None), "")
    return [placement.sharding(placement.axis, memory_kind=kinds.get(leaf, rest)) for leaf in stored]
