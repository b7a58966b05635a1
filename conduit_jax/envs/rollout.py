"""A policy acting in many lanes of a pure environment: rollouts for training, whole episodes for evaluation.

A policy is ``policy(parameters, observation, key) -> action`` or ``-> (action, extras)``, over all lanes at once:
observations and actions are ``(lanes, ...)``, ``extras`` any pytree of ``(lanes, ...)`` leaves to keep with each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.envs.autoreset import AutoResetState, AutoResetStep, autoreset
from conduit_jax.envs.core import Environment, EnvironmentSpec
from conduit_jax.errors import SpecError, check_integer, refuse
from conduit_jax.types import Array, Key, PyTree, Rollout

Policy = Callable[[PyTree, PyTree, Key], PyTree]


class EpisodeStatistics(NamedTuple):
    """Undiscounted returns and lengths of each lane, for display; leaves are ``(lanes,)``.

    ``episode_return`` (float32) and ``episode_length`` (int32) belong to the episode that is running, ``last_return``
    and ``last_length`` to the one that finished last (0 before the first). ``episodes`` (int32) have finished since
    the start, with ``return_sum`` (float32, so it resolves units up to 16 million) the sum of their returns.
    """

    episode_return: Array
    episode_length: Array
    last_return: Array
    last_length: Array
    episodes: Array
    return_sum: Array


class ActorState(NamedTuple):
    """What an actor carries from one rollout to the next; leaves are ``(lanes, ...)``."""

    lanes: AutoResetState
    observation: PyTree
    statistics: EpisodeStatistics


class RolloutFunctions(NamedTuple):
    """``init(key) -> actor`` and ``rollout(actor, parameters, key) -> (actor, Rollout)``: pure, not yet jitted."""

    init: Callable[[Key], ActorState]
    rollout: Callable[[ActorState, PyTree, Key], tuple[ActorState, Rollout]]


def make_rollout(env: Environment, policy: Policy, num_lanes: int, length: int) -> RolloutFunctions:
    """Return the functions that run ``policy`` in ``num_lanes`` lanes of ``env``, ``length`` steps a call.

    The rollout is time-major ``(length, num_lanes, ...)`` with float32 rewards, both kinds of ending, final and
    bootstrap observations, and the policy's ``extras`` (``None`` if it gives none). No two of the arrays it returns
    share a buffer, so the actor may be donated to the next call while the rollout is still in use.

    Args:
        env: an environment that ends its episodes; the resets are made here.
        policy: see the module; its actions are cast to the environment's action dtype.
        num_lanes: copies of the environment that step together.
        length: steps of every lane in one call.

    Raises:
        ConfigError: ``num_lanes`` or ``length`` is not a positive integer, or ``env`` resets itself already.
        SpecError: when ``rollout`` is traced, if the policy's actions do not fit the environment.
    """
    check_integer("num_lanes", num_lanes, 1)
    check_integer("length", length, 1)
    lane = autoreset(env)

    def init(key: Key) -> ActorState:
        lanes, observation = jax.vmap(lane.reset)(jax.random.split(key, num_lanes))
        return ActorState(lanes, _own(observation), _no_episodes(num_lanes))

    def rollout(actor: ActorState, parameters: PyTree, key: Key) -> tuple[ActorState, Rollout]:
        def act(actor: ActorState, key: Key) -> tuple[ActorState, Rollout]:
            action, extras = _read_policy(env.spec, num_lanes, policy(parameters, actor.observation, key))
            lanes, stepped = jax.vmap(lane.step)(actor.lanes, action)
            statistics = _record(actor.statistics, stepped)
            return ActorState(lanes, stepped.observation, statistics), _keep(actor.observation, action, stepped, extras)

        actor, steps = jax.lax.scan(act, actor, jax.random.split(key, length))
        return actor, steps._replace(bootstrap_observation=_own(actor.observation))

    return RolloutFunctions(init, rollout)


def evaluate(env: Environment, policy: Policy, parameters: PyTree, key: Key, episodes: int = 20) -> Array:
    """Return the undiscounted returns of ``episodes`` episodes, each run once from a fresh reset to its end.

    All episodes step side by side until the last one has ended, at the latest at the time limit. The function is pure;
    ``jax.jit(functools.partial(evaluate, env, policy))`` compiles it once for every call that follows.

    Args:
        env: an environment that ends its episodes, not an autoreset one.
        policy: see the module; ``extras`` are ignored.
        parameters: handed to the policy.
        key: decides resets and actions.
        episodes: how many, at least 1; static.

    Returns:
        float32 ``(episodes,)``.

    Raises:
        ConfigError: ``episodes`` is not a positive integer.
        SpecError: the policy's actions do not fit the environment.
    """
    check_integer("episodes", episodes, 1)
    reset_key, policy_key = jax.random.split(key)
    state, observation = jax.vmap(env.reset)(jax.random.split(reset_key, episodes))

    def running(carry: tuple) -> Array:
        return ~jnp.all(carry[2])

    def act(carry: tuple) -> tuple:
        state, observation, ended, returns, step = carry
        output = policy(parameters, observation, jax.random.fold_in(policy_key, step))
        action, _ = _read_policy(env.spec, episodes, output)
        state, stepped = jax.vmap(env.step)(state, action)
        # A select, not a product: what an ended lane goes on to compute is undefined and may be NaN.
        returns = returns + jnp.where(ended, 0, stepped.reward)
        return state, stepped.observation, ended | stepped.terminated | stepped.truncated, returns, step + 1

    start = (jnp.zeros(episodes, bool), jnp.zeros(episodes, jnp.float32), jnp.zeros((), jnp.int32))
    return jax.lax.while_loop(running, act, (state, observation, *start))[3]


def recent_return(statistics: EpisodeStatistics, since: EpisodeStatistics | None = None) -> Array:
    """Return the mean return of recent episodes, a float32 scalar; NaN if there was none.

    Without ``since``: of the last finished episode of every lane that has finished one. With an earlier state of the
    same statistics: of all episodes that finished after it (copy it to the host first if the actor is donated).
    """
    if since is None:
        count = jnp.sum(statistics.episodes > 0, dtype=jnp.int32)
        return jnp.sum(statistics.last_return) / count.astype(jnp.float32)
    count = jnp.sum(statistics.episodes - since.episodes, dtype=jnp.int32)
    return jnp.sum(statistics.return_sum - since.return_sum) / count.astype(jnp.float32)


def _own(tree: PyTree) -> PyTree:
    # Outside jit a scan or an environment may return one buffer under two names; donating one would delete the other.
    return jax.tree.map(jnp.copy, tree)


def _no_episodes(num_lanes: int) -> EpisodeStatistics:
    dtypes = (jnp.float32, jnp.int32, jnp.float32, jnp.int32, jnp.int32, jnp.float32)
    return EpisodeStatistics(*(jnp.zeros(num_lanes, dtype) for dtype in dtypes))


def _record(statistics: EpisodeStatistics, stepped: AutoResetStep) -> EpisodeStatistics:
    """Return the statistics after one step of every lane."""
    ended = stepped.terminated | stepped.truncated
    episode_return = statistics.episode_return + stepped.reward
    episode_length = statistics.episode_length + 1
    return EpisodeStatistics(
        episode_return=jnp.where(ended, 0, episode_return),
        episode_length=jnp.where(ended, 0, episode_length),
        last_return=jnp.where(ended, episode_return, statistics.last_return),
        last_length=jnp.where(ended, episode_length, statistics.last_length),
        episodes=statistics.episodes + ended.astype(jnp.int32),
        return_sum=statistics.return_sum + jnp.where(ended, episode_return, 0),
    )


def _keep(observation: PyTree, action: Array, stepped: AutoResetStep, extras: PyTree) -> Rollout:
    """Return one time step of the rollout: what was seen, done and got."""
    return Rollout(
        observation=observation,
        action=action,
        reward=stepped.reward,
        terminated=stepped.terminated,
        truncated=stepped.truncated,
        final_observation=stepped.final_observation,
        extras=extras,
    )


def _read_policy(spec: EnvironmentSpec, num_lanes: int, output: PyTree) -> tuple[Array, PyTree]:
    """Return ``(action, extras)`` of what the policy returned, the action checked and in the environment's dtype."""
    if isinstance(output, tuple) and len(output) != 2:
        refuse(
            SpecError, "The policy returned a tuple.", got=f"{len(output)} values", want="action, or (action, extras)"
        )
    action, extras = output if isinstance(output, tuple) else (output, None)
    action = jnp.asarray(action)
    kind = jnp.floating if spec.num_actions is None else jnp.integer
    if action.shape != (num_lanes, *spec.action.shape) or not jnp.issubdtype(action.dtype, kind):
        refuse(
            SpecError,
            "The policy's actions do not fit the environment.",
            got=f"{action.dtype} {action.shape}",
            want=f"{spec.action.dtype} {(num_lanes, *spec.action.shape)}",
            fix="return one action a lane; for discrete actions its number, e.g. jnp.argmax(logits, axis=-1)",
        )
    return action.astype(spec.action.dtype), extras
