"""Batches of several tables as one: rows one table after the other, refused where they could not stand in one batch."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from conduit_jax.errors import SpecError, refuse
from conduit_jax.trees import tree_spec
from conduit_jax.types import Sample


def joined(samples: Sequence[Sample], names: Sequence[object]) -> Sample:
    """Return the rows of ``samples``, of tables called ``names``, as one batch; ``SpecError`` naming the leaf that differs.

    How often items were sampled is left out unless every table counts it.
    """
    _check_same_data(samples, names)
    if any(sample.info.times_sampled is None for sample in samples):
        samples = [sample._replace(info=sample.info._replace(times_sampled=None)) for sample in samples]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *samples)


def _check_same_data(samples: Sequence[Sample], names: Sequence[object]) -> None:
    specs = [tree_spec(sample._replace(info=None, weights=None, valid=None), drop=1) for sample in samples]
    wanted = specs[0]
    for name, found in zip(names[1:], specs[1:], strict=True):
        if found == wanted:
            continue
        one, two = (dict(zip(spec.paths, spec.leaves, strict=True)) for spec in (wanted, found))
        differing = [path for path in {**one, **two} if one.get(path) != two.get(path)]
        refuse(
            SpecError,
            f"Tables {names[0]} and {name} deliver different data" + (f": leaf {differing[0]}." if differing else "."),
            got=two.get(differing[0], "no such leaf") if differing else found.treedef,
            want=one.get(differing[0], "no such leaf") if differing else wanted.treedef,
            fix="store the same item in all tables, or wrap the tables so that they deliver the same",
        )


__all__ = ["joined"]
