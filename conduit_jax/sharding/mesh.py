"""Finding the learner's mesh and its data axis; nothing here makes a mesh the user did not ask for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from conduit_jax.errors import PlacementError, refuse
from conduit_jax.types import Device

Array = jax.Array
PyTree = Any

PARTITION_AXIS = "partition"


def learner_mesh(learner: Any) -> Mesh | None:
    """Return the mesh the learner's arrays are laid out on, one of several devices first; ``None`` where there is none."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(learner)]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    meshes = [mesh for mesh in meshes if isinstance(mesh, Mesh)]
    return next((mesh for mesh in meshes if mesh.size > 1), meshes[0] if meshes else None)


def is_on_a_mesh(learner: PyTree) -> bool:
    """Return whether arrays of ``learner`` are laid out on a mesh, if only of one device."""
    return any(isinstance(getattr(leaf, "sharding", None), NamedSharding) for leaf in jax.tree.leaves(learner))


def in_callers_mesh(tree: PyTree) -> PyTree:
    """Return ``tree``, whose leaves leave the plane, typed for the mesh the caller computes on; as it is without one.

    Under ``jax.set_mesh`` an array of another mesh is refused by every operation ("context mesh ... should match the aval
    mesh ...", jax 0.10.2). Where the devices are the same nothing is copied; otherwise every device gets the whole.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    mesh = jax.sharding.get_mesh()
    leaves, structure = jax.tree.flatten(tree)
    if mesh.empty or all(_is_typed(leaf, mesh) for leaf in leaves):
        return tree
    return structure.unflatten(jax.device_put(leaves, [_on_mesh(leaf, mesh) for leaf in leaves]))


def _is_typed(leaf: Any, mesh: Mesh) -> bool:
    return isinstance(leaf.sharding, NamedSharding) and leaf.sharding.mesh == mesh


def _on_mesh(leaf: Any, mesh: Mesh) -> NamedSharding:
    """Return the leaf's own layout where its mesh differs from ``mesh`` in axis types alone, else the whole everywhere."""
    own = leaf.sharding
    alike = isinstance(own, NamedSharding) and own.mesh.shape == mesh.shape
    return NamedSharding(mesh, own.spec if alike else PartitionSpec())


def learner_device(learner: Any) -> Device | None:
    """Return the one device the learner's arrays sit on, or ``None`` if there is none or more than one."""
    devices = {device for leaf in jax.tree.leaves(learner) if isinstance(leaf, jax.Array) for device in leaf.devices()}
    return devices.pop() if len(devices) == 1 else None


def data_axis(mesh: Mesh, name: str | None = None) -> str | None:
    """Return the axis batches are split over: ``name``, else ``"data"``, else the only axis, else ``None``."""
    if name is not None:
        if name not in mesh.axis_names:
            refuse(
                PlacementError, "The mesh has no such axis.", got=repr(name), want=f"one of {tuple(mesh.axis_names)}"
            )
        return name
    if "data" in mesh.axis_names:
        return "data"
    return mesh.axis_names[0] if len(mesh.axis_names) == 1 else None


def processes_of(devices: Iterable[Device]) -> frozenset[int]:
    """Return the processes whose ``devices`` these are."""
    return frozenset(device.process_index for device in devices)


def on_host(array: Array | np.ndarray) -> np.ndarray:
    """Return all of an ``array``: a sync point. Of one that several processes have, each of them gets it if all of them ask."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def single_device_mesh(device: Device) -> Mesh:
    """Return the one-device mesh a memory kind can be named on (a ``SingleDeviceSharding`` loses it under jit)."""
    return Mesh(np.array([device]), (PARTITION_AXIS,), axis_types=(AxisType.Auto,))


def with_auto_axes(mesh: Mesh) -> Mesh:
    """Return ``mesh`` with Auto axes, where programs need not say how every result is laid out; retyping copies nothing."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
