"""What the experience path adds to an iteration of DQN: by ablation, and as the spans of its stages explain it.

python -m benchmarks.exposed --json benchmarks/results/exposed.json
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.harness import arguments, report
from conduit_jax.examples import dqn


def run(env: str, sampler: str, steps: int, schedule: str = "sequential") -> dict[str, Any]:
    """Train for ``steps`` and return the latency split, microseconds an iteration."""
    result = dqn.train(dqn.settings_for(env, steps=steps, sampler=sampler, schedule=schedule))
    latency = replace(result.stats.latency, exposed=result.exposed)
    row: dict[str, Any] = {
        "env": env,
        "sampler": sampler,
        "schedule": schedule,
        "iteration_us": latency.iteration_s.p50 * 1e6,
    }
    row |= {f"{name}_us": value.p50 * 1e6 for name, value in latency.stages_s.items()}
    row |= {"path_us": latency.path_s * 1e6, "exposed_us": latency.exposed_s * 1e6}
    row |= {"exposed_by_spans_us": latency.exposed_by_spans_s * 1e6, "agree": latency.agrees()}
    print({name: round(value, 1) if isinstance(value, float) else value for name, value in row.items()}, flush=True)
    return row


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    steps = 10_000 if options.quick else 60_000
    rows = [run("cartpole", sampler, steps) for sampler in ("uniform", "prioritized")]
    fused = [run("cartpole", "uniform", steps, "fused")]
    share = max(row["exposed_us"] / row["iteration_us"] for row in rows)
    agreed = all(row["agree"] for row in rows)
    summary = {"exposed_share_max": share, "spans_agree": agreed, "exposed_fused_us": fused[0]["exposed_us"]}
    report(options.json, rows + fused, summary)


if __name__ == "__main__":
    main()
