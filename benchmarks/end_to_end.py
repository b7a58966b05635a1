"""A whole training against what people run today, and against itself without the plane's decisions: same networks, sizes, machine.

python -m benchmarks.end_to_end --json benchmarks/results/end_to_end.json                # pip install '.[race]'
python -m benchmarks.end_to_end --json benchmarks/results/end_to_end.json --only dqn sac # the file keeps the other parts

Each part (a race or a ladder) is written when it ends, so a run that is stopped leaves what it had; ``parts`` says of each how
long it took, the load at its end, and whether it was ``--quick``: no return is judged in those. ``summary`` holds
ratios of times, theirs over ours (above 1: ours is faster), and reductions of an iteration and of its exposed latency, with
95 % intervals as ``_low`` and ``_high``: a floor is held on the lower one. A ratio is to the fastest of the peers that reach
the return that is owed, if ours does too. Peers that are not installed are named under ``missing``.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")  # the data plane may have one of its own
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import re
import time
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import conduit_jax as conduit
from benchmarks.end_to_end_ladder import FIGURES, climb, ladders
from benchmarks.harness import arguments, earlier_rows, earlier_summary, report
from conduit_jax.examples import dqn, ppo, sac

SEEDS = 4  # of each side that are trained to the end
UPDATES = 5  # an iteration of the races of DQN
TOGETHER = conduit.Schedule(g_delivery=Fraction(UPDATES))  # an iteration's batches in one call: within max_staleness=4
RACES = (
    "fused_vs_jitted_dqn",
    "fused_ppo_parity",
    "loop_vs_flashbax_loop",
    "sequential_loop_vs_flashbax_loop",
    "host_vs_sb3",
    "host_vs_sbx",
)
FLOORS = {
    "fused_vs_jitted_dqn": (1.0, 1.2),
    "fused_ppo_parity": (0.95, None),
    "loop_vs_flashbax_loop": (1.2, 1.4),
    "host_vs_sb3": (1.3, None),
    "host_vs_sbx": (1.3, None),
    "exposed_of_possible_dqn": (0.8, None),
    "exposed_of_possible_sac": (0.8, None),
    "exposed_of_possible_ppo": (0.8, None),
}


def dqn_settings(steps: int, **chosen: Any) -> dqn.Settings:
    """Return DQN on CartPole as both sides can run it: one-step targets, one update for every step of the lanes.

    With the example's own sizes and one-step targets a third of the seeds lose what they had learned, on either side and
    alike; twice the updates a step, values near 1 and a slower target keep it.
    """
    sizes: dict[str, Any] = dict(lanes=5, rollout_length=UPDATES, updates_per_rollout=UPDATES, n_step=1)
    steady: dict[str, Any] = dict(learning_rate=1e-3, reward_scale=0.05, polyak=0.01)
    return dqn.settings_for(
        chosen.pop("env", "cartpole"), steps=steps, **(sizes | steady | {"placement": "device"} | chosen)
    )


def races(quick: bool) -> dict[str, Callable[[], Any]]:
    """Return a function a race; each raises ``ImportError`` where its peer is not installed."""

    def fused_dqn() -> Any:
        from benchmarks import end_to_end_peers, end_to_end_rejax
        from benchmarks.end_to_end_races import fused_race

        sizes = dqn_settings(100_000), dqn_settings(2_000 if quick else 5_000)
        rejax = (end_to_end_rejax.dqn_training, end_to_end_rejax.evaluated)
        peers = {"purejaxrl's manner, flashbax": end_to_end_peers.jitted_dqn, "rejax": rejax}
        return fused_race("fused_vs_jitted_dqn", dqn, sizes, peers, owed=450.0, seeds=SEEDS)

    def fused_ppo() -> Any:
        from benchmarks import end_to_end_peers, end_to_end_rejax
        from benchmarks.end_to_end_races import fused_race

        full, short = (ppo.settings_for("cartpole", steps=n) for n in (100_000, 4_096 if quick else 8_192))
        rejax = (end_to_end_rejax.ppo_training, end_to_end_rejax.evaluated)
        peers = {"purejaxrl's manner": end_to_end_peers.jitted_ppo, "rejax": rejax}
        return fused_race("fused_ppo_parity", ppo, (full, short), peers, owed=450.0, seeds=SEEDS)

    def loop(name: str, schedule: Any) -> Any:
        from benchmarks.end_to_end_races import loop_race

        return loop_race(name, dqn, dqn_settings(100_000, schedule=schedule), owed=450.0, seeds=SEEDS)

    def host_sb3() -> Any:
        from benchmarks.end_to_end_races import host_race
        from benchmarks.end_to_end_sb3 import HostPeer

        settings = dqn_settings(100_000, env="gymnasium:CartPole-v1", observation_scale=(), schedule=TOGETHER)
        peer = ("stable-baselines3", lambda settings: HostPeer("stable_baselines3", "DQN", settings))
        return host_race("host_vs_sb3", dqn, dqn.make_dqn, settings, peer, owed=450.0)

    def host_sbx() -> Any:
        from benchmarks.end_to_end_races import host_race
        from benchmarks.end_to_end_sb3 import HostPeer

        # sbx draws all of an iteration's 16 batches before its first update: 8 here, the most a call may draw
        options: dict[str, Any] = dict(max_staleness=7, schedule=conduit.Schedule(g_delivery=8))
        settings = sac.settings_for("gymnasium:Pendulum-v1", observation_scale=(), placement="device", **options)
        peer = ("sbx", lambda settings: HostPeer("sbx", "SAC", settings))
        return host_race("host_vs_sbx", sac, sac.make_sac, settings, peer, owed=-200.0)

    made = (
        fused_dqn,
        fused_ppo,
        lambda: loop("loop_vs_flashbax_loop", TOGETHER),
        lambda: loop("sequential_loop_vs_flashbax_loop", "sequential"),
        host_sb3,
        host_sbx,
    )
    return dict(zip(RACES, made, strict=True))


def missed(summary: dict[str, Any]) -> list[str]:
    """Return the figures that miss their floors on the lower end of their interval, or have none."""
    short = []
    for name, (floor, goal) in FLOORS.items():
        low = summary.get(f"{name}_low")
        if name in summary and (low is None or low < floor):
            short.append(f"{name}: {low if low is None else round(low, 3)} against {floor} (goal {goal or floor})")
    return short


def kept(summary: dict[str, Any], part: str) -> dict[str, Any]:
    """Return ``summary`` without what it says of ``part``."""
    own = {part, *(f"{figure}_{part}" for figure in FIGURES)}
    ends = re.compile("_(low|high|peer|not_counted|why)$")
    missing, parts = ({k: v for k, v in summary.get(key, {}).items() if k != part} for key in ("missing", "parts"))
    rest = {name: value for name, value in summary.items() if ends.sub("", name) not in own}
    return rest | {"missing": missing, "parts": parts}


def run_part(name: str, *, quick: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows and figures of the race or ladder ``name``; ``ImportError`` where its peer is not installed."""
    if name in RACES:
        from benchmarks.end_to_end_races import run_race

        # equal bits are learned in sequential order: that race is only timed
        judge = not quick and not name.startswith("sequential")
        return run_race(races(quick)[name](), repeats=3 if quick else 9, block_s=0.1 if quick else 0.4, judge=judge)
    return climb(ladders()[name](), repeats=4 if quick else 10, block_s=0.05 if quick else 0.25)


def main() -> None:
    parts = [*RACES, *ladders()]
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=parts, help="these parts; what the file says of others is kept")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="rejax|gymnax|stable_baselines3|sbx|tensorflow_probability")
    rows = earlier_rows(options.json) if options.only else []
    summary = earlier_summary(options.json) if options.only else {}
    for name in options.only or parts:
        began, why = time.perf_counter(), {}
        try:
            more, figures = run_part(name, quick=options.quick)
        except ImportError as error:
            why, more = {name: str(error)}, []
            figures = {f"{name}{end}": None for end in ("", "_low", "_high")}
        rows = [row for row in rows if name not in (row.get("race"), row.get("ladder"))] + more
        summary = kept(summary, name) | figures
        summary["missing"] |= why
        told = {"seconds": round(time.perf_counter() - began, 1), "load_average": os.getloadavg()[0]}
        summary["parts"] |= {name: told | {"quick": options.quick}}
        summary["missed"] = missed(summary)
        report(options.json, rows, summary)


if __name__ == "__main__":
    main()
