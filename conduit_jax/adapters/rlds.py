"""Episode records in RLDS's layout as experience: what Open X-Embodiment and TensorFlow Datasets hold, without TensorFlow.

    data = RldsEpisodes(tfds.as_numpy(tfds.load(name, split="train")), length=64, observation_keys=("image",))
    for rollout in data:
        plane.push(rollout)

A record is a mapping whose ``steps`` is an iterable of mappings: ``observation`` (an array or a dict), ``action``, ``reward``,
``is_first``, ``is_last``, ``is_terminal``, often ``discount``. Any iterable of such records will do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from conduit_jax.adapters.episode_chunks import Counts, Leaves, Path, Piece, Rollouts, check_numbers, check_sizes, spelt
from conduit_jax.errors import SpecError, ValueRefusedError, check_choice, refuse

if TYPE_CHECKING:
    from conduit_jax.types import Rollout

__all__ = ["RldsEpisodes"]


class RldsEpisodes:
    """Episode records as ``Rollout``s ``(length, lanes, ...)``, read step by step in the order they come in.

    An episode whose last step is not terminal was truncated. Dtypes are the records'; a plane narrows 64 bits as JAX does.

    Attributes:
        counts: what became of episodes and steps in the last reading (``Counts``).
    """

    def __init__(
        self,
        episodes: Iterable[Mapping[str, Any]],
        *,
        length: int,
        lanes: int = 1,
        last_step: str = "observation",
        observation_keys: Sequence[str] | None = None,
        extras: Sequence[str] = (),
    ):
        """Take the records; nothing is read yet.

        Args:
            episodes: read once for each iteration over this object.
            length: steps of a lane in one rollout.
            lanes: episodes that are read side by side.
            last_step: what an episode's last step is. ``"observation"``, RLDS's definition: only what was seen last, its
                action and reward mean nothing. ``"action"``, as in many sets of Open X-Embodiment: a step that acts too.
                What followed it was not recorded: where it is terminal its own observation stands in (nothing is
                bootstrapped from it), where it is not, it is only what followed the step before and is counted as dropped.
            observation_keys: of observations that are a dict, the keys to keep (all unless given).
            extras: further fields of a step to keep, in ``Rollout.extras`` (``"discount"``).

        Raises:
            ConfigError: an argument out of range.
        """
        check_sizes(length, lanes)
        check_choice("last_step", last_step, ("observation", "action"))
        self._episodes, self._length, self._lanes = episodes, length, lanes
        keys = None if observation_keys is None else tuple(observation_keys)
        self._reading = _Reading(last_step == "action", keys, tuple(extras))
        self.counts = Counts()

    def __iter__(self) -> Iterator[Rollout]:
        """Yield all rollouts.

        Raises:
            SpecError: a record or step lacks a field, or a leaf has another shape or dtype than before.
            ValueRefusedError: ``is_first``, ``is_last`` or ``is_terminal`` where they cannot be.
        """
        self.counts = Counts()
        records = enumerate(self._episodes)
        episodes = (_Episode(record, f"episode {number}", self._reading, self.counts) for number, record in records)
        yield from Rollouts(episodes, self._length, self._lanes, self.counts)


class _Reading(NamedTuple):
    """How steps are read; see ``RldsEpisodes``."""

    last_acts: bool
    keys: tuple[str, ...] | None
    extras: tuple[str, ...]


class _Step(NamedTuple):
    observation: Leaves
    rest: Leaves
    is_last: bool
    is_terminal: bool


class _Episode:
    """One record, read one step ahead: what followed a step is the next one's observation."""

    def __init__(self, record: Any, name: str, reading: _Reading, counts: Counts):
        self.name, self._reading, self._counts = name, reading, counts
        steps = record.get("steps") if isinstance(record, Mapping) else None
        if steps is None or isinstance(steps, Mapping) or not isinstance(steps, Iterable):
            got = list(record) if steps is None and isinstance(record, Mapping) else type(steps or record).__name__
            want = "a mapping with 'steps', an iterable of steps"
            refuse(SpecError, f"{name} is no episode in RLDS's layout.", got=got, want=want)
        self._steps, self._number, self._was_last = iter(steps), 0, False
        self._now = self._read()
        if self._now is None:
            refuse(SpecError, f"{name} has no steps.", want="at least the one that is both first and last")

    def take(self, count: int) -> Piece | None:
        taken: list[_Step] = []
        following, terminated, truncated = None, False, False
        while len(taken) < count and self._now is not None and not (terminated or truncated):
            now, behind = self._now, self._read()
            self._now = behind
            if behind is None:
                if not (self._reading.last_acts and now.is_terminal):
                    self._counts.dropped_steps += self._reading.last_acts
                    break
                following, terminated = now.observation, True
            else:
                following = behind.observation
                if behind.is_last and not (self._reading.last_acts and behind.is_terminal):
                    terminated, truncated = behind.is_terminal, not behind.is_terminal
                    self._counts.dropped_steps += self._reading.last_acts
                    self._now = self._read()  # nothing, or it is refused
            taken.append(now)
        if not taken or following is None:
            return None
        return Piece(self._stacked(taken), following, terminated, truncated)

    def _read(self) -> _Step | None:
        """Return the next step, checked; ``None`` behind the last one."""
        raw, number = next(self._steps, None), self._number
        if raw is None:
            if number and not self._was_last:
                self._misplaced("is_last", number - 1, "it on the last step")
            return None
        if self._was_last:
            self._misplaced("is_last", number - 1, "it on the last step only")
        for field in ("observation", "action", "reward", "is_first", "is_last", "is_terminal", *self._reading.extras):
            if not isinstance(raw, Mapping) or field not in raw:
                got = ", ".join(raw) if isinstance(raw, Mapping) else type(raw).__name__
                refuse(SpecError, f"{self.name}: step {number} lacks a field.", got=got, want=field)
        if bool(raw["is_first"]) != (number == 0):
            self._misplaced("is_first", number, "it on step 0 only")
        step = _Step(self._observation(raw), self._rest(raw), bool(raw["is_last"]), bool(raw["is_terminal"]))
        if step.is_terminal and not step.is_last:
            self._misplaced("is_terminal", number, "it on the last step only")
        self._number, self._was_last = number + 1, step.is_last
        return step

    def _misplaced(self, flag: str, number: int, want: str) -> None:
        fix = "episodes with all their steps, in order"
        refuse(
            ValueRefusedError, f"{self.name}: {flag} is not where it belongs.", got=f"step {number}", want=want, fix=fix
        )

    def _observation(self, raw: Mapping[str, Any]) -> Leaves:
        tree, keys = raw["observation"], self._reading.keys
        if keys is not None:
            lacking = [key for key in keys if not isinstance(tree, Mapping) or key not in tree]
            if lacking:
                got = ", ".join(tree) if isinstance(tree, Mapping) else "one array"
                refuse(SpecError, f"{self.name}: the observation lacks keys.", got=got, want=", ".join(lacking))
            tree = {key: tree[key] for key in keys}
        return dict(self._leaves(tree, ("observation",)))

    def _rest(self, raw: Mapping[str, Any]) -> Leaves:
        rest = {**dict(self._leaves(raw["action"], ("action",))), **dict(self._leaves(raw["reward"], ("reward",)))}
        for name in self._reading.extras:
            rest |= dict(self._leaves(raw[name], ("extras", name)))
        return rest

    def _leaves(self, node: Any, path: Path) -> Iterator[tuple[Path, np.ndarray]]:
        if isinstance(node, Mapping):
            for key, below in node.items():
                yield from self._leaves(below, (*path, str(key)))
            return
        leaf = np.asarray(node)
        check_numbers(path, leaf.dtype, self.name)
        yield path, leaf

    def _stacked(self, steps: list[_Step]) -> Leaves:
        """Return the steps' leaves as rows; ``np.stack`` alone would promote those that differ."""
        rows: Leaves = {}
        merged = [step.observation | step.rest for step in steps]
        for path, first in merged[0].items():
            column = [leaves.get(path) for leaves in merged]
            odd = next(
                (one for one in column if one is None or (one.shape, one.dtype) != (first.shape, first.dtype)), first
            )
            if odd is not first:
                got = "nothing" if odd is None else f"{odd.dtype}, shape {odd.shape}"
                what = f"{self.name}: {spelt(path)} changes within the episode."
                refuse(SpecError, what, got=got, want=f"{first.dtype}, shape {first.shape}")
            rows[path] = np.stack(column)  # type: ignore[arg-type]
        return rows
