"""A whole training against what people run today, and against itself without the plane's decisions: same networks, sizes, machine.

python -m benchmarks.end_to_end --json benchmarks/results/end_to_end.json                # pip install '.[race]'

``summary`` holds ratios of times, theirs over ours (above 1: ours is faster), and reductions of an iteration and of its exposed
latency, with 95 % intervals as ``_low`` and ``_high``: a floor is held on the lower one. A ratio is to the fastest of the peers
that reach the return that is owed, if ours does too. Peers that are not installed are named under ``missing``.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")  # the data plane may have one of its own
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import time
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import conduit_jax as conduit
from benchmarks.end_to_end_ladder import climb, ladders
from benchmarks.harness import arguments, report
from conduit_jax.examples import dqn, ppo, sac

SEEDS = 2  # of each side that are trained to the end
UPDATES = 5  # an iteration of the races of DQN
TOGETHER = conduit.Schedule(g_delivery=Fraction(UPDATES))  # an iteration's batches in one call: within max_staleness=4
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
    """Return DQN on CartPole as both sides can run it: one-step targets, one update for every step of the lanes."""
    sizes = dict(lanes=10, rollout_length=UPDATES, updates_per_rollout=UPDATES, n_step=1, placement="device")
    return dqn.settings_for(chosen.pop("env", "cartpole"), steps=steps, **(sizes | chosen))


def races(quick: bool) -> dict[str, Callable[[], Any]]:
    """Return a function a race; each raises ``ImportError`` where its peer is not installed."""

    def fused_dqn() -> Any:
        from benchmarks import end_to_end_peers, end_to_end_rejax
        from benchmarks.end_to_end_races import fused_race

        sizes = dqn_settings(200_000), dqn_settings(2_000 if quick else 10_000)
        rejax = (end_to_end_rejax.dqn_training, end_to_end_rejax.evaluated)
        peers = {"purejaxrl's manner, flashbax": end_to_end_peers.jitted_dqn, "rejax": rejax}
        return fused_race("fused_vs_jitted_dqn", dqn, sizes, peers, owed=450.0, seeds=SEEDS)

    def fused_ppo() -> Any:
        from benchmarks import end_to_end_peers, end_to_end_rejax
        from benchmarks.end_to_end_races import fused_race

        full, short = (ppo.settings_for("cartpole", steps=n) for n in (150_000, 4_096 if quick else 20_480))
        rejax = (end_to_end_rejax.ppo_training, end_to_end_rejax.evaluated)
        peers = {"purejaxrl's manner": end_to_end_peers.jitted_ppo, "rejax": rejax}
        return fused_race("fused_ppo_parity", ppo, (full, short), peers, owed=450.0, seeds=SEEDS)

    def loop(name: str, schedule: Any) -> Any:
        from benchmarks.end_to_end_races import loop_race

        return loop_race(name, dqn, dqn_settings(200_000, schedule=schedule), owed=450.0, seeds=SEEDS)

    def host_sb3() -> Any:
        from benchmarks.end_to_end_races import host_race
        from benchmarks.end_to_end_sb3 import HostPeer

        settings = dqn_settings(100_000, env="gymnasium:CartPole-v1", observation_scale=(), schedule=TOGETHER)
        peer = ("stable-baselines3", lambda settings: HostPeer("stable_baselines3", "DQN", settings))
        return host_race("host_vs_sb3", dqn, dqn.make_dqn, settings, peer, owed=450.0)

    def host_sbx() -> Any:
        from benchmarks.end_to_end_races import host_race
        from benchmarks.end_to_end_sb3 import HostPeer

        settings = sac.settings_for(
            "gymnasium:Pendulum-v1", observation_scale=(), placement="device", schedule=conduit.Schedule(g_delivery=4)
        )
        peer = ("sbx", lambda settings: HostPeer("sbx", "SAC", settings))
        return host_race("host_vs_sbx", sac, sac.make_sac, settings, peer, owed=-200.0)

    return {
        "fused_vs_jitted_dqn": fused_dqn,
        "fused_ppo_parity": fused_ppo,
        "loop_vs_flashbax_loop": lambda: loop("loop_vs_flashbax_loop", TOGETHER),
        "sequential_loop_vs_flashbax_loop": lambda: loop("sequential_loop_vs_flashbax_loop", "sequential"),
        "host_vs_sb3": host_sb3,
        "host_vs_sbx": host_sbx,
    }


def missed(summary: dict[str, Any]) -> list[str]:
    """Return the figures that miss their floors on the lower end of their interval, or have none."""
    short = []
    for name, (floor, goal) in FLOORS.items():
        low = summary.get(f"{name}_low")
        if name in summary and (low is None or low < floor):
            short.append(f"{name}: {low if low is None else round(low, 3)} against {floor} (goal {goal or floor})")
    return short


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--race", help="only the race or ladder of this name")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="rejax|gymnax|stable_baselines3|sbx|tensorflow_probability")
    quick, began = options.quick, time.perf_counter()
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {"judged": not quick, "missing": {}}

    def enter(more: list[dict[str, Any]], figures: dict[str, Any]) -> None:
        rows.extend(more)
        summary.update(figures)
        summary["missed"] = missed(summary)
        summary["seconds"] = round(time.perf_counter() - began, 1)
        report(options.json, rows, summary)  # after each: a run that is stopped leaves what it had

    for name, make in races(quick).items():
        if options.race in (None, name):
            from benchmarks.end_to_end_races import run_race

            try:
                race = make()
            except ImportError as error:
                summary["missing"][name] = str(error)
                enter([], {name: None, f"{name}_low": None, f"{name}_high": None})
                continue
            enter(*run_race(race, repeats=3 if quick else 11, block_s=0.1 if quick else 0.6, judge=not quick))
    for name, make in ladders().items():
        if options.race in (None, name):
            enter(*climb(make(), repeats=4 if quick else 12, block_s=0.05 if quick else 0.3))


if __name__ == "__main__":
    main()
