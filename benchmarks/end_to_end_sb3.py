"""Upstream Stable-Baselines3 and sbx on Gymnasium's environments, with the sizes and learning rates of our DQN and SAC.

Both collect ``rollout_length`` steps of all lanes and then make ``updates_per_rollout`` updates, as our loop does. Their losses are
their own: DQN's is Huber's, without double Q-learning. sbx 0.28.0's DQN diverged on CartPole with these sizes (values of
20,000 where 100 is the most), so the race with sbx is SAC's.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import importlib
from typing import Any

import gymnasium
import numpy as np


class Scaled(gymnasium.RewardWrapper):
    """Rewards times ``scale``, as our targets have them; episodes' returns are counted beneath it."""

    def __init__(self, env: gymnasium.Env, scale: float):
        super().__init__(env)
        self._scale = scale

    def reward(self, reward: Any) -> float:
        return self._scale * float(reward)


class HostPeer:
    """DQN or SAC (``algorithm``) of ``library``, ``"stable_baselines3"`` or ``"sbx"``."""

    def __init__(self, library: str, algorithm: str, settings: Any):
        import torch
        from stable_baselines3.common.env_util import make_vec_env

        torch.set_num_threads(1)
        self.settings = settings
        name = settings.env.removeprefix("gymnasium:")
        scaled = {"wrapper_class": Scaled, "wrapper_kwargs": {"scale": settings.reward_scale}}
        env = make_vec_env(name, n_envs=settings.lanes, seed=settings.seed, **scaled)
        options: dict[str, Any] = dict(
            learning_rate=settings.learning_rate,
            buffer_size=settings.capacity,
            learning_starts=settings.min_size,
            batch_size=settings.batch_size,
            gamma=settings.discount,
            train_freq=(settings.rollout_length, "step"),
            gradient_steps=settings.updates_per_rollout,
            tau=settings.polyak,
            policy_kwargs={"net_arch": list(settings.hidden)},
            seed=settings.seed,
            device="cpu",
        )
        if algorithm == "DQN":
            options |= dict(
                learning_rate=lambda left: left * settings.learning_rate,
                max_grad_norm=settings.gradient_clip,
                target_update_interval=settings.lanes,  # counted in single steps: at every step of the lanes
                exploration_fraction=settings.exploration_fraction,
                exploration_final_eps=settings.epsilon_final,
            )
        self.model = getattr(importlib.import_module(library), algorithm)("MlpPolicy", env, **options)

    def run(self, iterations: int) -> None:
        """Run that many iterations, each of ``lanes * rollout_length`` steps, on from where the last ones ended."""
        steps = iterations * self.settings.lanes * self.settings.rollout_length
        self.model.learn(steps, reset_num_timesteps=False, log_interval=10**9)

    def train(self) -> float:
        """Train for all of the settings' steps and return the final policy's mean return, greedy, on fresh episodes."""
        from stable_baselines3.common.evaluation import evaluate_policy

        self.model.learn(self.settings.steps, log_interval=10**9)
        env, episodes = self.model.get_env(), self.settings.evaluation_episodes
        returns, _ = evaluate_policy(self.model, env, episodes, return_episode_rewards=True, warn=False)
        return float(np.mean(returns))
