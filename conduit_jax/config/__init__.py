"""What a user chooses: frozen, keyword-only, hashable values that refuse at once what can never work."""

from conduit_jax.config.algorithms import Algorithm, BoundedLag, OffPolicy, OnPolicy
from conduit_jax.config.limiters import Limiter, MinSize, Queue, RateLimits, SampleToInsertRatio, Stack
from conduit_jax.config.replay import MAX_TIMES_SAMPLED, ReplayConfig
from conduit_jax.config.selectors import (
    RING_SAMPLERS,
    Epochs,
    Fifo,
    Lifo,
    MaxHeap,
    MinHeap,
    Prioritized,
    Remover,
    Sampler,
    Uniform,
)
from conduit_jax.config.tables import DEFAULT_TABLE, Mixture, checked_seed, replay_tables

__all__ = [
    "DEFAULT_TABLE",
    "MAX_TIMES_SAMPLED",
    "RING_SAMPLERS",
    "Algorithm",
    "BoundedLag",
    "Epochs",
    "Fifo",
    "Lifo",
    "Limiter",
    "MaxHeap",
    "MinHeap",
    "MinSize",
    "Mixture",
    "OffPolicy",
    "OnPolicy",
    "Prioritized",
    "Queue",
    "RateLimits",
    "Remover",
    "ReplayConfig",
    "SampleToInsertRatio",
    "Sampler",
    "Stack",
    "Uniform",
    "checked_seed",
    "replay_tables",
]
