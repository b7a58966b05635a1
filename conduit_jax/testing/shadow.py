"""Replacing an attribute of one object for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def shadow(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Shadow ``owner.name`` and return what undoes it."""
    own = vars(owner)
    had, before = name in own, own.get(name)
    setattr(owner, name, value)

    def restore() -> None:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)

    return restore
