"""``schedule="auto"`` at run time: profile on iterations that count as training, choose, and look again when times drift.

The tuner is fed with what a loop measured and answers with schedules to run from the next iteration on, each with its
reason. It decides at fixed iteration counts; only the choice depends on times, so a run is repeated by pinning its history.
Fusing is tried first: it changes no bit of the sequential schedule.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from conduit_jax.config import Algorithm, OnPolicy
from conduit_jax.schedule.history import Change
from conduit_jax.schedule.latency import CallCost, Costs, fit
from conduit_jax.schedule.optimizer import HYSTERESIS, Decision, Memory, choose
from conduit_jax.schedule.semantics import (
    FUSED_ITERATIONS,
    SEQUENTIAL,
    Schedule,
    feasible_delivery,
    feasible_ingestion,
    resolve_schedule,
)

WORTH = 512  # iterations that must be left to begin: a trial compiles, and a short run would not get that back
WORTH_S = (
    15.0  # seconds that must be left to try another schedule: compiling one takes a few, and fusing saves about half
)
SETTLE = 16  # iterations with updates before anything is decided: they compile, and fill caches
TRIAL = 48  # iterations a schedule is timed for
PROBES = (1, 2, 4, 8)  # granularities that are profiled; the others follow from the fit
BAND = 1.5  # drift of the iteration time that asks for a new profile, either way
REST = 2048  # iterations between two profiles at least


@dataclass
class Measured:
    """What a trial told: seconds of whole iterations, of stages run blocked, less their waits, and of their calls' dispatch."""

    iterations: deque[float] = field(default_factory=lambda: deque(maxlen=256))
    stages: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    dispatched: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def iteration_s(self) -> float:
        """The median iteration; infinite where there was none."""
        return statistics.median(self.iterations) if self.iterations else float("inf")

    @property
    def mean_iteration_s(self) -> float:
        """The mean iteration: on-policy, only one in several trains."""
        return statistics.fmean(self.iterations) if self.iterations else float("inf")

    def mean(self, stage: str) -> float:
        """Return the mean seconds an iteration of ``stage``: a call of g parts falls on one iteration in g."""
        return statistics.fmean(self.stages[stage]) if self.stages.get(stage) else 0.0

    def dispatch(self, stage: str) -> float:
        """Return the mean seconds an iteration that the calls of ``stage`` take to return where nobody waits for them."""
        return statistics.fmean(self.dispatched[stage]) if self.dispatched.get(stage) else 0.0


