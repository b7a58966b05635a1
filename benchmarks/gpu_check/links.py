"""What do the links carry, by message size? Measured as ``conduit-jax profile`` does, on the first device alone."""

from __future__ import annotations

from typing import Any

import jax

from benchmarks.gpu_check.sizes import Sizes
from conduit_jax.sharding.profile import profile


def run(sizes: Sizes) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a row a link and size, and the largest bandwidth of each link."""
    topology = profile(jax.devices()[:1], sizes=sizes.messages, repeats=max(3, sizes.repeats // 2))
    rows, summary = [], {}
    for name, link in topology.links.items():
        for size, seconds in zip(link.bytes, link.seconds, strict=True):
            rows.append({"link": name, "bytes": size, "us": seconds * 1e6, "gb_per_s": size / seconds / 1e9})
        summary[f"link_{name.replace(' ', '_')}_gb_per_s"] = max(
            size / seconds / 1e9 for size, seconds in zip(link.bytes, link.seconds, strict=True)
        )
    return rows, summary
