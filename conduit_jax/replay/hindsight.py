"""Hindsight relabelling: a sampled step is shown with a goal that its own episode did reach.

    goals = Hindsight(
        achieved="next_observation.achieved_goal",
        desired=("observation.desired_goal", "next_observation.desired_goal"),
        recompute=(("reward", lambda achieved, desired, step: -jnp.float32(jnp.linalg.norm(achieved - desired) > 0.05)),),
    )
    replay = relabel(make_replay(ReplayConfig(capacity=1_000_000), batch_size=256, lanes=16), goals)

Source: Andrychowicz et al. 2017, "Hindsight experience replay", section 3 (strategies: section 4.5).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.errors import ConfigError, SpecError, check_choice, check_fraction, refuse
from conduit_jax.items import Items
from conduit_jax.replay import episode_ends, paths, random_bits, storage
from conduit_jax.replay.episode_ends import EpisodeEnds, Span
from conduit_jax.replay.interface import Faults, Replay, ReplayState
from conduit_jax.replay.ring import RingState
from conduit_jax.replay.storage import Experience, Storage, in_device_memory
from conduit_jax.trees import tree_spec
from conduit_jax.types import AddInfo, Sample, SampleInfo

Array = jax.Array
PyTree = Any
Recompute = Callable[[PyTree, PyTree, PyTree], PyTree]

STRATEGIES = ("final", "future", "episode")
_GOALS = np.uint32(0x6041)  # what the key is folded with for the goals; the draw of the items takes it as it is


@dataclass(frozen=True, kw_only=True)
class Hindsight(Items):
    """Which goals stand for which, and how often. Parts of an item are named by path: ``"observation.desired_goal"``.

    ``achieved``: the goal reached by a step, in the state it led to. ``desired``: everywhere the goal aimed for stands, of
    the same shapes and dtypes. ``recompute``: pairs of a path and ``f(achieved, desired, item) -> value`` of one item whose
    goals have been exchanged: the reward, and termination or discount where they depend on the goal. ``ended``: paths of
    bools that say that a step was its episode's last.

    ``strategy``: the new goal is what was achieved by the episode's ``"final"`` step (of one still running, its newest), by
    a step drawn uniformly from this one and those after it (``"future"``), or from all that live (``"episode"``).
    ``fraction`` of the draws, each by itself, are relabelled: k / (k + 1) for k relabelled ones beside each original.
    """

    noun: ClassVar[str] = "steps"
    slots_known: ClassVar[bool] = True

    achieved: str
    desired: tuple[str, ...]
    recompute: tuple[tuple[str, Recompute], ...]
    ended: tuple[str, ...] = ("terminated", "truncated")
    strategy: str = "future"
    fraction: float = 0.8

    def __post_init__(self) -> None:
        check_choice("Hindsight(strategy=)", self.strategy, STRATEGIES)
        check_fraction("Hindsight(fraction=)", self.fraction)
        if not isinstance(self.achieved, str):
            refuse(ConfigError, "Hindsight(achieved=) names nothing.", got=repr(self.achieved), want="a path")
        for name in ("desired", "ended"):
            paths.check_paths(f"Hindsight({name}=)", getattr(self, name))
        pairs = self.recompute
        if not isinstance(pairs, tuple) or not all(
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and callable(pair[1])
            for pair in pairs
        ):
            refuse(
                ConfigError,
                "Hindsight(recompute=) does not say what is computed anew.",
                got=repr(pairs),
                want='a tuple of pairs of a path and a function, such as (("reward", function),)',
            )


class HindsightControl(NamedTuple):
    """The replay's own control, and where its episodes end."""

    inner: Any
    episodes: EpisodeEnds

    @property
    def ring(self) -> RingState:
        return self.inner.ring

    @property
    def faults(self) -> Faults:
        return self.inner.faults

    @property
    def limiter(self) -> Any:
        return self.inner.limiter


