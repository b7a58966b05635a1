"""How items are drawn and removed: values, each usable for several tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

from conduit_jax.errors import ConfigError, check_at_least, check_choice, refuse


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


@dataclass(frozen=True, kw_only=True)
class Fifo:
    """Take the oldest insertion; priority updates do not move an item."""


@dataclass(frozen=True, kw_only=True)
class Lifo:
    """Take the newest insertion; priority updates do not move an item. As a remover it evicts the newcomer."""


@dataclass(frozen=True, kw_only=True)
class MinHeap:
    """Take the lowest priority; ties go to the least recently inserted or updated item."""


@dataclass(frozen=True, kw_only=True)
class MaxHeap:
    """Take the highest priority; ties go to the least recently inserted or updated item."""


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """Draw uniformly without replacement: every live item exactly once an epoch, in an order that the keys decide.

    An item inserted during an epoch belongs to it. The next epoch begins with the draw after the last item's.
    """


Remover = Uniform | Prioritized | Fifo | Lifo | MinHeap | MaxHeap
Sampler = Remover | Epochs
RING_SAMPLERS = (Uniform, Prioritized)
