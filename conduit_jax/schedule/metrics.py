"""From spans to the figures people ask for: what the experience path costs an iteration, and how much of it shows.

Exposed latency is defined once: T_iter(full) - T_iter(the same loop with ingestion left out and batches made beforehand),
measured in alternating blocks (``ExposedLatency``). Spans explain it: where all stages run blocked one after the other,
their times are what each would cost alone, and what of the path does not appear in the iteration was hidden.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

STAGES = ("rollout", "ingestion", "delivery", "update")
PATH_STAGES = ("ingestion", "delivery")
_KEPT = 4096


@dataclass
class Spans:
    """Seconds of recent iterations: ``iteration`` as they run, and each stage alone from iterations run blocked; bounded."""

    iteration: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    stages: dict[str, deque[float]] = field(default_factory=lambda: {name: deque(maxlen=_KEPT) for name in STAGES})

    def stage(self, name: str, seconds: float) -> None:
        """Enter one blocked span of a stage."""
        self.stages[name].append(seconds)

    def summary(self) -> LatencyReport:
        """Return percentiles of what has been entered so far."""
        return LatencyReport(
            iteration_s=_percentiles(self.iteration),
            stages_s={name: _percentiles(values) for name, values in self.stages.items()},
        )


@dataclass(frozen=True)
class Percentiles:
    """Median and 99th percentile, seconds; ``count`` of samples behind them."""

    p50: float
    p99: float
    count: int


def _percentiles(values: deque[float]) -> Percentiles:
    if not values:
        return Percentiles(float("nan"), float("nan"), 0)
    p50, p99 = np.percentile(np.fromiter(values, float), (50, 99))
    return Percentiles(float(p50), float(p99), len(values))


@dataclass(frozen=True)
class ExposedLatency:
    """Medians over alternating blocks, seconds an iteration: ``full_s``, ``ablated_s`` and their difference ``exposed_s``."""

    full_s: float
    ablated_s: float
    blocks: int
    iterations_per_block: int

    @property
    def exposed_s(self) -> float:
        """What the experience path adds to an iteration; may come out slightly negative where it adds nothing."""
        return self.full_s - self.ablated_s


@dataclass(frozen=True)
class LatencyReport:
    """Iteration time and what each stage costs alone; ``exposed`` by ablation once it has been measured."""

    iteration_s: Percentiles
    stages_s: dict[str, Percentiles]
    exposed: ExposedLatency | None = None

    @property
    def path_s(self) -> float:
        """Ingestion and delivery, each alone, seconds an iteration (median)."""
        return sum(self.stages_s[name].p50 for name in PATH_STAGES)

    @property
    def exposed_by_spans_s(self) -> float:
        """What remains of an iteration after rollout and update, at most the path itself and at least nothing."""
        rest = self.iteration_s.p50 - self.stages_s["rollout"].p50 - self.stages_s["update"].p50
        return float(np.clip(rest, 0.0, self.path_s)) if rest == rest else float("nan")

    @property
    def exposed_s(self) -> float:
        """Exposed path latency: by ablation where measured, else what the spans explain."""
        return self.exposed_by_spans_s if self.exposed is None else self.exposed.exposed_s

    @property
    def hidden_s(self) -> float:
        """What of the path does not show in the iteration."""
        return max(0.0, self.path_s - max(0.0, self.exposed_s))

    def agrees(self) -> bool:
        """Whether spans and ablation agree within max(20 %, 50 us)."""
        if self.exposed is None:
            return True
        return abs(self.exposed.exposed_s - self.exposed_by_spans_s) <= max(0.2 * abs(self.exposed.exposed_s), 50e-6)

    def as_dict(self) -> dict[str, object]:
        """Return plain data, seconds, for JSON."""
        data: dict[str, object] = {
            "iteration_s": vars(self.iteration_s),
            "stages_s": {name: vars(value) for name, value in self.stages_s.items()},
            "path_s": self.path_s,
            "exposed_s": self.exposed_s,
            "exposed_by_spans_s": self.exposed_by_spans_s,
            "hidden_s": self.hidden_s,
        }
        if self.exposed is not None:
            data["ablation"] = {
                "full_s": self.exposed.full_s,
                "ablated_s": self.exposed.ablated_s,
                "blocks": self.exposed.blocks,
            }
            data["spans_agree_with_ablation"] = self.agrees()
        return data
