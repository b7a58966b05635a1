"""Compiling for GPUs where there are none: skipped unless the extra ``aot`` is installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

_PACKAGES = ("jax_plugins.xla_cuda12", "nvidia.cuda_nvcc")


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _why_not() -> str | None:
    missing = [package for package in _PACKAGES if not _installed(package)]
    if missing:
        return f"needs the extra 'aot' in an environment of its own ({', '.join(missing)} missing)"
    if os.environ["JAX_PLATFORMS"] != "cpu":
        return "compiles for GPUs that are not there: needs JAX_PLATFORMS=cpu"
    return None


_REASON = _why_not()
if _REASON is None:
    # The plugin loads without a driver, and looks for no GPU. Set while tests are collected: JAX reads them once.
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if _REASON is not None and here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=_REASON))
