"""How a buffer's rows travel from one placement to another in the least time: the transfer plan (paper, eq. 3).

    minimise   max over i, j of f_ij * unit_bytes / BW(d_i -> d'_j)
    subject to sum_j f_ij = V_i,   sum_i f_ij = V'_j,   f_ij >= 0

Rows are whole things, so the flows are integers and the optimum is that of the integers: the linear program gives a lower
bound, and between it and its rounding lie few makespans to try. With bounds that are whole numbers the vertices of a
transportation polytope are whole numbers too, so each trial is a linear program again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from conduit_jax.errors import ConfigError, PlacementError, refuse

_SLACK = 1e-7  # relative: HiGHS answers to about 1e-7


class Flow(NamedTuple):
    """``rows`` that go from the ``source``-th holder to the ``target``-th."""

    source: int
    target: int
    rows: int


class TransferPlan(NamedTuple):
    """``flows`` with rows in them, by source and target, and the ``seconds`` that the slowest edge takes."""

    flows: tuple[Flow, ...]
    seconds: float


class Edges(NamedTuple):
    """The usable edges of a transport problem: ``sources`` and ``targets`` int ``(n,)``, ``seconds`` a row float ``(n,)``."""

    sources: np.ndarray
    targets: np.ndarray
    seconds: np.ndarray


def transfer_plan(
    supply: Sequence[int], demand: Sequence[int], bytes_per_s: Sequence[Sequence[float]], unit_bytes: int = 1
) -> TransferPlan:
    """Return the flows of least makespan, of those the ones that take the fewest seconds over all edges.

    Args:
        supply: rows that source ``i`` holds, whole numbers >= 0.
        demand: rows that target ``j`` is to hold; the same total.
        bytes_per_s: ``[i][j]``, the bandwidth of each edge; 0 where there is none, ``inf`` where a row stays in place.
        unit_bytes: bytes of one row.

    Raises ``ConfigError`` for numbers that describe no transport, ``PlacementError`` where no edges carry it.

    Source: paper section 5.3 and Appendix D, eq. (3).
    """
    edges = _edges(supply, demand, bytes_per_s, unit_bytes)
    if not sum(supply):
        return TransferPlan((), 0.0)
    bound, relaxed = _relaxed(supply, demand, edges)
    rounded = float(np.max(np.ceil(relaxed - _SLACK) * edges.seconds, initial=0.0))
    makespans = _makespans(edges, bound, max(rounded, bound))
    low, high = 0, len(makespans) - 1  # the last one is feasible: the rounding of a solution always is
    while low < high:
        middle = (low + high) // 2
        if _within(supply, demand, edges, makespans[middle]) is None:
            low = middle + 1
        else:
            high = middle
    flows = _within(supply, demand, edges, makespans[low])
    if flows is None:
        refuse(PlacementError, "No transfer plan was found.", got=f"supply {list(supply)}, demand {list(demand)}")
    used = np.flatnonzero(flows)
    moves = tuple(Flow(int(edges.sources[at]), int(edges.targets[at]), int(flows[at])) for at in used)
    return TransferPlan(moves, float(np.max(flows * edges.seconds, initial=0.0)))


def _edges(
    supply: Sequence[int], demand: Sequence[int], bytes_per_s: Sequence[Sequence[float]], unit_bytes: int
) -> Edges:
    amounts, rates = [*supply, *demand], np.asarray(bytes_per_s, float)
    if any(not float(amount).is_integer() or amount < 0 for amount in amounts) or unit_bytes <= 0:
        got = f"supply {list(supply)}, demand {list(demand)}, unit_bytes={unit_bytes}"
        refuse(ConfigError, "Rows to be moved are whole numbers.", got=got, want="integers >= 0, unit_bytes > 0")
    if sum(supply) != sum(demand):
        got = f"supply {sum(supply)}, demand {sum(demand)}"
        refuse(ConfigError, "What leaves is not what arrives.", got=got, want="the same number of rows")
    if rates.shape != (len(supply), len(demand)) or np.isnan(rates).any() or (rates < 0).any():
        want = f"numbers >= 0 of shape ({len(supply)}, {len(demand)})"
        refuse(ConfigError, "Bandwidths do not describe the edges.", got=f"shape {rates.shape}", want=want)
    sources, targets = np.nonzero(rates > 0)
    return Edges(sources, targets, unit_bytes / rates[sources, targets])


def _balance(supply: Sequence[int], demand: Sequence[int], edges: Edges) -> tuple[coo_array, np.ndarray]:
    """Return the equations "all leaves, all arrives": matrix ``(sources + targets, edges)`` and right-hand side."""
    count = len(edges.seconds)
    rows = np.concatenate([edges.sources, len(supply) + edges.targets])
    shape = (len(supply) + len(demand), count)
    return coo_array((np.ones(2 * count), (rows, np.tile(np.arange(count), 2))), shape), np.array([*supply, *demand])


def _relaxed(supply: Sequence[int], demand: Sequence[int], edges: Edges) -> tuple[float, np.ndarray]:
    """Return makespan and flows of the linear program, whose flows may be fractions of rows."""
    matrix, amounts = _balance(supply, demand, edges)
    count = len(edges.seconds)
    timed = np.flatnonzero(edges.seconds > 0)
    scale = max(float(edges.seconds.max(initial=0.0)), np.finfo(float).tiny)  # makespans of about one for the solver
    lines = np.arange(timed.size)
    within = coo_array(
        (
            np.concatenate([edges.seconds[timed] / scale, -np.ones(timed.size)]),
            (np.tile(lines, 2), np.concatenate([timed, np.full(timed.size, count)])),
        ),
        (timed.size, count + 1),
    )
    solved = linprog(
        np.append(np.zeros(count), 1.0),
        A_ub=within.tocsr() if timed.size else None,
        b_ub=np.zeros(timed.size) if timed.size else None,
        A_eq=coo_array((matrix.data, matrix.coords), (len(amounts), count + 1)).tocsr(),
        b_eq=amounts,
        method="highs",
    )
    if solved.status != 0:
        refuse(
            PlacementError,
            "No edges carry the transfer.",
            got=f"supply {list(supply)}, demand {list(demand)} over {count} edges",
            want="a link with a bandwidth above 0 from every source to some target, enough for all",
        )
    found = np.asarray(solved.x)
    return float(found[count]) * scale, found[:count]


def _makespans(edges: Edges, least: float, most: float) -> list[float]:
    """Return, ascending, the seconds that some whole number of rows takes on some edge, from ``least`` to ``most``."""
    found = {most}
    for seconds in np.unique(edges.seconds[edges.seconds > 0]):
        first, last = np.ceil(least / seconds - _SLACK), np.floor(most / seconds + _SLACK)
        found.update((np.arange(first, last + 1) * seconds).tolist())
    return sorted(found)


def _within(supply: Sequence[int], demand: Sequence[int], edges: Edges, makespan: float) -> np.ndarray | None:
    """Return whole flows int ``(edges,)`` that end within ``makespan``, of fewest seconds over all; ``None`` if there are none."""
    matrix, amounts = _balance(supply, demand, edges)
    timed = edges.seconds > 0
    room = np.full(edges.seconds.shape, float(sum(supply)))
    room[timed] = np.minimum(room[timed], np.floor(makespan / edges.seconds[timed] + _SLACK))
    cost = edges.seconds / max(float(edges.seconds.max(initial=0.0)), np.finfo(float).tiny)
    bounds = np.stack([np.zeros_like(room), room], axis=1)
    solved = linprog(cost, A_eq=matrix.tocsr(), b_eq=amounts, bounds=bounds, method="highs-ds")
    if solved.status != 0:
        return None
    flows = np.rint(np.asarray(solved.x)).astype(np.int64)
    return flows if np.array_equal(matrix @ flows, amounts) and (flows <= room).all() else None
