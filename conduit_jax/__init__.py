"""conduit_jax: an Experience Data Plane for reinforcement learning in JAX (arXiv 2609.24456).

Names are imported when they are first used (PEP 562), so that an actor process can import an adapter without JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "conduit_jax.config": (
        "BoundedLag",
        "Epochs",
        "Fifo",
        "Lifo",
        "MaxHeap",
        "MinHeap",
        "MinSize",
        "Mixture",
        "OffPolicy",
        "OnPolicy",
        "Prioritized",
        "Queue",
        "ReplayConfig",
        "SampleToInsertRatio",
        "Stack",
        "Uniform",
    ),
    "conduit_jax.errors": (
        "BackpressureError",
        "CheckpointError",
        "ConduitError",
        "ConfigError",
        "HookError",
        "LifecycleError",
        "NotReadyError",
        "PlacementError",
        "SpecError",
        "ValueRefusedError",
    ),
    "conduit_jax.hooks": ("register_delivery", "register_ingestion"),
    "conduit_jax.interrupts": ("interruptible",),
    "conduit_jax.loop": ("Loop", "LoopState", "wrap"),
    "conduit_jax.normalization": (
        "ObservationStatistics",
        "RewardScale",
        "merge_observation_statistics",
        "normalize_observations",
        "observation_statistics",
        "observation_statistics_carry",
        "reward_scale_carry",
        "scale_rewards",
        "update_observation_statistics",
    ),
    "conduit_jax.plane": ("ExperiencePlane",),
    "conduit_jax.replay.buffer": ("Replay", "ReplayState", "mutate"),
    "conduit_jax.replay.episode_batches": ("Buckets", "Packed", "PackedEpisodes", "Padded"),
    "conduit_jax.replay.episode_config": ("ByLength", "EpisodesConfig"),
    "conduit_jax.replay.episode_items": ("Episodes",),
    "conduit_jax.replay.episodes": ("draw_bucket", "for_bucket", "make_episodes"),
    "conduit_jax.replay.hindsight": ("Hindsight", "relabel"),
    "conduit_jax.replay.items": ("make_replay",),
    "conduit_jax.replay.mixture": ("for_table", "mix"),
    "conduit_jax.replay.footprint": ("Footprint", "bytes_per_item", "describe"),
    "conduit_jax.replay.neighbours": (
        "NStepRange",
        "Step",
        "TransitionView",
        "make_transition_view",
        "overwritten_finals",
        "steps_of",
    ),
    "conduit_jax.replay.windows": ("RecurrentWindow", "Windows", "make_window_replay", "sequence_priorities"),
    "conduit_jax.returns": (
        "generalized_advantages",
        "n_step_carry",
        "n_step_transitions",
        "n_step_transitions_carried",
        "one_step_transitions",
    ),
    "conduit_jax.schedule.semantics": ("Schedule",),
    "conduit_jax.schedule.worker": ("HostQueue",),
    "conduit_jax.sharding.choice": ("AutoPlacement",),
    "conduit_jax.sharding.place": ("place",),
    "conduit_jax.growth": ("Growth",),
    "conduit_jax.sharding.disk": ("Disk",),
    "conduit_jax.sharding.placement": ("Part", "Placement"),
    "conduit_jax.sharding.planner": ("plan",),
    "conduit_jax.sharding.plans": ("Plan",),
    "conduit_jax.sharding.topology": ("Topology", "load_topology", "shipped_topologies"),
    "conduit_jax.sharding.workload": ("Workload",),
    "conduit_jax.sinks": ("CsvSink", "JsonLinesSink", "TensorBoardSink", "recording"),
    "conduit_jax.types": (
        "AddInfo",
        "Records",
        "Rollout",
        "Sample",
        "SampleInfo",
        "Trajectory",
        "Transition",
        "next_observations",
    ),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [*sorted(_MODULE_OF), "__version__"]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value
    try:
        return importlib.import_module(f"{__name__}.{name}")  # submodules by attribute: conduit.envs, conduit.testing
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise  # the submodule is there, and something it needs is not
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from conduit_jax.config import (
        BoundedLag,
        Epochs,
        Fifo,
        Lifo,
        MaxHeap,
        MinHeap,
        MinSize,
        Mixture,
        OffPolicy,
        OnPolicy,
        Prioritized,
        Queue,
        ReplayConfig,
        SampleToInsertRatio,
        Stack,
        Uniform,
    )
    from conduit_jax.errors import (
        BackpressureError,
        CheckpointError,
        ConduitError,
        ConfigError,
        HookError,
        LifecycleError,
        NotReadyError,
        PlacementError,
        SpecError,
        ValueRefusedError,
    )
    from conduit_jax.growth import Growth
    from conduit_jax.hooks import register_delivery, register_ingestion
    from conduit_jax.interrupts import interruptible
    from conduit_jax.loop import Loop, LoopState, wrap
    from conduit_jax.normalization import (
        ObservationStatistics,
        RewardScale,
        merge_observation_statistics,
        normalize_observations,
        observation_statistics,
        observation_statistics_carry,
        reward_scale_carry,
        scale_rewards,
        update_observation_statistics,
    )
    from conduit_jax.plane import ExperiencePlane
    from conduit_jax.replay.buffer import Replay, ReplayState, mutate
    from conduit_jax.replay.episode_batches import Buckets, Packed, PackedEpisodes, Padded
    from conduit_jax.replay.episode_config import ByLength, EpisodesConfig
    from conduit_jax.replay.episode_items import Episodes
    from conduit_jax.replay.episodes import draw_bucket, for_bucket, make_episodes
    from conduit_jax.replay.footprint import Footprint, bytes_per_item, describe
    from conduit_jax.replay.hindsight import Hindsight, relabel
    from conduit_jax.replay.items import make_replay
    from conduit_jax.replay.mixture import for_table, mix
    from conduit_jax.replay.neighbours import (
        NStepRange,
        Step,
        TransitionView,
        make_transition_view,
        overwritten_finals,
        steps_of,
    )
    from conduit_jax.replay.windows import RecurrentWindow, Windows, make_window_replay, sequence_priorities
    from conduit_jax.returns import (
        generalized_advantages,
        n_step_carry,
        n_step_transitions,
        n_step_transitions_carried,
        one_step_transitions,
    )
    from conduit_jax.schedule.semantics import Schedule
    from conduit_jax.schedule.worker import HostQueue
    from conduit_jax.sharding.choice import AutoPlacement
    from conduit_jax.sharding.disk import Disk
    from conduit_jax.sharding.place import place
    from conduit_jax.sharding.placement import Part, Placement
    from conduit_jax.sharding.planner import plan
    from conduit_jax.sharding.plans import Plan
    from conduit_jax.sharding.topology import Topology, load_topology, shipped_topologies
    from conduit_jax.sharding.workload import Workload
    from conduit_jax.sinks import CsvSink, JsonLinesSink, TensorBoardSink, recording
    from conduit_jax.types import (
        AddInfo,
        Records,
        Rollout,
        Sample,
        SampleInfo,
        Trajectory,
        Transition,
        next_observations,
    )
