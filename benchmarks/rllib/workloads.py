"""What is trained, and with what in RLlib's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

CASES: dict[str, dict[str, int] | None] = {
    "stock": None,
    "sequential": {"max_staleness": 0},
    "granularity": {"granularity": 5, "prefetch": 0},
    "overlap": {"granularity": 2, "prefetch": 1},
}
"""Options of ``attach`` by case; ``None``: RLlib as it is. For batches this small ``attach`` itself takes ``granularity``."""
ADOPTED = "granularity"


class Workload(NamedTuple):
    """``make`` returns RLlib's configuration; a block is ``updates`` updates of ``steps`` environment steps each."""

    make: Callable[[], Any]
    updates: int
    steps: int
    runners: int = 0


def _dqn(environment: str, runners: int) -> Any:
    from ray.rllib.algorithms.dqn.dqn import DQNConfig

    config = DQNConfig().environment(environment)
    buffer = {"type": "PrioritizedEpisodeReplayBuffer", "capacity": 50_000, "alpha": 0.6, "beta": 0.4}
    config.training(train_batch_size_per_learner=32, replay_buffer_config=buffer)
    return config.env_runners(num_env_runners=runners, rollout_fragment_length=4)


def _sac(environment: str, runners: int) -> Any:
    from ray.rllib.algorithms.sac.sac import SACConfig

    config = SACConfig().environment(environment)
    config.training(
        train_batch_size_per_learner=256, replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": 20_000}
    )
    return config.env_runners(num_env_runners=runners, rollout_fragment_length=1)


WORKLOADS = {
    "dqn_cartpole": Workload(lambda: _dqn("CartPole-v1", 0), 150, 4),
    "dqn_mountaincar": Workload(lambda: _dqn("MountainCar-v0", 0), 150, 4),
    "dqn_mountaincar_2_runners": Workload(lambda: _dqn("MountainCar-v0", 2), 100, 8, 2),
    "sac_pendulum": Workload(lambda: _sac("Pendulum-v1", 0), 30, 1),
}


def build(workload: Workload, options: dict[str, int] | None, updates: int, start: int) -> Any:
    """Return the algorithm: an iteration of it is ``updates`` updates, learning begins after ``start`` steps."""
    config = workload.make().debugging(seed=0)
    config.training(num_steps_sampled_before_learning_starts=start)
    config.reporting(min_sample_timesteps_per_iteration=updates * workload.steps, min_time_s_per_iteration=0)
    if options is not None:
        from conduit_jax.adapters import rllib

        config = rllib.attach(config, **options)
    return config.build_algo()
