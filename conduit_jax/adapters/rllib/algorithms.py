"""RLlib's DQN and SAC with conduit's replay: they make it, report its figures, and keep it in their checkpoints.

Imports no JAX: actors load this with the configuration. Only RLlib's own override points are used.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from ray.rllib.algorithms.dqn.dqn import DQN, DQNConfig
from ray.rllib.algorithms.sac.sac import SAC, SACConfig
from ray.rllib.utils.checkpoints import Checkpointable

from conduit_jax.adapters.rllib.connector import deliver_ready_columns
from conduit_jax.adapters.rllib.mapping import check_mapping
from conduit_jax.adapters.rllib.options import unmarked
from conduit_jax.errors import ConfigError, refuse

COMPONENT_REPLAY = "conduit_replay"


def build_buffer(config: Any) -> Any:
    """Return the buffer an attached configuration describes; ``ConfigError`` where it was changed since."""
    settings, options = unmarked(config.replay_buffer_config)
    if config._learner_connector is not deliver_ready_columns or config.add_default_connectors_to_learner_pipeline:
        refuse(
            ConfigError,
            "The learner connector was changed after attach().",
            got=f"learner_connector={config._learner_connector!r}, "
            f"add_default_connectors_to_learner_pipeline={config.add_default_connectors_to_learner_pipeline}",
            want="what attach() set",
            fix="attach last",
        )
    from conduit_jax.adapters.rllib.buffer import ConduitEpisodeReplayBuffer

    trained = config.policies_to_train
    return ConduitEpisodeReplayBuffer(
        settings,
        options,
        modules=tuple(config.policies),
        trained=None if trained is None or callable(trained) else tuple(trained),
        seed=config.seed,
    )


class ReplayCheckpoint(Checkpointable):
    """The replay as a part of the algorithm's checkpoint, in a folder of its own."""

    def __init__(self, buffer: Any = None):
        self._buffer = buffer

    def get_state(self, components: Any = None, *, not_components: Any = None, **unused: Any) -> dict[str, Any]:
        """Return the replay's state."""
        return self._buffer.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; ``CheckpointError`` where the replay was configured otherwise."""
        self._buffer.set_state(state)

    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return nothing: the algorithm makes the buffer."""
        return (), {}


class ConduitReplay:
    """What is the same for all algorithms; goes before RLlib's class among the bases of a subclass."""

    config: Any
    local_replay_buffer: Any

    def _create_local_replay_buffer_if_necessary(self, config: Any) -> Any:
        return build_buffer(config)

    def setup(self, config: Any) -> None:
        """Set up as RLlib does, then refuse modules with a state, and agents mapped to modules that do not exist."""
        super().setup(config)  # type: ignore[misc]
        check_mapping(self)
        if getattr(self, "_module_is_stateful", False):
            refuse(
                ConfigError,
                "Recurrent modules need sequences with their states, and the replay delivers single transitions.",
                got="an RLModule with is_stateful() == True",
                want="a module without state",
                fix="train it with RLlib's own buffer: leave attach() out",
            )

    def step(self) -> dict[str, Any]:
        """Return RLlib's results, and the replay's figures of this iteration under ``conduit``."""
        results = super().step()  # type: ignore[misc]
        results["conduit"] = self.local_replay_buffer.report()
        return results

    def get_state(self, components: Any = None, *, not_components: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Return RLlib's state and the replay's."""
        state = super().get_state(components, not_components=not_components, **kwargs)  # type: ignore[misc]
        if self._check_component(COMPONENT_REPLAY, components, not_components):  # type: ignore[attr-defined]
            state[COMPONENT_REPLAY] = self.local_replay_buffer.get_state()
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        if COMPONENT_REPLAY in state:
            self.local_replay_buffer.set_state(state[COMPONENT_REPLAY])
        super().set_state(state)  # type: ignore[misc]

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        """Return RLlib's components and the replay."""
        replay = COMPONENT_REPLAY, ReplayCheckpoint(self.local_replay_buffer)
        return [*super().get_checkpointable_components(), replay]  # type: ignore[misc]


class ConduitDQN(ConduitReplay, DQN):
    """RLlib's DQN on conduit's replay; ``attach`` puts it into a ``DQNConfig``."""

    @classmethod
    def get_default_config(cls) -> DQNConfig:
        """Return RLlib's own defaults, for this class."""
        return DQNConfig(algo_class=cls)


class ConduitSAC(ConduitReplay, SAC):
    """RLlib's SAC on conduit's replay; ``attach`` puts it into a ``SACConfig``."""

    @classmethod
    def get_default_config(cls) -> SACConfig:
        """Return RLlib's own defaults, for this class."""
        return SACConfig(algo_class=cls)


__all__ = ["ConduitDQN", "ConduitReplay", "ConduitSAC", "ReplayCheckpoint", "build_buffer"]
