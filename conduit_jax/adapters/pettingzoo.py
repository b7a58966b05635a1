"""PettingZoo's parallel environments as actors: every agent of every copy is a lane of a numpy rollout.

``ParallelActor`` imports nothing of PettingZoo: an environment is whatever has ``possible_agents``, ``agents``, ``reset``,
``step``, ``observation_space(agent)`` and ``action_space(agent)`` as its parallel interface says. ``make_parallel`` finds one
by name: ``conduit-jax train dqn --env pettingzoo:butterfly/knights_archers_zombies-v11``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from conduit_jax.adapters.gymnasium_spaces import read_actions, read_observations
from conduit_jax.adapters.host_episodes import Episodes, HostActor
from conduit_jax.adapters.optional import required
from conduit_jax.errors import ConfigError, LifecycleError, SpecError, check_choice, check_integer, refuse

if TYPE_CHECKING:
    from conduit_jax.types import Rollout

__all__ = ["ParallelActor", "make_parallel"]

PolicyStep = Callable[[np.ndarray], Any]
UNLIMITED_EVALUATION_STEPS = 100_000


def make_parallel(name: str) -> Callable[[], Any]:
    """Return what builds a registered id, ``"butterfly/pistonball-v6"``, or a module's ``parallel_env``, ``"mpe2.simple_spread_v3"``.

    Raises:
        ConfigError: PettingZoo, the environment (with the nearest name) or what it needs is missing, or it is not a parallel one.
    """
    pettingzoo = required("pettingzoo", "PettingZoo", "pettingzoo")
    if "/" in name:
        known = getattr(pettingzoo, "parallel_registry", None)
        if known is None:
            fix = "pip install 'conduit_jax[pettingzoo]', or name a module"
            refuse(ConfigError, "This PettingZoo has no ids.", got=name, want="PettingZoo 1.27 or later", fix=fix)
        check_choice("PettingZoo environment", name, known)
        return functools.partial(_make_registered, name)
    try:
        module = importlib.import_module(name)
    except (ImportError, ValueError) as error:  # ValueError: an empty name
        want, fix = "an id, or a module with parallel_env", str(error)
        refuse(ConfigError, "Unknown PettingZoo environment.", got=repr(name), want=want, fix=fix)
    if not hasattr(module, "parallel_env"):
        refuse(ConfigError, f"{name} has no parallel environment.", want="a module with parallel_env")
    return module.parallel_env


def _make_registered(name: str) -> Any:
    pettingzoo = required("pettingzoo", "PettingZoo", "pettingzoo")
    try:
        return pettingzoo.make("parallel", name)
    except ImportError as error:
        fix = str(error)
    family = name.partition("/")[0]
    refuse(ConfigError, f"{name} needs more than PettingZoo.", want=f"what pettingzoo[{family}] installs", fix=fix)


class ParallelActor(HostActor):
    """Acts with one policy for all agents in ``num_lanes`` copies of a parallel environment.

    Lane ``copy * agents + number`` is the agent of that number in ``possible_agents``. An agent that does not play (it has
    ended while others of its copy go on, or has not joined yet) keeps its lane: it sees zeros, is rewarded with 0 and is
    terminated at every step, so nothing is bootstrapped from those rows. A copy is reset in the step that ended its last
    agent. Dtypes and actions are those of a ``GymnasiumActor``.

    Attributes:
        agents: their names, in the order of the lanes.
        lanes: lanes of a rollout.
        observation_shape, observation_dtype, actions: of one agent; all agents are alike. The interface declares no time limit.
    """

    def __init__(self, make: Callable[[], Any], num_lanes: int, length: int, seed: int = 0) -> None:
        """Build and reset the copies; copy i is seeded ``seed + i`` once.

        Raises:
            ConfigError: an argument is out of range, the environment does not name its agents beforehand, or they differ
                in what they see or do.
        """
        check_integer("num_lanes", num_lanes, 1)
        check_integer("length", length, 1)
        check_integer("seed", seed, 0)
        self.length, self._make, self._seed = length, make, seed
        self._copies = [make() for _ in range(num_lanes)]
        self._closed = False
        self.agents = _agents_of(self._copies[0])
        self.lanes = num_lanes * len(self.agents)
        self._read_spaces(self._copies[0])
        self._now = np.zeros((num_lanes, len(self.agents), *self.observation_shape), self.observation_dtype)
        self._playing = np.zeros((num_lanes, len(self.agents)), bool)
        self._reset_all()
        self._episodes = Episodes(self.lanes)

    def rollout(self, policy_step: PolicyStep) -> Rollout:
        """Act for ``length`` steps and return them, time-major ``(length, lanes, ...)``, as numpy arrays nothing writes again.

        Args:
            policy_step: ``(observations) -> actions``, or ``-> (actions, extras)``: observations ``(lanes, ...)``, not to be
                written to; ``extras`` a dict of ``(lanes, ...)`` arrays to keep.

        Raises:
            LifecycleError: the actor is closed. SpecError, ValueRefusedError: actions that do not fit, or do not exist.
        """
        from conduit_jax.types import Rollout

        self._check_open()
        copies, agents = self._playing.shape
        lead = (self.length, copies, agents)
        seen = np.zeros((*lead, *self.observation_shape), self.observation_dtype)
        final, reward = np.zeros_like(seen), np.zeros(lead, np.float32)
        terminated, truncated = np.ones(lead, bool), np.zeros(lead, bool)
        action = np.zeros((*lead, *self.actions.shape), self.actions.dtype)
        extras: list[dict[str, np.ndarray]] = []
        for t in range(self.length):
            seen[t], played = self._now, self._playing.copy()
            chosen, extra = self._act(policy_step, seen[t])
            action[t] = chosen
            extras.append(extra)
            for number in range(copies):
                row = (final[t, number], reward[t, number], terminated[t, number], truncated[t, number])
                self._step(number, self.actions.for_environment(action[t, number]), row)
            ended = (terminated[t] | truncated[t]) & played
            self._episodes.record(reward[t].reshape(-1), ended.reshape(-1), played.reshape(-1))

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
        if extras[0]:
            fields["extras"] = {name: np.stack([extra[name] for extra in extras]) for name in extras[0]}
        return Rollout(**fields)

    def evaluate(self, policy_step: PolicyStep, episodes: int = 20, seed: int = 0) -> np.ndarray:
        """Return the undiscounted returns of ``episodes`` episodes, float32 ``(episodes,)``: each the mean over its agents.

        Episode i is seeded ``seed + i``, in copies of its own: training is not disturbed, and the policy sees the shapes it knows.

        Raises:
            ConfigError: ``episodes`` or ``seed`` is out of range, or an episode does not end. Others as ``rollout``.
        """
        check_integer("episodes", episodes, 1)
        check_integer("seed", seed, 0)
        self._check_open()
        copies = len(self._copies)
        returns: list[np.ndarray] = []
        for first in range(0, episodes, copies):
            other = ParallelActor(self._make, copies, 1, seed + first)
            try:
                returns.append(other._play_once(policy_step))
            finally:
                other.close()
        return np.concatenate(returns)[:episodes]

    def close(self) -> None:
        """End the environments. Closing twice is harmless."""
        if not self._closed:
            self._closed = True
            for copy in self._copies:
                copy.close()

    def _play_once(self, policy_step: PolicyStep) -> np.ndarray:
        """Play every copy's first episode to its end; return the agents' mean returns, float32 ``(copies,)``."""
        copies, agents = self._playing.shape
        returns, over = np.zeros((copies, agents), np.float32), np.zeros(copies, bool)
        for _ in range(UNLIMITED_EVALUATION_STEPS):
            action, _ = self._act(policy_step, self._now.copy())
            for number in np.flatnonzero(~over).tolist():
                row = (np.zeros_like(self._now[number]), np.zeros(agents, np.float32), *np.ones((2, agents), bool))
                over[number] = self._step(number, self.actions.for_environment(action[number]), row)
                returns[number] += row[1]
            if over.all():
                return returns.mean(axis=1)
        refuse(ConfigError, "An evaluation episode did not end.", got=f"{UNLIMITED_EVALUATION_STEPS} steps")

    def _act(self, policy_step: PolicyStep, seen: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return checked actions ``(copies, agents, ...)``, and what else the policy said of each lane."""
        output = policy_step(seen.reshape(self.lanes, *self.observation_shape))
        chosen, extras = self.actions.read_policy(output, self.lanes)
        return chosen.reshape(*self._playing.shape, *self.actions.shape), extras

    def _check_open(self) -> None:
        if self._closed:
            refuse(LifecycleError, "The actor is closed.", fix="build a new ParallelActor")

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
        name = type(env).__name__
        self.observation_shape, self.observation_dtype = read_observations(name, observations[0])
        self.actions = read_actions(name, actions[0])

    def _reset_all(self) -> None:
        for number, copy in enumerate(self._copies):
            self._begin(number, copy.reset(seed=self._seed + number)[0])

    def _begin(self, number: int, observations: dict[str, Any]) -> None:
        for index, agent in enumerate(self.agents):
            self._playing[number, index] = agent in self._copies[number].agents
            self._now[number, index] = observations[agent] if self._playing[number, index] else 0

    def _step(self, number: int, actions: np.ndarray, row: tuple[np.ndarray, ...]) -> bool:
        """Step one copy, fill in what came of it, and return whether that ended it, and it was reset.

        The lanes of agents that do not play stay as they were allocated.
        """
        copy, (final, reward, terminated, truncated) = self._copies[number], row
        playing = np.flatnonzero(self._playing[number])
        taken = {self.agents[index]: actions[index] for index in playing}
        observations, rewards, terminations, truncations, _ = copy.step(taken)
        for index in playing:
            agent = self.agents[index]
            if agent not in observations or agent not in terminations:
                what = f"{agent} played and was told nothing of its step."
                refuse(
                    SpecError, what, got=", ".join(observations), want="every agent that acted, as the interface says"
                )
            final[index], reward[index] = observations[agent], rewards[agent]
            terminated[index], truncated[index] = terminations[agent], truncations[agent]
        if not copy.agents:
            self._begin(number, copy.reset()[0])
            return True
        self._begin(number, observations)  # who goes on, and who joins
        return False


def _agents_of(env: Any) -> tuple[str, ...]:
    agents = tuple(getattr(env, "possible_agents", ()))
    if not agents:
        what = f"{type(env).__name__} does not name its agents beforehand."
        refuse(ConfigError, what, want="possible_agents, at least one", fix="an environment whose agents are known")
    return agents
