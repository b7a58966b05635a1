"""Facts of the programs on 8, 64 and 1,024 virtual devices: each device does as much, whatever the number of all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
COUNTS, BATCH, CAPACITY, LANES = (8, 64, 1024), 256, 4096, 4  # batch, capacity and lanes of one device


@cache
def facts_on(devices: int) -> dict[str, Any]:
    """Compile in a process with so many devices; run nothing (more than 256 would need a flag of XLA's not to deadlock)."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    program = [sys.executable, "-W", "error", __file__, str(devices)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def compile_on(devices: int) -> dict[str, Any]:
    """Return the facts of insert, sample and priority update over ``devices`` partitions, by sampler and program."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import conduit_jax as conduit
    from conduit_jax.replay.buffer import ReplayState
    from conduit_jax.sharding.placement import LearnerSite, resolve_placement
    from conduit_jax.testing import compiled_facts

    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    placement = resolve_placement("device", LearnerSite(jax.devices()[0], mesh, "data"), devices, 1)
    item = {"x": jax.ShapeDtypeStruct((64,), jnp.float32), "a": jax.ShapeDtypeStruct((), jnp.int32)}

    def on_mesh(tree: Any, *spec: str | None, lead: tuple[int, ...] = ()) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((*lead, *leaf.shape), leaf.dtype, sharding=sharding), tree
        )

    def bytes_per_device(tree: Any) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)) // devices

    def of_sampler(sampler: Any) -> dict[str, Any]:
        config = conduit.ReplayConfig(capacity=CAPACITY * devices, sampler=sampler, partitions=devices)
        core = conduit.make_replay(config, batch_size=BATCH * devices, lanes=LANES * devices, partitions=devices)
        replay = conduit.place(core, placement)
        storage, control = on_mesh(jax.eval_shape(core.init, item), "data", lead=(devices,))
        chunk = on_mesh(item, None, "data", lead=(3, LANES * devices))
        key = on_mesh(jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")))
        info = jax.eval_shape(replay.sample, control, storage, key)[1].info
        info, priorities = on_mesh((info, jax.ShapeDtypeStruct((BATCH * devices,), jnp.float32)), "data")
        programs = {
            "insert": (
                jax.jit(lambda s, c, r: replay.add(ReplayState(s, c), r), donate_argnums=(0, 1)),
                (storage, control, chunk),
            ),
            "sample": (jax.jit(replay.sample, donate_argnums=0), (control, storage, key)),
            "update": (jax.jit(replay.update_priorities, donate_argnums=0), (control, info, priorities)),
        }
        facts = {name: compiled_facts(program, *arguments)._asdict() for name, (program, arguments) in programs.items()}
        return {**facts, "storage_bytes": bytes_per_device(storage), "control_bytes": bytes_per_device(control)}

    return {"uniform": of_sampler(conduit.Uniform()), "prioritized": of_sampler(conduit.Prioritized())}


by_count = pytest.mark.parametrize("devices", COUNTS)
by_sampler = pytest.mark.parametrize("sampler", ["uniform", "prioritized"])


@by_count
@by_sampler
def test_insert_and_sample_are_in_place_without_collectives(devices: int, sampler: str) -> None:
    facts = facts_on(devices)[sampler]
    storage, control = facts["storage_bytes"], facts["control_bytes"]
    assert not facts["insert"]["collectives"]
    assert not facts["sample"]["collectives"]
    assert not facts["update"]["collectives"]
    assert facts["insert"]["alias_bytes"] == storage + control
    assert facts["sample"]["alias_bytes"] == facts["update"]["alias_bytes"] == control
    for name in ("insert", "sample", "update"):
        assert facts[name]["temp_bytes"] < storage / 8
        assert facts[name]["output_bytes"] - facts[name]["alias_bytes"] < storage / 8


@by_sampler
def test_a_device_holds_and_moves_as_much_whatever_their_number(sampler: str) -> None:
    few, *more = (facts_on(devices)[sampler] for devices in COUNTS)
    for many in more:
        assert many == few


if __name__ == "__main__":
    print(json.dumps(compile_on(int(sys.argv[1]))))
