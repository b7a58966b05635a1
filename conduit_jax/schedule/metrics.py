"""From spans to the figures people ask for: what the experience path costs an iteration, and how much of it shows.

Exposed latency is defined once: T_iter(full) - T_iter(the same loop with ingestion left out and batches made beforehand),
measured in alternating blocks (``ExposedLatency``). Spans explain it. An iteration has two lanes, the host's dispatching and
the device's work, and takes as long as the longer one. What a stage occupies of the host's lane is the time its call takes
to return; what it occupies of the device's is the time it takes when it is waited for, less its dispatch and less what any
wait costs (``wake_s``: with eight updates an iteration these alone add up to more than the path). What the host does besides
is told by the same blocked iterations: in others a call that is no stage (publishing a policy, say) may wait for the device.
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
    """Seconds of recent iterations: ``iteration`` as they run, and each stage alone from iterations run blocked; bounded.

    ``dispatched`` is what the stages' calls take to return as iterations run, ``waited`` what the host then waits for the
    device, ``besides`` what blocked iterations take beside their stages;
    ``calls`` counts a stage's calls in an iteration and ``wake_s`` is what one blocked call costs beyond its work.
    """

    iteration: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    stages: dict[str, deque[float]] = field(default_factory=lambda: {name: deque(maxlen=_KEPT) for name in STAGES})
    dispatched: dict[str, deque[float]] = field(default_factory=lambda: {name: deque(maxlen=_KEPT) for name in STAGES})
    waited: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    besides: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    calls: dict[str, int] = field(default_factory=dict)
    wake_s: float = 0.0
    fused: bool = False

    def stage(self, name: str, seconds: float) -> None:
        """Enter one blocked span of a stage."""
        self.stages[name].append(seconds)

    def clear(self, *, fused: bool) -> None:
        """Forget the times: another schedule is run from here on. In a fused one no stage can be timed, so what they cost stays."""
        self.fused = fused
        for kept in (self.iteration, self.waited, *self.dispatched.values()):
            kept.clear()
        for kept in () if fused else (self.besides, *self.stages.values()):
            kept.clear()

    def summary(self) -> LatencyReport:
        """Return percentiles of what has been entered so far."""
        return LatencyReport(
            iteration_s=_percentiles(self.iteration),
            stages_s={name: _percentiles(values) for name, values in self.stages.items()},
            lanes=self._lanes(),
            fused=self.fused,
        )

    def _lanes(self) -> Lanes | None:
        if not self.waited or not all(self.stages.values()) or not all(self.dispatched.values()):
            return None
        host = {name: float(np.median(self.dispatched[name])) for name in STAGES}
        blocked = {name: float(np.median(self.stages[name])) for name in STAGES}
        woken = {name: self.wake_s * self.calls.get(name, 1) for name in STAGES}
        device = {name: max(0.0, blocked[name] - host[name] - woken[name]) for name in STAGES}
        besides = float(np.median(self.besides)) if self.besides else None
        return Lanes(host, device, float(np.median(self.waited)), besides)


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
class Lanes:
    """Seconds an iteration (medians) that each stage occupies of the host's and of the device's lane; ``waited_s`` by the host.

    ``besides_s``: what the host does beside the stages, where that was measured; else it is what of the iteration is left.
    """

    host_s: dict[str, float]
    device_s: dict[str, float]
    waited_s: float
    besides_s: float | None = None

    def iteration_s(self, other_s: float, stages: tuple[str, ...] = STAGES) -> float:
        """Return how long an iteration of ``stages`` takes; ``other_s`` is what the host does besides."""
        return max(other_s + sum(self.host_s[name] for name in stages), sum(self.device_s[name] for name in stages))

    def exposed_s(self, iteration_s: float) -> float:
        """Return what the path adds to an iteration measured to take ``iteration_s``."""
        other = max(0.0, iteration_s - self.waited_s - sum(self.host_s.values()))
        other = other if self.besides_s is None else min(other, self.besides_s)
        rest = tuple(name for name in STAGES if name not in PATH_STAGES)
        explained, without = self.iteration_s(other), self.iteration_s(other, rest)
        # what lanes do not explain slows all of it alike: lanes that share cores, say
        stretch = iteration_s / explained if self.besides_s is not None and explained > 0 else 1.0
        return max(0.0, explained - without) * stretch


@dataclass(frozen=True)
class LatencyReport:
    """Iteration time and what each stage costs alone; ``exposed`` by ablation once it has been measured."""

    iteration_s: Percentiles
    stages_s: dict[str, Percentiles]
    exposed: ExposedLatency | None = None
    lanes: Lanes | None = None
    fused: bool = False

    @property
    def path_s(self) -> float:
        """Ingestion and delivery, each alone, seconds an iteration (median)."""
        return sum(self.stages_s[name].p50 for name in PATH_STAGES)

    @property
    def exposed_by_spans_s(self) -> float:
        """What the path adds to the longer of both lanes; without lanes, what an iteration leaves beside rollout and update.

        NaN in a fused schedule: its iterations have no stages, and those timed before it ran unfused.
        """
        if self.fused:
            return float("nan")
        if self.lanes is not None:
            return float(np.clip(self.lanes.exposed_s(self.iteration_s.p50), 0.0, self.path_s))
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
        if self.exposed is None or self.fused:  # nothing to compare it with
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
        if self.lanes is not None:
            data["lanes"] = {
                "host_s": self.lanes.host_s,
                "device_s": self.lanes.device_s,
                "waited_s": self.lanes.waited_s,
                "besides_s": self.lanes.besides_s,
            }
        if self.exposed is not None:
            data["ablation"] = {
                "full_s": self.exposed.full_s,
                "ablated_s": self.exposed.ablated_s,
                "blocks": self.exposed.blocks,
            }
            data["spans_agree_with_ablation"] = self.agrees()
        return data
