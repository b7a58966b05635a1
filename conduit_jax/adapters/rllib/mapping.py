"""Do all agents of an environment go to modules that exist: asked once, when the algorithm is built."""

from __future__ import annotations

from typing import Any

from conduit_jax.errors import ConfigError, refuse


def agents_of(runner: Any) -> list[Any]:
    """Return the agents that an env runner's environment says may appear, none where it does not say."""
    env = getattr(runner, "env", None)
    for part in (env, getattr(env, "unwrapped", None), *getattr(env, "envs", ())[:1]):
        found = getattr(part, "possible_agents", None)
        if not found and part is not None:
            found = getattr(getattr(part, "unwrapped", None), "possible_agents", None)
        if found:
            return list(found)
    return []


def check_mapping(algo: Any) -> None:
    """Raise ``ConfigError`` where ``policy_mapping_fn`` sends an agent to a module nobody declared.

    A mapping that needs to see the episode is asked when the first one comes.
    """
    config, group = algo.config, algo.env_runner_group
    if not config.is_multi_agent or group is None:
        return
    agents = {agent for found in group.foreach_env_runner(agents_of) for agent in found}
    for agent in sorted(agents, key=str):
        try:
            name = config.policy_mapping_fn(agent, None)
        except Exception:
            return
        if name not in config.policies:
            refuse(
                ConfigError,
                f"Agent {agent!r} is mapped to a module that the configuration does not know.",
                got=repr(name),
                want=", ".join(sorted(config.policies)),
                fix="name it in config.multi_agent(policies=), or correct policy_mapping_fn",
            )


__all__ = ["agents_of", "check_mapping"]
