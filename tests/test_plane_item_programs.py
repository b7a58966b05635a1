"""Facts of what a plane compiles for tables of items: inserts and draws in place, without collectives, on one device and on eight."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

import conduit_jax as conduit
from conduit_jax.testing import CompiledFacts, assert_in_place, compiled_facts
from tests.reference_items import BATCH, GOALS, PRIORITIZED, config_of, hidden_of, unit_of

CAPACITY = 32_768  # steps: what is drawn and inserted is small beside them
TABLES = {
    "windows": config_of(conduit.Windows(length=4, burn_in=1, state=hidden_of), sampler=PRIORITIZED),
    "crossing windows": config_of(conduit.Windows(length=4, boundary="cross")),
    "view": config_of(
        conduit.TransitionView(discount=0.5, n=conduit.NStepRange(low=1, high=3), stack=3), sampler=PRIORITIZED
    ),
    "hindsight": config_of(conduit.Hindsight(**GOALS), sampler=PRIORITIZED),
    "padded episodes": config_of(conduit.Episodes(max_length=8), sampler=PRIORITIZED),
    "packed episodes": config_of(
        conduit.Episodes(max_length=8, delivery=conduit.Packed(rows=BATCH, row_length=10), max_episodes=4096)
    ),
}
everything = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("crossing windows", "packed episodes") else name
        for name in TABLES
    ],
)
on_one_and_eight = pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 8])


@cache
def built(name: str, devices: int) -> tuple[Any, Any]:
    """A plane's pipeline of such a table, nothing pushed, and the shapes of a rollout."""
    config = conduit.ReplayConfig(**{**vars(TABLES[name]), "capacity": CAPACITY})
    mesh = None if devices == 1 else jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    plane = conduit.ExperiencePlane(algorithm=conduit.OffPolicy(batch_size=BATCH), replay=config, mesh=mesh)
    rollout = unit_of(config)(0)
    plane.build(rollout)
    door = plane._tables["experience"].intake
    return plane.running(), door(rollout)[0]


def bytes_of(tree: Any, devices: int) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) // devices


@cache
def inserting(name: str, devices: int) -> CompiledFacts:
    pipeline, rollout = built(name, devices)
    return compiled_facts(pipeline.programs.ingest.compiled, *pipeline.store, rollout, (), np.uint32(0))


@cache
def drawing(name: str, devices: int) -> CompiledFacts:
    pipeline, _ = built(name, devices)
    storage, control, _ = pipeline.store
    return compiled_facts(pipeline.programs.deliver.compiled, control, storage, pipeline.key, np.uint32(0), ())


@everything
@on_one_and_eight
def test_an_insert_is_in_place_and_local(name: str, devices: int) -> None:
    (pipeline, rollout), facts = built(name, devices), inserting(name, devices)
    storage, control, carry = pipeline.store
    assert not facts.collectives
    assert facts.alias_bytes >= bytes_of((storage, control, carry), devices)
    assert facts.temp_bytes < bytes_of(storage, devices) / 8
    ingest = pipeline.programs.ingest.compiled
    assert_in_place(ingest, storage, control, carry, rollout, (), np.uint32(0), max_temp_fraction=0.125)


@everything
@on_one_and_eight
def test_a_draw_only_reads_storage_and_is_local(name: str, devices: int) -> None:
    (pipeline, _), facts = built(name, devices), drawing(name, devices)
    storage, control, _ = pipeline.store
    assert not facts.collectives
    assert facts.alias_bytes >= bytes_of(control, devices)
    assert facts.output_bytes - facts.alias_bytes < bytes_of(storage, devices) / 8
    assert facts.temp_bytes < bytes_of(storage, devices) / 8


@pytest.mark.parametrize("name", [name for name, config in TABLES.items() if config.sampler == PRIORITIZED])
@on_one_and_eight
def test_new_priorities_are_in_place_and_local(name: str, devices: int) -> None:
    pipeline, _ = built(name, devices)
    storage, control, _ = pipeline.store
    programs = pipeline.programs
    info = programs.deliver.shapes(control, storage, pipeline.key, np.uint32(0), ())[1].info
    given = (info, jax.ShapeDtypeStruct((BATCH,), np.float32))
    given = programs.to_placement(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), given))
    facts = compiled_facts(programs.update_priorities.compiled, control, *given)
    assert not facts.collectives
    assert facts.alias_bytes >= bytes_of(control, devices)
