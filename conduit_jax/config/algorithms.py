"""How fresh experience has to be: the three classes of algorithms."""

from __future__ import annotations

from dataclasses import dataclass

from conduit_jax.errors import check_integer


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
    """Each item is used once, oldest first, and only while at most ``max_policy_lag`` versions old; older ones are dropped and counted.

    An item's age is the plane's ``policy_version`` when its batch is handed over less the version it was pushed with.
    ``plane.stats()`` counts delivered items by age and the items dropped; ``SampleInfo.policy_version`` tells each item's.
    """

    batch_size: int
    max_policy_lag: int
    updates_per_rollout: int = 1

    def __post_init__(self) -> None:
        check_integer("BoundedLag(batch_size=)", self.batch_size, 1)
        check_integer("BoundedLag(max_policy_lag=)", self.max_policy_lag, 0)
        check_integer("BoundedLag(updates_per_rollout=)", self.updates_per_rollout, 1)


Algorithm = OffPolicy | OnPolicy | BoundedLag