def relabel(replay: Replay, goals: Hindsight, *, storage_access: Storage = in_device_memory) -> Replay:
    """Return ``replay`` with a part of every batch relabelled; draws, weights and ``SampleInfo`` stay as they are.

    ``replay`` is a ring of single steps in time order, of any sampler. A goal comes from the same episode of the same
    lane as its step, and from what still lives of it: never from beyond an episode's end or the write head. Rows that are
    not relabelled come back bit for bit. Beside the items it keeps 8 bytes a slot.

    Raises:
      ConfigError: when made into a state, for a replay that does not keep its steps in time order.
      SpecError: for a path that leads nowhere, goals of different shapes or dtypes, or a recomputed value that differs
        from the one it replaces.
    """
    geometry = replay.geometry

    def init(item: PyTree) -> ReplayState:
        inner = replay.init(item)
        _check_ring(inner)
        _check_goals(inner.storage.layout.spec.shapes(), goals)
        return inner._replace(control=HindsightControl(inner.control, episode_ends.init(geometry)))

    def add(
        state: ReplayState, chunk: PyTree, lengths: Array | None = None, *rest: Any, **more: Any
    ) -> tuple[ReplayState, AddInfo]:
        inner, info = replay.add(ReplayState(state.storage, state.control.inner), chunk, lengths, *rest, **more)
        ended = paths.any_of(chunk, goals.ended)
        steps = ended.shape[0]
        count = jnp.full((), steps, jnp.int32) if lengths is None else jnp.clip(lengths.astype(jnp.int32), 0, steps)
        count = jnp.where(info.added > 0, count, 0)  # a limiter leaves a chunk out whole
        episodes = episode_ends.advance(state.control.episodes, geometry, state.control.ring, ended, count)
        return inner._replace(control=HindsightControl(inner.control, episodes)), info

    def sample(control: HindsightControl, experience: Experience, key: Array) -> tuple[HindsightControl, Sample]:
        inner, batch = replay.sample(control.inner, experience, key)
        count = batch.valid.shape[0]
        words = random_bits.bits(random_bits.fold(key, _GOALS), 2 * count)
        span = episode_ends.span(control.episodes, geometry, control.ring, batch.info.slot)
        offset = _goal_offset(goals.strategy, span, words[:count])
        source = episode_ends.shift(geometry, batch.info.slot, offset)
        reached = paths.get(storage.gather(storage_access, experience, source)[0], goals.achieved)
        chosen = batch.valid & _below_fraction(words[count:], goals.fraction)
        return control._replace(inner=inner), batch._replace(data=_relabelled(batch.data, goals, reached, chosen))

    def update_priorities(control: HindsightControl, info: SampleInfo, priorities: Array) -> tuple:
        return _rewrap(control, replay.update_priorities(control.inner, info, priorities))

    def delete(control: HindsightControl, info: SampleInfo) -> tuple:
        return _rewrap(control, replay.delete(control.inner, info))

    def reset(control: HindsightControl) -> HindsightControl:
        return HindsightControl(replay.reset(control.inner), episode_ends.reset(control.episodes, geometry))

    return Replay(
        init=init,
        can_add=lambda control, n: replay.can_add(control.inner, n),
        add=add,
        can_sample=lambda control, n: replay.can_sample(control.inner, n),
        sample=sample,
        update_priorities=update_priorities,
        delete=delete,
        reset=reset,
        explain_blocked=lambda control, operation, n: replay.explain_blocked(control.inner, operation, n),
        size=lambda control: replay.size(control.inner),
        geometry=geometry,
    )


def _rewrap(control: HindsightControl, changed: tuple[Any, Array]) -> tuple[HindsightControl, Array]:
    return control._replace(inner=changed[0]), changed[1]


def _goal_offset(strategy: str, span: Span, words: Array) -> Array:
    """Return how many steps after its own each row's goal was achieved, int32; negative: before."""
    if strategy == "final":
        return span.after
    if strategy == "future":
        return random_bits.below(words, span.after + 1)
    return random_bits.below(words, span.before + span.after + 1) - span.before


def _below_fraction(words: Array, fraction: float) -> Array:
    """Return bools that are True with probability ``fraction`` (to 2**-32) for uniform uint32 ``words``."""
    bound = round(fraction * 2**32)
    return jnp.ones(words.shape, bool) if bound >= 2**32 else words < jnp.uint32(bound)


def _relabelled(data: PyTree, goals: Hindsight, reached: PyTree, chosen: Array) -> PyTree:
    """Return ``data`` ``(batch, ...)`` with the goals ``reached`` in the rows ``chosen`` bool, and what follows from them."""
    exchanged = data
    for path in goals.desired:
        exchanged = paths.put(exchanged, path, reached)
    achieved, result = paths.get(data, goals.achieved), data
    for path, function in goals.recompute:
        value = jax.vmap(function)(achieved, reached, exchanged)
        _check_same(value, paths.get(data, path), f"What Hindsight(recompute=) gives for {path!r}", drop=1)
        result = paths.put(result, path, _choose(chosen, value, paths.get(data, path)))
    for path in goals.desired:
        result = paths.put(result, path, _choose(chosen, reached, paths.get(data, path)))
    return result


def _choose(chosen: Array, new: PyTree, old: PyTree) -> PyTree:
    def choose(one: Array, other: Array) -> Array:
        return jnp.where(chosen.reshape(chosen.shape + (1,) * (one.ndim - 1)), one, other)

    return jax.tree.map(choose, new, old)


def _check_ring(inner: ReplayState) -> None:
    if not isinstance(inner.storage, Experience) or not hasattr(inner.control, "ring"):
        refuse(
            ConfigError,
            "Hindsight needs a replay that keeps single steps in time order.",
            got=type(inner.control).__name__,
            want="a ring: remover Fifo(), sampler Uniform() or Prioritized(), no max_times_sampled",
        )


def _check_goals(item: PyTree, goals: Hindsight) -> None:
    """Refuse goals that cannot stand for each other, and paths that lead nowhere."""
    achieved = paths.get(item, goals.achieved)
    for path in goals.desired:
        _check_same(paths.get(item, path), achieved, f"The goal at {path!r}")
    for path, _ in goals.recompute:
        paths.get(item, path)
    jax.eval_shape(lambda one: paths.any_of(one, goals.ended), item)


def _check_same(found: PyTree, wanted: PyTree, what: str, *, drop: int = 0) -> None:
    got, want = tree_spec(found, drop=drop), tree_spec(wanted, drop=drop)
    if got != want:
        refuse(SpecError, f"{what} differs in tree, shape or dtype.", got=got.shapes(), want=want.shapes())
