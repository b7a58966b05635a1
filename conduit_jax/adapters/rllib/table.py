"""One module's replay: chunks in, batches of torch tensors out, priorities back. All of it on the caller's thread.

What happens when is decided here, in the order of the calls, and never by how long anything takes: a draw sees every chunk
added and every priority given before it was made. With ``Schedule(granularity, prefetch)`` one call draws several batches,
and a call can be made while the batches of the one before it are used; XLA then works beside the update.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from conduit_jax.adapters.dlpack import Handovers, import_torch, leaf_to_torch
from conduit_jax.adapters.rllib import chunks, programs
from conduit_jax.adapters.rllib.options import Options, Schedule, Settings
from conduit_jax.adapters.rllib.priorities import Priorities
from conduit_jax.adapters.rllib.programs import Draw, Layout, State
from conduit_jax.adapters.rllib.staging import Staging
from conduit_jax.errors import NotReadyError, PlacementError, refuse
from conduit_jax.sharding.memory import available_bytes

_FUSED_ROWS = 64  # more rows than this go in by a program of their own, so that few shapes are compiled
_TREE_BYTES = 9  # a slot's share of the sum tree
_REUSED_BYTES = 1 << 20  # more than this is overwritten by the next draw
_NESTED = ("obs", "new_obs", "actions")


class Request(NamedTuple):
    """What RLlib asks of a batch: its size, the range of steps, both ends included, the discount, beta."""

    batch: int
    low: int
    high: int
    gamma: float
    beta: float


@dataclass
class Drawn:
    """Batches drawn by one call: ``columns`` of each as leaves ``(groups, batch, ...)``, still JAX's until they are needed.

    ``flushed`` rows had been written when they were drawn, ``used`` batches are given away already, ``ahead`` batches
    had been drawn before them and not been used.
    """

    columns: dict[str, Any]
    flushed: int
    ahead: int
    used: int = 0
    tensors: list[dict[str, Any]] | None = None
    slots: np.ndarray | None = None


class Table:
    """The replay of the module ``name``. ``seed`` is two uint32 words; the replay lives on ``device``."""

    def __init__(self, name: str, settings: Settings, options: Options, seed: np.ndarray, device: Any):
        self.name, self.settings, self.options, self.device = name, settings, options, device
        self.counts: Counter[str] = Counter()
        self.handovers = Handovers()
        self.staleness = 0  # of the last batch: updates since it was drawn
        self._seed, self._drawn_calls, self._flushed = seed, 0, 0
        self._request: Request | None = None
        self._schedule = Schedule(1, 0)
        self._groups: list[Drawn] = []
        self._spent: list[tuple[Any, ...]] = []
        self.priorities = Priorities(name, settings.capacity)
        self.layout: Layout | None = None

    @property
    def live(self) -> int:
        """The steps that may be drawn."""
        return 0 if self.layout is None else self.staging.live

    @property
    def open_episodes(self) -> int:
        """The episodes whose end has not come."""
        return 0 if self.layout is None else len(self.staging.open)

    @property
    def broken(self) -> int:
        """The chunks whose beginning could not be joined to the steps before it."""
        return 0 if self.layout is None else self.staging.broken

    # ------------------------------------------------------------------ in

    def add(self, episode: Any) -> None:
        """Take a ``SingleAgentEpisode`` chunk in; ``SpecError`` where its arrays differ from the first's."""
        chunk = chunks.read(episode)
        if not chunk.steps:
            if (chunk.terminated or chunk.truncated) and self.layout is not None:
                self.counts["lost_ends"] += not self.staging.end(chunk)
            return
        if self.layout is None:
            self._build(chunk)
        assert self.layout is not None
        chunks.check_fits(self.layout, chunk)
        for begin in range(0, chunk.steps, self.staging.piece):
            end = min(begin + self.staging.piece, chunk.steps)
            if not self.staging.room_for(end - begin):
                self._flush()
            self.staging.add(chunk, begin, end)
        self.counts["added_steps"] += chunk.steps

    def _build(self, chunk: chunks.Chunk) -> None:
        layout = chunks.layout_of(chunk)
        self.structures = chunk.structures
        self._check_memory(layout)
        self.layout, self.staging = layout, Staging(layout, self.settings.capacity)
        self.state: State = programs.init(layout, self.settings.capacity, self.device)

    def _check_memory(self, layout: Layout) -> None:
        """Raise ``PlacementError`` before memory is asked for that is not there."""
        row_bytes = layout.row_bytes + _TREE_BYTES
        wanted, free = self.settings.capacity * row_bytes, available_bytes(self.device, "device")
        if free and wanted > 0.9 * free:
            fit = int(0.9 * free / row_bytes)
            refuse(
                PlacementError,
                f"The replay of module {self.name!r} does not fit into memory.",
                got=f"capacity {self.settings.capacity} of {row_bytes} bytes: {wanted} bytes, {free} free",
                want=f"at most {fit}",
                fix="lower replay_buffer_config['capacity']",
            )

    def _flush(self) -> None:
        writes = self.staging.take()
        self.state = programs.insert(self.state, *writes, exponent=self.settings.exponent)
        self._flushed = self.staging.written
        self.counts["dispatches"] += 1

    # ------------------------------------------------------------------ out

    def next(self, request: Request) -> dict[str, Any]:
        """Return the next batch: RLlib's columns as tensors ``(batch, ...)``; ``NotReadyError`` where nothing is stored."""
        if self.layout is None or self.staging.live == 0:
            refuse(
                NotReadyError,
                f"Nothing to sample for module {self.name!r} yet.",
                got="0 steps",
                fix="raise config.training(num_steps_sampled_before_learning_starts=)",
            )
        if request != self._request:
            self._plan(request)
        if not self._groups or self._groups[0].used == self._schedule.granularity:
            self._spent += [self._observations(group) for group in self._groups[:1]]
            del self._groups[:1]
            while len(self._groups) <= self._schedule.prefetch:
                self._draw(request)
        group = self._groups[0]
        if group.tensors is None:
            self._deliver(group)
        assert group.tensors is not None
        columns, slots, number = group.tensors[group.used], group.slots, group.used
        group.used += 1
        self.staleness = group.ahead + number
        if slots is not None:
            self.priorities.expect(slots[number], group.flushed)
        self.counts["batches"] += 1
        return columns

    def _plan(self, request: Request) -> None:
        """Draw as ``request`` says from now on; what was drawn for another one is dropped, and counted."""
        assert self.layout is not None
        self.counts["dropped_batches"] += sum(self._schedule.granularity - group.used for group in self._groups)
        leaves = self.layout.observation * 2 + self.layout.action
        self._request, self._groups, self._spent = request, [], []
        self._schedule = self.options.schedule(request.batch * sum(leaf.bytes for leaf in leaves))
        prioritized = self.settings.alpha is not None
        self._draw_spec = Draw(
            request.batch,
            self._schedule.granularity,
            request.low,
            request.high,
            request.gamma,
            self.settings.exponent,
            request.beta if prioritized else None,
            self.options.observation_dtype,
        )
        torch = import_torch()
        self._constant = {"n_step": torch.ones(request.batch, dtype=torch.int32)} if request.high == 1 else {}
        self._constant |= {} if prioritized else {"weights": torch.ones(request.batch)}

    def _draw(self, request: Request) -> None:
        """Dispatch one call: priorities given, chunks added, then the draw. Nothing is waited for."""
        assert self.layout is not None
        if self.staging.rows > _FUSED_ROWS:
            self._flush()
        usual = self._schedule.granularity * request.batch if self.settings.alpha is not None else 1
        updates, writes = self.priorities.take(usual, self._flushed), self.staging.take()
        key = np.array([*self._seed, self._drawn_calls], np.uint32)
        spent = self._spent.pop() if self._spent else ()
        self._spent.clear()
        self.state, columns = programs.advance(
            self.state, *writes, updates, key, spent, layout=self.layout, draw=self._draw_spec
        )
        self._drawn_calls, self._flushed = self._drawn_calls + 1, self.staging.written
        ahead = sum(self._schedule.granularity - group.used for group in self._groups)
        self._groups.append(Drawn(columns, self._flushed, ahead))
        self.counts["dispatches"] += 1

    def _observations(self, group: Drawn) -> tuple[Any, ...]:
        """Return what the next draw may overwrite: large observations in host memory, that torch has done with."""
        leaves = group.columns["obs"], group.columns["new_obs"]
        large = sum(leaf.nbytes for leaf in leaves[0]) > _REUSED_BYTES
        return leaves if large and self.device.platform == "cpu" else ()

    def _deliver(self, group: Drawn) -> None:
        """Hand a call's columns to torch, without a copy wherever that is safe, and part them into batches."""
        columns = dict(group.columns)
        slots = columns.pop("slots", None)
        group.slots = None if slots is None else np.asarray(slots)
        parts: dict[str, Any] = {}
        for name, value in columns.items():
            if name in _NESTED:
                leaves = zip(*(leaf_to_torch(leaf, None, self.handovers).unbind(0) for leaf in value), strict=True)
                structure = self.structures[name == "actions"]
                parts[name] = [one[0] if structure is None else jax.tree.unflatten(structure, one) for one in leaves]
            else:
                parts[name] = leaf_to_torch(value, None, self.handovers).unbind(0)
        numbers = range(self._schedule.granularity)
        group.tensors = [{name: part[n] for name, part in parts.items()} | self._constant for n in numbers]

    # ------------------------------------------------------------------ back

    def update_priorities(self, priorities: Any) -> None:
        """Give the batch returned last its priorities, ``(batch,)``: kept until the next draw."""
        if self.settings.alpha is not None:
            self.priorities.receive(priorities)

    # ------------------------------------------------------------------ state

    def get_state(self) -> dict[str, Any]:
        """Return all that decides the batches to come, as plain values and numpy arrays."""
        if self.layout is None:
            return {}
        used = min(self.staging.written, self.settings.capacity)
        host = jax.tree.map(np.array, self.state._replace(rows=self.state.rows[:used]))
        host = host._replace(apart=tuple(leaf[:used] for leaf in host.apart))
        groups = [
            (jax.tree.map(np.array, group.columns), group.flushed, group.ahead, group.used) for group in self._groups
        ]
        names = ("_seed", "_drawn_calls", "_flushed", "_request", "_schedule", "counts")
        plain = {name: copy.copy(getattr(self, name)) for name in names}
        fixed = {"layout": self.layout, "structures": self.structures, "priorities": self.priorities.get_state()}
        return fixed | {"state": host, "groups": groups, "plain": plain, "staging": self.staging.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from what ``get_state`` returned."""
        if not state:
            return
        self.layout, self.structures = state["layout"], state["structures"]
        self._check_memory(state["layout"])
        self.staging = Staging(state["layout"], self.settings.capacity)
        self.staging.set_state(state["staging"])
        self.priorities.set_state(state["priorities"])
        self.state = self._placed(state["state"])
        request = state["plain"]["_request"]
        if request is not None:
            self._plan(request)
        for name, value in state["plain"].items():
            setattr(self, name, copy.copy(value))
        put = jax.sharding.SingleDeviceSharding(self.device)
        self._groups = [
            Drawn(jax.device_put(columns, put, may_alias=False), *rest) for columns, *rest in state["groups"]
        ]

    def _placed(self, host: State) -> State:
        """Return the saved state on the device, rows never written as zeros."""
        capacity = self.settings.capacity

        def whole(part: np.ndarray) -> np.ndarray:
            full = np.zeros((capacity, *part.shape[1:]), part.dtype)
            full[: len(part)] = part
            return full

        full = host._replace(
            rows=whole(np.asarray(host.rows)), apart=tuple(whole(np.asarray(leaf)) for leaf in host.apart)
        )
        put = jax.sharding.SingleDeviceSharding(self.device)
        return jax.tree.map(lambda leaf: jax.device_put(leaf, put, may_alias=False), full)


__all__ = ["Request", "Table"]
