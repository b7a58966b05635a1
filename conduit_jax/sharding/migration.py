"""Moving storage between holders: in pieces of bounded size, on all edges at once; what was moved is untouched until all has arrived.

A move reads a piece where it is, sends it, and writes it in place where it goes. The next one is read while it travels, the
one before is written meanwhile: at most ``IN_FLIGHT`` pieces of an edge are anywhere in between, so memory peaks at what
source and target hold and those pieces. Nothing of the source is written: a move that fails is a target that is thrown away.

Source: paper section 5.3, Algorithm 2.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.errors import PlacementError
from conduit_jax.sharding.holders import Holder, Pieces, on_device
from conduit_jax.sharding.memory import DEVICE
from conduit_jax.types import Device

PIECE_BYTES = 16 << 20
IN_FLIGHT = 3  # pieces of one edge: read, on its way, and being written
_FEWEST_PIECES, _SMALLEST_PIECE_BYTES = 4, 1 << 20  # an edge that has one piece has nothing to overlap
_TIMES = 5
Put = Callable[[Any, Any], Any]


class Run(NamedTuple):
    """``slots`` consecutive slots of a ``partition``, from ``start`` on in the source and from ``to`` on in the target."""

    partition: int
    start: int
    to: int
    slots: int


class Edge(NamedTuple):
    """What goes from one holder to another."""

    source: Holder
    target: Holder
    runs: tuple[Run, ...]

    @property
    def rows(self) -> int:
        """Slots that travel along this edge."""
        return sum(run.slots for run in self.runs)


def edges_between(sources: Sequence[Holder], targets: Sequence[Holder], runs: Sequence[Run]) -> list[Edge]:
    """Return the edges on which ``runs`` travel: to every holder of a partition, from its nearest one.

    Where several sources hold a partition (replicas), the target's own device serves it, else the one with least to do.
    """
    load: dict[int, int] = defaultdict(int)
    found: dict[tuple[int, int], list[Run]] = defaultdict(list)
    for at, target in enumerate(targets):
        for run in runs:
            if not _holds(target, run.partition):
                continue
            able = [number for number, source in enumerate(sources) if _holds(source, run.partition)]
            own = [number for number in able if sources[number].device == target.device]
            chosen = own[0] if own else min(able, key=lambda number: load[number])
            load[chosen] += run.slots
            found[chosen, at].append(run)
    return [Edge(sources[one], targets[other], tuple(own)) for (one, other), own in found.items()]


def _holds(holder: Holder, partition: int) -> bool:
    return holder.first <= partition < holder.first + holder.partitions


class Carrier(NamedTuple):
    """How storage travels: ``piece_bytes`` at a time of rows of ``row_bytes``, by ``put``, made new ones of by ``convert``.

    ``put`` is ``(pieces, sharding) -> pieces``, ``jax.device_put`` unless links are emulated. ``convert`` is applied on the
    target's device (padding of grown leaves).
    """

    row_bytes: int
    piece_bytes: int = PIECE_BYTES
    convert: Callable[[Pieces], Pieces] | None = None
    put: Put = jax.device_put

    @property
    def rows(self) -> int:
        """Slots of a piece, a power of two: so there are few sizes to compile, whatever is moved."""
        return 1 << (max(1, self.piece_bytes // max(1, self.row_bytes)).bit_length() - 1)

    def for_edges(self, edges: Sequence[Edge]) -> Carrier:
        """Return the carrier with pieces small enough that the fullest edge has several, which overlap."""
        fullest = max((edge.rows for edge in edges), default=0) * self.row_bytes
        several = max(fullest // _FEWEST_PIECES, _SMALLEST_PIECE_BYTES)
        return self._replace(piece_bytes=min(self.piece_bytes, several))

    def send(self, pieces: Pieces, device: Device) -> Pieces:
        """Return ``pieces`` on ``device``, as they are to be written."""
        arrived = self.put(pieces, on_device(device))
        return arrived if self.convert is None else self.convert(arrived)


def move(edges: Sequence[Edge], carrier: Carrier) -> None:
    """Copy all runs of all ``edges``, one thread an edge, and return when everything has arrived.

    Raises what a thread raised first, as the cause of ``PlacementError``; all threads have ended by then.
    """
    stop, failures = threading.Event(), deque[BaseException]()

    def work(edge: Edge) -> None:
        try:
            _move_edge(edge, carrier, stop)
        except BaseException as error:
            failures.append(error)
            stop.set()

    with ThreadPoolExecutor(max(1, len(edges)), thread_name_prefix="conduit_move") as pool:
        try:
            wait([pool.submit(work, edge) for edge in edges])
        except BaseException:  # the caller is interrupted: what it no longer waits for should end soon
            stop.set()
            raise
    if failures:
        first = failures[0]
        raise PlacementError(f"A move failed half way: {type(first).__name__}: {first}") from first


def _move_edge(edge: Edge, carrier: Carrier, stop: threading.Event) -> None:
    written: deque[Any] = deque()
    for to, pieces in _read_ahead(edge, carrier):
        if stop.is_set():
            break
        arrived = carrier.send(pieces, edge.target.device)
        with edge.target.lock:
            written.append(edge.target.write(to.partition, to.to, arrived))
        if len(written) >= IN_FLIGHT - 1:
            jax.block_until_ready(written.popleft())
    jax.block_until_ready(list(written))


def _read_ahead(edge: Edge, carrier: Carrier) -> Iterator[tuple[Run, Pieces]]:
    """Yield what has to be moved as runs of one piece each, with their content; the next one is asked for before."""
    runs = [
        Run(run.partition, run.start + start, run.to + start, count)
        for run in edge.runs
        for start, count in cuts(run.slots, carrier.rows)
    ]
    ahead: deque[Pieces] = deque()
    for number, run in enumerate(runs):
        for one in runs[number + len(ahead) : number + 2]:
            ahead.append(edge.source.read(one.partition, one.start, one.slots))
        yield run, ahead.popleft()


def cuts(count: int, most: int) -> list[tuple[int, int]]:
    """Cut ``count`` slots into (start, length) pieces: as many of ``most`` as go in, the rest in powers of two.

    So every move compiles the same few sizes.
    """
    pieces = [(start, most) for start in range(0, count - most + 1, most)]
    start = len(pieces) * most
    while start < count:
        size = 1 << ((count - start).bit_length() - 1)
        pieces.append((start, size))
        start += size
    return pieces


def rehearse(edges: Sequence[Edge], carrier: Carrier) -> float:
    """Compile what ``move`` will run, with zeros in place of the source, and return the link's rate, bytes a second.

    The rate is what bare transfers of one piece on every edge at once reach, into fresh memory: the median of several. The
    targets are written to: they are not in use yet, and the move overwrites them. ``PlacementError`` where a transfer fails.
    """
    try:
        return _rehearsed(edges, carrier)
    except (RuntimeError, ValueError, OSError) as error:  # what JAX and links raise: nothing has paused yet
        raise PlacementError(f"A move could not be prepared: {type(error).__name__}: {error}") from error


def _rehearsed(edges: Sequence[Edge], carrier: Carrier) -> float:
    largest = []
    for edge in edges:
        sizes = sorted({count for run in edge.runs for _, count in cuts(run.slots, carrier.rows)})
        expected = [edge.source.expect(count) for count in sizes]
        for pieces in expected:
            arrived = carrier.send(pieces, edge.target.device)
            jax.block_until_ready(edge.target.write(edge.runs[0].partition, 0, arrived))
        largest.append(expected[-1])
    times = []
    with ThreadPoolExecutor(max(1, len(edges))) as pool:
        for _ in range(_TIMES + 1):
            begun = time.perf_counter()
            list(pool.map(partial(_send, put=carrier.put), edges, largest))
            times.append(time.perf_counter() - begun)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(largest)) / max(median(times[1:]), 1e-9)


def _send(edge: Edge, pieces: Pieces, put: Put) -> None:
    """Bring ``pieces`` into fresh memory of the edge's target: its own kind of memory, where the device stays the same."""
    if edge.source.device != edge.target.device:
        jax.block_until_ready(put(pieces, on_device(edge.target.device)))
        return
    kind = getattr(edge.target, "memory_kind", DEVICE)
    jax.block_until_ready(
        jax.tree.map(jnp.copy, pieces) if kind == DEVICE else put(pieces, on_device(edge.target.device, kind))
    )
