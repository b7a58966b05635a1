"""Tables of items of several steps compiled for one H100 and for 1,024: inserts and draws in place, in device and host memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import conduit_jax as conduit
from tests.aot import h100
from tests.aot.h100 import Setting
from tests.aot.test_h100 import assert_storage_is_in_place

FLAGS = {name: jax.ShapeDtypeStruct((), jnp.bool_) for name in ("terminated", "truncated")}
STEP = h100.ITEM | FLAGS
GOAL = {name: jax.ShapeDtypeStruct((3,), jnp.float32) for name in ("at", "goal")}
SEEN = jax.ShapeDtypeStruct((32, 32, 3), jnp.uint8)
FRAMES: Any = conduit.Step(SEEN, h100.ITEM["action"], h100.ITEM["reward"], *FLAGS.values(), SEEN)


def reward(at: Any, goal: Any, item: Any) -> Any:
    return -jnp.linalg.norm(at - goal)


HINDSIGHT = conduit.Hindsight(achieved="at", desired=("goal",), recompute=(("reward", reward),))
ITEMS: dict[str, tuple[Any, Any]] = {
    "windows": (conduit.Windows(length=8), STEP),
    "view": (conduit.TransitionView(discount=0.99, n=3, stack=4), FRAMES),
    "hindsight": (HINDSIGHT, STEP | GOAL),
    "episodes": (conduit.Episodes(max_length=32), STEP),
}
everywhere = pytest.mark.parametrize(("kind", "devices"), [("device", 1), ("device", 1024), ("pinned_host", 1)])


def setting_of(name: str, kind: str, devices: int) -> Setting:
    items, item = ITEMS[name]
    return Setting(kind, devices, True, devices, items=items, item=h100.Hashed(item))


@pytest.mark.parametrize("name", ITEMS)
@everywhere
def test_an_insert_is_in_place_without_collectives(name: str, kind: str, devices: int) -> None:
    setting = setting_of(name, kind, devices)
    program = h100.insert(setting)
    assert_storage_is_in_place(setting, program, (setting.storage, setting.control))
    assert not program.collectives


@pytest.mark.parametrize("name", ITEMS)
@everywhere
def test_a_draw_reads_storage_where_it_is_without_collectives(name: str, kind: str, devices: int) -> None:
    setting = setting_of(name, kind, devices)
    program = h100.sample(setting)
    storage = setting.bytes_per_device(setting.storage)
    assert program.device_alias == setting.bytes_per_device(setting.control)
    assert program.host_temp < storage / 1024
    assert max(program.device_temp, program.largest_copy) < storage / 16, "a batch of stacks is six megabytes itself"
    assert not program.collectives
