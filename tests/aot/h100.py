"""Replay programs compiled for H100s, and what is read from them.

Compile-only devices have no memories, and a sharding on a mesh of them silently drops its memory kind (jax 0.10.2). So
placements here are laid out on the abstract mesh, which keeps it; arguments in device memory name the real mesh, and that
is how ``jax.jit`` learns for which devices to compile.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import conduit_jax as conduit
from conduit_jax.replay.buffer import Replay, ReplayState
from conduit_jax.sharding.memory import storage_access
from conduit_jax.sharding.placement import Part, Placement
from conduit_jax.testing import compiled_facts

PER_DEVICE = conduit.ReplayConfig(capacity=65_536, min_size=1_000)
LANES, STEPS, BATCH = 8, 6, 256  # a partition; six steps are cut unevenly at the end of a ring
ITEM = {
    "observation": jax.ShapeDtypeStruct((64,), jnp.float32),
    "frame": jax.ShapeDtypeStruct((32, 32, 3), jnp.uint8),  # large: stored apart
    "action": jax.ShapeDtypeStruct((), jnp.int32),
    "reward": jax.ShapeDtypeStruct((), jnp.float32),
}
_TOPOLOGIES = {1: "1x1x1", 8: "1x1x8", 1024: "1x128x8"}  # slices x hosts x devices


@cache
def h100s(count: int) -> Mesh:
    """Return a mesh of ``count`` H100s that can be compiled for, and no more."""
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="h100",
        target_config=Path(__file__).with_name("h100.textproto").read_text(),
        topology=_TOPOLOGIES[count],
    )
    return Mesh(np.array(topology.devices), ("data",))


class Hashed:
    """A tree that may be part of a ``Setting``: itself, and no other one."""

    def __init__(self, tree: Any):
        self.tree = tree


class Setting(NamedTuple):
    """A replay with ``partitions`` partitions on ``devices`` H100s, storage in ``kind``."""

    kind: str
    devices: int
    prioritized: bool
    partitions: int
    ragged: bool = False
    items: Any = None
    item: Hashed | None = None

    @property
    def one(self) -> Any:
        """The shapes of one stored step."""
        return ITEM if self.item is None else self.item.tree

    @property
    def abstract(self) -> Any:
        return h100s(self.devices).abstract_mesh

    @property
    def core(self) -> Replay:
        """One partition's replay."""
        config = conduit.ReplayConfig(
            capacity=PER_DEVICE.capacity * self.partitions,
            min_size=PER_DEVICE.min_size,
            sampler=conduit.Prioritized() if self.prioritized else conduit.Uniform(),
            partitions=self.partitions,
            ragged=self.ragged,
            items=self.items,
        )
        return conduit.make_replay(
            config,
            batch_size=BATCH * self.partitions,
            lanes=LANES * self.partitions,
            partitions=self.partitions,
            storage_access=storage_access(self.kind),
        )

    @property
    def placed(self) -> Replay:
        """The replay of all partitions, as users have it."""
        devices = tuple(h100s(self.devices).devices.flat)
        part = Part(devices, self.kind, self.partitions)
        return conduit.place(self.core, Placement(self.kind, (part,), self.abstract, "data"))

    def on_device(self, shape: tuple[int, ...], dtype: Any, *spec: str | None) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(h100s(self.devices), PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    @property
    def storage(self) -> Any:
        sharding = NamedSharding(self.abstract, PartitionSpec("data"), memory_kind=self.kind)
        shapes = jax.eval_shape(self.core.init, self.one).storage
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((self.partitions, *leaf.shape), leaf.dtype, sharding=sharding), shapes
        )

    @property
    def control(self) -> Any:
        shapes = jax.eval_shape(self.core.init, self.one).control
        return jax.tree.map(lambda leaf: self.on_device((self.partitions, *leaf.shape), leaf.dtype, "data"), shapes)

    @property
    def chunk(self) -> Any:
        lead = (STEPS, LANES * self.partitions)
        return jax.tree.map(lambda leaf: self.on_device((*lead, *leaf.shape), leaf.dtype, None, "data"), self.one)

    @property
    def lengths(self) -> Any:
        return self.on_device((LANES * self.partitions,), jnp.int32, "data")

    @property
    def key(self) -> Any:
        key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
        return self.on_device(key.shape, key.dtype)

    @property
    def params(self) -> Any:
        return {"hidden": self.on_device((64, 128), jnp.float32), "out": self.on_device((129,), jnp.float32)}

    def bytes_per_device(self, tree: Any) -> int:
        """Return the bytes each device holds of ``tree``, whose leaves are split over all devices."""
        return total_bytes(tree) // self.devices


def total_bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


