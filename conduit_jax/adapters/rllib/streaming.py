"""Sampling in pieces, each handed on as soon as it is there: on-policy work on one piece goes on while the next is sampled.

Nothing is sampled otherwise than by RLlib: an env runner's ``sample`` is called several times for parts of its fragment, and
goes on where it stopped. Weights do not change in between. Whether work beside sampling pays is seen by trying: where no core
is free, sampling takes longer by as much. Imports no JAX: the calls are sent to env runners.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any, NamedTuple

from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED

Sink = Callable[[list[Any], int], None]
_EVEN_PIECES = 8
_TAIL = (0.5, 0.75)  # of the last piece: what is handed on last is small, as nothing is sampled beside it
_LEAST_BYTES = 4 << 20
_SERIALS = count()
_WARM_UP = 2
_TURNS = (True, False, False, True)
_TRIED = 2 * len(_TURNS)


class Sampled(NamedTuple):
    """``episodes`` in RLlib's order (runner by runner), their env runners' ``metrics``, and how many ``pieces`` there were."""

    episodes: list[Any]
    metrics: list[Any]
    pieces: int


class Stream:
    """One iteration's chunks on their way into ``packing``, valued by ``values(module, packing, begin, end)``.

    ``worker`` packs them as they come; it values each at once where ``beside``, all of them in ``wait`` otherwise: by the same
    calls on the same thread, so to the same bits.
    """

    def __init__(self, packing: Any, values: Callable[..., Any], worker: ThreadPoolExecutor, *, beside: bool):
        self.packing, self._values, self._worker, self._beside = packing, values, worker, beside
        self._chunks: list[Any] = []
        self._work: list[Future[float]] = []
        self._later: list[tuple[int, int]] = []

    def add(self, chunks: list[Any], group: int) -> None:
        """Let the worker take ``chunks`` in."""
        self._chunks += chunks
        self._work.append(self._worker.submit(self._take, chunks, group))

    def _take(self, chunks: list[Any], group: int) -> float:
        rows = [self.packing.add(chunk, group) for chunk in chunks]
        if self._beside:
            return self._value(rows)
        self._later += rows
        return 0.0

    def _value(self, rows: list[tuple[int, int]]) -> float:
        start = time.perf_counter()
        for begin, end in rows:
            if end > begin:
                self.packing.value(self._values(DEFAULT_MODULE_ID, self.packing, begin, end))
        return time.perf_counter() - start

    def wait(self) -> float:
        """Wait for the worker, raise what it raised; return the seconds of all value forwards."""
        beside = sum(done.result() for done in self._work)
        return beside + self._worker.submit(self._value, self._later).result()

    def has(self, episodes: list[Any]) -> bool:
        """Whether ``episodes`` are the very chunks that were added."""
        return {id(one) for one in episodes} == {id(one) for one in self._chunks}

    def order(self, episodes: list[Any]) -> list[int]:
        """Return for each of ``episodes`` the number of its chunk."""
        number = {id(chunk): at for at, chunk in enumerate(self._chunks)}
        return [number[id(episode)] for episode in episodes]


class Trial:
    """Whether chunks are valued ``beside`` sampling or after it: both in turn, then the one that was quicker by its median.

    What is learned is the same. The first iterations compile, and are not counted. ``kept``: no trial, always so.
    """

    def __init__(self, kept: bool | None = None):
        self._kept, self._entered = kept, 0
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    @property
    def left(self) -> int:
        """The iterations still to try."""
        return 0 if self._kept is not None else _WARM_UP + _TRIED - self._entered

    @property
    def beside(self) -> bool:
        """How the next iteration's chunks are valued."""
        return _TURNS[self._entered % len(_TURNS)] if self._kept is None else self._kept

    def enter(self, seconds: float) -> None:
        """Enter what a step of this iteration took, sampling and the waiting for values."""
        if self._kept is not None:
            return
        if self._entered >= _WARM_UP:
            self._seconds[self.beside].append(seconds)
        self._entered += 1
        if not self.left:
            beside, after = (statistics.median(self._seconds[kind]) for kind in (True, False))
            self._kept = beside < after


