"""A training loop's memory across runs: learner, actor and iteration beside the plane, in one checkpoint.

The run that is resumed goes on as if it had never ended: same keys, same published parameters, same batches, bit for bit.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax import snapshot
from conduit_jax.checkpoint import folder
from conduit_jax.checkpoint.arrays import Reader, Writer
from conduit_jax.checkpoint.leaves import filled, kept, load_tree, save_tree, spec_of
from conduit_jax.checkpoint.structure import differences, told
from conduit_jax.errors import CheckpointError, ConfigError, check_integer, refuse

PyTree = Any
Data = dict[str, Any]

_COUNTS = ("iteration", "updates", "trained_iterations")


class Running(NamedTuple):
    """What a loop carries from one iteration to the next, beside its plane and its counts."""

    learner: PyTree
    actor: PyTree
    metrics: PyTree
    published: PyTree


class Checkpoints:
    """The checkpoints of one run: to ``directory``, every so many iterations and at its end; ``None``: none at all."""

    def __init__(self, loop: Any, directory: str | os.PathLike[str] | None, every: int | None, *, resume: bool):
        if every is not None:
            check_integer("checkpoint_every", every, 1)
        if directory is None and (resume or every is not None):
            got = f"checkpoint_every={every}, resume={resume}"
            refuse(ConfigError, "There is no folder to keep checkpoints in.", got=got, want="checkpoint_dir=")
        self._loop, self._directory, self._every = loop, directory, every
        self._resumes = resume and directory is not None and folder.exists(directory)
        self._saved_at: int | None = None
        if directory is not None and not resume and loop.iteration == 0 and folder.exists(directory):
            refuse(
                CheckpointError,
                "The folder holds the checkpoint of another run, which this one would replace.",
                got=directory,
                want="a folder of its own for each run",
                fix="resume=True goes on with it",
            )

    def resumed(self, running: Running) -> Running:
        """Return what was saved last, or ``running`` where nothing was or nobody asked; the plane and counts follow."""
        if not self._resumes or self._directory is None:
            return running
        loop = self._loop
        saved = folder.opened(self._directory)
        if "loop" not in saved.body:
            refuse(
                CheckpointError, "This is the checkpoint of a plane alone.", got=self._directory, fix="plane.restore"
            )
        data, reader = saved.body["loop"], Reader(saved.data)
        lines = [
            line
            for name in ("learner", "actor", "published")
            for line in differences(data[name]["spec"], spec_of(getattr(running, name)), name)
        ]
        if lines:
            got, fix = told(lines), "make learner and actor as they were, or begin in another folder"
            refuse(ConfigError, "The checkpoint holds another learner or actor.", got=got, fix=fix)
        learner, actor, published = (
            filled(reader, data[name]["leaves"], getattr(running, name)) for name in ("learner", "actor", "published")
        )
        snapshot.restore(loop.plane, self._directory, running.published.context)
        for name in _COUNTS:
            setattr(loop, name, data["counts"][name])
        self._saved_at = loop.resumed_at = loop.iteration
        return Running(learner, actor, _metrics(reader, data["metrics"]), published)

    def after_iteration(self, running: Running) -> None:
        """Save where it is time to."""
        if self._every is not None and self._loop.iteration % self._every == 0:
            self.save(running)

    def save(self, running: Running) -> None:
        """Save now, unless this iteration is saved already."""
        loop = self._loop
        if self._directory is None or self._saved_at == loop.iteration:
            return

        def also(writer: Writer) -> Data:
            return {
                "counts": {name: getattr(loop, name) for name in _COUNTS},
                "metrics": save_tree(writer, running.metrics),
                **{name: kept(writer, getattr(running, name)) for name in ("learner", "actor", "published")},
            }

        snapshot.save(loop.plane, self._directory, also)
        self._saved_at = loop.iteration


def saved_learner(directory: str | os.PathLike[str], example: PyTree) -> PyTree:
    """Return the learner that a training run last saved to ``directory``; ``example`` is one shaped like it.

    Raises ``CheckpointError`` where the folder holds no such checkpoint and ``ConfigError`` naming the leaves that differ.
    """
    saved = folder.opened(directory)
    if "loop" not in saved.body:
        refuse(CheckpointError, "This is the checkpoint of a plane alone: it holds no learner.", got=directory)
    data = saved.body["loop"]["learner"]
    lines = list(differences(data["spec"], spec_of(example), "learner"))
    if lines:
        fix = "name the algorithm, environment and settings it was trained with"
        refuse(ConfigError, "The checkpoint holds another learner.", got=told(lines), fix=fix)
    return filled(Reader(saved.data), data["leaves"], example)


def _metrics(reader: Reader, saved: Data) -> PyTree:
    """Return the last metrics on the default device; ``None`` where they have no form on the disk."""
    if saved["structure"] is None:
        return None
    return jax.tree.map(jnp.asarray, load_tree(reader, saved, lambda: None))
