"""Facts of the package as a whole: what importing it costs, what it exports, what it ships."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import re
import subprocess
import sys
from pathlib import Path

import pytest

import conduit_jax

ROOT = Path(__file__).resolve().parent.parent


def modules_loaded_by(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after running ``statement``."""
    program = f"{statement}\nimport sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("statement", ["import conduit_jax", "from conduit_jax import *"])
def test_the_base_package_loads_no_foreign_framework_and_no_plotting(statement: str) -> None:
    assert not modules_loaded_by(statement) & {"torch", "ray", "matplotlib", "gymnasium", "h5py"}


@pytest.mark.parametrize(
    "statement",
    [
        "import conduit_jax",
        "import conduit_jax.adapters",
        "import conduit_jax.adapters.minari, conduit_jax.adapters.rlds",
    ],
)
def test_a_process_that_only_acts_does_not_load_jax(statement: str) -> None:
    assert not modules_loaded_by(statement) & {"jax", "jaxlib", "flax", "torch", "ray"}


def test_every_public_name_resolves_and_is_listed() -> None:
    names = list(getattr(conduit_jax, "__all__", ()))
    assert len(names) == len(set(names)), "a name is exported twice"
    unresolved = [name for name in names if not hasattr(conduit_jax, name)]
    assert not unresolved, f"conduit_jax.__all__ promises {unresolved}"
    assert set(names) <= set(dir(conduit_jax)), "dir(conduit_jax) hides a public name"


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = conduit_jax.no_such_name  # pyright: ignore[reportAttributeAccessIssue]


def test_the_version_is_one_version_everywhere() -> None:
    assert importlib.metadata.version("conduit_jax") == conduit_jax.__version__
    assert re.search(rf"\b{re.escape(conduit_jax.__version__)}\b", (ROOT / "CHANGELOG.md").read_text())


def test_type_checkers_are_told_that_the_package_is_typed() -> None:
    assert importlib.resources.files("conduit_jax").joinpath("py.typed").is_file()
