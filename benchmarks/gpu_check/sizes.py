"""How large the cases are: for a GPU, and for a smoke run on the CPU."""

from __future__ import annotations

from typing import NamedTuple


class Sizes(NamedTuple):
    """``rows`` of ``row_bytes`` make a storage, ``batch`` of them a message; ``messages`` are bytes of plain copies."""

    rows: int
    row_bytes: int
    batch: int
    messages: tuple[int, ...]
    repeats: int
    capacity: int  # items of the pixel replay
    image: tuple[int, int, int]
    width: int  # of the layer that keeps the learner busy
    iterations: int
    blocks: int  # of the ablation
    loops: int  # pixel loops, of four


GPU = Sizes(
    rows=40_000,
    row_bytes=49_152,
    batch=256,
    messages=(1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28),
    repeats=20,
    capacity=50_000,
    image=(84, 84, 4),
    width=4096,
    iterations=60,
    blocks=4,
    loops=4,
)
CPU = Sizes(
    rows=256,
    row_bytes=1024,
    batch=8,
    messages=(1 << 12, 1 << 16),
    repeats=2,
    capacity=512,
    image=(36, 36, 1),
    width=64,
    iterations=5,
    blocks=1,
    loops=2,
)
