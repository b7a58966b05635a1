"""From timings to the figures asked for: every one says how many times faster ours is, so more than 1 is good."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import Ratio, Timing, ratio

FLOORS = {
    "sample_vs_flashbax": 1.0,
    "sample_vs_flashbax_median": 1.5,
    "add_vs_flashbax": 1.0,
    "per_vs_flashbax": 0.8,
    "per_scheduled_vs_flashbax": 1.0,
    "per_vs_cpprb": 0.8,
    "sample_scheduled_vs_best_peer": 1.0,
    "roofline_fraction": 0.75,
}
GOALS = {"sample_vs_flashbax_median": 2.0, "per_vs_flashbax": 1.2}
ROOFLINE, BOUND = "numpy roofline", "bare take"
FLASHBAX = ("flashbax item", "flashbax flat", "flashbax trajectory")
SAME_TASK = {
    "flashbax flat": "ours pairs",
    "flashbax trajectory": "ours windows",
    f"{BOUND} pairs": "ours pairs",
    f"{BOUND} windows": "ours windows",
}


BARE = {"ours": BOUND, "ours pairs": f"{BOUND} pairs", "ours windows": f"{BOUND} windows"}


def counterpart(operation: str, peer: str) -> str:
    """Return which of ours does what ``peer`` does."""
    return "ours prioritized" if operation == "sample+update" else SAME_TASK.get(peer, "ours")


class Case(NamedTuple):
    """One thing that was timed. ``count`` is the batches a call of a draw, or the rows of an add."""

    workload: str
    operation: str
    system: str
    count: int
    timing: Timing
    calls: int
    first_call_s: float

    @property
    def is_ours(self) -> bool:
        return self.system.startswith("ours")

    @property
    def a_batch(self) -> Timing:
        """The time of a batch of a draw, or of a whole add."""
        return self.timing if self.operation == "add" else self.timing.shared_by(self.count)


def as_row(case: Case, cases: Iterable[Case]) -> dict[str, Any]:
    """Return a case as a row of the result file, with what ours gains over it in the same operation and count."""
    timing = case.timing
    row: dict[str, Any] = {
        "workload": case.workload,
        "operation": case.operation,
        "system": case.system,
        "rows" if case.operation == "add" else "batches_a_call": case.count,
        "best_us": timing.best * 1e6,
        "median_us": timing.median * 1e6,
        "cpu_us": timing.cpu * 1e6,
        "best_us_a_batch": case.a_batch.best * 1e6,
        "compile_s": max(0.0, case.first_call_s - timing.best),
        "repeats": len(timing.repeats),
        "calls_a_repeat": case.calls,
    }
    own = counterpart(case.operation, case.system)
    same = [one for one in cases if one[:2] == case[:2] and one.count == case.count and one.system == own]
    if same and not case.is_ours:
        row["ours_is_faster"] = ratio(timing, same[0].timing)._asdict()
    return row


def best_schedule(cases: Iterable[Case]) -> Case:
    """Return the case whose batches take least."""
    return min(cases, key=lambda case: case.a_batch.best)


class Figures:
    """Looks up cases and compares them."""

    def __init__(self, cases: list[Case]) -> None:
        self.cases = cases

    def find(self, operation: str, system: str, **exactly: Any) -> list[Case]:
        """Return the cases of ``operation`` whose system's name starts with ``system``."""
        return [
            case
            for case in self.cases
            if case.operation == operation
            and case.system.startswith(system)
            and all(getattr(case, name) == value for name, value in exactly.items())
        ]

    def ours(self, operation: str, name: str, workload: str, count: int | None = None) -> list[Case]:
        """Return the cases of the system of that very name."""
        found = self.find(operation, name, workload=workload)
        return [case for case in found if case.system == name and count in (None, case.count)]

    def per_call(
        self, operation: str, peers: Iterable[str], own: str | None = None, *, bare: bool = False, **exactly: Any
    ) -> dict[str, Ratio]:
        """Return ours, ``own`` or the one that does the same, against every case of ``peers`` of the same workload and count.

        ``bare`` puts the bare take that does the same in our place.
        """
        ratios = {}
        for case in [case for peer in peers for case in self.find(operation, peer, **exactly)]:
            wanted = own or counterpart(operation, case.system)
            wanted = BARE[wanted] if bare else wanted
            for own_case in self.ours(operation, wanted, case.workload, case.count):
                unit = "rows" if operation == "add" else "batches"
                ratios[f"{case.workload}, {case.count} {unit}: {case.system}"] = ratio(case.timing, own_case.timing)
        return ratios

    def scheduled(self, operation: str, peers: Iterable[str], *, bare: bool = False) -> dict[str, Ratio]:
        """Return ours at its best batches a call against each of ``peers`` at its best, a batch each; ``bare`` as above."""
        ratios, peers = {}, tuple(peers)
        for workload in dict.fromkeys(case.workload for case in self.cases):
            for peer in peers:
                wanted = counterpart(operation, peer)
                own = self.ours(operation, BARE[wanted] if bare else wanted, workload)
                theirs = [case for case in self.find(operation, peer, workload=workload) if case.system == peer]
                if own and theirs:
                    fast, slow = best_schedule(own), best_schedule(theirs)
                    name = f"{workload}: {'bare' if bare else 'ours'} at {fast.count}, {peer} at {slow.count}"
                    ratios[name] = ratio(slow.a_batch, fast.a_batch)
        return ratios

    def peers(self, operation: str) -> list[str]:
        """Return the names of everyone but ours, the roofline and the bounds."""
        names = dict.fromkeys(case.system for case in self.cases if case.operation == operation and not case.is_ours)
        return [name for name in names if not name.startswith((ROOFLINE, BOUND))]


