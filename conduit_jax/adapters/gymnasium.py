"""Gymnasium environments as actors: numpy rollouts from a vector environment, in this process or in workers.

Importing this module, and acting with it, needs neither JAX nor (until an actor is built) Gymnasium: an actor process
stays light. ``rollout``, ``spec`` and ``statistics`` return this package's types and do import JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from conduit_jax.adapters.gymnasium_lanes import Lane, close_lanes, lane_maker, make_lanes, step_lanes
from conduit_jax.adapters.gymnasium_spaces import read_actions, read_observations
from conduit_jax.adapters.host_episodes import Episodes, Frames, HostActor
from conduit_jax.errors import (
    ConfigError,
    LifecycleError,
    check_at_least,
    check_integer,
    refuse,
)

if TYPE_CHECKING:
    from conduit_jax.types import Rollout

PolicyStep = Callable[[np.ndarray], Any]

UNLIMITED_EVALUATION_STEPS = 1_000_000


class GymnasiumActor(HostActor):
    """Acts in ``num_lanes`` copies of a Gymnasium environment, with discrete actions or a bounded box of them.

    Lanes reset within the step that ended an episode (Gymnasium's SAME_STEP), so no step is spent on a reset and the
    final observation is kept apart. Lane i is seeded ``seed + i`` once; later resets draw from its own generator.

    Observations keep their dtype (pixels stay uint8) but for float64 and int64, which become float32 and int32, as they
    would in JAX. Rewards are float32, actions int32 numbered from 0 even where the environment counts from elsewhere, or
    float32, kept as the policy gave them and clipped to the bounds on their way to the environment.

    Attributes:
        env_id, num_lanes, length: as given.
        observation_shape, observation_dtype, actions, num_actions: of one lane; ``num_actions`` is ``None`` for continuous ones.
        max_steps: the time limit, ``None`` where the environment declares none.
    """

    def __init__(
        self,
        env_id: str,
        num_lanes: int,
        length: int,
        seed: int = 0,
        workers: int = 0,
        timeout_s: float = 60.0,
        lane: Lane | None = None,
        stack: int = 1,
    ) -> None:
        """Build and reset the lanes.

        Args:
            env_id: a registered id, or ``"module:Id-v0"`` where importing ``module`` registers it.
            num_lanes: environments that step together.
            length: steps of every lane in one rollout.
            seed: of lane 0.
            workers: 0 steps the lanes one after the other in this process. Otherwise every lane gets a process of its
                own, of which ``workers`` step at the same time. They are spawned, never forked (JAX does not survive a
                fork), so the calling script needs the usual ``if __name__ == "__main__":``.
            timeout_s: how long to wait for workers to answer one step.
            lane: how a lane is built where no registered id says it; ``env_id`` is only its name then.
            stack: where more than 1, a policy sees so many frames, ``(lanes, stack, ...)``, the newest last and an episode's
                first one repeated; rollouts hold each frame once, as ``make_transition_view(stack=)`` stores them.

        Raises:
            ConfigError: an argument is out of range, the id is unknown, Gymnasium is missing, actions are of another kind,
                or observations are not one array.
        """
        check_integer("num_lanes", num_lanes, 1)
        check_integer("length", length, 1)
        check_integer("seed", seed, 0)
        check_integer("workers", workers, 0)
        check_at_least("timeout_s", timeout_s, 0)
        check_integer("stack", stack, 1)
        self.env_id, self.num_lanes, self.length = env_id, num_lanes, length
        lane = lane or lane_maker(env_id)
        self.max_steps = lane.max_steps
        self._timeout_s, self._seed, self._stack = timeout_s, seed, stack
        self._build = functools.partial(make_lanes, lane.make, num_lanes, workers)
        self._lanes = self._build()
        self._evaluation: Any = None
        self._closed = False
        try:
            self._read_spaces()
            self._reset_all()
        except BaseException:
            self.close()
            raise
        self._episodes = Episodes(num_lanes)

    def rollout(self, policy_step: PolicyStep) -> Rollout:
        """Act for ``length`` steps and return them, time-major, as numpy arrays that nothing will write again.

        Every call allocates: JAX may read a numpy array later than the call that was given it, so none is reused here.

        Args:
            policy_step: ``(observations) -> actions``, or ``-> (actions, extras)``: observations ``(lanes, ...)``, not
                to be written to; integer actions ``(lanes,)`` or floats ``(lanes, *shape)``; ``extras`` a dict of
                ``(lanes, ...)`` arrays to keep.

        Raises:
            LifecycleError: the actor is closed.
            SpecError: actions or extras of the wrong shape or dtype. ValueRefusedError: an action that does not exist.
            ConduitError: a worker did not answer within ``timeout_s``; close the actor then.
        """
        from conduit_jax.types import Rollout

        return Rollout(**self.collect(policy_step))

    def collect(self, policy_step: PolicyStep) -> dict[str, Any]:
        """Return what ``rollout`` returns as a dict of its fields, without importing JAX."""
        self._check_open()
        steps: dict[str, Any] = self._allocate()
        extras = []
        for t in range(self.length):
            steps["observation"][t] = self._observation
            seen = steps["observation"][t] if self._stack == 1 else self._seen.stacked(self.observation_dtype)
            action, extra = self.actions.read_policy(policy_step(seen), self.num_lanes)
            steps["action"][t] = action
            extras.append(extra)
            self._act({name: array[t] for name, array in steps.items()})
        steps["bootstrap_observation"] = np.array(self._observation, self.observation_dtype)
        if extras[0]:
            steps["extras"] = {name: np.stack([extra[name] for extra in extras]) for name in extras[0]}
        return steps

    def evaluate(self, policy_step: PolicyStep, episodes: int = 20, seed: int = 0) -> np.ndarray:
        """Return the undiscounted returns of ``episodes`` episodes, float32 ``(episodes,)``, each run once to its end.

        Episode i is seeded ``seed + i``. They run in lanes of their own, ``num_lanes`` at a time, so training lanes are
        not disturbed and the policy sees the shapes it knows. Built at the first call, kept until ``close``.

        Raises:
            LifecycleError, SpecError, ValueRefusedError, ConduitError: as ``rollout``.
            ConfigError: ``episodes`` or ``seed`` is out of range, or an episode without a time limit does not end.
        """
        check_integer("episodes", episodes, 1)
        check_integer("seed", seed, 0)
        self._check_open()
        self._evaluation = self._evaluation or self._build()
        rounds = range(0, episodes, self.num_lanes)
        return np.concatenate([self._evaluate_lanes(policy_step, seed + first) for first in rounds])[:episodes]

    def close(self) -> None:
        """End the environments and their processes. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        for lanes in (self._lanes, self._evaluation):
            if lanes is not None:
                close_lanes(lanes)

    def __enter__(self) -> GymnasiumActor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _seen_shape(self) -> tuple[int, ...]:
        return self.observation_shape if self._stack == 1 else (self._stack, *self.observation_shape)

    def _reset_all(self) -> None:
        self._observation, _ = self._lanes.reset(seed=self._seed)
        self._seen = Frames(self._observation, self._stack)

    def _read_spaces(self) -> None:
        observation, action = self._lanes.single_observation_space, self._lanes.single_action_space
        self.actions = read_actions(self.env_id, action)
        self.num_actions = self.actions.number
        self.observation_shape, self.observation_dtype = read_observations(self.env_id, observation)

    def _check_open(self) -> None:
        if self._closed:
            refuse(LifecycleError, f"The actor of {self.env_id} is closed.", fix="build a new GymnasiumActor")

    def _allocate(self) -> dict[str, np.ndarray]:
        steps = (self.length, self.num_lanes)
        return {
            "observation": np.empty((*steps, *self.observation_shape), self.observation_dtype),
            "action": np.empty((*steps, *self.actions.shape), self.actions.dtype),
            "reward": np.empty(steps, np.float32),
            "terminated": np.empty(steps, bool),
            "truncated": np.empty(steps, bool),
            # Written only where an episode ends. Zeros, not empty: equal runs are to give equal bytes.
            "final_observation": np.zeros((*steps, *self.observation_shape), self.observation_dtype),
        }

    def _step(self, lanes: Any, action: np.ndarray) -> tuple:
        return step_lanes(lanes, self.actions.for_environment(action), self._timeout_s)

    def _act(self, step: dict[str, np.ndarray]) -> None:
        """Take ``step["action"]`` in the training lanes and fill in what came of it."""
        self._observation, step["reward"][:], terminated, truncated, infos = self._step(self._lanes, step["action"])
        step["terminated"][:], step["truncated"][:] = terminated, truncated
        ended = terminated | truncated
        self._seen.push(self._observation, ended)
        for lane in np.flatnonzero(ended):
            step["final_observation"][lane] = infos["final_obs"][lane]
        self._episodes.record(step["reward"], ended)

    def _evaluate_lanes(self, policy_step: PolicyStep, seed: int) -> np.ndarray:
        """Run one episode in every evaluation lane and return their returns, float32 ``(lanes,)``."""
        observation, _ = self._evaluation.reset(seed=seed)
        frames = Frames(observation, self._stack)
        returns, ended = np.zeros(self.num_lanes, np.float32), np.zeros(self.num_lanes, bool)
        for _ in range(self.max_steps or UNLIMITED_EVALUATION_STEPS):
            action, _ = self.actions.read_policy(policy_step(frames.stacked(self.observation_dtype)), self.num_lanes)
            observation, reward, terminated, truncated, _ = self._step(self._evaluation, action)
            frames.push(observation, terminated | truncated)
            returns += np.where(ended, 0, reward).astype(np.float32)
            ended |= terminated | truncated
            if ended.all():
                return returns
        refuse(
            ConfigError,
            f"An evaluation episode of {self.env_id} did not end.",
            got=f"{self.max_steps or UNLIMITED_EVALUATION_STEPS} steps",
            fix="register the environment with max_episode_steps",
        )
