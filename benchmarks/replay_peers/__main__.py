"""Ours beside the peers: sampling, adding, and prioritized sampling with its update.

python -m benchmarks.replay_peers --json benchmarks/results/replay_peers.json

Everything runs in one process, on one thread where a system has a choice, the cases in turn. A call ends when its
samples exist. ``sample`` of g batches means g separate samples: one jitted program for the JAX systems (keys made ahead
for all of them), g calls for the others. Transitions are filled to capacity before anything is timed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import gc
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments, calibrate, interleave, report
from benchmarks.replay_peers import dead_draws
from benchmarks.replay_peers.dispatch import dispatch_bounds
from benchmarks.replay_peers.summary import Case, as_row, check_floors, summarize
from benchmarks.replay_peers.workloads import ADD_ROWS, PRIORITIZED, WORKLOADS, Workload

PEERS = {
    "ours": "ours",
    "flashbax": "flashbax_peer",
    "cpprb": "cpprb_peer",
    "torchrl": "torchrl_peer",
    "brax": "brax_peer",
    "naive jax ring": "naive",
    "numpy roofline": "numpy_roofline",
    "bare take": "bare_take",
    "dm-reverb": "reverb_peer",
}
NEEDED = ("ours", "naive jax ring", "numpy roofline", "bare take")
NOTES = (
    "figures compare shortest times, by_median has medians of ratios of neighbouring repeats: load draws those to 1",
    "1000 floats and images: 10,000 items, 4 and 128 floats: 100,000, prioritized: 2**20; --quick: fewer",
    "ours stands beside the peer that does the same: items beside flashbax item and all others, pairs of neighbouring steps "
    "beside flashbax flat, 16 windows of 16 steps from 16 lanes beside flashbax trajectory; by_items compares our items with "
    "all three, though flat stores and adds half the bytes and trajectory reads neighbours",
    "chunks are time first for ours, as a scan makes them, and lanes first for flashbax trajectory: its users transpose",
    "XLA on CPU hands a program of more than 1000 operations by its own count (256 random words are 13,000) to another "
    "thread, and waking it and the caller takes as long as reading 256 rows of 512 bytes: read_inline_us and "
    "read_handed_over_us are such a read in the caller and handed over, call_inline_us and call_handed_over_us calls that do "
    "next to nothing. Ours draws a batch and writes a chunk in loops, whose body XLA counts once, and is not handed over; "
    "prioritized draws, several draws a call and the other JAX systems' draws are, cpprb and numpy never",
    "XLA on CPU splits a gather over threads by the size of the array it reads from, and waking one costs tens of "
    "microseconds: ours reads up to 128 KB of a leaf on one thread; more is split for everyone",
    "XLA on CPU wakes another thread as soon as more than eight kernels are ready: small draws of ours in one program wait "
    "for each other",
    "bare take is XLA's own bound: a jitted gather a leaf at indices given and nothing else; sample_vs_bound has how many "
    "times longer it takes than ours (below 1: what drawing and describing cost; above 1: ours packs leaves or wakes no "
    "thread), with_bare_take what the floors' figures would be with it in our place",
    "large items are bound by memory: numpy roofline takes the same rows of the same size with indices given, and a ratio "
    "between two systems that both gather 256 random rows of them cannot leave one by much",
    "flashbax returns probabilities, ours and cpprb importance weights as well",
    "the numpy roofline and bare take draw nothing: they are no peers, and sample_scheduled_vs_best_peer leaves them out",
    "torchrl's prioritized sampler needs a C++ extension that its wheel cannot load with torch 2.13: named under missing",
    "brax rolls its whole full queue at every insert",
    "a scheduled update of g batches is one update of all their items for ours and flashbax, g updates for cpprb",
)


def load_peers(wanted: list[str], reverb_python: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the modules of the peers that can be had, and the reason for each that cannot."""
    modules, missing = {}, {}
    for name in wanted:
        if name == "dm-reverb" and reverb_python is None:
            missing[name] = "not asked for: give --reverb-python PATH"
            continue
        try:
            modules[name] = importlib.import_module(f"benchmarks.replay_peers.{PEERS[name]}")
        except ImportError as error:
            missing[name] = f"not installed: {error}"
    if "dm-reverb" in modules:
        modules["dm-reverb"].Reverb.python = reverb_python
    return modules, missing


def build(kinds: list[Any], workload: Workload, missing: dict[str, str]) -> list[Any]:
    """Return the systems filled with ``workload``; one that cannot be made is reported, not dropped."""
    systems = []
    for kind in kinds:
        try:
            systems.append(kind(workload))
        except Exception as error:  # a peer's own fault must not end the run, nor pass in silence
            if kind.name.startswith("ours"):
                raise
            missing[kind.name] = f"cannot be used: {type(error).__name__}: {error}"
    return systems


def repeat(call: Callable[[], Any]) -> Callable[[int], None]:
    """Return a case that makes ``calls`` calls."""

    def run(calls: int) -> None:
        for _ in range(calls):
            call()

    return run


