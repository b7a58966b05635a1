"""``attach``: two public switches of RLlib's configuration, and every reason to refuse one."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any, TypeVar

from ray.rllib.algorithms.dqn.dqn import DQN, DQNConfig
from ray.rllib.algorithms.ppo.ppo import PPO, PPOConfig
from ray.rllib.algorithms.sac.sac import SAC, SACConfig

from conduit_jax.adapters.rllib.algorithms import ConduitDQN, ConduitReplay, ConduitSAC
from conduit_jax.adapters.rllib.connector import deliver_ready_columns
from conduit_jax.adapters.rllib.options import CONDUIT_KEY, Options, make_options, marked
from conduit_jax.adapters.rllib.ppo import ConduitPPO, ConduitPPOLearner
from conduit_jax.errors import ConfigError, refuse

_Config = TypeVar("_Config")
_SERVED = {DQN: ConduitDQN, SAC: ConduitSAC, PPO: ConduitPPO}
_ON_POLICY_OPTIONS = ("observation_dtype", "backend", "prefetch")


def attach(config: _Config, **options: Any) -> _Config:
    """Give a ``DQNConfig``, ``SACConfig`` or ``PPOConfig`` conduit's experience path; return the same object, ready to build.

    Call it last: buffer, connectors and modules are read off ``config`` as they are. ``options`` are those of ``Options``:
    ``max_staleness``, ``granularity``, ``prefetch``, ``observation_dtype``, ``backend``; PPO takes the last three.

    Raises ``ConfigError`` for what is not served: another algorithm, the old API stack, recurrent modules, offline input,
    an own learner connector, another kind of buffer, an unknown option.
    """
    chosen = make_options(options)
    given: Any = config
    check_config(given)
    if isinstance(given, PPOConfig):
        _attach_on_policy(given, chosen, options)
    else:
        buffer = {key: value for key, value in given.replay_buffer_config.items() if key != CONDUIT_KEY}
        given.replay_buffer_config = marked(buffer, chosen)
        given.learners(learner_connector=deliver_ready_columns, add_default_connectors_to_learner_pipeline=False)
    if not issubclass(given.algo_class, ConduitReplay | ConduitPPO):
        given.algo_class = _SERVED[given.algo_class]
    return config


def _attach_on_policy(config: Any, chosen: Options, named: dict[str, Any]) -> None:
    other = sorted(set(named) - set(_ON_POLICY_OPTIONS))
    if other:
        refuse(
            ConfigError,
            "On-policy experience is used once, in its own iteration: no batch is stale.",
            got=", ".join(other),
            want=", ".join(_ON_POLICY_OPTIONS),
        )
    own = config._learner_class
    if own is not None and not issubclass(own, ConduitPPOLearner):
        refuse(
            ConfigError,
            "An own learner class makes its batches in its own way.",
            got=own.__name__,
            want="RLlib's PPO learner",
            fix="derive it from conduit_jax.adapters.rllib.ConduitPPOLearner",
        )
    config.learners(learner_class=own or ConduitPPOLearner)
    kept = {name: getattr(chosen, name) for name in _ON_POLICY_OPTIONS}
    config.learner_config_dict = {**config.learner_config_dict, CONDUIT_KEY: kept}


def check_config(config: Any) -> None:
    """Raise ``ConfigError`` for a configuration that ``attach`` cannot serve."""
    _check_algorithm(config)
    if not (config.enable_rl_module_and_learner and config.enable_env_runner_and_connector_v2):
        refuse(
            ConfigError,
            "The old API stack has no learner connectors to deliver through.",
            got=f"enable_rl_module_and_learner={config.enable_rl_module_and_learner}, "
            f"enable_env_runner_and_connector_v2={config.enable_env_runner_and_connector_v2}",
            want="both True",
            fix="leave config.api_stack(...) out",
        )
    if config.framework_str != "torch":
        refuse(
            ConfigError,
            "Batches are handed over as torch tensors.",
            got=f"framework({config.framework_str!r})",
            want="framework('torch'), RLlib's default",
        )
    if getattr(config, "_is_frozen", False):
        refuse(ConfigError, "The configuration is frozen.", fix="attach(config.copy(copy_frozen=False))")
    connector = config._learner_connector
    if connector is not None and connector is not deliver_ready_columns:
        refuse(
            ConfigError,
            "An own learner connector reads episodes, and batches come ready-made.",
            got=f"learners(learner_connector={connector!r})",
            want="none",
            fix="change observations in config.env_runners(env_to_module_connector=), which writes them into the episodes",
        )
    if _is_recurrent(config):
        refuse(
            ConfigError,
            "Recurrent modules need sequences with their states, and the replay delivers single transitions.",
            got="use_lstm=True",
            want="a module without state",
            fix="train it with RLlib's own buffer: leave attach() out",
        )
    if getattr(config, "burn_in_len", 0):
        refuse(
            ConfigError,
            "Burn-in needs sequences, and the replay delivers single transitions.",
            got=f"burn_in_len={config.burn_in_len}",
            want="0",
            fix="config.training(burn_in_len=0)",
        )
    if config.input_ and config.input_ != "sampler":
        refuse(
            ConfigError, "Offline input does not go through a replay.", got=f"input_={config.input_!r}", want="sampler"
        )


def _check_algorithm(config: Any) -> None:
    want = "a DQNConfig, SACConfig or PPOConfig"
    if isinstance(config, type):
        got, fix = f"the class {config.__name__}", f"attach({config.__name__}().environment(...))"
        refuse(ConfigError, "A configuration is wanted, not its class.", got=got, want=want, fix=fix)
    if not isinstance(config, DQNConfig | SACConfig | PPOConfig):
        refuse(ConfigError, "This configuration is not served.", got=type(config).__name__, want=want)
    known = config.algo_class in _SERVED or (
        isinstance(config.algo_class, type) and issubclass(config.algo_class, ConduitReplay | ConduitPPO)
    )
    if not known:
        refuse(
            ConfigError,
            "This algorithm is not served.",
            got=getattr(config.algo_class, "__name__", repr(config.algo_class)),
            want=f"{want} of RLlib's own DQN, SAC or PPO",
            fix="derive your algorithm from conduit_jax.adapters.rllib.ConduitDQN, ConduitSAC or ConduitPPO",
        )


def _is_recurrent(config: Any) -> bool:
    model = config.model_config
    return bool(model.get("use_lstm") if isinstance(model, dict) else getattr(model, "use_lstm", False))


__all__ = ["attach", "check_config"]
