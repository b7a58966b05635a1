"""The door of the data plane: a pushed tree is checked against the built spec, then brought to where its program runs."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from conduit_jax.errors import SpecError, refuse
from conduit_jax.growth import Growth, fitted
from conduit_jax.sharding.staging import Stager, Ticket
from conduit_jax.trees import TreeSpec, check_matches, tree_spec
from conduit_jax.types import rollout_lane_axes

PyTree = Any

_look_of = attrgetter("aval", "sharding")


class Intake:
    """Accepts trees shaped like ``example``, or that ``growth`` makes so; lanes are laid out along ``axis`` of ``mesh``."""

    def __init__(
        self, example: PyTree, mesh: Mesh, axis: str | None, what: str = "Rollout", growth: Growth | None = None
    ):
        self.spec: TreeSpec = tree_spec(example)
        self.growth = growth
        self._what, self._stager = what, Stager()
        self._dtypes = [leaf.dtype for leaf in self.spec.leaves]
        lane_axes = jax.tree.leaves(rollout_lane_axes(example))
        specs = [
            PartitionSpec() if lane < 0 or axis is None else PartitionSpec(*[None] * lane, axis) for lane in lane_axes
        ]
        self._shardings: list[Any] = [NamedSharding(mesh, spec) for spec in specs]
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._at_home: list[set[Any]] = [{sharding} for sharding in self._shardings]
        self._came: dict[int, Any] = {}  # how leaves came that were laid out otherwise, by number
        self._usual: Any = None  # types and layouts of the leaves of a tree that was let in, all of them at home

    def __call__(self, tree: PyTree) -> tuple[PyTree, Ticket | None]:
        """Return ``tree`` on the placement, with the ticket its reader signs where it came through a slab.

        Host arrays are copied before this returns, so the caller may write to them again at once. ``SpecError`` names
        the leaf by path for another tree, shape or dtype.
        """
        if self._usual is not None and self._looks(tree) == self._usual:
            return tree, None
        if self.growth is not None:
            tree, _ = fitted(tree, self.spec, self.growth)
        leaves = check_matches(tree, self.spec, self._what)
        away = [index for index, leaf in enumerate(leaves) if not self._is_home(index, leaf)]
        if not away:
            self._usual = self._looks(tree)
            return tree, None
        host = [index for index in away if not isinstance(leaves[index], jax.Array)]
        for index in host:
            _check_range(leaves[index], self._dtypes[index], f"{self._what}: leaf {self.spec.paths[index]}")
        moved = [index for index in away if isinstance(leaves[index], jax.Array)]
        leaves = list(leaves)
        if moved:
            self._came |= {index: leaves[index].sharding for index in moved}
            arrived = jax.device_put([leaves[index] for index in moved], [self._shardings[index] for index in moved])
            for index, leaf in zip(moved, arrived, strict=True):
                leaves[index] = leaf
        ticket = None
        if host:
            staged, ticket = self._stager.stage(
                [np.asarray(leaves[index]) for index in host],
                [self._dtypes[index] for index in host],
                [self._shardings[index] for index in host],
            )
            for index, leaf in zip(host, staged, strict=True):
                leaves[index] = leaf
        return self.spec.unflatten(leaves), ticket

    def shapes(self, before: Intake | None = None) -> list[PyTree]:
        """Return the shapes of the trees it lets in, laid out as it brings them, and as those let in ``before`` came if that is home.

        Arrays of an equivalent sharding are not moved, but a program is compiled for each sharding by its own.
        """
        layouts = [self._shardings]
        if before is not None and len(before._shardings) == len(self._shardings):
            came = [before._came.get(index, own) for index, own in enumerate(self._shardings)]
            pairs = zip(came, self._shardings, self.spec.leaves, strict=True)
            if came != self._shardings and all(_equal(one, own, len(leaf.shape)) for one, own, leaf in pairs):
                layouts.append(came)
        return [
            self.spec.unflatten(
                [
                    jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
                    for leaf, sharding in zip(self.spec.leaves, layout, strict=True)
                ]
            )
            for layout in layouts
        ]

    def rehearse(self, before: Intake) -> None:
        """Bring zeros in the way leaves came that were let in ``before``: JAX compiles transfers that split arrays by shape."""
        if len(before._shardings) != len(self._shardings):
            return
        for index, sharding in before._came.items():
            leaf, own = self.spec.leaves[index], self._shardings[index]
            if not _equal(sharding, own, len(leaf.shape)):
                zeros = jax.jit(partial(jnp.zeros, leaf.shape, leaf.dtype), out_shardings=sharding)()
                jax.block_until_ready(jax.device_put([zeros], [own]))
        self._came = dict(before._came)

    def context(self, context: PyTree) -> PyTree:
        """Return ``context`` on all devices of the placement; host arrays are copied before this returns."""
        if isinstance(context, tuple) and not context:  # most planes have none
            return context
        return jax.tree.map(self._everywhere, context)

    def _looks(self, tree: PyTree) -> list[Any] | None:
        """Return types and layouts of the leaves of ``tree``, the least that tells that it may enter as it is; else ``None``."""
        try:
            return list(map(_look_of, self.spec.treedef.flatten_up_to(tree)))
        except (AttributeError, ValueError):  # no array of JAX, another tree
            return None

    def _everywhere(self, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf
        return leaf if _same(leaf, self._replicated) else jax.device_put(leaf, self._replicated)

    def _is_home(self, index: int, leaf: Any) -> bool:
        """Whether ``leaf`` is where its program wants it; equivalent shardings are remembered."""
        if not isinstance(leaf, jax.Array):
            return False
        sharding, known = leaf.sharding, self._at_home[index]
        if sharding in known:
            return True
        if not _same(leaf, self._shardings[index]):
            return False
        known.add(sharding)
        self._came[index] = sharding
        return True


def _check_range(leaf: Any, dtype: np.dtype, what: str) -> None:
    """Raise ``SpecError`` for host integers that the narrower ``dtype`` they are stored as would wrap."""
    values = np.asarray(leaf)
    if values.dtype == dtype or values.dtype.kind not in "iu" or not values.size:
        return
    limits, least, most = np.iinfo(dtype), int(values.min()), int(values.max())
    if least < limits.min or most > limits.max:
        refuse(
            SpecError,
            f"{what} holds integers that {dtype} cannot.",
            got=f"{values.dtype} from {least} to {most}",
            want=f"from {limits.min} to {limits.max}",
            fix="store them in two leaves (high and low words), or switch x64 on: jax.config.update('jax_enable_x64', True)",
        )


def _same(leaf: jax.Array, wanted: NamedSharding) -> bool:
    """Whether ``leaf`` is laid out as ``wanted``, on axes of the same types: Explicit and Auto ones do not mix."""
    return _equal(leaf.sharding, wanted, leaf.ndim)


def _equal(sharding: Any, wanted: NamedSharding, axes: int) -> bool:
    if isinstance(sharding, NamedSharding) and set(sharding.mesh.axis_types) != set(wanted.mesh.axis_types):
        return False
    return sharding.is_equivalent_to(wanted, axes)
