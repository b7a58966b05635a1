"""How drawn episodes become arrays of one shape: padded, packed several to a row, or padded to the length of their bucket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from conduit_jax.errors import ConfigError, check_integer, refuse
from conduit_jax.replay import packing, storage
from conduit_jax.replay.storage import Experience, Storage
from conduit_jax.types import Sample

Array = jax.Array
PyTree = Any


@dataclass(frozen=True, kw_only=True)
class Padded:
    """One episode a row: data ``(batch, max_length, ...)``, zeros after its end, where ``Sample.mask`` is False."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Several episodes a row of ``row_length`` steps, by first fit in the order drawn: data is a ``PackedEpisodes``.

    ``Sample.info``, ``weights`` and ``valid`` are those of the drawn episodes, ``valid`` False for one that no row had room
    for. Those are the longer ones more often than not: with ``rows = batch_size`` there are none.
    """

    rows: int
    row_length: int

    def __post_init__(self) -> None:
        check_integer("Packed(rows=)", self.rows, 1)
        check_integer("Packed(row_length=)", self.row_length, 1)


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Batches of one bucket each, padded to its length: bucket ``i`` holds episodes of at most ``lengths[i]`` steps.

    The last of the increasing ``lengths`` is the longest episode there may be. ``batch_sizes`` may give each bucket its
    own. The bucket is static, as shapes are: ``draw_bucket`` chooses one and ``sample(..., bucket=i)`` draws from it.
    """

    lengths: tuple[int, ...]
    batch_sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for number, length in enumerate(self.lengths):
            check_integer(f"Buckets(lengths=)[{number}]", length, 1)
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            refuse(ConfigError, "Buckets need increasing lengths.", got=self.lengths, want="(8, 32, 128), for example")
        if self.batch_sizes is not None and len(self.batch_sizes) != len(self.lengths):
            refuse(
                ConfigError, "Buckets(batch_sizes=) are not one a bucket.", got=self.batch_sizes, want=len(self.lengths)
            )


Delivery = Padded | Packed | Buckets


class PackedEpisodes(NamedTuple):
    """Rows of several episodes: ``steps`` leaves ``(rows, row_length, ...)``, zeros on padding, and int32 ``(rows, row_length)``:

    ``segment_ids`` 1, 2, … along a row and 0 on padding; ``positions``, the step within its episode; ``episodes``, which of
    the drawn ones (of ``Sample.info`` and ``weights``; of its partition's share of them) it is, -1 on padding.
    """

    steps: PyTree
    segment_ids: Array
    positions: Array
    episodes: Array


class Drawn(NamedTuple):
    """Where the steps of drawn episodes are, int32 ``(n,)``: ``lane``, the ``begin`` in its ring of ``ring`` steps, ``length``."""

    lane: Array
    begin: Array
    length: Array
    ring: int


Assemble = Callable[[Storage, Experience, Drawn, Sample], Sample]


def padded_to(length: int) -> Assemble:
    """Return the function that pads drawn episodes, none longer than ``length``."""

    def assemble(access: Storage, steps: Experience, drawn: Drawn, sample: Sample) -> Sample:
        position = jnp.arange(length, dtype=jnp.int32)
        mask = (position < drawn.length[:, None]) & sample.valid[:, None]
        episode = jnp.arange(drawn.length.shape[0], dtype=jnp.int32)[:, None]
        return sample._replace(data=_gather(access, steps, drawn, episode, position, mask), mask=mask)

    return assemble


def packed_into(rows: int, row_length: int) -> Assemble:
    """Return the function that packs drawn episodes into ``rows`` of ``row_length``."""

    def assemble(access: Storage, steps: Experience, drawn: Drawn, sample: Sample) -> Sample:
        lengths = jnp.where(sample.valid, drawn.length, 0)
        fit = packing.first_fit(lengths, rows, row_length)
        segment, position, episode = packing.lay_out(fit, lengths, rows, row_length)
        mask = segment > 0
        data = _gather(access, steps, drawn, jnp.maximum(episode, 0), position, mask)
        data = PackedEpisodes(data, segment, position, episode)
        return sample._replace(data=data, mask=mask, valid=fit.placed)

    return assemble


def _gather(access: Storage, steps: Experience, drawn: Drawn, episode: Array, position: Array, mask: Array) -> PyTree:
    """Return step ``position`` of each ``episode``, zeros where not ``mask``; the three broadcast to the shape of ``mask``."""
    time = drawn.begin[episode] + jnp.where(mask, position, 0)
    time = jnp.where(time >= drawn.ring, time - drawn.ring, time)
    slots = jnp.broadcast_to(drawn.lane[episode] * drawn.ring + time, mask.shape)
    data, _ = storage.gather(access, steps, slots.reshape(-1))

    def shaped(leaf: Array) -> Array:
        leaf = leaf.reshape(*mask.shape, *leaf.shape[1:])
        return jnp.where(mask.reshape(mask.shape + (1,) * (leaf.ndim - mask.ndim)), leaf, jnp.zeros((), leaf.dtype))

    return jax.tree.map(shaped, data)
