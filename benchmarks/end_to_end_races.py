"""Races of whole trainings: what both sides run, how they are timed in turn, and whether what they learn counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import conduit_jax as conduit
from benchmarks.harness import Ratio, calibrate, interleave, ratio
from conduit_jax import envs
from conduit_jax.examples import fused
from conduit_jax.examples.worlds import Algorithm, PureWorld, make_pure_world, make_world

Returns = Callable[[], np.ndarray]
WARM = 140  # iterations of a loop: it fills its buffer, compiles, and is then watched less often


class Side(NamedTuple):
    """One way of a training: ``run(calls)`` is timed; ``returns()`` are its final policies', by seed."""

    run: Callable[[int], Any]
    returns: Returns


class Race(NamedTuple):
    """``ours`` against every peer, on the same sizes; a peer counts where both reach ``owed``, the interquartile mean over seeds.

    ``warm``: calls before anything is timed, which compile and fill buffers.
    """

    name: str
    owed: float
    ours: Side
    peers: Mapping[str, Side]
    warm: int = 1


def run_race(race: Race, *, repeats: int, block_s: float, judge: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Time all sides in turn; return a row a peer, and the summary: the ratio to the fastest peer that counts.

    Peers are judged from the fastest on until one counts: slower ones could not change the figure.
    """
    sides = {"ours": race.ours, **race.peers}
    for side in sides.values():
        side.run(race.warm)
    calls = {name: calibrate(side.run, block_s)[0] for name, side in sides.items()}
    times = interleave({name: side.run for name, side in sides.items()}, calls=calls, repeats=repeats)
    ours, rows, counted = race.ours.returns() if judge else None, [], {}
    for name in sorted(race.peers, key=lambda name: times[name].median):
        judged = judge and not counted
        theirs = race.peers[name].returns() if judged and not _misses(ours, race.owed) else None
        faster = ratio(times[name], times["ours"])
        row: dict[str, Any] = {"race": race.name, "peer": name, "repeats": repeats, **faster._asdict()}
        row |= {"ours_s": times["ours"].median, "theirs_s": times[name].median}
        row |= {"ours_cpu_s": times["ours"].cpu, "theirs_cpu_s": times[name].cpu}
        short = [side for side, returns in (("ours", ours), (name, theirs)) if judged and _misses(returns, race.owed)]
        row |= {"owed": race.owed, "our_returns": _listed(ours), "their_returns": _listed(theirs)}
        row |= {"judged": judged, "missed_the_return": short}
        rows.append(row)
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
        if not short and (judged or not judge):
            counted[name] = faster
    return rows, _figures(race, counted, rows)


def _figures(race: Race, counted: dict[str, Ratio], rows: list[dict[str, Any]]) -> dict[str, Any]:
    missed = {row["peer"]: row["missed_the_return"] for row in rows if row["missed_the_return"]}
    why = {f"{race.name}_not_counted": missed} if missed else {}
    if not counted:
        return {race.name: None, f"{race.name}_low": None, f"{race.name}_high": None} | why
    peer = min(counted, key=lambda name: counted[name].median)
    least = counted[peer]
    figures = {race.name: least.median, f"{race.name}_low": least.low, f"{race.name}_high": least.high}
    return figures | {f"{race.name}_peer": peer} | why


def interquartile_mean(returns: np.ndarray) -> float:
    """Return the mean of the middle half (of all, where there are fewer than four): one seed that fails does not decide."""
    cut = len(returns) // 4
    return float(np.sort(returns)[cut : len(returns) - cut].mean())


def _misses(returns: np.ndarray | None, owed: float) -> bool:
    return returns is not None and interquartile_mean(returns) < owed


def _listed(returns: np.ndarray | None) -> list[float] | None:
    return None if returns is None else [float(value) for value in returns]


def fused_side(training: Callable, timed: Callable, world: PureWorld, algorithm: Algorithm, seeds: int) -> Side:
    """Return the side of a training that is one program: ``timed(key)`` is a short one, ``training(key)`` is judged."""
    program = jax.jit(timed)

    def run(calls: int) -> None:
        for number in range(calls):
            jax.block_until_ready(program(jax.random.key(number)))

    def returns() -> np.ndarray:
        keys = jax.vmap(jax.random.key)(100 + jnp.arange(seeds))
        learner = jax.jit(jax.vmap(training))(keys)[0]
        evaluate = jax.jit(jax.vmap(lambda learner, key: world.evaluate(algorithm.policy(learner), key)))
        fresh = jax.vmap(jax.random.key)(1000 + jnp.arange(seeds))
        return np.asarray(evaluate(learner, fresh)).mean(axis=1)

    return Side(run, returns)


def fused_race(name: str, example: Any, sizes: tuple[Any, Any], peers: Mapping[str, Any], *, owed: float, seeds: int):
    """Race ``fused.py``'s training of ``example`` with one-program peers; ``sizes``: settings to judge and to time by.

    A peer is ``make(settings, algorithm, env) -> train`` in our algorithm's functions, or a whole ``(train_of, evaluated)``.
    """
    full, short = sizes
    env = envs.make(full.env)
    (training, world, algorithm), (timed, _, brief) = (fused.make_training(example, one) for one in sizes)
    sides = {}
    for peer, make in peers.items():
        if isinstance(make, tuple):
            train_of, evaluated = make
            whole, act_of = train_of(full, env)
            program = jax.jit(train_of(short, env)[0])
            returns = partial(evaluated, whole, act_of, full, env, seeds)
            sides[peer] = Side(partial(_repeated, program), returns)
        else:
            sides[peer] = fused_side(make(full, algorithm, env), make(short, brief, env), world, algorithm, seeds)
    return Race(name, owed, fused_side(training, timed, world, algorithm, seeds), sides)


def _repeated(program: Callable, calls: int) -> None:
    for number in range(calls):
        jax.block_until_ready(program(jax.random.key(number)))


class OurLoop:
    """``conduit.wrap`` around a rollout and a train step, with what a training begins from."""

    def __init__(
        self, algorithm: Algorithm, rollout: Callable, plane: conduit.ExperiencePlane, learner: Any, actor: Any
    ):
        self.loop = conduit.wrap(
            algorithm.train_step, rollout=rollout, policy=algorithm.policy, plane=plane, context=algorithm.context
        )
        self.learner, self.actor = learner, actor

    def run(self, iterations: int) -> None:
        """Run that many iterations and wait for them."""
        self.learner, self.actor, _ = self.loop.run(self.learner, self.actor, iterations)
        jax.block_until_ready(self.learner)


def loop_race(name: str, example: Any, settings: Any, *, owed: float, seeds: int) -> Race:
    """Return the race of our Python loop, on the settings' schedule, with flashbax's."""
    from benchmarks.end_to_end_peers import FlashbaxLoop

    world, algorithm = make_pure_world(settings, lambda spec: example.make_dqn(spec, settings))
    rollout, init = jax.jit(world.rollout), jax.jit(world.init)
    evaluate = jax.jit(lambda learner, key: world.evaluate(algorithm.policy(learner), key))

    def ours(settings: Any) -> OurLoop:
        actor_key, learner_key = jax.random.split(jax.random.key(settings.seed))
        learner = jax.jit(algorithm.init)(learner_key)
        return OurLoop(algorithm, rollout, example.make_plane(settings), learner, init(actor_key))

    def theirs(settings: Any) -> Any:
        return FlashbaxLoop(settings, algorithm, world)

    def returns(make: Callable[[Any], Any]) -> np.ndarray:
        ends = []
        for seed in range(seeds):
            loop = make(replace(settings, seed=seed))
            loop.run(settings.iterations)
            ends.append(float(np.mean(evaluate(loop.learner, jax.random.key(1000 + seed)))))
        return np.array(ends)

    sides = [Side(make(settings).run, partial(returns, make)) for make in (ours, theirs)]
    return Race(name, owed, sides[0], {"flashbax loop": sides[1]}, WARM)


def host_race(
    name: str, example: Any, make: Callable, settings: Any, peer: tuple[str, Callable], *, owed: float
) -> Race:
    """Return the race of our loop over Gymnasium's environments with ``peer``: its name, and ``make(settings)``."""

    def train(settings: Any) -> tuple[OurLoop, Any]:
        world, algorithm = make_world(settings, lambda spec: make(spec, settings), jax.random.key(settings.seed))
        learner = jax.jit(algorithm.init)(jax.random.key(settings.seed))
        return OurLoop(algorithm, world.rollout, example.make_plane(settings), learner, world.actor), (world, algorithm)

    def returns() -> np.ndarray:
        ours, (world, algorithm) = train(settings)
        ours.run(settings.iterations)
        return np.array([np.mean(world.evaluate(algorithm.policy(ours.learner), jax.random.key(1)))])

    called, make_peer = peer
    theirs = Side(make_peer(settings).run, lambda: np.array([make_peer(settings).train()]))
    return Race(name, owed, Side(train(settings)[0].run, returns), {called: theirs}, WARM)
