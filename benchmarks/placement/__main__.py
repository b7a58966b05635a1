"""``python -m benchmarks.placement``: every feasible placement measured and predicted, natively and on emulated links."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
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
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--no-trace", action="store_true", help="leave out the trace of growing items (Fig. 13)")
    parser.add_argument(
        "--trace", type=Path, metavar="PATH", help="take its figures from what migration_trace has written"
    )
    parsed = parser.parse_args()
    trace: dict[str, Any] = {}
    if parsed.trace is not None:
        trace = kept_trace(parsed.trace, parser)
    elif not parsed.no_trace:
        trace = trace_figures(quick=parsed.quick)
    if _COUNT not in os.environ.get("XLA_FLAGS", ""):  # eight devices, and one that stands for pageable host memory
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT}={DEVICES + 1}".strip()
    if len(jax.devices()) <= DEVICES:
        sys.exit(f"needs {DEVICES + 1} devices: XLA_FLAGS={_COUNT}={DEVICES + 1}")
    repeats = 4 if parsed.quick else 8
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
        rows += measure(dimension, native, emulated, links, repeats)
        if parsed.json is not None:  # so far, should the run be ended
            used = [{"topology": system.as_dict()} for system in (native, emulated)]
            harness.report(parsed.json, [*rows, *used], figures(rows) | trace)
    if parsed.json is None:
        harness.report(None, rows, figures(rows) | trace)


def kept_trace(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the summary in ``path``; the parser ends the program where there is none."""
    want = "a file that `python -m benchmarks.migration_trace --json PATH` has written"
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        return parser.error(f"--trace cannot be read\n  got:  {path}: {error}\n  want: {want}")
    if not isinstance(kept, dict) or not isinstance(kept.get("summary"), dict):
        return parser.error(f"--trace has no summary\n  got:  {path}\n  want: {want}")
    return kept["summary"]


def trace_figures(*, quick: bool) -> dict[str, Any]:
    """Return the figures of ``benchmarks.migration_trace``, run in a process of its own: it wants eight devices."""
    if importlib.util.find_spec("benchmarks.migration_trace") is None:
        print("benchmarks.migration_trace is not there: no figures of the trace")
        return {}
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        command = [sys.executable, "-m", "benchmarks.migration_trace", "--json", str(path)]
        subprocess.run([*command, *(["--quick"] if quick else [])], check=True, env=environment)
        return json.loads(path.read_text())["summary"]


def _calls(dimension: int) -> int:
    return 3 if dimension < 2000 else 1


def launches(repeats: int) -> tuple[float, ...]:
    """Return the seconds an iteration of a plane takes with hardly any data, by number of devices."""
    _, feasible = planes.candidates(systems.load_topology("a100_80gb_x8"), 4)
    names = {1: "single_device", **{count: f"shared:{count}" for count in (2, 4, 8)}}
    built = {name: planes.filled_plane(feasible[name][0], 4) for name in names.values()}
    unit = planes.rollout(4, 0)
    cases = {name: planes.plane_case(plane, unit) for name, plane in built.items()}
    timed = harness.interleave(cases, calls=10, repeats=repeats)
    for plane in built.values():
        plane.close()
    medians = [timed[name].median for name in names.values()]
    return tuple(float(np.interp(count, list(names), medians)) for count in range(1, DEVICES + 1))


def measure(dimension: int, native: Any, emulated: Any, links: Any, repeats: int) -> list[dict[str, Any]]:
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
        timed = harness.interleave(cases, calls=_calls(dimension), repeats=repeats)
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
