"""RLlib on conduit's replay: two lines of configuration (ray 2.60, new API stack).

    from conduit_jax.adapters import rllib as conduit_rllib

    config = conduit_rllib.attach(DQNConfig().environment("CartPole-v1"))      # or SACConfig, PPOConfig
    algo = config.build_algo()

Importing this loads neither JAX nor RLlib; actors never load JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conduit_jax.adapters.rllib.algorithms import ConduitDQN, ConduitSAC
    from conduit_jax.adapters.rllib.configuration import attach
    from conduit_jax.adapters.rllib.connector import cast_observations
    from conduit_jax.adapters.rllib.ppo import ConduitPPO, ConduitPPOLearner

_HOMES = {
    "attach": "configuration",
    "ConduitDQN": "algorithms",
    "ConduitPPO": "ppo",
    "ConduitPPOLearner": "ppo",
    "ConduitSAC": "algorithms",
    "cast_observations": "connector",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    from conduit_jax.adapters.rllib.options import import_rllib

    import_rllib()
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


__all__ = ["ConduitDQN", "ConduitPPO", "ConduitPPOLearner", "ConduitSAC", "attach", "cast_observations"]
