"""Places a buffer of ``reference_plane`` units can live in several parts, and planes on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import conduit_jax as conduit
from conduit_jax.sharding.mesh import PARTITION_AXIS, single_device_mesh
from tests.reference_plane import BATCH, CAPACITY, ReferencePlane, run_program

CONFIG = conduit.ReplayConfig(capacity=CAPACITY, sampler=conduit.Prioritized())


def split(partitions: int = 1, devices: int = 1, pinned: tuple[str, ...] = ("large",)) -> conduit.Placement:
    """The rest on the first ``devices``, ``pinned`` leaves in their host memory."""
    chosen = tuple(jax.devices()[:devices])
    mesh = Mesh(np.array(chosen), (PARTITION_AXIS,), axis_types=(AxisType.Auto,))
    parts = (
        conduit.Part(chosen, "pinned_host", partitions, pinned),
        conduit.Part(chosen, "device", partitions),
    )
    return conduit.Placement("split", parts, mesh, PARTITION_AXIS)


def scattered(*parts: conduit.Part) -> conduit.Placement:
    return conduit.Placement("scattered", parts, single_device_mesh(jax.devices()[0]), PARTITION_AXIS)


def apart(partitions: int = 1, kind: str = "device") -> conduit.Placement:
    """The large leaf on another device (as pageable host memory is to a GPU), the rest at home."""
    one, other = jax.devices()[:2]
    return scattered(conduit.Part((other,), kind, partitions, ("large",)), conduit.Part((one,), "device", partitions))


def uneven(*counts: int) -> conduit.Placement:
    """Everything dealt over as many devices as there are ``counts``."""
    return scattered(conduit.Part(tuple(jax.devices()[1 : 1 + len(counts)]), "device", sum(counts), None, counts))


def both() -> conduit.Placement:
    """The large leaf dealt over three devices, the rest in pinned memory of a fourth."""
    chosen = tuple(jax.devices()[:4])
    return scattered(
        conduit.Part(chosen[:3], "device", 8, ("large",), (1, 5, 2)), conduit.Part(chosen[3:], "pinned_host", 8)
    )


def plane_on(where: Any, partitions: int = 1, schedule: Any = "sequential", **config: Any) -> conduit.ExperiencePlane:
    return conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=BATCH),
        replay=replace(CONFIG, partitions=partitions, **config),
        placement=where,
        schedule=schedule,
        seed=3,
    )


@cache
def reference(partitions: int) -> tuple[conduit.Sample, ...]:
    """What ``run_program`` delivers, wherever the buffer is."""
    return tuple(run_program(ReferencePlane(CONFIG, partitions, seed=3)))


def fragile(transfers: int) -> Callable[[Any, Any], Any]:
    """A transfer function whose link breaks after so many ``transfers``."""
    left = [transfers]

    def put(pieces: Any, sharding: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("the link is down")
        return jax.device_put(pieces, sharding)

    return put
