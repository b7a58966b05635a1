"""A link as data: seconds a transfer takes by its size, a piecewise table rather than latency plus bytes over bandwidth."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conduit_jax.errors import ConfigError, refuse


@dataclass(frozen=True)
class Link:
    """Seconds of one transfer by its size, linear between the table's points.

    Attributes:
        bytes: sizes that were measured, ascending.
        seconds: median seconds of a transfer of each size, into memory that has been used before.
        fresh_seconds: the same into memory that is touched for the first time; empty: as ``seconds``.
        spread: (90th - 10th percentile) / median of each size; empty: not known.
        latency_s: seconds of a transfer of no bytes.
    """

    bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    fresh_seconds: tuple[float, ...] = ()
    spread: tuple[float, ...] = ()
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        table = list(self.bytes)
        if not table or table != sorted(set(table)) or table[0] <= 0:
            refuse(ConfigError, "A link's sizes must ascend.", got=table, want="positive byte counts, ascending")
        for name in ("seconds", "fresh_seconds", "spread"):
            column = getattr(self, name)
            if (column or name == "seconds") and len(column) != len(table):
                refuse(ConfigError, f"A link's {name} does not go with its sizes.", got=len(column), want=len(table))
            if not all(isinstance(value, int | float) and 0 <= value < float("inf") for value in column):
                refuse(ConfigError, f"A link's {name} is out of range.", got=list(column), want="finite numbers >= 0")
        if not all(value > 0 for value in (*self.seconds, *self.fresh_seconds)):
            refuse(ConfigError, "A transfer takes time.", got=list(self.seconds), want="seconds > 0")

    @staticmethod
    def of_bandwidth(bytes_per_s: float, latency_s: float = 0.0) -> Link:
        """Return the link of latency plus bytes over bandwidth: what a vendor's figure can say."""
        if not 0 < bytes_per_s < float("inf") or not 0 <= latency_s < float("inf"):
            got = f"{bytes_per_s} bytes/s, {latency_s} s"
            refuse(ConfigError, "A link's figures are out of range.", got=got, want="bytes_per_s > 0, latency_s >= 0")
        return Link((1 << 30,), (latency_s + (1 << 30) / bytes_per_s,), latency_s=latency_s)

    def transfer_s(self, size_bytes: float, *, fresh: bool = False) -> float:
        """Return the seconds of one transfer of ``size_bytes``, 0 for none; beyond the table at its last bandwidth."""
        if size_bytes <= 0:
            return 0.0
        seconds = self.fresh_seconds if fresh and self.fresh_seconds else self.seconds
        if size_bytes > self.bytes[-1]:
            return _beyond((self.latency_s, *seconds), (0, *self.bytes), size_bytes)
        above = bisect_left(self.bytes, size_bytes)
        low, low_s = (self.bytes[above - 1], seconds[above - 1]) if above else (0, self.latency_s)
        weight = (size_bytes - low) / (self.bytes[above] - low)
        return low_s + weight * (seconds[above] - low_s)

    def bytes_per_s(self, size_bytes: float) -> float:
        """Return the bandwidth a transfer of ``size_bytes`` sees."""
        return size_bytes / self.transfer_s(size_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        fields = {name: list(getattr(self, name)) for name in ("bytes", "seconds", "fresh_seconds", "spread")}
        return {**{name: value for name, value in fields.items() if value}, "latency_s": self.latency_s}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Link:
        """Invert ``as_dict``; ``{"bytes_per_s", "latency_s"}`` is read too. ``ConfigError`` for anything else."""
        known = {"bytes", "seconds", "fresh_seconds", "spread", "latency_s"}
        if isinstance(data, Mapping) and set(data) <= {"bytes_per_s", "latency_s"} and "bytes_per_s" in data:
            return Link.of_bandwidth(data["bytes_per_s"], data.get("latency_s", 0.0))
        if not isinstance(data, Mapping) or not {"bytes", "seconds"} <= set(data) <= known:
            refuse(ConfigError, "No link can be read.", got=data, want="bytes and seconds, or bytes_per_s")
        columns = {name: tuple(data.get(name, ())) for name in ("bytes", "seconds", "fresh_seconds", "spread")}
        return Link(**columns, latency_s=float(data.get("latency_s", 0.0)))


def _beyond(seconds: tuple[float, ...], sizes: tuple[int, ...], size_bytes: float) -> float:
    """Extend the table by the bandwidth between its two last points, or that of the last where they do not ascend."""
    slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    slope = slope if slope > 0 else seconds[-1] / sizes[-1]
    return seconds[-1] + slope * (size_bytes - sizes[-1])
