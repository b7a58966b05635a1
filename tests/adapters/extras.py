"""Tests of optional packages: skipped by name where one is not installed, and failing where one is there and broken."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import pytest


def needs(module: str, extra: str) -> ModuleType:
    """Return the module; skip the test where its package is not installed."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"needs the extra {extra}")
    return importlib.import_module(module)
