"""The buffer RLlib sees: its calls, its names, its metrics; a ``Table`` a module behind it. Loaded by the driver alone."""

# pyright: reportMissingImports=false
from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.replay_buffers.episode_replay_buffer import EpisodeReplayBuffer
from ray.rllib.utils.replay_buffers.prioritized_episode_buffer import PrioritizedEpisodeReplayBuffer

from conduit_jax.adapters.rllib.connector import ReadyBatch
from conduit_jax.adapters.rllib.options import Options, Settings, find_device
from conduit_jax.adapters.rllib.table import Request, Table
from conduit_jax.errors import CheckpointError, ConfigError, NotReadyError, SpecError, refuse

_FORMAT = 1


class ConduitEpisodeReplayBuffer(PrioritizedEpisodeReplayBuffer):
    """A replay by module of rows in JAX arrays. RLlib hands priorities to descendants of its own prioritized buffer only.

    ``modules``: the module ids that may appear; ``trained``: those that are stored, all unless given. ``seed``: 32 bits.
    """

    def __init__(
        self,
        settings: Settings,
        options: Options,
        *,
        modules: Collection[str] = (DEFAULT_MODULE_ID,),
        trained: Collection[str] | None = None,
        seed: int | None = None,
    ):
        EpisodeReplayBuffer.__init__(self, capacity=settings.capacity)  # without RLlib's own trees
        self.settings, self.options = settings, options
        self._modules, self._trained = frozenset(modules), None if trained is None else frozenset(trained)
        self.seed = np.random.SeedSequence().entropy % 2**32 if seed is None else seed % 2**32  # type: ignore[operator]
        self._device = find_device(options.backend)
        self._tables: dict[str, Table] = {}
        self._sampled = 0
        self.exposed: defaultdict[str, float] = defaultdict(float)
        self._reported: dict[str, float] = {}
        self._stale, self._stalest = 0, 0

    # ------------------------------------------------------------------ RLlib's calls

    def add(self, episodes: Any) -> None:
        """Take in chunks of single- or multi-agent episodes, cut anywhere; ``SpecError`` for a module nobody declared."""
        begin = time.perf_counter()
        for episode in episodes if isinstance(episodes, list) else [episodes]:
            agents = getattr(episode, "agent_episodes", None)
            for part in (episode,) if agents is None else agents.values():
                name = DEFAULT_MODULE_ID if part is episode else part.module_id
                if name not in self._modules:
                    self._refuse_module(name)
                if self._trained is None or name in self._trained:
                    self._table(name).add(part)
        self.exposed["add_s"] += time.perf_counter() - begin

    def sample(
        self,
        num_items: int | None = None,
        *,
        n_step: int | tuple[int, int] | None = None,
        batch_length_T: int | None = None,
        lookback: int = 0,
        min_batch_length_T: int = 0,
        gamma: float = 0.99,
        beta: float | None = None,
        sample_episodes: bool = True,
        **unused: Any,
    ) -> list[Any]:
        """Return one ``ReadyBatch`` of ``num_items`` transitions a module, as a list; ``NotReadyError`` where there are none.

        ``n_step``: a number, or a range with both ends included. An episode's last steps, and the newest, span fewer; the
        column ``n_step`` says how many.
        """
        begin = time.perf_counter()
        if batch_length_T or lookback or min_batch_length_T:
            refuse(
                ConfigError,
                "Sequences were asked for, and the replay delivers single transitions.",
                got=f"batch_length_T={batch_length_T}, lookback={lookback}, burn-in {min_batch_length_T}",
                want="a module without state and burn_in_len=0",
            )
        low, high = n_step if isinstance(n_step, tuple | list) else (n_step or 1, n_step or 1)
        beta = self.settings.beta if beta is None else beta
        request = Request(num_items or self.batch_size_B, int(low), int(high), float(gamma), float(beta))
        ready = {name: table for name, table in sorted(self._tables.items()) if table.live}
        if not ready:
            fix = "raise config.training(num_steps_sampled_before_learning_starts=)"
            refuse(NotReadyError, "Nothing to sample yet.", got="0 steps", fix=fix)
        batch = ReadyBatch({name: table.next(request) for name, table in ready.items()})
        self._sampled += request.batch * len(ready)
        staleness = max(table.staleness for table in ready.values())
        self._stale, self._stalest = self._stale + staleness, max(self._stalest, staleness)
        self.exposed["batches"] += 1
        self.exposed["sample_s"] += time.perf_counter() - begin
        return [batch]

    def update_priorities(self, priorities: Any, module_id: str | None = None) -> None:
        """Give the batch that was sampled last its priorities, ``(num_items,)`` absolute TD errors."""
        begin = time.perf_counter()
        self._tables[module_id or DEFAULT_MODULE_ID].update_priorities(priorities)
        self.exposed["update_priorities_s"] += time.perf_counter() - begin

    def get_metrics(self) -> dict[str, Any]:
        """Return nothing: figures are taken once an iteration, by ``report``, not at every batch."""
        return {}

    # ------------------------------------------------------------------ figures

    def report(self) -> dict[str, float]:
        """Return the figures since the last report: seconds the caller spent, staleness, drops; and what is stored now.

        ``exposed_s`` is wall time on the caller's thread, in the buffer's calls.
        """
        names = ("add_s", "sample_s", "update_priorities_s", "batches")
        since = {name: self.exposed[name] - self._reported.get(name, 0) for name in names}
        self._reported = dict(self.exposed)
        found: dict[str, float] = {name: since[name] for name in names[:-1]}
        found["exposed_s"] = sum(found.values())
        found["batches"] = since["batches"]
        found["draw_staleness_updates_mean"] = self._stale / max(since["batches"], 1)
        found["draw_staleness_updates_max"] = self._stalest
        self._stale, self._stalest = 0, 0
        counts = sum((table.counts for table in self._tables.values()), Counter())
        for name in ("dispatches", "dropped_batches", "lost_ends"):
            found[f"{name}_lifetime"] = counts[name]
        found["stale_priorities_lifetime"] = sum(table.priorities.stale for table in self._tables.values())
        found["broken_chunks_lifetime"] = sum(table.broken for table in self._tables.values())
        found["stored_steps"] = self.get_num_timesteps()
        found["copied_leaves_lifetime"] = sum(sum(t.handovers.copied.values()) for t in self._tables.values())
        return found

    def get_num_timesteps(self, module_id: str | None = None) -> int:
        """Return the steps stored, of one module or all."""
        return sum(table.live for table in self._of(module_id))

    def get_added_timesteps(self, module_id: str | None = None) -> int:
        """Return the steps ever added."""
        return sum(table.counts["added_steps"] for table in self._of(module_id))

    def get_sampled_timesteps(self, module_id: str | None = None) -> int:
        """Return the transitions ever given out, over all modules."""
        return self._sampled

    def get_num_episodes(self, module_id: str | None = None) -> int:
        """Return the episodes that are still open."""
        return sum(table.open_episodes for table in self._of(module_id))

    def get_num_episodes_evicted(self, module_id: str | None = None) -> int:
        """Refuse: rows leave one by one, not by episodes."""
        return refuse(ConfigError, "The replay evicts rows, not episodes.", fix="get_num_timesteps()")

    def _of(self, module_id: str | None) -> Iterable[Table]:
        return self._tables.values() if module_id is None else [self._tables[module_id]]

    # ------------------------------------------------------------------ state

    def get_state(self) -> dict[str, Any]:
        """Return all that decides the batches to come."""
        tables = {name: table.get_state() for name, table in self._tables.items()}
        return {"format": _FORMAT, "identity": self._identity(), "sampled": self._sampled, "tables": tables}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``get_state``; ``CheckpointError`` where the replay was configured otherwise."""
        if state.get("format") != _FORMAT or state["identity"] != self._identity():
            refuse(
                CheckpointError,
                "The checkpoint's replay was configured otherwise.",
                got=state.get("identity", f"format {state.get('format')}"),
                want=self._identity(),
                fix="attach with the checkpoint's settings, or start without its replay",
            )
        self._sampled, self._tables = state["sampled"], {}
        for name, kept in state["tables"].items():
            self._table(name).set_state(kept)

    def _identity(self) -> dict[str, Any]:
        options = self.options
        return {
            "capacity": self.settings.capacity,
            "alpha": self.settings.alpha,
            "max_staleness": options.max_staleness,
            "granularity": options.granularity,
            "prefetch": options.prefetch,
            "observation_dtype": options.observation_dtype,
            "modules": sorted(self._modules),
        }

    def _table(self, name: str) -> Table:
        if name not in self._tables:
            words = np.array([self.seed, sorted(self._modules).index(name)], np.uint32)
            self._tables[name] = Table(name, self.settings, self.options, words, self._device)
        return self._tables[name]

    def _refuse_module(self, name: str) -> None:
        refuse(
            SpecError,
            "An episode belongs to a module that the configuration does not know.",
            got=repr(name),
            want=", ".join(sorted(self._modules)),
            fix="name it in config.multi_agent(policies=), or correct policy_mapping_fn",
        )


__all__ = ["ConduitEpisodeReplayBuffer"]
