"""The trace of growing items, tiny: every policy does what it is there to show, and nothing is lost."""

from __future__ import annotations

import pytest

from benchmarks import migration_trace
from conduit_jax.sharding.topology import load_topology


def test_a_tiny_trace_moves_where_it_must_loses_nothing_and_runs_out_where_it_may_not_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(migration_trace, "CAPACITY", 192)
    topology = load_topology("a100_80gb_x8")
    wires = migration_trace.Wires(topology, slower=1)
    policies = migration_trace.policies(topology, limit=int(1.2 * 192 * (8 * 128 + 12)))
    trace = migration_trace.run(policies["adaptive"], wires, [128, 200])
    assert trace.completed
    assert (trace.lost_items, len(trace.iterations)) == (0, 2)
    assert trace.placements == ["device", "shared:2"]
    assert [move.reason for move in trace.moves] == ["growth"]
    assert trace.compiled == 0
    anew = migration_trace.run(policies["adaptive"], wires, [128, 200], "drop")
    assert (anew.lost_items, anew.placements, anew.moves[-1].bytes) == (0, trace.placements, 0)
    greedy = migration_trace.run(policies["greedy"], wires, [128, 200])
    assert (greedy.completed, greedy.lost_items, len(greedy.iterations)) == (False, 0, 1)
