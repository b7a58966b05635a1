"""Memory pressure, foreseen: a program that would not fit is not dispatched, so nothing it was to donate is lost.

What a dispatch allocates is known once it is compiled (``memory_analysis``): temporaries, and results that do not live in
donated buffers. What is free is asked of the device (``memory_stats``) or, on the CPU backend, of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from conduit_jax.errors import PlacementError, refuse
from conduit_jax.sharding.memory import DEVICE, available_bytes
from conduit_jax.types import Device

_ON_CPU_EVERY = 64  # calls: reading /proc takes longer than many a program, and host memory moves slowly
_SMALL_EVERY = 1024  # of programs that allocate less than
_SMALL_BYTES = 2**20


class MemoryPressure(PlacementError):
    """A program would not fit into memory now; it was not dispatched, and nothing has changed."""


def watched(program: Any, devices: Sequence[Device]) -> Callable[..., Any]:
    """Return ``program`` (a lifted function) that raises ``MemoryPressure`` instead of a dispatch that would not fit ``devices``."""
    on_cpu = devices[0].platform == "cpu"
    looked_at = devices[:1] if on_cpu else devices  # there all have one memory
    known: list[int] = []
    left = 0  # calls before memory is looked at again

    def ahead(*values: Any) -> Any:
        compiled = program.ahead(*values)
        known[:] = [extra_bytes(compiled)]
        return compiled

    def look(values: tuple) -> int:
        if not known:
            ahead(*values)
        for device in looked_at:
            check_room(device, known[0])
        if not on_cpu:
            return 0
        return (_ON_CPU_EVERY if known[0] >= _SMALL_BYTES else _SMALL_EVERY) - 1

    def call(*values: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
        else:
            left = look(values)
        return program(*values)

    call.compiled, call.shapes, call.ahead = program.compiled, program.shapes, ahead  # type: ignore[attr-defined]
    return call


def extra_bytes(compiled: Any) -> int:
    """Return the bytes a compiled program allocates when it runs, on each device; 0 where the backend does not tell."""
    facts = compiled.memory_analysis()
    if facts is None:
        return 0
    return facts.temp_size_in_bytes + max(0, facts.output_size_in_bytes - facts.alias_size_in_bytes)


def check_room(device: Device, needed_bytes: int) -> None:
    """Raise ``MemoryPressure`` unless ``needed_bytes`` are free in the memory of ``device``."""
    free = available_bytes(device, DEVICE)
    if free < needed_bytes:
        refuse(
            MemoryPressure,
            f"The memory of {device} is too full for the next program.",
            got=f"{needed_bytes:,} bytes needed, {max(free, 0):,} free",
            want="room for it before it is dispatched",
            fix="placement='auto' moves the buffer by itself; or plane.migrate(...), a lower capacity, a smaller batch",
        )
