"""The fused mode: rollout, ingestion, delivery and update of many iterations as one compiled program.

Nothing is dispatched between the stages, so their fixed costs vanish. The program runs the very functions of the
sequential schedule in its order, with keys and numbers counted on, and stages are kept apart (``isolation``): the bits are
the sequential schedule's. Nothing is kept of an iteration but its last metrics. On the CPU the number of iterations is an
argument, and one program serves all; elsewhere it is static, because a loop of unknown length waits for the host each turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from conduit_jax.config import OffPolicy, OnPolicy
from conduit_jax.errors import ConduitError, HookError, refuse
from conduit_jax.schedule.isolation import isolated
from conduit_jax.schedule.iteration import IterationPipeline
from conduit_jax.schedule.pipeline import ReplayPipeline
from conduit_jax.sharding.lift import in_own_mesh
from conduit_jax.types import Rollout

Array = jax.Array
PyTree = Any


class Acting(NamedTuple):
    """The user's functions as a loop has them: ``rollout(actor, policy, key)``, ``train_step(learner, sample)``.

    ``publish(learner)`` gives what actors and hooks read, a pair (policy, context), every ``publish_every`` iterations.
    """

    rollout: Callable[..., Any]
    train_step: Callable[..., Any]
    publish: Callable[[PyTree], Any]
    publish_every: int
    key: Array


class Progress(NamedTuple):
    """What a loop carries beside learner and store: ``counters`` uint32 are (iteration, updates, number, version)."""

    actor: PyTree
    published: Any
    metrics: PyTree
    counters: tuple[Array, Array, Array, Array]


def check_traceable(rollout: Callable[..., Any], actor: PyTree, policy: PyTree, key: Array) -> None:
    """Raise ``HookError`` unless ``rollout`` can become part of a program: no host actor, nothing that reads values."""
    strange = [type(leaf).__name__ for leaf in jax.tree.leaves(actor) if not hasattr(leaf, "dtype")]
    fix = "schedule='auto', or a rollout in JAX (conduit.envs.make_rollout)"
    if strange:
        refuse(HookError, "A fused schedule needs an actor made of arrays.", got=", ".join(strange[:3]), fix=fix)
    try:
        jax.eval_shape(rollout, actor, policy, key)
    except ConduitError:
        raise
    except Exception as error:
        message = f"A fused schedule needs a rollout that JAX can trace.\n  got:  {type(error).__name__}: {error}"
        raise HookError(f"{message}\n  fix:  {fix}") from error


def _step(acting: Acting, on: Array | None, progress: Progress) -> tuple[Progress, PyTree]:
    """Return the rollout of one iteration."""
    key = jax.random.fold_in(acting.key, progress.counters[0])
    actor, rollout = isolated(on, acting.rollout, progress.actor, progress.published[0], key)
    return progress._replace(actor=actor), rollout


def _update(acting: Acting, on: Array | None, learner: PyTree, sample: Any) -> tuple[PyTree, PyTree, list]:
    learner, metrics, *priorities = isolated(on, acting.train_step, learner, sample)
    return learner, metrics, priorities


def _published(acting: Acting, on: Array | None, learner: PyTree, progress: Progress) -> Progress:
    """End an iteration: count it, and publish where it is time."""
    iteration, updates, number, version = progress.counters
    iteration = iteration + jnp.uint32(1)
    fresh = (isolated(on, acting.publish, learner), updates)
    if acting.publish_every > 1:
        due = iteration % jnp.uint32(acting.publish_every) == 0
        fresh = jax.tree.map(lambda new, old: jnp.where(due, new, old), fresh, (progress.published, version))
    return progress._replace(published=fresh[0], counters=(iteration, updates, number, fresh[1]))


def fuse_replay(pipeline: ReplayPipeline, algorithm: OffPolicy, acting: Acting) -> Callable[..., tuple]:
    """Return ``(count, learner, store, progress) -> (learner, store, progress)``: ``count`` off-policy iterations.

    ``store`` is (storage, control, carry), donated with ``learner``; ``progress.counters``' number is that of the next draw.
    """
    programs, draw_key = pipeline.programs, pipeline.key
    ingest, deliver, update_priorities = (
        getattr(program, "compiled")  # noqa: B009
        for program in (programs.ingest, programs.deliver, programs.update_priorities)
    )

    def iterate(on: Array | None, state: tuple) -> tuple:
        learner, (storage, control, carry), progress = state
        progress, rollout = _step(acting, on, progress)
        context, version = progress.published[1], progress.counters[3]
        storage, control, carry, _added = ingest(storage, control, carry, rollout, context, version)

        def learn(_: Array, inner: tuple) -> tuple:
            learner, control, _metrics, (iteration, updates, number, version) = inner
            control, sample = deliver(control, storage, draw_key, number, context)
            learner, metrics, priorities = _update(acting, on, learner, sample)
            if priorities and programs.keeps_priorities:
                control, _applied = update_priorities(control, sample.info, priorities[0])
            one = jnp.uint32(1)
            return learner, control, metrics, (iteration, updates + one, number + one, version)

        inner = (learner, control, progress.metrics, progress.counters)
        learner, control, metrics, counters = _repeat(algorithm.updates_per_rollout, learn, inner)
        progress = _published(acting, on, learner, progress._replace(metrics=metrics, counters=counters))
        return learner, (storage, control, carry), progress

    return _looped(iterate, pipeline.mesh)


def fuse_iterations(pipeline: IterationPipeline, algorithm: OnPolicy, acting: Acting) -> Callable[..., tuple]:
    """Return ``fuse_replay`` for on-policy iterations of several units: ``store`` is (carry,), number the iteration's."""
    ingest, finalize, permute, gather = (getattr(program, "compiled") for program in pipeline.programs)  # noqa: B009
    key, minibatches = pipeline.key, algorithm.num_minibatches

    def iterate(on: Array | None, state: tuple) -> tuple:
        learner, (carry,), progress = state
        units, versions, context = [], [], ()
        for last in [False] * (algorithm.units_per_iteration - 1) + [True]:
            progress, rollout = _step(acting, on, progress)
            context, version = progress.published[1], progress.counters[3]
            carry, (records,) = isolated(on, ingest, carry, (rollout,), (context,))
            own = rollout.policy_version if isinstance(rollout, Rollout) else None
            units.append(records)
            versions.append(version if own is None else own.astype(jnp.uint32))
            progress = progress if last else _published(acting, on, learner, progress)
        records, version = isolated(on, finalize, tuple(units), tuple(versions), context)
        number = progress.counters[2]

        def epoch(index: Array, inner: tuple) -> tuple:
            order = permute(key, number, index.astype(jnp.uint32))

            def learn(batch: Array, inner: tuple) -> tuple:
                learner, _metrics = inner
                start, serial = batch * pipeline.batch_size, (index * minibatches + batch).astype(jnp.uint32)
                (sample,) = gather(records, order, (start,), (serial,), (number, version), key, context)
                return _update(acting, on, learner, sample)[:2]

            return _repeat(minibatches, learn, inner)

        learner, metrics = _repeat(algorithm.num_epochs, epoch, (learner, progress.metrics))
        iteration, updates, number, version = progress.counters
        updates = updates + jnp.uint32(algorithm.num_epochs * minibatches)
        progress = progress._replace(metrics=metrics, counters=(iteration, updates, number + jnp.uint32(1), version))
        return learner, (carry,), _published(acting, on, learner, progress)

    return _looped(iterate, pipeline.mesh)


