"""Run all sections, each within its time, and write what they found."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.sizes import CPU, GPU
from benchmarks.harness import arguments, report

SECTIONS = ("in_place", "links", "gathers", "handover", "peers", "pixels")
SECTION_S = 85.0  # six of them stay under ten minutes


def has_gpu() -> bool:
    """Whether JAX sees a GPU; a machine without one answers quickly."""
    import jax

    return any(device.platform in ("gpu", "cuda", "rocm") for device in jax.devices())


def in_this_process(name: str, *, small: bool) -> dict[str, Any]:
    """Run a section and return its rows, summary and seconds."""
    start = time.perf_counter()
    rows, summary = importlib.import_module(f"benchmarks.gpu_check.{name}").run(CPU if small else GPU)
    return {"rows": rows, "summary": summary, "seconds": time.perf_counter() - start}


def in_its_own(name: str, *, small: bool) -> dict[str, Any]:
    """Run a section in a process of its own; what goes wrong there is its result."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "section.json"
        command = [sys.executable, "-m", "benchmarks.gpu_check", "--section", name, "--json", str(path)]
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        try:
            done = subprocess.run(
                [*command, *["--cpu"] * small], capture_output=True, text=True, timeout=SECTION_S, env=environment
            )
        except subprocess.TimeoutExpired:
            return failed(f"took longer than {SECTION_S:.0f} s")
        if done.returncode or not path.exists():
            return failed(f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['no word'])[-1][:300]}")
        return json.loads(path.read_text())


def failed(why: str) -> dict[str, Any]:
    """Return the result of a section that gave none."""
    return {"rows": [{"failed": why}], "summary": {"failed": why}, "seconds": SECTION_S}


def main() -> None:
    parser: argparse.ArgumentParser = arguments(sys.modules["benchmarks.gpu_check"].__doc__ or "")
    parser.add_argument("--cpu", action="store_true", help="small sizes, in this process, on whatever device there is")
    parser.add_argument("--section", choices=SECTIONS, help="one section alone")
    options = parser.parse_args()
    if not options.cpu and not has_gpu():
        print("skipped: no GPU")
        report(options.json, [], {"skipped": "no GPU"})
        return
    if options.section:
        result = in_this_process(options.section, small=options.cpu)
        print(json.dumps(result, indent=1))
        if options.json:
            options.json.write_text(json.dumps(result))
        return
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for name in SECTIONS:
        result = (in_this_process if options.cpu else in_its_own)(name, small=options.cpu)
        rows += [{"section": name, **row} for row in result["rows"]]
        summary |= {f"{name}: {key}" if key == "failed" else key: value for key, value in result["summary"].items()}
        summary[f"{name}_s"] = result["seconds"]
    report(options.json, rows, summary)


if __name__ == "__main__":
    main()
