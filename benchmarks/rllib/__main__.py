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
import warnings
from typing import Any

from benchmarks.harness import arguments, report
from benchmarks.rllib.probes import Probe
from benchmarks.rllib.summary import as_row, of_workload, summarize
from benchmarks.rllib.workloads import WORKLOADS, Workload, build

NOTES = (
    "path: the buffer's add, sample, get_metrics and update_priorities, and the making of the learner's batch (connector "
    "pipeline, conversion); rollout: sample and get_metrics of the env runners, with remote runners the waiting too",
    "cpu is CPU time of the driver's main thread: what XLA computes on threads of its own is not in it, but is in wall",
    "summary figures are lower bounds of 95 % intervals of medians over neighbouring blocks; iteration_of_share are medians",
    "exposed_reduction is by CPU time, iteration_reduction by wall time",
    "sequential: no staleness; granularity: 5 batches a call; overlap: 2 batches a call, one call ahead. A workload's figures "
    "are those of the case attach() chooses by itself: granularity for small batches, overlap for pixels",
    "pixels: B = 32, two convolutions; RLlib keeps them as float32, as its modules take no uint8, conduit as uint8, cast at "
    "delivery",
    "PPO's exposed_reduction is without the value function's forward pass, which is the same in both and not streamed: so "
    "value_forward_hidden is absent; also absent, because not measured: operations counted. Learning by seed: benchmarks.rllib.learning",
)


def run_workload(workload: Workload, blocks: int, updates: int, start: int) -> dict[str, list[dict[str, Any]]]:
    """Return the blocks of every case, the first one of each left out: it compiles and fills the buffer."""
    probes = {case: Probe(build(workload, options, updates, start)) for case, options in workload.cases.items()}
    found: dict[str, list[dict[str, Any]]] = {case: [] for case in probes}
    for probe in probes.values():
        for _ in range((4 if workload.on_policy else 2) + start // (updates * workload.steps)):
            probe.block()
    for number in range(blocks):
        gc.collect()
        for case in list(probes)[:: 1 if number % 2 == 0 else -1]:
            found[case].append(probes[case].block())
    for probe in probes.values():
        probe.algo.stop()
    return found


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, help="all unless given")
    parser.add_argument("--blocks", type=int, default=12, help="a case's blocks")
    options = parser.parse_args()
    import ray
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # RLlib's own
    names = options.workloads or (["dqn_cartpole"] if options.quick else list(WORKLOADS))
    ray.init(
        num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=200 << 20
    )
    rows, found = [], {}
    for name in names:
        workload = WORKLOADS[name]
        updates = min(10, workload.updates) if options.quick else workload.updates
        blocks, start = (2, 50) if options.quick else (options.blocks, workload.start)
        cases = run_workload(workload, blocks, updates, start)
        rows += [as_row(name, case, case_blocks) for case, case_blocks in cases.items()]
        found[name] = of_workload(cases, workload.adopted, on_policy=workload.on_policy)
        figures = found[name]
        print(f"{name}: exposed {figures['exposed_reduction']}, iteration {figures['iteration_reduction']}", flush=True)
    report(options.json, rows, summarize(found) | {"notes": NOTES})
    ray.shutdown()


if __name__ == "__main__":
    main()
