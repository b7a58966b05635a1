"""What a plane costs beyond the bare jitted calls: push + pull + priorities with tiny data, against the same programs by hand.

python -m benchmarks.overhead --json results/overhead.json
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import conduit_jax as conduit
from benchmarks.harness import arguments, interleave, report

OWED_US = 40.0


def make_plane(sampler: Any) -> tuple[conduit.ExperiencePlane, Any]:
    """Return a plane over tiny transitions, filled and ready, and the rollout it was filled with."""
    plane = conduit.ExperiencePlane(
        algorithm=conduit.OffPolicy(batch_size=32),
        replay=conduit.ReplayConfig(capacity=1024, min_size=32, sampler=sampler),
        schedule="sequential",
    )
    rollout = {
        "observation": jnp.zeros((4, 8, 4)),
        "action": jnp.zeros((4, 8), jnp.int32),
        "reward": jnp.zeros((4, 8)),
        "discount": jnp.ones((4, 8)),
    }
    for _ in range(8):
        plane.push(rollout)
    return plane, rollout


def through_plane(plane: conduit.ExperiencePlane, rollout: Any, priorities: Any) -> Any:
    """Return a case that pushes, pulls and, where ``priorities`` are given, updates."""

    def run(calls: int) -> None:
        for _ in range(calls):
            plane.push(rollout)
            sample = plane.pull()
            if priorities is not None:
                plane.update_priorities(sample.info, priorities)
        jax.block_until_ready(plane._tables["experience"].pipeline.state)

    return run


def by_hand(plane: conduit.ExperiencePlane, rollout: Any, priorities: Any) -> Any:
    """Return the same calls of the same compiled programs, with nothing around them."""
    pipeline = plane._tables["experience"].pipeline
    programs = pipeline._programs
    ingest, deliver = programs.ingest.compiled, programs.deliver.compiled
    update = programs.update_priorities.compiled
    (storage, control), carry, key = pipeline.state, pipeline._carry, pipeline._key
    kept = [storage, control, carry]

    def run(calls: int) -> None:
        storage, control, carry = kept
        version = np.uint32(0)
        for number in range(calls):
            storage, control, carry, _ = ingest(storage, control, carry, rollout, (), version)
            control, sample = deliver(control, storage, key, np.uint32(number), ())
            if priorities is not None:
                control, _ = update(control, sample.info, priorities)
        jax.block_until_ready(control)
        kept[:] = storage, control, carry

    return run


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    calls, repeats = (200, 3) if options.quick else (2000, 15)
    rows, worst = [], 0.0
    for name, sampler in (("uniform", conduit.Uniform()), ("prioritized", conduit.Prioritized())):
        priorities = jnp.ones((32,)) if name == "prioritized" else None
        (plane, rollout), (other, _) = make_plane(sampler), make_plane(sampler)
        timings = interleave(
            {"plane": through_plane(plane, rollout, priorities), "bare": by_hand(other, rollout, priorities)},
            calls=calls,
            repeats=repeats,
        )
        differences = np.subtract(timings["plane"].repeats, timings["bare"].repeats) * 1e6
        row = {
            "case": name,
            "plane_us": timings["plane"].best * 1e6,
            "bare_us": timings["bare"].best * 1e6,
            "overhead_us": (timings["plane"].best - timings["bare"].best) * 1e6,
            "overhead_median_us": float(np.median(differences)),
        }
        rows.append(row)
        worst = max(worst, row["overhead_us"])
        print({key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()})
    report(options.json, rows, {"overhead_us": worst, "owed_us": OWED_US, "met": worst <= OWED_US})


if __name__ == "__main__":
    main()
