"""Draws of one program, one after the other.

XLA on CPU (jax 0.10.2) gives half of the kernels that are ready to another thread as soon as more than eight are, and waking
it costs more than the small kernels of several draws: two draws of 256 items of 44 bytes side by side take twice as long as
one after the other. A draw is at most eight wide, so where it is small the next one of a program waits for it: its key does,
by way of the counts of faults, which nothing else reads. Large draws gain from two threads and wait for nobody, and other
backends run kernels in the program's order.
"""

from __future__ import annotations

import operator
from functools import partial, reduce
from typing import Any

import jax

from conduit_jax.replay.interface import Faults
from conduit_jax.replay.piecewise import zero_of
from conduit_jax.replay.random_bits import key_words
from conduit_jax.types import SampleInfo

Array = jax.Array
PyTree = Any

SMALL_BYTES = 2**16  # of a draw whose rows take less time than waking a thread


@partial(jax.jit, inline=True)
def _after(words: Array, read: Array) -> Array:
    """Return ``words`` uint32 as they are, which wait for ``read`` on CPU."""
    return jax.lax.platform_dependent(
        words,
        read,
        cpu=lambda words, read: words + zero_of(reduce(operator.xor, list(read))[None]).astype(words.dtype),
        default=lambda words, read: words,
    )


def waiting(key: Array, control: Any) -> Array:
    """Return the words of a threefry ``key``, uint32 ``(2,)``, which wait for the draw that ``control`` comes from."""
    return _after(key_words(key), control.faults.words)


def in_turn(control: Any, info: SampleInfo, data: PyTree) -> Any:
    """Return ``control`` as it is, for a draw that waits for the first row of ``info``, which a small draw of ``data`` makes last."""
    if sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(data)) > SMALL_BYTES:
        return control
    first = info.words.reshape(-1, info.words.shape[-1])[0]
    return control._replace(faults=Faults.of_words(_after(control.faults.words, first), control.faults.present))
