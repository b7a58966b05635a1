"""What a user chooses: frozen, keyword-only, hashable values that refuse at once what can never work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from conduit_jax.errors import ConfigError, check_at_least, check_choice, check_integer, refuse


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Draw every live item with probability 1/size, with replacement."""


@dataclass(frozen=True, kw_only=True)
class Prioritized:
    """Draw item i with probability p_i**exponent / sum_j p_j**exponent (Schaul et al. 2016, proportional variant).

    A new item gets the highest priority seen so far. Weights are (N * P)**-importance_exponent, divided by the largest of
    the ``"batch"`` or left as they are (``"none"``). ``stratified`` draws one item from each of ``batch_size`` equal
    strata of the total, otherwise draws are independent.
    """

    exponent: float = 0.6
    importance_exponent: float = 0.4
    importance_normalization: str = "batch"
    stratified: bool = True

    def __post_init__(self) -> None:
        for name in ("exponent", "importance_exponent"):
            check_at_least(f"Prioritized({name}=)", getattr(self, name), 0.0)
            if math.isinf(getattr(self, name)):
                refuse(
                    ConfigError,
                    f"Prioritized({name}=) is not finite.",
                    got=getattr(self, name),
                    want="a finite number >= 0",
                )
        check_choice("Prioritized(importance_normalization=)", self.importance_normalization, ("batch", "none"))


Sampler = Uniform | Prioritized


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """One table: how many items it holds, from when on it may be sampled, and how.

    ``capacity`` is in items over all partitions; where it does not divide evenly it is rounded up and reported.
    ``partitions`` is decided by the learner's mesh unless given. ``ragged`` says that pushes may fill lanes unequally far
    (``lengths``, or a subset of the lanes); a plane sets it by itself when its hook or its pushes ask for it.
    """

    capacity: int
    min_size: int = 1
    sampler: Sampler = field(default_factory=Uniform)
    partitions: int | None = None
    ragged: bool = False

    def __post_init__(self) -> None:
        check_integer("ReplayConfig(capacity=)", self.capacity, 1)
        check_integer("ReplayConfig(min_size=)", self.min_size, 1)
        if self.partitions is not None:
            check_integer("ReplayConfig(partitions=)", self.partitions, 1)
        if self.min_size > self.capacity:
            refuse(
                ConfigError,
                "A replay that may hold fewer items than it needs before sampling would wait for ever.",
                got=f"min_size={self.min_size}, capacity={self.capacity}",
                want="min_size <= capacity",
            )
        if not isinstance(self.sampler, Sampler):
            refuse(
                ConfigError,
                "Unknown sampler.",
                got=repr(self.sampler),
                want="conduit.Uniform() or conduit.Prioritized()",
            )


@dataclass(frozen=True, kw_only=True)
class OffPolicy:
    """Any stored item may be used, however old. ``max_staleness`` bounds the updates between drawing a batch and using it.

    A schedule with ``prefetch`` batches drawn ahead, ``g`` batches a call, is feasible when (prefetch + 1) * g - 1 <=
    max_staleness (paper section 4.2); 0 means strictly sequential.
    """

    batch_size: int
    updates_per_rollout: int = 1
    max_staleness: int = 4

    def __post_init__(self) -> None:
        check_integer("OffPolicy(batch_size=)", self.batch_size, 1)
        check_integer("OffPolicy(updates_per_rollout=)", self.updates_per_rollout, 1)
        check_integer("OffPolicy(max_staleness=)", self.max_staleness, 0)


@dataclass(frozen=True, kw_only=True)
class OnPolicy:
    """Only this iteration's items: ``units_per_iteration`` rollouts, then ``num_epochs`` passes of ``num_minibatches``."""

    num_minibatches: int
    num_epochs: int = 1
    units_per_iteration: int = 1

    def __post_init__(self) -> None:
        check_integer("OnPolicy(num_minibatches=)", self.num_minibatches, 1)
        check_integer("OnPolicy(num_epochs=)", self.num_epochs, 1)
        check_integer("OnPolicy(units_per_iteration=)", self.units_per_iteration, 1)


@dataclass(frozen=True, kw_only=True)
class BoundedLag:
    """Each item is used once, oldest first, and only while at most ``max_policy_lag`` versions old; older ones are dropped and counted."""

    batch_size: int
    max_policy_lag: int
    updates_per_rollout: int = 1

    def __post_init__(self) -> None:
        check_integer("BoundedLag(batch_size=)", self.batch_size, 1)
        check_integer("BoundedLag(max_policy_lag=)", self.max_policy_lag, 0)
        check_integer("BoundedLag(updates_per_rollout=)", self.updates_per_rollout, 1)


Algorithm = OffPolicy | OnPolicy | BoundedLag

DEFAULT_TABLE = "experience"


def replay_tables(
    algorithm: Algorithm, replay: ReplayConfig | Mapping[str, ReplayConfig] | None
) -> dict[str, ReplayConfig]:
    """Return the tables a plane of ``algorithm`` has, by name; ``ConfigError`` for a combination that can never work."""
    if isinstance(algorithm, BoundedLag):
        refuse(ConfigError, "BoundedLag is described but not run yet.", got="BoundedLag", want="OffPolicy or OnPolicy")
    if not isinstance(algorithm, Algorithm):
        refuse(ConfigError, "Unknown algorithm class.", got=repr(algorithm), want="OffPolicy, OnPolicy or BoundedLag")
    if isinstance(algorithm, OnPolicy):
        if replay is not None:
            refuse(
                ConfigError,
                "On-policy experience has no replay: it is dropped after its iteration.",
                got=repr(replay),
                want="replay=None",
            )
        return {DEFAULT_TABLE: ReplayConfig(capacity=1)}
    if replay is None:
        refuse(ConfigError, "Off-policy experience needs a replay.", want="replay=conduit.ReplayConfig(capacity=...)")
    tables = {DEFAULT_TABLE: replay} if isinstance(replay, ReplayConfig) else dict(replay)
    for name, config in tables.items():
        if not isinstance(config, ReplayConfig):
            refuse(ConfigError, f"Table {name!r} is not described by a ReplayConfig.", got=type(config).__name__)
        if isinstance(algorithm, OffPolicy) and algorithm.batch_size > config.capacity:
            refuse(
                ConfigError,
                "A batch is larger than the replay.",
                got=f"batch_size={algorithm.batch_size}, capacity={config.capacity}",
                want="batch_size <= capacity",
            )
    return tables
