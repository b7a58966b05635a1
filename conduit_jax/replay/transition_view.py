"""What a transition is made of when observations are stored once: how many steps it spans, how many frames it sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.config import ReplayConfig
from conduit_jax.errors import ConfigError, SpecError, check_choice, check_fraction, check_integer, refuse
from conduit_jax.items import Items
from conduit_jax.replay import random_bits
from conduit_jax.trees import tree_spec
from conduit_jax.types import Rollout

Array = jax.Array
PyTree = Any

_STEPS_A_FINAL, _FEWEST_FINALS = 16, 1024


class Step(NamedTuple):
    """One step of a lane, ``(T, lanes, ...)`` in a chunk: what ``make_transition_view`` stores.

    ``final_observation`` is what followed a step that ended an episode; elsewhere it may hold anything. With frame stacks
    both observations are single frames.
    """

    observation: PyTree
    action: PyTree
    reward: Array
    terminated: Array
    truncated: Array
    final_observation: PyTree


def steps_of(rollout: Rollout) -> Step:
    """Return ``rollout``'s steps for ``make_transition_view``: an ingestion. The next rollout must go on where it ends."""
    if rollout.final_observation is None or rollout.lengths is not None:
        refuse(
            SpecError,
            "Steps need their final observations, and all of a rollout's steps.",
            got=f"final_observation={type(rollout.final_observation).__name__}, lengths={rollout.lengths}",
            want="Rollout(final_observation=), lengths=None",
            fix="return Records(steps, lengths) from the ingestion for rollouts with lengths",
        )
    return Step(*(getattr(rollout, name) for name in Step._fields))


@dataclass(frozen=True, kw_only=True)
class NStepRange:
    """Draw n uniformly from ``low`` to ``high`` (both included), anew for every sampled transition."""

    low: int
    high: int

    def __post_init__(self) -> None:
        check_integer("NStepRange(low=)", self.low, 1)
        check_integer("NStepRange(high=)", self.high, self.low, fix="high must not be below low")


@dataclass(frozen=True, kw_only=True)
class TransitionView(Items):
    """Transitions over ``n`` steps with observations of ``stack`` frames.

    ``n`` is a number, a tuple that a batch's rows take in turn, or an ``NStepRange``. ``discount`` is that of one step.
    ``padding`` says what stands before an episode's first frame: that frame again (``"repeat"``) or ``"zero"``.
    ``final_observations`` is the room, over all partitions, for what followed the last steps of episodes; unless given one
    for every 16 steps, in a partition at least 1024. A step whose final observation was overwritten is not drawn any more, and is counted.
    """

    noun: ClassVar[str] = "transitions"

    discount: float
    n: int | tuple[int, ...] | NStepRange = 1
    stack: int = 1
    padding: str = "repeat"
    final_observations: int | None = None

    def __post_init__(self) -> None:
        check_fraction("TransitionView(discount=)", self.discount)
        check_integer("TransitionView(stack=)", self.stack, 1)
        check_choice("TransitionView(padding=)", self.padding, ("repeat", "zero"))
        if self.final_observations is not None:
            check_integer("TransitionView(final_observations=)", self.final_observations, 1)
        if self.n == ():
            refuse(ConfigError, "TransitionView(n=) is empty.", got="()", want="at least one number of steps")
        if not isinstance(self.n, NStepRange):
            for number in self.n if isinstance(self.n, tuple) else (self.n,):
                check_integer("TransitionView(n=)", number, 1)

    @property
    def largest_n(self) -> int:
        """The most steps a transition may span."""
        return self.n.high if isinstance(self.n, NStepRange) else max(self.n) if isinstance(self.n, tuple) else self.n

    def most_lost(self, steps: int) -> int:
        """Return what may go with so many steps overwritten: they, those whose frames they were, and n for each lost end."""
        return steps * (1 + self.largest_n) + self.stack - 1

    def steps_drawn(self, key: Array, rows: int) -> Array:
        """Return each row's n, int32 ``(rows,)``; only an ``NStepRange`` looks at ``key``."""
        if isinstance(self.n, NStepRange):
            words = random_bits.bits(random_bits.fold(key, np.uint32(1)), rows)
            return self.n.low + random_bits.below(words, jnp.uint32(self.n.high - self.n.low + 1))
        if isinstance(self.n, tuple):
            return jnp.tile(jnp.array(self.n, jnp.int32), rows // len(self.n))
        return jnp.full((rows,), self.n, jnp.int32)

    def final_capacity(self, slots: int, partitions: int) -> int:
        """Return the room for final observations of one partition of ``slots`` steps."""
        total = self.final_observations
        wanted = max(slots // _STEPS_A_FINAL, _FEWEST_FINALS) if total is None else -(-total // partitions)
        return min(slots, wanted)


def check_view(view: TransitionView, config: ReplayConfig, length: int, lanes: int, rows: int) -> None:
    """Refuse what could never be drawn from lanes of ``length`` steps, ``rows`` a partition."""
    reach = view.largest_n + view.stack
    if reach > length:
        refuse(
            ConfigError,
            "A transition reaches further than a lane's ring.",
            got=f"n={view.largest_n} steps on and stack={view.stack} frames back, over {length} steps a lane",
            want=f"n + stack <= {length}",
            fix=f"raise capacity to at least {reach * lanes}",
        )
    if isinstance(view.n, tuple) and rows % len(view.n):
        refuse(
            ConfigError,
            "A batch's rows do not divide by the numbers of steps that they take in turn.",
            got=f"{rows} rows a partition over {len(view.n)}",
            want="a multiple",
        )
    sure = lanes * (length - reach + 1)
    if config.min_size > sure:
        refuse(
            ConfigError,
            "A replay that may hold fewer transitions than it needs before sampling would wait for ever.",
            got=f"min_size={config.min_size} transitions, at most {sure} that are complete",
            want=f"min_size <= {sure}",
            fix="min_size counts transitions that may be drawn: lower it, or raise capacity",
        )


def check_step(item: PyTree) -> Step:
    """Return ``item``; raise ``SpecError`` unless ``item`` is a ``Step`` that transitions can be made of."""
    if not isinstance(item, Step):
        refuse(SpecError, "A transition view stores steps.", got=type(item).__name__, want="conduit_jax.Step")
    observation, final = tree_spec(item.observation), tree_spec(item.final_observation)
    if observation != final:
        refuse(
            SpecError,
            "Final observations differ from observations.",
            got=final.shapes(),
            want=observation.shapes(),
        )
    for name in ("reward", "terminated", "truncated"):
        leaf, kind = getattr(item, name), jnp.floating if name == "reward" else jnp.bool_
        if getattr(leaf, "shape", None) != () or not jnp.issubdtype(leaf.dtype, kind):
            want = "a scalar of a floating dtype" if name == "reward" else "a bool scalar"
            refuse(SpecError, f"Step({name}=) has another form.", got=str(leaf), want=want)
    return item