def summarize(cases: list[Case]) -> tuple[dict[str, Any], dict[str, dict[str, Ratio]]]:
    """Return the figures, and the ratios that each was made from; a figure without its peer is ``None``.

    A figure is made from ratios of shortest times; ``by_median`` has the same from medians of ratios, ``with_bare_take`` those
    that the bare take would have in our place.
    """
    figures = Figures(cases)
    per, draw = "sample+update", "sample"
    sampled = figures.per_call(draw, FLASHBAX, count=1)
    images = {
        "sample": figures.per_call(draw, [ROOFLINE], count=1),
        "add": figures.per_call("add", [ROOFLINE], count=256),
    }
    images = {what: {name: one for name, one in ratios.items() if "image" in name} for what, ratios in images.items()}
    used = {
        "sample_vs_flashbax": sampled,
        "sample_vs_flashbax_median": sampled,
        "sample_vs_flashbax_by_items": figures.per_call(draw, FLASHBAX, own="ours", count=1),
        "add_vs_flashbax": figures.per_call("add", FLASHBAX),
        "add_vs_flashbax_by_items": figures.per_call("add", FLASHBAX, own="ours"),
        "per_vs_flashbax": figures.per_call(per, ["flashbax"], count=1),
        "per_vs_cpprb": figures.per_call(per, ["cpprb"], count=1),
        "per_scheduled_vs_flashbax": figures.scheduled(per, [n for n in figures.peers(per) if "flashbax" in n]),
        "sample_scheduled_vs_best_peer": figures.scheduled(draw, figures.peers(draw)),
        "sample_vs_bound": figures.per_call(draw, [BOUND], count=1),
        "add_vs_bound": figures.per_call("add", [BOUND]),
        "roofline_fraction": {**images["sample"], **images["add"]},
        "roofline_fraction_sample": images["sample"],
        "roofline_fraction_add": images["add"],
    }
    summary: dict[str, Any] = {name: _reduce(name, ratios, "of_best") for name, ratios in used.items()}
    summary["sample_vs_bound_by_case"] = {name: one.of_best for name, one in used["sample_vs_bound"].items()}
    summary["with_bare_take"] = {
        name: _reduce(name, ratios, "of_best") for name, ratios in _with_bare_take(figures).items()
    }
    return summary | {"by_median": {name: _reduce(name, ratios, "median") for name, ratios in used.items()}}, used


def _with_bare_take(figures: Figures) -> dict[str, dict[str, Ratio]]:
    """Return what the figures that have a floor would be made from if our draws and adds took what XLA's bare kernels take."""
    draw = "sample"
    sampled = figures.per_call(draw, FLASHBAX, count=1, bare=True)
    roofline = {
        **figures.per_call(draw, [ROOFLINE], count=1, bare=True),
        **figures.per_call("add", [ROOFLINE], count=256, bare=True),
    }
    return {
        "sample_vs_flashbax": sampled,
        "sample_vs_flashbax_median": sampled,
        "add_vs_flashbax": figures.per_call("add", FLASHBAX, bare=True),
        "sample_scheduled_vs_best_peer": figures.scheduled(draw, figures.peers(draw), bare=True),
        "roofline_fraction": {name: ratio for name, ratio in roofline.items() if "image" in name},
    }


def _reduce(name: str, ratios: dict[str, Ratio], field: str) -> float | None:
    values = [getattr(one, field) for one in ratios.values()]
    return float((np.median if name.endswith("_median") else np.min)(values)) if values else None


def check_floors(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return each floor and goal with whether it is met (``None`` where there is no figure)."""
    floors: dict[str, dict[str, Any]] = {}
    for name, floor in FLOORS.items():
        value = summary[name]
        floors[name] = {"floor": floor, "met": None if value is None else value >= floor}
        if summary["with_bare_take"].get(name) is not None:
            floors[name]["with_bare_take"] = summary["with_bare_take"][name]
        if name in GOALS:
            floors[name] |= {"goal": GOALS[name], "goal_met": None if value is None else value >= GOALS[name]}
    floors["per_dead_draws"] = {"floor": 0, "met": summary["per_dead_draws"] == 0}
    return floors