class Program:
    """A compiled program and what it says of itself; bytes are those of one device."""

    def __init__(self, compiled: Any):
        memory, self.text = compiled.memory_analysis(), compiled.as_text()
        self.collectives: Counter[str] = compiled_facts(compiled).collectives
        self.device_alias, self.host_alias = memory.alias_size_in_bytes, memory.host_alias_size_in_bytes
        self.device_temp, self.host_temp = memory.temp_size_in_bytes, memory.host_temp_size_in_bytes
        self.output = (
            memory.output_size_in_bytes + memory.host_output_size_in_bytes - self.device_alias - self.host_alias
        )
        self.bytes = {name: getattr(memory, name) for name in dir(memory) if name.endswith("_size_in_bytes")}

    @cached_property
    def instructions(self) -> list[tuple[str, str]]:
        """(opcode, line) of every instruction."""
        return [(found.group(1), found.string) for found in map(_OPCODE.match, self.text.splitlines()) if found]

    @property
    def aliased_parameters(self) -> int:
        """How many parameters share their buffer with a result."""
        header = self.text.split("entry_computation_layout", 1)[0]
        return len(re.findall(r"\{[\d, ]*\}: \(\d+, \{[\d, ]*\}, (?:may|must)-alias\)", header))

    @property
    def largest_copy(self) -> int:
        """Bytes of the largest array that is copied as it is, whatever memory it is in."""
        copies = [line for opcode, line in self.instructions if opcode in ("copy", "copy-start")]
        return max((_bytes(shape) for line in copies for shape in _SHAPE.findall(line)), default=0)

    def host_opcodes(self) -> Counter[str]:
        """Count the instructions of the entry computation that touch host memory, those that move nothing left out."""
        entry = set(self.text[self.text.index("\nENTRY ") :].splitlines())
        touching = (
            opcode for opcode, line in self.instructions if line in entry and (":S(5)" in line or "S(5)}" in line)
        )
        return Counter(opcode for opcode in touching if opcode not in _STILL)


_OPCODE = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (?:\(.*?\)|\S+) ([\w\-]+)\(")
_SHAPE = re.compile(r"\b([a-z]+)(\d*)(?:e\w+)?\[([\d,]*)\]")
_STILL = ("parameter", "bitcast", "tuple", "get-tuple-element")


def _bytes(shape: tuple[str, str, str]) -> int:
    _, bits, lengths = shape
    return math.prod(int(length) for length in lengths.split(",") if length) * max(1, int(bits or 8) // 8)


def train(params: Any, sample: Any) -> tuple[Any, jax.Array]:
    """Take one step of gradient descent on all that was sampled; returns new priorities too."""

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        data = sample.data
        hidden = jnp.tanh(data["observation"] @ params["hidden"])
        seen = data["frame"].astype(jnp.float32).mean((1, 2, 3)) + data["action"]
        error = hidden @ params["out"][1:] + seen * params["out"][0] - data["reward"]
        return jnp.mean(sample.weights * error**2), jnp.abs(error)

    gradients, errors = jax.grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda value, gradient: value - 0.1 * gradient, params, gradients), errors


def _compile(function: Any, donate: tuple[int, ...], *arguments: Any) -> Program:
    return Program(jax.jit(function, donate_argnums=donate).trace(*arguments).lower().compile())


@cache
def insert(setting: Setting) -> Program:
    replay = setting.placed

    def step(storage: Any, control: Any, chunk: Any, lengths: Any) -> Any:
        return replay.add(ReplayState(storage, control), chunk, lengths)

    lengths = setting.lengths if setting.ragged else None
    return _compile(step, (0, 1), setting.storage, setting.control, setting.chunk, lengths)


@cache
def sample(setting: Setting) -> Program:
    return _compile(setting.placed.sample, (0,), setting.control, setting.storage, setting.key)


@cache
def train_alone(setting: Setting) -> Program:
    """The learner's step on a batch that is already there."""
    core = setting._replace(kind="device").core  # the same batch, without a memory to put it in
    state = jax.eval_shape(core.init, ITEM)
    shapes = jax.eval_shape(core.sample, state.control, state.storage, setting.key)[1]
    lead = BATCH * setting.partitions
    batch = jax.tree.map(lambda leaf: setting.on_device((lead, *leaf.shape[1:]), leaf.dtype, "data"), shapes)
    return _compile(train, (0,), setting.params, batch)


@cache
def fused(setting: Setting) -> Program:
    """Insert, sample, train and, prioritized, update: one program."""
    replay = setting.placed

    def step(storage: Any, control: Any, params: Any, chunk: Any, key: Any) -> Any:
        (storage, control), _ = replay.add(ReplayState(storage, control), chunk)
        control, batch = replay.sample(control, storage, key)
        params, errors = train(params, batch)
        if setting.prioritized:
            control, _ = replay.update_priorities(control, batch.info, errors)
        return storage, control, params

    arguments = (setting.storage, setting.control, setting.params, setting.chunk, setting.key)
    return _compile(step, (0, 1, 2), *arguments)