def boundaries(length: int) -> list[int]:
    """Return where the pieces of a fragment of ``length`` steps end, the last one shorter than the others."""
    ends = [(number + 1) / _EVEN_PIECES for number in range(_EVEN_PIECES - 1)]
    ends += [1 - (1 - part) / _EVEN_PIECES for part in _TAIL] + [1.0]
    return sorted({max(1, round(end * length)) for end in ends})


def is_worth_it(config: Any, observation_space: Any) -> bool:
    """Whether an iteration's observations are so large that their value forward is worth a thread.

    Only single agents and fragments of steps are sampled in pieces.
    """
    if config.is_multi_agent or config.batch_mode != "truncate_episodes" or config.count_steps_by != "env_steps":
        return False
    shapes = [space for space in _leaves(observation_space) if getattr(space, "shape", None)]
    size = sum(math.prod(space.shape) * space.dtype.itemsize for space in shapes)
    return size * config.total_train_batch_size >= _LEAST_BYTES


def _leaves(space: Any) -> list[Any]:
    inner = getattr(space, "spaces", None)
    if inner is None:
        return [space]
    return [leaf for part in (inner.values() if hasattr(inner, "values") else inner) for leaf in _leaves(part)]


def sample_piece(runner: Any, number: int) -> tuple[list[Any], Any]:
    """Let an env runner sample the ``number``-th piece of its fragment; return chunks and, after the last, its metrics."""
    length = runner.config.get_rollout_fragment_length(runner.worker_index)
    ends = boundaries(length)
    if number >= len(ends):
        return [], None
    before = getattr(runner, "conduit_sampled", 0) if number else 0
    wanted = ends[number] * runner.num_envs - before  # several environments may have given a step or two too many
    chunks = runner.sample(num_timesteps=wanted) if wanted > 0 else []
    runner.conduit_sampled = before + sum(len(chunk) for chunk in chunks)
    return chunks, runner.get_metrics() if number == len(ends) - 1 else None


def sample_streamed(group: Any, config: Any, sink: Sink) -> Sampled:
    """Sample at least ``config.total_train_batch_size`` steps; hand each piece on by ``sink(chunks, round)``.

    Chunks of an episode in the same round are one chunk to RLlib. Fewer steps come back where no env runner is healthy.
    """
    episodes, metrics, pieces, steps = [], [], 0, 0
    for turn in count():
        got = _sample_round(group, config, functools.partial(_hand_on, sink, turn))
        if not got:
            break
        for _, (chunks, found) in sorted(got.items()):
            pieces += 1
            episodes += chunks
            if found is not None:
                metrics.append(found)
                steps += int(found.get(NUM_ENV_STEPS_SAMPLED, 0))
        if steps >= config.total_train_batch_size:
            break
    return Sampled(episodes, metrics, pieces)


def _hand_on(sink: Sink, turn: int, chunks: list[Any]) -> None:
    if chunks:
        sink(chunks, turn)


def _sample_round(group: Any, config: Any, sink: Callable[[list[Any]], None]) -> dict[tuple[int, int], Any]:
    """Let every env runner sample its fragment; return the pieces by env runner and number."""
    number_of = len(boundaries(config.get_rollout_fragment_length(0)))
    most = max(number_of, len(boundaries(config.get_rollout_fragment_length(1))))
    found = {}
    if not group.num_remote_env_runners():
        for number in range(most):
            found[0, number] = sample_piece(group.local_env_runner, number)
            sink(found[0, number][0])
        return found
    serial = next(_SERIALS)

    def ask(number: int) -> None:
        group.foreach_env_runner_async(functools.partial(sample_piece, number=number), tag=f"conduit {serial} {number}")

    ask(0)
    for number in range(most):
        if number + 1 < most:
            ask(number + 1)  # before this one is fetched: no env runner waits for the others
        tag, timeout = f"conduit {serial} {number}", config.sample_timeout_s
        for runner, piece in group.fetch_ready_async_reqs(tags=tag, timeout_seconds=timeout):
            found[runner, number] = piece
            sink(piece[0])
    return found


__all__ = ["Sampled", "Stream", "Trial", "boundaries", "is_worth_it", "sample_piece", "sample_streamed"]