def measure(
    workload: Workload, operation: str, systems: list[Any], counts: tuple[int, ...], block_s: float, repeats: int
) -> list[Case]:
    """Time ``operation`` of all systems and counts, in turn."""
    method = operation.replace("+", "_and_")
    cases, calls, first, names = {}, {}, {}, {}
    for system in systems:
        for count in counts:
            name = f"{system.name} {count}"
            call = getattr(system, method)(count)
            cases[name] = call if hasattr(system, "close") else repeat(call)  # another process makes its calls itself
            calls[name], first[name] = calibrate(cases[name], block_s)
            names[name] = (system.name, count)
    slow = {name: case for name, case in cases.items() if calls[name] == 1 and first[name] > 10 * block_s}
    slow = {name: case for name, case in slow.items() if _seconds(case) > 5 * block_s}
    timings = interleave({name: case for name, case in cases.items() if name not in slow}, calls=calls, repeats=repeats)
    timings |= interleave(slow, calls=calls, repeats=min(repeats, 5))
    return [Case(workload.name, operation, *names[name], timings[name], calls[name], first[name]) for name in cases]


def _seconds(case: Callable[[int], Any]) -> float:
    start = time.perf_counter()
    case(1)
    return time.perf_counter() - start


def show(cases: list[Case]) -> None:
    """Print a line a system: microseconds a batch (or an add) for each count, best and median."""
    print(f"\n{cases[0].workload}: {cases[0].operation}, us best|median")
    for system in dict.fromkeys(case.system for case in cases):
        own = [case for case in cases if case.system == system]
        times = (f"{case.count:>4}: {case.a_batch.best * 1e6:8.1f}|{case.a_batch.median * 1e6:8.1f}" for case in own)
        print(f"{system:>32} ", *times, flush=True)


def run_workload(
    workload: Workload, kinds: list[Any], plan: dict[str, tuple[int, ...]], options: Any, missing: dict[str, str]
) -> list[Case]:
    """Build the systems, time every operation of ``plan`` and let them go."""
    systems, cases = build(kinds, workload.small if options.quick else workload, missing), []
    block_s, repeats = (0.002, 3) if options.quick else (0.01, options.repeats)
    for operation, counts in plan.items():
        timed = measure(workload, operation, systems, counts, block_s, repeats)
        show(timed)
        cases += timed
    for system in systems:
        getattr(system, "close", lambda: None)()
    systems.clear()
    gc.collect()
    return cases


def count_dead_draws(options: Any, modules: dict[str, Any]) -> dict[str, Any]:
    """Return the dead draws of ours and, where it is installed, of flashbax."""
    capacity, draws = (2**14, 2 * 10**5) if options.quick else (2**20, 10**7)
    dead, of = dead_draws.count_dead(dead_draws.ours, capacity, draws)
    found = {"per_dead_draws": dead, "per_dead_draws_of": of}
    if "flashbax" in modules:
        found["per_dead_draws_flashbax"], _ = dead_draws.count_dead(dead_draws.flashbax, capacity, draws)
    return found


def parse() -> Any:
    parser = arguments((__doc__ or "").splitlines()[0])
    names = [workload.name for workload in (*WORKLOADS, PRIORITIZED)]
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS), help="with whom")
    parser.add_argument("--workloads", nargs="+", choices=names, default=names, help="with what items")
    parser.add_argument("--repeats", type=int, default=31, help="blocks of each case")
    parser.add_argument("--reverb-python", type=Path, help="an interpreter that has dm-reverb")
    return parser.parse_args()


def main() -> None:
    options = parse()
    batches = (1, 2) if options.quick else (1, 2, 4, 8)
    python = None if options.reverb_python is None else str(options.reverb_python)
    modules, missing = load_peers([name for name in PEERS if name in (*NEEDED, *options.peers)], python)
    cases: list[Case] = []
    for workload in WORKLOADS:
        if workload.name in options.workloads:
            kinds = [kind for module in modules.values() for kind in module.UNIFORM]
            cases += run_workload(workload, kinds, {"sample": batches, "add": ADD_ROWS}, options, missing)
    if PRIORITIZED.name in options.workloads:
        kinds = [kind for module in modules.values() for kind in module.PRIORITIZED]
        cases += run_workload(PRIORITIZED, kinds, {"sample+update": batches}, options, missing)
    summary, used = summarize(cases)
    summary |= count_dead_draws(options, modules) | dispatch_bounds()
    floors = check_floors(summary)
    print()
    for name, floor in floors.items():
        bare = f"  with the bare take: {floor['with_bare_take']:.3g}" if "with_bare_take" in floor else ""
        print(f"{name:>32}  floor {floor['floor']:<5}  met: {floor['met']}{bare}")
    made_from = {
        name: {case: value._asdict() for case, value in ratios.items()}
        for name, ratios in used.items()
        if not name.endswith("_median")
    }
    summary |= {"floors": floors, "missing": missing, "notes": list(NOTES)}
    rows = [as_row(case, cases) for case in cases]
    report(options.json, rows, summary | {"ratios": made_from})


if __name__ == "__main__":
    main()
