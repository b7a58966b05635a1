"""Which gather from pinned host memory works, and at what share of what a plain copy of as many bytes gets?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.gpu_check.sizes import Sizes
from benchmarks.harness import interleave
from conduit_jax.replay.storage import in_device_memory
from conduit_jax.sharding.memory import storage_access
from conduit_jax.sharding.mesh import single_device_mesh

Array = jax.Array


def to_device(value: Array) -> Array:
    """Bring ``value`` to device memory, inside a program."""
    return jax.device_put(value, jax.memory.Space.Device)


def by_host_compute(array: Array, slots: Array) -> Array:
    """The package's own: the host gathers, the rows cross."""
    return storage_access("pinned_host").gather(array, slots)


def by_index_on_host(array: Array, slots: Array) -> Array:
    """A kernel that reads host memory through the link."""
    return to_device(in_device_memory.gather(array, jax.device_put(slots, jax.memory.Space.Host)))


def row_by_row(array: Array, slots: Array) -> Array:
    """A copy a row."""
    return jax.lax.map(lambda slot: to_device(jax.lax.dynamic_slice_in_dim(array, slot, 1))[0], slots)


def as_a_window(array: Array, slots: Array) -> Array:
    """Neighbouring rows in one copy: what a gather can at best be."""
    return to_device(jax.lax.dynamic_slice_in_dim(array, slots[0], slots.shape[0]))


VARIANTS: dict[str, Callable[[Array, Array], Array]] = {
    "host compute": by_host_compute,
    "index on the host": by_index_on_host,
    "row by row": row_by_row,
    "window": as_a_window,
}


def run(sizes: Sizes) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a row a variant: whether it ran, whether its rows are right, microseconds and share of the link."""
    mesh = single_device_mesh(jax.devices()[0])
    host, device = (NamedSharding(mesh, PartitionSpec(), memory_kind=kind) for kind in ("pinned_host", "device"))
    words = sizes.row_bytes // 4
    make = partial(jax.jit, out_shardings=host)(
        lambda: jnp.broadcast_to(jnp.arange(sizes.rows, dtype=jnp.uint32)[:, None], (sizes.rows, words))
    )
    array = jax.block_until_ready(make())
    draws = np.random.default_rng(0)
    random = jax.device_put(draws.permutation(sizes.rows)[: sizes.batch].astype(np.int32), device)
    message = jax.block_until_ready(jax.device_put(np.zeros((sizes.batch, words), np.uint32), host))
    rows: list[dict[str, Any]] = []
    cases: dict[str, Any] = {"copy": lambda calls: _repeat(lambda: jax.device_put(message, device), calls)}
    for name, variant in VARIANTS.items():
        slots = random if name != "window" else jax.device_put(np.arange(sizes.batch, dtype=np.int32), device)
        program = jax.jit(variant, out_shardings=device)
        try:
            right = np.array_equal(np.asarray(program(array, slots))[:, 0], np.asarray(slots))
        except Exception as error:  # that is what is asked
            rows.append({"gather": name, "works": False, "error": str(error).splitlines()[0][:300]})
            continue
        rows.append({"gather": name, "works": right})
        if right:
            cases[name] = lambda calls, program=program, slots=slots: _repeat(lambda: program(array, slots), calls)
    times = interleave(cases, calls=5, repeats=sizes.repeats)
    copy = times.pop("copy").best
    for row in rows:
        if row["gather"] in times:
            taken = times[row["gather"]].best
            row |= {"us": taken * 1e6, "share_of_link": copy / taken, "gb_per_s": message.nbytes / taken / 1e9}
    best = max((row for row in rows if "us" in row and row["gather"] != "window"), key=lambda row: row["share_of_link"])
    return rows, {"gather_best": best["gather"], "gather_share_of_link": best["share_of_link"]}


def _repeat(call: Callable[[], Array], calls: int) -> None:
    for _ in range(calls):
        jax.block_until_ready(call())
