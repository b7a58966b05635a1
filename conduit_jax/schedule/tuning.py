"""``schedule="auto"`` at run time: profile on iterations that count as training, choose, and look again when times drift.

The tuner is fed with what a loop measured and answers with schedules to run from the next iteration on, each with its
reason. It decides at fixed iteration counts; only the choice depends on times, so a run is repeated by pinning its history.
Fusing is tried first: it changes no bit of the sequential schedule.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from conduit_jax.config import Algorithm, OnPolicy
from conduit_jax.schedule.history import Change
from conduit_jax.schedule.latency import CallCost, Costs, fit, predict
from conduit_jax.schedule.optimizer import HYSTERESIS, Candidate, Decision, Memory, choose
from conduit_jax.schedule.semantics import (
    FUSED_ITERATIONS,
    SEQUENTIAL,
    Schedule,
    feasible_delivery,
    feasible_ingestion,
    resolve_schedule,
    updates_together,
)

WORTH = 512  # iterations that must be left to begin: a trial compiles, and a short run would not get that back
WORTH_S = (
    15.0  # seconds that must be left to try another schedule: compiling one takes a few, and fusing saves about half
)
SETTLE = 16  # iterations with updates before anything is decided: they compile, and fill caches
TRIAL = 48  # iterations a schedule is tried for; the first ones compile and are not timed
COMPILES, ROUNDS = (
    16,
    16,
)  # of them; and those in which a profile times calls as they run, then as many run stage by stage
PROBES = (1, 2, 4, 8)  # granularities that are profiled; the others follow from the fit
BAND = 1.5  # drift of the iteration time that asks for a new profile, either way
REST = 2048  # iterations between two profiles at least


@dataclass
class Measured:
    """What a trial told: seconds of whole iterations, of stages run blocked, less their waits, and of their calls' dispatch.

    ``elsewhere_s`` the loop waited without wanting a core, for each update, as iterations ran.
    """

    elsewhere_s: float = 0.0
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

    def mean(self, stage: str, g: int = 1) -> float:
        """Return the mean seconds an iteration of ``stage``, whose calls of ``g`` parts fall on one iteration in g."""
        return _mean(self.stages.get(stage, []), g)

    def dispatch(self, stage: str, g: int = 1) -> float:
        """Return the mean seconds an iteration that the calls of ``stage`` take to return where nobody waits for them."""
        return _mean(self.dispatched.get(stage, []), g)


def _mean(values: list[float], g: int) -> float:
    """Return the mean over as many whole rounds of ``g`` as there are; 0 where there is none."""
    whole = values[: len(values) // g * g]
    return statistics.fmean(whole) if whole else 0.0


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
        self._asked, self._since = False, 0  # iterations since the last change

    def runs_blocked(self, usual: bool) -> bool:
        """Return whether the next iteration is to be run stage by stage: a profile's last ones, the timed ones before never.

        They follow each other without another between: calls of g parts fall on one iteration in g. Others are as ``usual``.
        """
        if not self._asked or self._since < COMPILES:
            return usual
        return self._since >= COMPILES + ROUNDS

    def note(
        self, iterations: int, seconds: float | None, stages: dict[str, float] | None, left: float = float("inf")
    ) -> Change | None:
        """Enter ``iterations`` that took ``seconds`` each, or one (``None``) run blocked; return a change to make now, if any.

        ``stages`` took so long, blocked; otherwise it took so long to dispatch them. ``left`` iterations are still to come.
        ``Change.iteration`` is counted from the first note.
        """
        self._count += iterations
        self._since += iterations
        self._left = left
        if self._since > COMPILES:
            self._enter(iterations, seconds, stages or {})
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
        self.present, self._since = schedule, 0
        return Change(self._count, schedule, reason)

    def _enter(self, iterations: int, seconds: float | None, stages: dict[str, float]) -> None:
        measured = self._measured
        if seconds is not None:
            measured.iterations.extend([seconds] * min(iterations, 32))
        told = measured.stages if seconds is None else measured.dispatched
        for stage, value in stages.items():
            told[stage].append(value)
        if self._asked and self._since == COMPILES + ROUNDS:
            measured.elsewhere_s = self._elsewhere()

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
        present = self.present
        self.costs, took = yield from self._probes()
        self.decision = choose(self.costs, self.algorithm, present=present, memory=self._memory)
        chosen = self.decision.chosen
        yield (
            chosen.schedule,
            f"{self.decision.reason}: {chosen.prediction.iteration_s * 1e6:,.0f} us an iteration predicted",
        )
        if chosen.schedule.overlap_ingestion or chosen.schedule.overlap_delivery:
            yield from self._stretched(chosen, took)
        yield from self._watch()

    def _probes(self) -> Generator[tuple[Schedule, str], None, tuple[Costs, dict[Schedule, float]]]:
        """Run a few granularities in order; return what they tell, and the seconds of an iteration under each."""
        units = {int(g) for _, g in feasible_ingestion(self.algorithm) if g >= 1}
        batches = {int(g) for _, g in feasible_delivery(self.algorithm) if g >= 1}
        ingestion, delivery, updates, syncs = {}, {}, {}, ({}, {})
        rollout, elsewhere, took = [], [], {}
        self._asked = True
        for g in PROBES:
            own = max(n for n in units if n <= g), max(n for n in batches if n <= g)
            schedule = Schedule(g_ingestion=own[0], g_delivery=own[1])
            yield schedule, f"profile: {own[0]} units, {own[1]} batches a call"
            measured, together = self._measured, updates_together(schedule, self.algorithm)
            ingestion[own[0]] = measured.mean("ingestion", own[0]) * own[0]
            delivery[own[1]] = measured.mean("delivery", own[1]) * own[1] / self._updates
            updates.setdefault(together, []).append(measured.mean("update") * together / self._updates)
            syncs[0][own[0]] = measured.dispatch("ingestion", own[0]) * own[0]
            syncs[1][own[1]] = measured.dispatch("delivery", own[1]) * own[1] / self._updates
            rollout.append(measured.mean("rollout"))
            elsewhere.append(measured.elsewhere_s * self._updates)
            took[schedule] = measured.mean_iteration_s
        self._asked = False
        update = fit({count: statistics.median(seconds) for count, seconds in updates.items()})
        calls = (fit(ingestion), fit(delivery)), (fit(syncs[0]), fit(syncs[1]))
        costs = self._costs(statistics.median(rollout), update, *calls)
        most_s = costs.rollout_s + self._updates * update.per_part(1)
        return costs._replace(elsewhere_s=min(statistics.median(elsewhere), most_s)), took

    def _stretched(self, chosen: Candidate, took: dict[Schedule, float]) -> Iterator[tuple[Schedule, str] | None]:
        """Charge overlapping with what ``chosen`` takes longer than predicted, as far as no sequential one does; choose again.

        ``took`` are the seconds of an iteration under the schedules that were profiled.
        """
        yield None  # its programs compiled
        assert self.costs is not None
        g = chosen.schedule.g_delivery
        beside, seconds = min(took.items(), key=lambda one: abs(one[0].g_delivery - g))
        usual_s = seconds - predict(self.costs, beside, self.algorithm).iteration_s
        now_s = self._measured.mean_iteration_s
        longer_s = now_s - chosen.prediction.iteration_s - usual_s
        if longer_s <= 0:
            return
        self.costs = self.costs._replace(stretch=CallCost(0.0, longer_s / self._updates))
        self.decision = choose(self.costs, self.algorithm, present=chosen.schedule, memory=self._memory)
        if self.decision.chosen.schedule != chosen.schedule:
            told = f"{now_s * 1e6:,.0f} us an iteration instead, {longer_s * 1e6:,.0f} us of it where stages overlap"
            yield self.decision.chosen.schedule, told

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
        self, rollout: float, update: CallCost, calls: tuple[CallCost, CallCost], syncs: tuple[CallCost, CallCost]
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
