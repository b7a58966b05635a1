"""What holds for every test: eight virtual CPU devices, and hypothesis profiles that repeat themselves.

The environment is set while pytest loads this file, before any test module can import jax: XLA reads its flags once.
"""

from __future__ import annotations

import os
import re
import tempfile

import pytest
from hypothesis import HealthCheck, settings

_KEPT: list[object] = []  # what lives as long as the run
_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


def _prepare_environment() -> None:
    """Choose the CPU with eight devices, unless the caller has already chosen otherwise."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags = os.environ.get("XLA_FLAGS", "")
    if _DEVICE_COUNT_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_DEVICE_COUNT_FLAG}=8".strip()
    # Many planes compile the same program: one cache for the run (workers and subprocesses inherit the folder).
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = tempfile.TemporaryDirectory(prefix="conduit_jax_tests_", ignore_cleanup_errors=True)
        _KEPT.append(cache)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache.name
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


_prepare_environment()

# The first call of a jitted function compiles, so a deadline would measure the compiler; and a slow draw on a busy
# machine says nothing about the law being tested.
settings.register_profile("dev", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
# Fewer examples than at the desk: the suite must end within a coffee break on two cores.
settings.register_profile("ci", settings.get_profile("dev"), max_examples=15, derandomize=True, print_blob=True)
settings.register_profile("thorough", settings.get_profile("dev"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the ``gpu`` tests where JAX was not told to use a GPU."""
    if re.search(r"cuda|rocm|gpu", os.environ["JAX_PLATFORMS"]):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU: JAX_PLATFORMS=cuda,cpu pytest -m gpu"))
