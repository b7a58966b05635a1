"""Does a batch reach torch by dlpack without a copy, on the device it is on?"""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_check.sizes import Sizes
from benchmarks.harness import interleave


def run(sizes: Sizes) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a row a dtype: same address, same device, microseconds; without torch a row that says so."""
    if importlib.util.find_spec("torch") is None:
        return [{"skipped": "torch is not installed"}], {"dlpack": "skipped: torch is not installed"}
    from conduit_jax.adapters.torch import to_torch

    rows = []
    for dtype in ("uint8", "int32", "float32", "bfloat16", "bool"):
        array = jax.block_until_ready(jnp.ones((sizes.batch, sizes.row_bytes // 4), jnp.dtype(dtype)))
        tensor = to_torch(array)
        case = lambda calls, array=array: [to_torch(array) for _ in range(calls)]  # noqa: E731
        times = interleave({"handover": case}, calls=20, repeats=sizes.repeats)
        rows.append(
            {
                "dtype": dtype,
                "without_copy": tensor.data_ptr() == array.unsafe_buffer_pointer(),
                "device": str(tensor.device),
                "equal": bool((tensor == 1).all()),
                "us": times["handover"].best * 1e6,
            }
        )
    return rows, {"dlpack_without_copy": all(row["without_copy"] for row in rows), "dlpack_device": rows[0]["device"]}
