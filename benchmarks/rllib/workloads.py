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
"""Options of ``attach`` by case; ``None``: RLlib as it is."""
PIXEL_CASES = CASES | {"granularity": {"granularity": 4, "prefetch": 0}}
ON_POLICY_CASES: dict[str, dict[str, int] | None] = {
    "stock": None,
    "sequential": {"prefetch": 0},
    "ahead": {"prefetch": 1},
    "tried": {},
}


class Workload(NamedTuple):
    """``make(conduit)`` returns RLlib's configuration; a block is ``updates`` updates of ``steps`` environment steps each.

    A block is short, so that neighbours see the same machine, and a whole number of every case's draws: none pays for another's.
    ``adopted`` is the case that ``attach`` chooses by itself for batches of this size. Learning begins after ``start`` steps.
    It is measured ``weight`` times as long as others, where the path's share is small against the noise.
    """

    make: Callable[[bool], Any]
    updates: int
    steps: int
    adopted: str = "granularity"
    start: int = 1000
    weight: float = 1.0

    @property
    def on_policy(self) -> bool:
        return self.adopted == "tried"

    @property
    def cases(self) -> dict[str, dict[str, int] | None]:
        if self.on_policy:
            return ON_POLICY_CASES
        return PIXEL_CASES if self.adopted == "overlap" else CASES


def _ppo(steps: int, minibatch: int, epochs: int) -> Any:
    from ray.rllib.algorithms.ppo.ppo import PPOConfig

    config = PPOConfig().environment("CartPole-v1")
    config.training(train_batch_size_per_learner=steps, minibatch_size=minibatch, num_epochs=epochs)
    return config.env_runners(num_env_runners=0)


def _dqn(environment: str, runners: int = 0) -> Any:
    from ray.rllib.algorithms.dqn.dqn import DQNConfig

    config = DQNConfig().environment(environment)
    buffer = {"type": "PrioritizedEpisodeReplayBuffer", "capacity": 50_000, "alpha": 0.6, "beta": 0.4}
    config.training(train_batch_size_per_learner=32, replay_buffer_config=buffer)
    return config.env_runners(num_env_runners=runners, rollout_fragment_length=4)


def _dqn_multi_agent() -> Any:
    from ray.rllib.examples.envs.classes.multi_agent import MultiAgentCartPole

    config = _dqn("CartPole-v1").environment(MultiAgentCartPole, env_config={"num_agents": 2})
    config.training(
        replay_buffer_config={**config.replay_buffer_config, "type": "MultiAgentPrioritizedEpisodeReplayBuffer"}
    )
    return config.multi_agent(policies={"0", "1"}, policy_mapping_fn=lambda agent, *_, **__: str(agent))


def _sac(environment: Any) -> Any:
    from ray.rllib.algorithms.sac.sac import SACConfig

    config = SACConfig().environment(environment)
    config.training(
        train_batch_size_per_learner=256, replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": 20_000}
    )
    return config.env_runners(num_env_runners=0, rollout_fragment_length=1)


def _pixels(config: Any, conduit: bool, size: int, continuous: bool) -> Any:
    """Let ``config`` see frames. RLlib's modules take no uint8, so its users store floats; with conduit bytes are kept."""
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    from benchmarks.rllib.pixels import Pixels
    from conduit_jax.adapters import rllib

    config.environment(
        Pixels, env_config={"size": size, "dtype": "uint8" if conduit else "float32", "continuous": continuous}
    )
    if hasattr(config, "replay_buffer_config"):
        config.training(train_batch_size_per_learner=32, replay_buffer_config={"capacity": 2000})
    last = [32, 4, 4] if size == 128 else [32, 8, 8]
    config.rl_module(
        model_config=DefaultModelConfig(
            conv_filters=[[16, 8, 8], last], conv_activation="relu", head_fcnet_hiddens=[64]
        )
    )
    return config.env_runners(env_to_module_connector=rllib.cast_observations) if conduit else config


WORKLOADS = {
    "dqn_cartpole": Workload(lambda _: _dqn("CartPole-v1"), 20, 4),
    "dqn_mountaincar": Workload(lambda _: _dqn("MountainCar-v0"), 20, 4),
    "dqn_mountaincar_2_runners": Workload(lambda _: _dqn("MountainCar-v0", 2), 10, 8, weight=2.0),
    "dqn_cartpole_multi_agent": Workload(lambda _: _dqn_multi_agent(), 20, 4),
    "sac_pendulum": Workload(lambda _: _sac("Pendulum-v1"), 10, 1),
    "dqn_pixels_128": Workload(
        lambda conduit: _pixels(_dqn("CartPole-v1"), conduit, 128, continuous=False), 12, 4, "overlap", 400
    ),
    "sac_pixels_128": Workload(
        lambda conduit: _pixels(_sac("Pendulum-v1"), conduit, 128, continuous=True), 4, 1, "overlap", 400
    ),
    "sac_pixels_256": Workload(
        lambda conduit: _pixels(_sac("Pendulum-v1"), conduit, 256, continuous=True), 4, 1, "overlap", 200, 2.0
    ),
    "ppo_cartpole": Workload(lambda _: _ppo(2000, 128, 4), 1, 2000, "tried", 0, 3.0),
    "ppo_pixels_128": Workload(
        lambda conduit: _pixels(_ppo(400, 50, 2), conduit, 128, continuous=False), 1, 400, "tried", 0
    ),
    "ppo_pixels_256": Workload(
        lambda conduit: _pixels(_ppo(200, 25, 2), conduit, 256, continuous=False), 1, 200, "tried", 0
    ),
}
"""The six of the paper's Fig. 11 that have a counterpart, in its sizes, and five more."""


class Cluster(NamedTuple):
    """Where it runs: env runners and learners of every workload in the place of its own, GPUs over all learners."""

    runners: int | None = None
    learners: int | None = None
    gpus: float = 0

    def apply(self, config: Any) -> Any:
        """Return ``config`` with as many env runners and learners."""
        if self.runners is not None:
            config.env_runners(num_env_runners=self.runners)
        if self.learners is not None:
            config.learners(num_learners=self.learners)
        if self.gpus:
            config.learners(num_gpus_per_learner=self.gpus / max(self.learners or 1, 1))
        return config


def build(
    workload: Workload, options: dict[str, int] | None, updates: int, start: int, cluster: Cluster | None = None
) -> Any:
    """Return the algorithm: an iteration of it is ``updates`` updates, learning begins after ``start`` steps."""
    config = (cluster or Cluster()).apply(workload.make(options is not None).debugging(seed=0))
    if not workload.on_policy:
        config.training(num_steps_sampled_before_learning_starts=start)
    config.reporting(min_sample_timesteps_per_iteration=updates * workload.steps, min_time_s_per_iteration=0)
    if options is not None:
        from conduit_jax.adapters import rllib

        config = rllib.attach(config, **options, observation_dtype="float32")
    return config.build_algo()