class Tuner:
    """Decides for one loop. ``contention`` is that of the path with the learner, ``sync_s`` what a wait costs.

    What overlapping costs, T_sync, is that and what calls take to return, which is measured. ``elsewhere`` returns the
    seconds that the loop lately waited without a core for each update.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        present: Schedule,
        *,
        fusable: bool,
        contention: float,
        sync_s: float = 0.0,
        memory: Memory | None = None,
        elsewhere: Callable[[], float] = lambda: 0.0,
    ):
        self.algorithm, self.present = algorithm, present
        self.decision: Decision | None = None
        self.costs: Costs | None = None
        self._fusable, self._contention, self._sync_s, self._memory = fusable, contention, sync_s, memory
        self._elsewhere = elsewhere
        self._measured = Measured()
        self._plan = self._first_plan()
        self._due, self._count, self._left = SETTLE, 0, float("inf")
        self._asked = False

    @property
    def wants_stages(self) -> bool:
        """Whether the next iteration is to be run stage by stage: every other one of a profile, as dispatch is measured too."""
        return self._asked and self._count % 2 == 0

    def note(
        self, iterations: int, seconds: float | None, stages: dict[str, float] | None, left: float = float("inf")
    ) -> Change | None:
        """Enter ``iterations`` that took ``seconds`` each, or one (``None``) run blocked; return a change to make now, if any.

        ``stages`` took so long, blocked; otherwise it took so long to dispatch them. ``left`` iterations are still to come.
        ``Change.iteration`` is counted from the first note.
        """
        self._count += iterations
        self._left = left
        if seconds is not None:
            self._measured.iterations.extend([seconds] * min(iterations, 32))
        told = self._measured.stages if seconds is None else self._measured.dispatched
        for stage, value in (stages or {}).items():
            told[stage].append(value)
        if self._count < self._due:
            return None
        try:
            change = next(self._plan)
        except StopIteration:
            return None
        self._measured = Measured()
        self._due = self._count + TRIAL
        if change is None:
            return None
        schedule, reason = change
        self.present = schedule
        return Change(self._count, schedule, reason)

    def _first_plan(self) -> Iterator[tuple[Schedule, str] | None]:
        """Yield changes (or ``None`` for none), each ``TRIAL`` iterations after the last."""
        yield None  # what was measured so far compiled
        while self._left * self._measured.mean_iteration_s < WORTH_S:
            yield None
        plain = self._measured.iteration_s
        if self._fusable:
            before = self.present
            yield (
                Schedule(fused=FUSED_ITERATIONS),
                f"trial of the fused program; {plain * 1e6:,.0f} us an iteration without",
            )
            yield None  # its first program compiled
            fused = self._measured.iteration_s
            if fused <= (1 - HYSTERESIS) * plain:
                yield None
                yield from self._watch()
                return
            yield before, f"fused {fused * 1e6:,.0f} us an iteration, {plain * 1e6:,.0f} us without"
        yield from self._profile()

    def _profile(self) -> Iterator[tuple[Schedule, str] | None]:
        if isinstance(self.algorithm, OnPolicy):
            yield from self._compare()
            return
        units = {int(g) for _, g in feasible_ingestion(self.algorithm) if g >= 1}
        batches = {int(g) for _, g in feasible_delivery(self.algorithm) if g >= 1}
        present, ingestion, delivery, syncs = self.present, {}, {}, ({}, {})
        rollout, update, elsewhere = [], [], []
        self._asked = True
        for g in PROBES:
            own = max(n for n in units if n <= g), max(n for n in batches if n <= g)
            yield Schedule(g_ingestion=own[0], g_delivery=own[1]), f"profile: {own[0]} units, {own[1]} batches a call"
            ingestion[own[0]] = self._measured.mean("ingestion") * own[0]
            delivery[own[1]] = self._measured.mean("delivery") * own[1] / self._updates
            syncs[0][own[0]] = self._measured.dispatch("ingestion") * own[0]
            syncs[1][own[1]] = self._measured.dispatch("delivery") * own[1] / self._updates
            rollout.append(self._measured.mean("rollout"))
            update.append(self._measured.mean("update") / self._updates)
            elsewhere.append(self._elsewhere() * self._updates)
        self._asked = False
        computed = statistics.median(rollout), statistics.median(update)
        costs = self._costs(*computed, (fit(ingestion), fit(delivery)), (fit(syncs[0]), fit(syncs[1])))
        self.costs = costs._replace(
            elsewhere_s=min(statistics.median(elsewhere), computed[0] + self._updates * computed[1])
        )
        self.decision = choose(self.costs, self.algorithm, present=present, memory=self._memory)
        chosen = self.decision.chosen
        yield (
            chosen.schedule,
            f"{self.decision.reason}: {chosen.prediction.iteration_s * 1e6:,.0f} us an iteration predicted",
        )
        yield from self._watch()

    def _compare(self) -> Iterator[tuple[Schedule, str] | None]:
        """On-policy: time schedules as they are, all of which deliver the same bits, and keep the fastest."""
        overlap = resolve_schedule("overlap", self.algorithm, own_device=True)
        times: dict[Schedule, float] = {}
        for schedule in (SEQUENTIAL, overlap):
            yield schedule, "trial"
            yield None
            times[schedule] = self._measured.mean_iteration_s
        best = min(times, key=lambda schedule: times[schedule])
        told = ", ".join(f"{seconds * 1e6:,.0f} us with {schedule}" for schedule, seconds in times.items())
        yield best, f"fastest: {told}"
        yield from self._watch()

    def _costs(
        self, rollout: float, update: float, calls: tuple[CallCost, CallCost], syncs: tuple[CallCost, CallCost]
    ) -> Costs:
        ingestion, delivery = (one._replace(marginal_s=one.marginal_s + self._sync_s) for one in syncs)
        contended = self._contention, self._contention
        return Costs(rollout, update, *calls, ingestion, delivery, *contended, one_queue=True)

    def _watch(self) -> Iterator[tuple[Schedule, str] | None]:
        """Take the iteration time as it is now; when two trials in a row are out of its band, profile again."""
        yield None
        usual, out, rested = self._measured.iteration_s, 0, TRIAL
        while True:
            yield None
            rested += TRIAL
            now = self._measured.iteration_s
            out = out + 1 if not usual / BAND <= now <= usual * BAND else 0
            if out >= 2 and rested >= REST and not self.present.fused:
                yield SEQUENTIAL, f"drift: {now * 1e6:,.0f} us an iteration, {usual * 1e6:,.0f} us when it was chosen"
                yield from self._profile()
                return

    @property
    def _updates(self) -> int:
        return getattr(self.algorithm, "updates_per_rollout", 1)