def _repeat(count: int, body: Callable[..., tuple], state: tuple) -> tuple:
    return body(jnp.int32(0), state) if count == 1 else jax.lax.fori_loop(0, count, body, state)


def _looped(iterate: Callable[..., tuple], mesh: Mesh) -> Callable[..., tuple]:
    """Return ``(count, learner, store, progress) -> (learner, store, progress)``, compiled at its first call.

    What is not committed to devices is put where the buffer is, and results keep the shardings of what came in: otherwise
    the second call, which is given the first one's results, would be compiled anew.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    home: Any = SingleDeviceSharding(mesh.devices.item()) if mesh.size == 1 else NamedSharding(mesh, PartitionSpec())

    def run(count: Array, on: Array, *state: Any) -> tuple:
        body = lambda _, state: iterate(on if on_cpu else None, state)  # noqa: E731
        return jax.lax.fori_loop(0, count, body, state)

    def call(count: int, *state: Any) -> tuple:
        state = jax.tree.map(lambda leaf: leaf if _is_committed(leaf) else jax.device_put(leaf, home), state)
        if call.compiled is None:  # type: ignore[attr-defined]
            out = jax.tree.map(lambda leaf: leaf.sharding, state)
            static = () if on_cpu else (0,)
            program = jax.jit(run, donate_argnums=(2, 3), static_argnums=static, out_shardings=out)
            call.compiled = program  # type: ignore[attr-defined]  # for tests
        placed = in_own_mesh(call.compiled, mesh)  # type: ignore[attr-defined]
        return placed(np.int32(count) if on_cpu else count, np.bool_(True), *state)

    call.compiled = None  # type: ignore[attr-defined]
    return call


def _is_committed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.committed


__all__ = ["Acting", "Progress", "check_traceable", "fuse_iterations", "fuse_replay"]
