"""Insert and sample against flashbax, both on the device, as ``benchmarks.replay_peers`` calls them."""

from __future__ import annotations

import importlib.util
from typing import Any

from benchmarks.gpu_check.sizes import Sizes
from benchmarks.harness import interleave
from benchmarks.replay_peers.ours import Ours, OursPrioritized
from benchmarks.replay_peers.workloads import PRIORITIZED, WORKLOADS


def run(sizes: Sizes) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return microseconds a call of ours and of flashbax, and their ratios; without flashbax a row that says so."""
    if importlib.util.find_spec("flashbax") is None:
        return [{"skipped": "flashbax is not installed"}], {"flashbax": "skipped: not installed"}
    from benchmarks.replay_peers.flashbax_peer import FlashbaxItem, FlashbaxPrioritisedFlat

    small = sizes.rows < 1000
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for workload in (WORKLOADS[0], WORKLOADS[-1], PRIORITIZED):
        prioritized = workload is PRIORITIZED
        workload = workload.small if small else workload
        ours = (OursPrioritized if prioritized else Ours)(workload)
        peer = (FlashbaxPrioritisedFlat if prioritized else FlashbaxItem)(workload)
        for what in ("add", "sample_and_update" if prioritized else "sample"):
            argument = 32 if what == "add" else 1
            calls = {"ours": getattr(ours, what)(argument), "flashbax": getattr(peer, what)(argument)}
            cases = {name: lambda count, call=call: [call() for _ in range(count)] for name, call in calls.items()}
            times = interleave(cases, calls=3 if small else 50, repeats=sizes.repeats)
            us = {name: timing.best * 1e6 for name, timing in times.items()}
            rows.append(
                {"workload": workload.name, "call": what, **{f"{name}_us": value for name, value in us.items()}}
            )
            summary[f"{workload.name}, {what}: flashbax / ours"] = us["flashbax"] / us["ours"]
    return rows, summary
