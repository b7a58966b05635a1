"""Functions among settings: told apart where they do something else, known again where they do the same."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conduit_jax as conduit
from conduit_jax.checkpoint.structure import differences, settings_as_data


def made(source: str, **names: Any) -> Callable[..., Any]:
    """The function ``reward`` of a module with this source."""
    module = types.ModuleType("rewards")
    vars(module).update(names)
    exec(textwrap.dedent(source), vars(module))
    return module.reward


def differ(one: Any, other: Any) -> bool:
    saved = json.loads(json.dumps(settings_as_data({"f": one})))
    return differences(saved, settings_as_data({"f": other})) != []


def scaled(by: float) -> Callable[[float], float]:
    return lambda x: x * by


class Reward:
    def __init__(self, by: Any):
        self.by = by

    def __call__(self, x: Any) -> Any:
        return x * self.by

    def method(self, x: Any) -> Any:
        return x * self.by


PLAIN = "def reward(x):\n    return abs(x) * 2"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: lambda x: x + 1, lambda: lambda x: x + 2),
        (lambda: lambda x: x + 1, lambda: lambda x: x - 1),
        (lambda: lambda x: jnp.sin(x), lambda: lambda x: jnp.cos(x)),
        (lambda: scaled(1.0), lambda: scaled(2.0)),
        (lambda: lambda x, by=1: x, lambda: lambda x, by=2: x),
        (lambda: made(PLAIN), lambda: made(PLAIN.replace("2", "3"))),
        (
            lambda: made("def inner(x): return x\ndef reward(x): return inner(x)"),
            lambda: made("def inner(x): return -x\ndef reward(x): return inner(x)"),
        ),
        (lambda: made("BY = 1\ndef reward(x): return x * BY"), lambda: made("BY = 2\ndef reward(x): return x * BY")),
        (
            lambda: made("def reward(x): return [y + 1 for y in x]"),
            lambda: made("def reward(x): return [y for y in x]"),
        ),
        (lambda: functools.partial(abs), lambda: functools.partial(round)),
        (lambda: functools.partial(scaled(1.0)), lambda: functools.partial(scaled(2.0))),
        (lambda: jax.jit(lambda x: x + 1), lambda: jax.jit(lambda x: x + 2)),
        (lambda: scaled(functools.partial(int, base=2)), lambda: scaled(functools.partial(int, base=3))),
        (lambda: scaled(jax.random.key(1)), lambda: scaled(jax.random.key(2))),
        (lambda: scaled(np.array([str(1)], object)), lambda: scaled(np.array([str(2)], object))),
        (lambda: Reward(np.arange(3)), lambda: Reward(np.arange(4))),
        (lambda: Reward(1).method, lambda: Reward(2).method),
    ],
)
def test_functions_of_one_name_that_do_something_else_are_told_apart(one: Any, other: Any) -> None:
    assert differ(one(), other())
    assert not differ(one(), one())
    assert not differ(other(), other())


@pytest.mark.parametrize(
    "other",
    [
        "# a comment\n\n" + PLAIN,
        "def reward(x):\n    # another line\n    return abs(x) * 2  # twice",
        "UNUSED = 1\n" + PLAIN,
    ],
)
def test_comments_lines_and_what_is_not_used_make_no_difference(other: str) -> None:
    assert not differ(made(PLAIN), made(other))


def test_a_docstring_makes_no_difference_to_another() -> None:
    source = 'def reward(x):\n    "What it is."\n    return abs(x) * 2'
    assert not differ(made(source), made(source.replace("What it is.", "Twice the size.")))


def test_functions_that_call_each_other_are_told_to_the_end() -> None:
    source = "def reward(x): return other(x - 1) if x else 0\ndef other(x): return reward(x - 1) if x else {}"
    assert not differ(made(source.format(1)), made(source.format(1)))
    assert differ(made(source.format(1)), made(source.format(2)))


def test_the_same_function_is_known_again_in_another_process() -> None:
    code = "import json, sys; sys.path.insert(0, '.')\n"
    code += "from tests.checkpoint.test_functions import OF_EVERY_KIND\n"
    code += "from conduit_jax.checkpoint.structure import settings_as_data\n"
    code += "print(json.dumps(settings_as_data(OF_EVERY_KIND)))"
    told = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_seeded(seed)
        ).stdout
        for seed in (1, 2)
    ]
    assert told[0] == told[1]


OF_EVERY_KIND = {
    "lambda": lambda x: x in {"a", "b", "c", "d"},
    "closure": scaled(3.0),
    "object": Reward({"a", "b", "c"}),
    "jitted": jax.jit(lambda x: x + 1),
    "partial": functools.partial(scaled(2.0), 1),
    "method": Reward(jnp).method,
    "type": Reward,
    "builtin": abs,
}


def _seeded(seed: int) -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONHASHSEED": str(seed), "JAX_PLATFORMS": "cpu"}


def test_another_python_cannot_tell_and_says_so() -> None:
    saved = settings_as_data({"f": abs, "g": scaled(1.0)})
    saved["g"] |= {"python": "cpython-307", "code": "0" * 16}
    with pytest.warns(UserWarning, match=r"g: whether .*scaled.* cannot be told: it was saved by cpython-307"):
        assert differences(saved, settings_as_data({"f": abs, "g": scaled(1.0)})) == []
    assert differences(saved, settings_as_data({"f": abs, "g": abs})) != []


def test_a_checkpoint_of_another_reward_function_is_refused_and_nothing_is_restored(tmp_path: Any) -> None:
    def plane_of(reward: Callable[..., Any]) -> conduit.ExperiencePlane:
        goals = conduit.Hindsight(achieved="at", desired=("goal",), recompute=(("reward", reward),))
        replay = conduit.ReplayConfig(capacity=64, items=goals)
        return conduit.ExperiencePlane(algorithm=conduit.OffPolicy(batch_size=8), replay=replay)

    shape, ended = (4, 8), np.zeros((4, 8), bool)
    unit = {name: np.ones(shape, np.float32) for name in ("at", "goal", "reward")}
    saved = plane_of(lambda at, goal, item: -jnp.abs(at - goal))
    saved.push(unit | {"terminated": ended, "truncated": ended})
    saved.save(tmp_path)
    same, other = plane_of(lambda at, goal, item: -jnp.abs(at - goal)), plane_of(lambda at, goal, item: at - goal)
    same.restore(tmp_path)
    with pytest.raises(
        conduit.ConfigError, match=r"items\.recompute\[0\]\[1\]: saved .*<lambda>, here another function"
    ):
        other.restore(tmp_path)
    assert not other.ready()
