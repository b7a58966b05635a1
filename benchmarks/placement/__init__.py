"""Placement measured: what the planner predicts and chooses against what every feasible placement really takes.

    python -m benchmarks.placement [--quick] --json benchmarks/results/placement.json

``native``: eight virtual devices of one process, real copies. ``emulated``: the same planes, whose transfers take the time of
an A100 node's links, all of them slowed down alike so that they outweigh this machine's own work.
"""
