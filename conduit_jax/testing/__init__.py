"""What users test their own code with too: facts of compiled programs, traces, live memory, injected delays,
emulated links.

    conduit.testing.assert_in_place(train_step, learner, batch)      # donated buffers are reused, nothing is copied
    conduit.testing.compiled_facts(update, state).collectives         # Counter({"all-reduce": 1})
    with conduit.testing.count_traces() as traces: ...                # traces.count == 0 in a steady state
    with conduit.testing.delayed(plane, pause=time.sleep): ...        # same bits, whatever the timing
    with conduit.testing.shaped_links(topology, pause=time.sleep, clock=time.perf_counter).on(plane): ...

These are facts of the program, so they hold on any machine; nothing here measures time.
"""

from __future__ import annotations

from conduit_jax.testing.delays import delayed
from conduit_jax.testing.links import ShapedLinks, shaped_links
from conduit_jax.testing.programs import CompiledFacts, assert_in_place, compiled_facts
from conduit_jax.testing.steady import TraceCount, count_traces, live_buffer_bytes

__all__ = [
    "CompiledFacts",
    "ShapedLinks",
    "TraceCount",
    "assert_in_place",
    "compiled_facts",
    "count_traces",
    "delayed",
    "live_buffer_bytes",
    "shaped_links",
]
