"""What a table's items are where they are not single steps: values of one kind, given as ``ReplayConfig(items=)``."""

from __future__ import annotations

from typing import Any, ClassVar


class Items:
    """Windows, transitions read from neighbouring steps, relabelled steps, whole episodes: a frozen, hashable value each.

    ``ReplayConfig(capacity=)`` counts the steps that are stored and ``min_size`` the items, whose ``noun`` is for words.
    ``replay/items.py`` knows what makes the replay of each.
    """

    noun: ClassVar[str] = "items"
    slots_known: ClassVar[bool] = (
        False  # whether what a draw reads follows from control alone, so that others may fetch it
    )

    def check(self, config: Any) -> None:
        """Raise ``ConfigError`` for a ``ReplayConfig`` that cannot have such items; the ring storage it has."""

    def whole_length(self, length: int) -> int:
        """Return how many steps a lane holds where ``length`` were asked for."""
        return length

    def most_lost(self, steps: int) -> int | None:
        """Return how many items of a lane may at most be there no more after an insert of ``steps`` steps.

        ``None`` where every stored step is an item, so that there are never fewer than there were.
        """
        return None


__all__ = ["Items"]
