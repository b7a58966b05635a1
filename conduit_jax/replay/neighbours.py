"""Observations stored once: a transition's next observation, its n steps and its frames are read from ring neighbours.

    view = TransitionView(discount=0.99, n=3, stack=4)
    replay = make_transition_view(ReplayConfig(capacity=1_000_000), view, batch_size=256, lanes=16)
    state, _ = replay.add(state, Step(observation, action, reward, terminated, truncated, final_observation))
    sample.data                     # Transition; observations (batch, 4, ...) stacked from single frames

A chunk holds every step once, and chunks follow each other without a gap. Where an episode ended the next step in the ring
belongs to the next episode, so the observation that really followed is kept in a bounded ring beside it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.config import ReplayConfig
from conduit_jax.replay import finals, interface, neighbour_starts, ring, storage
from conduit_jax.replay import starts as startable
from conduit_jax.replay.buffer import Control, Replay, ReplayState, make_replay
from conduit_jax.replay.finals import Finals
from conduit_jax.replay.neighbour_reads import StepStorage, StoredStep, read_transitions
from conduit_jax.replay.neighbour_starts import Marks
from conduit_jax.replay.records import record_layout
from conduit_jax.replay.ring import RingState
from conduit_jax.replay.selectors import Geometry, Selection, Table, describe
from conduit_jax.replay.starts import BEYOND, Starts
from conduit_jax.replay.storage import Storage, in_device_memory
from conduit_jax.replay.transition_view import NStepRange, Step, TransitionView, check_step, check_view, steps_of
from conduit_jax.replay.turns import in_turn, waiting
from conduit_jax.replay.window_starts import added_steps
from conduit_jax.trees import tree_spec
from conduit_jax.types import AddInfo, Sample, SampleInfo

Array = jax.Array
PyTree = Any


class NeighbourState(NamedTuple):
    """``starts``: what may be drawn; ``marks``: what a start's neighbours need to be known by; ``finals``: whose is whose.

    ``plain`` is the selector state of the ring below.
    """

    plain: PyTree
    starts: Starts
    marks: Marks
    finals: Finals


def make_transition_view(
    config: ReplayConfig,
    view: TransitionView,
    *,
    batch_size: int,
    lanes: int = 1,
    partitions: int = 1,
    storage_access: Storage = in_device_memory,
) -> Replay:
    """Return the replay of **one** of ``partitions`` partitions whose items are ``Step`` and whose samples ``Transition``.

    A step may be drawn when everything its transition needs is there: its n successors (fewer where the episode ended), the
    final observation where it did, and the frames before it. ``config.capacity`` counts steps, ``min_size`` and
    ``SampleInfo.table_size`` those that may be drawn, ``AddInfo`` and a limiter's inserts steps. How many
    final observations were overwritten while their step was live says ``overwritten_finals(control)``. Raises ``ConfigError``
    where n or the stack exceed a lane's ring.
    """
    plain = startable.ring_below(config)
    base = make_replay(plain, batch_size=batch_size, lanes=lanes, partitions=partitions, storage_access=storage_access)
    geometry, draws, least = base.geometry, batch_size // partitions, -(-config.min_size // partitions)
    check_view(view, config, geometry.length, lanes, draws)
    count, sampler, room = geometry.slots, config.sampler, view.final_capacity(geometry.slots, partitions)
    limiter = startable.make_limiter(config, geometry, partitions, draws, view.largest_n + -(-least // geometry.lanes))

    def init(item: Step) -> ReplayState:
        check_step(item)
        entry: Any = jax.ShapeDtypeStruct((), jnp.int32)
        state = base.init(StoredStep(*item[:-1], entry))
        beside = storage.allocate(record_layout(tree_spec(item.final_observation)), room)
        marks = neighbour_starts.init(geometry, view.stack)
        held = NeighbourState(state.control.selector, startable.init(sampler, count), marks, finals.init(room))
        kept: Any = StepStorage(state.storage, beside)
        return ReplayState(kept, state.control._replace(selector=held))

    def below(control: Control) -> Control:
        return control._replace(selector=control.selector.plain)

    def add(
        state: ReplayState,
        chunk: Step,
        lengths: Array | None = None,
        priorities: Array | None = None,
        version: Array | None = None,
        key: Array | None = None,  # a ring removes its oldest steps, never drawn ones
    ) -> tuple[ReplayState, AddInfo]:
        kept: Any = state.storage
        held, before = state.control.selector, state.control.ring
        check_step(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), chunk))
        ended = (chunk.terminated | chunk.truncated).T  # (lanes, T)
        offered = jnp.full((), ended.shape[1], jnp.int32) if lengths is None else lengths
        entry = finals.assign(held.finals, ended & _leading(offered, ended)).entry
        stored = StoredStep(*chunk[:-1], entry.T)
        inner, info = base.add(ReplayState(kept.steps, below(state.control)), stored, lengths, None, version)
        slots = _written_slots(geometry, before, inner.control.ring, ended)
        ends = finals.assign(held.finals, ended & (slots < BEYOND))
        beside = _keep_finals(storage_access, kept.finals, ends, chunk.final_observation, version)
        given = None if priorities is None else priorities.T.reshape(-1)
        held, replaced = _after_add(config, view, geometry, held, inner.control.ring, (slots, ended, ends, given))
        faults = inner.control.faults
        faults = faults._replace(replaced_priorities=faults.replaced_priorities + replaced)
        control = inner.control._replace(selector=held._replace(plain=inner.control.selector), faults=faults)
        kept = StepStorage(inner.storage, beside)
        return ReplayState(kept, control), info._replace(replaced=replaced)

    def size(control: Control) -> Array:
        return startable.drawable_count(control.selector.starts, count)

    def can_sample(control: Control, n: int) -> Array:
        return base.can_sample(below(control), n) & (size(control) >= least)

    def sample(control: Control, experience: StepStorage, key: Array) -> tuple[Control, Sample]:
        key = waiting(key, control)
        held, total = control.selector, size(control)
        selection = startable.select(sampler, held.starts, count, key, draws)
        slots, depth = selection.drawn, held.marks.depth
        depth = None if depth is None else depth[slots].astype(jnp.int32)
        n = view.steps_drawn(key, draws)
        data, versions = read_transitions(view, geometry, storage_access, experience, slots, depth, n)
        weights, ready = interface.importance_weights(sampler, selection.probability, total), can_sample(control, draws)
        selection = Selection(slots, selection.probability, selection.priority)
        info = describe(control.ring, geometry, selection, Table(total, ready), versions, weights)
        paid = limiter.sampled(control.limiter, jnp.where(ready, draws, 0))
        return in_turn(control._replace(limiter=paid), info, data), Sample.described(data, info, None)

    def update_priorities(control: Control, info: SampleInfo, priorities: Array) -> tuple[Control, Array]:
        priorities, held = priorities.astype(jnp.float32), control.selector
        control, index, applied = startable.accepted_update(
            control, geometry, partial(startable.may_be_drawn, held.starts), info, priorities
        )
        kept = startable.update(sampler, held.starts, index, priorities)
        return control._replace(selector=held._replace(starts=kept)), applied

    def reset(control: Control) -> Control:
        empty, held = base.reset(below(control)), control.selector
        marks = neighbour_starts.restart(held.marks)
        held = held._replace(plain=empty.selector, starts=startable.init(sampler, count), marks=marks)
        return empty._replace(selector=held)

    def explain_blocked(control: Control, operation: str, n: int) -> str:
        reason = base.explain_blocked(below(control), operation, n)
        return reason if reason or operation != "sample" else startable.explain_too_few(int(size(control)), least, n)

    return base._replace(
        init=init,
        can_add=lambda control, n: base.can_add(below(control), n),
        add=add,
        can_sample=can_sample,
        sample=sample,
        update_priorities=update_priorities,
        delete=startable.refuse_delete,
        reset=reset,
        explain_blocked=explain_blocked,
        size=size,
    )


def overwritten_finals(control: Control) -> Array:
    """Return how many final observations were overwritten while their step was live, uint32: raise the room if it grows."""
    return control.selector.finals.overwritten


def _leading(count: Array, like: Array) -> Array:
    """Return bool ``(lanes, T)``, True on each lane's ``count`` leading steps."""
    return jnp.broadcast_to(jnp.arange(like.shape[1], dtype=jnp.int32) < count.reshape(-1, 1), like.shape)


