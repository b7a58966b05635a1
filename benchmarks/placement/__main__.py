"""``python -m benchmarks.placement``: every feasible placement measured and predicted, natively and on emulated links."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import jax
import numpy as np

from benchmarks import harness
from benchmarks.placement import planes, summary, systems
from benchmarks.placement.workload import DEVICES, DIMENSIONS, QUICK_DIMENSIONS
from conduit_jax.testing.links import shaped_links

_COUNT = "--xla_force_host_platform_device_count"


def main() -> None:
    """Measure, print the summary, and write the JSON file where one was asked for."""
    parsed = harness.arguments(__doc__ or "").parse_args()
    if _COUNT not in os.environ.get("XLA_FLAGS", ""):  # eight devices, and one that stands for pageable host memory
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT}={DEVICES + 1}".strip()
    if len(jax.devices()) <= DEVICES:
        sys.exit(f"needs {DEVICES + 1} devices: XLA_FLAGS={_COUNT}={DEVICES + 1}")
    repeats, calls = (4, 1) if parsed.quick else (10, 3)
    launch_s = launches(3 if parsed.quick else 11)
    native = systems.native_topology(launch_s, 3 if parsed.quick else 7)
    emulated = systems.emulated_topology(native)
    links = shaped_links(
        emulated,
        pause=systems.wait,
        clock=time.perf_counter,
        devices=jax.devices()[:DEVICES],
        host=jax.devices()[DEVICES],
    )
    rows = []
    for dimension in QUICK_DIMENSIONS if parsed.quick else DIMENSIONS:
        rows += measure(dimension, native, emulated, links, (repeats, calls))
    harness.report(
        parsed.json, [*rows, {"topology": native.as_dict()}, {"topology": emulated.as_dict()}], figures(rows)
    )


def launches(repeats: int) -> tuple[float, ...]:
    """Return the seconds an iteration of a plane takes with hardly any data, by number of devices."""
    topology = systems.load_topology("a100_80gb_x8")
    _, feasible = planes.candidates(topology, 4)
    seconds = {}
    for count in (1, 2, 4, 8):
        layout, _ = feasible["single_device" if count == 1 else f"shared:{count}"]
        plane = planes.filled_plane(layout, 4)
        case = planes.plane_case(plane, planes.rollout(4, 0))
        timing = harness.interleave({"plane": case}, calls=10, repeats=repeats)["plane"]
        seconds[count] = timing.median
        plane.close()
    return tuple(float(np.interp(count, list(seconds), list(seconds.values()))) for count in range(1, DEVICES + 1))


def measure(dimension: int, native: Any, emulated: Any, links: Any, effort: tuple[int, int]) -> list[dict[str, Any]]:
    """Return a row for each setting of one dimension: measured and predicted seconds of every placement and service."""
    (here, natively), (chosen, shaped) = (planes.candidates(system, dimension) for system in (native, emulated))
    layouts = {name: layout for name, (layout, _) in {**shaped, **natively}.items()}
    built = {name: planes.filled_plane(layout, dimension) for name, layout in layouts.items()}
    unit = planes.rollout(dimension, 1)
    plain = {name: planes.plane_case(plane, unit) for name, plane in built.items()}
    rows = []
    for setting, decided, feasible, put in (
        ("native", here, natively, None),
        ("emulated", chosen, shaped, links),
    ):
        cases = {
            name: plain[name] if put is None else planes.shaped(plain[name], links, built[name]) for name in feasible
        }
        cases["reverb_like"] = planes.reverb_like(dimension, jax.device_put if put is None else links.put)
        cases["gear_like"] = planes.gear_like(dimension, put)
        timed = harness.interleave(cases, calls=effort[1], repeats=effort[0])
        times = {name: timing.repeats for name, timing in timed.items()}
        predicted = {name: seconds for name, (_, seconds) in feasible.items()}
        rows.append(row(setting, dimension, decided, times, predicted))
        print(
            f"{setting:>9} d={dimension:<6} {rows[-1]['chosen']:<14} "
            + "  ".join(
                f"{name} {1e3 * float(np.median(values)):.2f}/{1e3 * predicted.get(name, float('nan')):.2f}"
                for name, values in times.items()
            ),
            flush=True,
        )
    for plane in built.values():
        plane.close()
    return rows


def row(
    setting: str, dimension: int, decided: Any, times: dict[str, list[float]], predicted: dict[str, float]
) -> dict[str, Any]:
    """Return what one setting of one dimension came to."""
    placements = {name: times[name] for name in predicted}
    name = decided.layout.name
    services = {peer: summary.ratio_low(times[peer], times[name]) for peer in ("reverb_like", "gear_like")}
    return {
        "setting": setting,
        "dimension": dimension,
        "chosen": name,
        "seconds": times,
        "predicted_s": predicted,
        "predicted_terms_s": decided.seconds,
        "regret": summary.regret(placements, name),
        "rank_correlation": summary.rank_correlation(placements, predicted),
        "errors": dict(zip(placements, summary.errors(placements, predicted), strict=True)),
        "times_faster": {peer: ratio for peer, (ratio, _) in services.items()},
        "times_faster_low": {peer: low for peer, (_, low) in services.items()},
        "not_taken": {one.layout.name: one.reason for one in decided.rejected},
    }


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures asked for; of the emulated setting where no other is named."""
    emulated = [row for row in rows if row["setting"] == "emulated"]
    native = [row for row in rows if row["setting"] == "native"]
    return {
        "regret_max": max(row["regret"]["low"] for row in emulated),
        "regret_max_native": max(row["regret"]["low"] for row in native),
        "rank_correlation_min": summary.worst([row["rank_correlation"] for row in emulated], min),
        "prediction_mape": float(np.mean([error for row in emulated for error in row["errors"].values()])),
        "prediction_mape_native": float(np.mean([error for row in native for error in row["errors"].values()])),
        "vs_reverb_like": min(row["times_faster"]["reverb_like"] for row in emulated),
        "vs_gear_like": min(row["times_faster"]["gear_like"] for row in emulated),
        "chosen": {row["dimension"]: row["chosen"] for row in emulated},
    }


if __name__ == "__main__":
    main()
