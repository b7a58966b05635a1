"""Does a donated insert stay in place, in device memory and in pinned host memory?

Three witnesses: the compiled program aliases its storage and has no temporary of that size, the buffer's address stays the
same, and an insert into eight times the capacity takes no longer.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import conduit_jax as conduit
from benchmarks.gpu_check.sizes import Sizes
from benchmarks.harness import interleave
from conduit_jax.testing import compiled_facts

KINDS = ("device", "pinned_host")


def filled_plane(kind: str, capacity: int, sizes: Sizes) -> tuple[conduit.ExperiencePlane, Any]:
    """Return a plane of rows in memory ``kind`` and the rollout it is fed with."""
    lanes, steps = 8, max(1, sizes.batch // 8)
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=sizes.batch),
        replay=conduit.ReplayConfig(capacity=capacity),
        placement=kind,
        schedule="sequential",
    )
    rollout = {"row": jnp.zeros((steps, lanes, sizes.row_bytes), jnp.uint8)}
    for _ in range(3):
        plane.push(rollout)
    plane.flush()
    return plane, rollout


def address(plane: conduit.ExperiencePlane) -> int | None:
    """Return where the large leaf of the storage starts, ``None`` where the backend does not tell."""
    leaf = max(jax.tree.leaves(plane._tables["experience"].pipeline.state.storage), key=lambda one: one.nbytes)
    try:
        return leaf.addressable_shards[0].data.unsafe_buffer_pointer()
    except (RuntimeError, ValueError, NotImplementedError):
        return None


def case(kind: str, sizes: Sizes) -> dict[str, Any]:
    """Return the figures of one memory kind."""
    capacities = (sizes.rows // 8, sizes.rows)
    planes = {capacity: filled_plane(kind, capacity, sizes) for capacity in capacities}
    plane, rollout = planes[sizes.rows]
    pipeline = plane._tables["experience"].pipeline
    before, state = address(plane), pipeline.state
    ingest: Any = pipeline._programs.ingest
    facts = compiled_facts(ingest.compiled, *state, pipeline._carry, rollout, (), np.uint32(0))
    del state

    def inserts(capacity: int) -> Any:
        own, unit = planes[capacity]

        def run(calls: int) -> None:
            for _ in range(calls):
                own.push(unit)
            own.flush()

        return run

    times = interleave({str(one): inserts(one) for one in capacities}, calls=8, repeats=sizes.repeats)
    storage_bytes = plane.stats().tables["experience"].storage_bytes
    small, large = (times[str(one)].best * 1e6 for one in capacities)
    return {
        "kind": kind,
        "storage_bytes": storage_bytes,
        "alias_bytes": facts.alias_bytes,
        "temp_bytes": facts.temp_bytes,
        "same_address": None if before is None else before == address(plane),
        "insert_us": large,
        "insert_into_an_eighth_us": small,
        "in_place": facts.alias_bytes >= storage_bytes > 2 * facts.temp_bytes and before == address(plane),
    }


def run(sizes: Sizes) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return rows and summary."""
    rows = [case(kind, sizes) for kind in KINDS]
    return rows, {f"insert_in_place_{row['kind']}": row["in_place"] for row in rows}
