"""Finding the learner's mesh and its data axis; nothing here makes a mesh the user did not ask for."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from conduit_jax.errors import PlacementError, refuse
from conduit_jax.types import Device

PARTITION_AXIS = "partition"


def learner_mesh(learner: Any) -> Mesh | None:
    """Return the mesh the learner's arrays are laid out on, or ``None`` when they sit on single devices."""
    for leaf in jax.tree.leaves(learner):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) and sharding.mesh.size > 1:
            return sharding.mesh
    return None


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


def single_device_mesh(device: Device) -> Mesh:
    """Return the one-device mesh a memory kind can be named on (a ``SingleDeviceSharding`` loses it under jit)."""
    return Mesh(np.array([device]), (PARTITION_AXIS,), axis_types=(AxisType.Auto,))


def with_auto_axes(mesh: Mesh) -> Mesh:
    """Return ``mesh`` with Auto axes, where programs need not say how every result is laid out; retyping copies nothing."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
