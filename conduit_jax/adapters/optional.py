"""Packages that are there or are not: imported when first needed, and named with their extra where they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from conduit_jax.errors import ConfigError, refuse


def required(module: str, title: str, extra: str) -> ModuleType:
    """Return the module of that name; ``ConfigError`` naming ``title`` and the extra that installs it where it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing, reason = error.name or "", str(error)
    fix = f"pip install 'conduit_jax[{extra}]'"
    if missing and missing.partition(".")[0] != module.partition(".")[0]:
        refuse(ConfigError, f"{title} cannot be imported.", got=reason, fix=fix)
    refuse(ConfigError, f"{title} is not installed.", fix=fix)
