"""RLlib's DQN, SAC and PPO with and without conduit, interleaved in one process.

python -m benchmarks.rllib --json benchmarks/results/rllib.json          (extra rllib)

An iteration here is one ``training_step``: a rollout fragment, an insert, a draw, an update; PPO's has a whole rollout and all its
epochs. All cases of a workload are
built side by side and take turns, a block of updates each; the order is reversed from block to block. A block of conduit's
is compared with its neighbour of RLlib's own.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import gc
import time
import warnings
from typing import Any

from benchmarks.harness import arguments, report
from benchmarks.rllib.probes import Probe
from benchmarks.rllib.results import Results
from benchmarks.rllib.summary import as_row, of_workload
from benchmarks.rllib.workloads import WORKLOADS, Cluster, Workload, build

NOTES = (
    "path: the buffer's add, sample, get_metrics and update_priorities, and the making of the learner's batch (connector "
    "pipeline, conversion); rollout: sample and get_metrics of the env runners, with remote runners the waiting too",
    "cpu is CPU time of the driver's main thread: what XLA and the adapter compute on other threads is not in it, but is in wall; "
    "what a block began and did not need is waited for at its end, as part of the path",
    "summary figures are lower bounds of 95 % intervals of medians over neighbouring blocks; iteration_of_share is the ratio of "
    "the median saving and the median share, its interval over the same pairs of blocks",
    "exposed_reduction is by CPU time, iteration_reduction by wall time",
    "off-policy, sequential: no staleness; granularity: 5 batches a call (pixels 4); overlap: 2 batches a call, one call ahead; "
    "on-policy, sequential: values after sampling, minibatches when needed; ahead: both ahead, small minibatches several a call; "
    "tried: values ahead where the first iterations showed it to be quicker. A workload's figures are those of the case attach() "
    "chooses by itself",
    "pixels: B = 32, two convolutions; RLlib keeps them as float32, as its modules take no uint8, conduit as uint8, cast at "
    "delivery",
    "PPO's exposed_reduction is without the value function's forward pass; value_forward_hidden (case ahead) is the share of that "
    "pass that the learner no longer waits for; net counts against it what the rollout beside it takes longer",
    "with remote learners the path is the buffer's calls alone, the rest is in update",
    "learning by seed: benchmarks.rllib.learning",
)
_OTHERS_EVERY = 3


def run_workload(
    workload: Workload, limits: tuple[int, float], start: int, cluster: Cluster, cases: list[str]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """Return the blocks of every case, without those that compile and fill the buffer, and the operations counted.

    ``limits``: blocks of RLlib's own and of the adopted case, as many as ``limits[1]`` seconds allow, ``limits[0]`` at
    least; of the other ``cases`` a third.
    """
    updates, options = workload.updates, workload.cases
    probes = {case: Probe(build(workload, options[case], updates, start, cluster)) for case in cases}
    found: dict[str, list[dict[str, Any]]] = {case: [] for case in probes}
    for probe in probes.values():
        for _ in range(2 + -(-start // (updates * workload.steps))):
            probe.block()
        while probe.trial_left:
            probe.block()
    pair = ["stock", workload.adopted]
    others = [case for case in probes if case not in pair]
    begin, number = time.perf_counter(), 0
    while number < limits[0] or time.perf_counter() - begin < limits[1]:
        if number % _OTHERS_EVERY == 0:
            gc.collect()
        turn = [*pair, *(others if number % _OTHERS_EVERY == 0 else [])]
        for case in turn if number % 2 == 0 else turn[::-1]:
            found[case].append(probes[case].block() | {"turn": number})
        number += 1
    counted = {case: probes[case].count_operations() for case in pair}
    for probe in probes.values():
        probe.algo.stop()
    return found, counted


def _measure(name: str, options: Any, cluster: Cluster) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a workload's rows, one a case, and its figures."""
    workload, begin = WORKLOADS[name], time.perf_counter()
    limits, start = (6, options.seconds * workload.weight), workload.start
    if options.quick:
        limits, start = (2, 0.0), min(100, workload.start)
    names = ["stock", workload.adopted] if options.quick else list(workload.cases)
    cases, counted = run_workload(workload, limits, start, cluster, names)
    figures = of_workload(cases, workload.adopted, on_policy=workload.on_policy, cores=len(os.sched_getaffinity(0)))
    figures |= {"operations": counted, "blocks": {case: len(blocks) for case, blocks in cases.items()}}
    figures |= {"load_average": os.getloadavg()[0], "seconds": time.perf_counter() - begin, "quick": options.quick}
    shown = ", ".join(
        f"{part} {figures[part]['median']:.3f} [{figures[part]['low']:.3f}, {figures[part]['high']:.3f}]"
        for part in ("exposed_reduction", "iteration_reduction", "iteration_of_share")
    )
    print(f"{name}: {shown}, {figures['seconds']:.0f} s, load {figures['load_average']:.1f}", flush=True)
    return [as_row(name, case, case_blocks) for case, case_blocks in cases.items()], figures


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, help="these; what the file says of others is kept")
    parser.add_argument(
        "--seconds", type=float, default=30, help="a workload's blocks take about so long, two noisy ones twice"
    )
    parser.add_argument("--runners", type=int, help="remote env runners of every workload (the paper: 8)")
    parser.add_argument("--learners", type=int, help="remote learners of every workload (the paper: 8)")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs, shared by the learners")
    parser.add_argument("--address", help="a Ray cluster's address, 'auto' for the one this machine is in")
    options = parser.parse_args()
    import ray
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # RLlib's own
    cluster = Cluster(options.runners, options.learners, options.gpus)
    quiet = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": False}
    own = {"num_cpus": 8 + 4 * ((options.runners or 0) + (options.learners or 0)), "object_store_memory": 200 << 20}
    ray.init(address=options.address, **({} if options.address else own), **quiet)
    names = options.only or list(WORKLOADS)
    results = Results(options.json, names)
    try:
        for name in names:
            results.enter(name, *_measure(name, options, cluster))
    except KeyboardInterrupt:
        print(f"Stopped: {len(results.workloads)} workloads are kept.")
    if results.workloads:
        report(options.json, results.rows, results.summary() | {"notes": NOTES})
    ray.shutdown()


if __name__ == "__main__":
    main()
