"""PettingZoo's parallel environments as actors: every agent of every copy is a lane of a numpy rollout.

Nothing of PettingZoo is imported: an environment is whatever has ``possible_agents``, ``agents``, ``reset``, ``step``,
``observation_space(agent)`` and ``action_space(agent)`` as its parallel interface says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from conduit_jax.adapters.gymnasium_actions import read_actions
from conduit_jax.errors import ConfigError, check_integer, refuse

if TYPE_CHECKING:
    from conduit_jax.types import Rollout

__all__ = ["ParallelActor"]

PolicyStep = Callable[[np.ndarray], Any]


class ParallelActor:
    """Acts with one policy for all agents in ``num_lanes`` copies of a parallel environment.

    Lane ``copy * agents + number`` is the agent of that number in ``possible_agents``. An agent that has ended while others
    of its copy go on keeps its lane: it sees zeros, is rewarded with 0 and is terminated at every step until the copy is
    reset, so nothing is bootstrapped from those rows. A copy is reset in the step that ended its last agent.

    Attributes:
        agents: their names, in the order of the lanes.
        lanes: lanes of a rollout.
        observation_shape, observation_dtype, actions: of one agent; all agents are alike.
    """

    def __init__(self, make: Callable[[], Any], num_lanes: int, length: int, seed: int = 0) -> None:
        """Build and reset the copies; copy i is seeded ``seed + i`` once.

        Raises:
            ConfigError: an argument is out of range, or agents differ in what they see or do.
        """
        check_integer("num_lanes", num_lanes, 1)
        check_integer("length", length, 1)
        check_integer("seed", seed, 0)
        self.length = length
        self._copies = [make() for _ in range(num_lanes)]
        self.agents = tuple(self._copies[0].possible_agents)
        self.lanes = num_lanes * len(self.agents)
        self._read_spaces(self._copies[0])
        self._now = np.zeros((num_lanes, len(self.agents), *self.observation_shape), self.observation_dtype)
        self._playing = np.ones((num_lanes, len(self.agents)), bool)
        for number, copy in enumerate(self._copies):
            self._begin(number, copy.reset(seed=seed + number)[0])

    def rollout(self, policy_step: PolicyStep) -> Rollout:
        """Act for ``length`` steps and return them, time-major ``(length, lanes, ...)``, as numpy arrays nothing writes again.

        Args:
            policy_step: ``(observations) -> actions``, observations ``(lanes, ...)``, not to be written to.

        Raises:
            SpecError, ValueRefusedError: actions that do not fit, or do not exist.
        """
        from conduit_jax.types import Rollout

        copies, agents = self._playing.shape
        lead = (self.length, copies, agents)
        seen = np.zeros((*lead, *self.observation_shape), self.observation_dtype)
        final, reward = np.zeros_like(seen), np.zeros(lead, np.float32)
        terminated, truncated = np.ones(lead, bool), np.zeros(lead, bool)
        action = np.zeros((*lead, *self.actions.shape), self.actions.dtype)
        for t in range(self.length):
            seen[t] = self._now
            chosen = self.actions.checked(policy_step(seen[t].reshape(self.lanes, *self.observation_shape)), self.lanes)
            action[t] = chosen.reshape(action[t].shape)
            for number in range(copies):
                row = (final[t, number], reward[t, number], terminated[t, number], truncated[t, number])
                self._step(number, self.actions.for_environment(action[t, number]), row)

        def as_lanes(array: np.ndarray) -> np.ndarray:
            return array.reshape(self.length, self.lanes, *array.shape[3:])

        fields: dict[str, Any] = {
            "observation": as_lanes(seen),
            "action": as_lanes(action),
            "reward": as_lanes(reward),
            "terminated": as_lanes(terminated),
            "truncated": as_lanes(truncated),
            "final_observation": as_lanes(final),
            "bootstrap_observation": self._now.reshape(self.lanes, *self.observation_shape).copy(),
        }
        return Rollout(**fields)

    def close(self) -> None:
        """End the environments."""
        for copy in self._copies:
            copy.close()

    def _read_spaces(self, env: Any) -> None:
        observations = [env.observation_space(agent) for agent in self.agents]
        actions = [env.action_space(agent) for agent in self.agents]
        if any(space != observations[0] for space in observations) or any(space != actions[0] for space in actions):
            refuse(
                ConfigError,
                "Agents differ in what they see or do.",
                got=dict(zip(self.agents, zip(observations, actions, strict=True), strict=True)),
                want="one observation and one action space for all",
                fix="an actor and a table for each kind of agent",
            )
        self.observation_shape, dtype = tuple(observations[0].shape), np.dtype(observations[0].dtype)
        self.observation_dtype = np.dtype(np.float32) if dtype == np.float64 else dtype
        self.actions = read_actions(type(env).__name__, actions[0])

    def _begin(self, number: int, observations: dict[str, Any]) -> None:
        self._playing[number] = True
        for index, agent in enumerate(self.agents):
            self._now[number, index] = observations[agent]

    def _step(self, number: int, actions: np.ndarray, row: tuple[np.ndarray, ...]) -> None:
        """Step one copy and fill in what came of it; the lanes of agents that had ended stay as they were allocated."""
        copy, (final, reward, terminated, truncated) = self._copies[number], row
        playing = [index for index, agent in enumerate(self.agents) if agent in copy.agents]
        taken = {self.agents[index]: actions[index] for index in playing}
        observations, rewards, terminations, truncations, _ = copy.step(taken)
        for index in playing:
            agent = self.agents[index]
            final[index], reward[index] = observations[agent], rewards[agent]
            terminated[index], truncated[index] = terminations[agent], truncations[agent]
            ended = terminations[agent] or truncations[agent]
            self._now[number, index] = 0 if ended else observations[agent]
            self._playing[number, index] = not ended
        if not copy.agents:
            self._begin(number, copy.reset()[0])