def _written_slots(geometry: Geometry, before: RingState, after: RingState, like: Array) -> Array:
    """Return the slots that an add has written, int32 ``(lanes, T)``, ``BEYOND`` where it wrote none."""
    lanes, steps = like.shape
    times = jnp.broadcast_to(ring.write_times(before, geometry.length, steps), like.shape)
    slots = jnp.arange(lanes, dtype=jnp.int32)[:, None] * geometry.length + times
    return jnp.where(_leading(added_steps(before, after, geometry.length), like), slots, BEYOND)


def _keep_finals(
    access: Storage, kept: storage.Experience, ends: finals.Ends, observations: PyTree, version: Array | None
) -> storage.Experience:
    """Return the final observations with those ``(T, lanes, ...)`` of a chunk's ends among them."""
    flat = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1).reshape(-1, *leaf.shape[2:]), observations)
    version = jnp.zeros((), jnp.uint32) if version is None else version
    return storage.write(access, kept, finals.entries_to_write(ends), flat, version)


def _after_add(
    config: ReplayConfig,
    view: TransitionView,
    geometry: Geometry,
    held: NeighbourState,
    steps: RingState,
    written: tuple[Array, Array, finals.Ends, Array | None],
) -> tuple[NeighbourState, Array]:
    """Return what is known of all steps once ``written`` (slots, ended, ends, priorities) are there, and bad priorities."""
    slots, ended, ends, priorities = written
    owned, lost = finals.advance(geometry, steps, held.finals, ends, slots)
    marks = neighbour_starts.write(held.marks, slots, ended, ends, lost, view.stack)
    touched = neighbour_starts.touched_by_add(view, geometry, steps, ended.shape[1], lost)
    drawable = neighbour_starts.drawable_starts(view, geometry, steps, marks, touched)
    kept, replaced = startable.record(held.starts, slots.reshape(-1), priorities)
    kept = startable.mark(config.sampler, kept, geometry.slots, touched, drawable)
    return NeighbourState(held.plain, kept, marks, owned), replaced


__all__ = [
    "NStepRange",
    "NeighbourState",
    "Step",
    "StepStorage",
    "TransitionView",
    "make_transition_view",
    "overwritten_finals",
    "steps_of",
]
