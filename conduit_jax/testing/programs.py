"""Facts of a compiled program: what it moves between devices, what it allocates, which of its inputs it reuses in place."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from conduit_jax.errors import explain

PyTree = Any

_COLLECTIVES = "all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter|collective-broadcast"
_COLLECTIVE = re.compile(rf"\b(?:ragged-)?({_COLLECTIVES})(?:-start)?\(")
_ALIASED_PARAMETER = re.compile(r"\{[\d, ]*\}: \((\d+),")
_PARAMETER = re.compile(r"\bparameter\((\d+)\)(?:.*?op_name=\"((?:[^\"\\]|\\.)*)\")?")
_COPY = re.compile(r"= (\w+?)(\d*)\[([\d,]*)\]\S* copy\(")


class CompiledFacts(NamedTuple):
    """Bytes **per device** of a compiled program, host memory included, and its ``collectives`` by kind.

    ``alias_bytes`` of the outputs live in the buffers of donated arguments; ``temp_bytes`` are allocated while it runs.
    Asynchronous collectives count once, under the name without ``-start``.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    collectives: Counter[str]


def compiled_facts(function: Callable[..., Any], *args: PyTree) -> CompiledFacts:
    """Return the facts of ``function`` compiled for ``args`` (arrays or ``ShapeDtypeStruct``); nothing is run.

    ``function`` may be a plain function, a jitted one, or one already compiled (``args`` are then not looked at).
    """
    if hasattr(function, "memory_analysis"):
        return _facts(function)
    jitted: Any = function if hasattr(function, "lower") else jax.jit(function)
    return _facts(jitted.lower(*args).compile())


def assert_in_place(
    function: Callable[..., Any],
    state: PyTree,
    *args: PyTree,
    donate_argnums: int | Sequence[int] = 0,
    max_temp_fraction: float = 0.5,
) -> None:
    """Raise ``AssertionError`` unless ``function(state, *args)`` updates its donated arguments in place.

    In place means: every leaf of a donated argument shares its buffer with an output, and the program's temporaries take
    less than ``max_temp_fraction`` of the donated bytes (per device). Nothing is run and nothing is donated.

    Args:
        function: a plain function, jitted here with ``donate_argnums``; or a jitted one, whose own donation counts.
        state: the first argument, or its shapes; states of a few hundred bytes say little about temporaries.
        args: the remaining arguments.
        donate_argnums: which arguments a plain function hands over.
        max_temp_fraction: how large temporaries may be, as a share of the donated bytes.
    """
    jitted: Any = function if hasattr(function, "lower") else jax.jit(function, donate_argnums=donate_argnums)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")  # raised below, by name
        lowered = jitted.lower(state, *args)
        compiled = lowered.compile()
    text, facts = compiled.as_text(), _facts(compiled)
    leaves = jax.tree.leaves_with_path(lowered.args_info[0])
    donated = [index for index, (_, leaf) in enumerate(leaves) if leaf.donated]
    if not donated:
        raise AssertionError(
            explain("The function donates nothing.", want="a donated state", fix="jax.jit(function, donate_argnums=0)")
        )
    donated_bytes = facts.alias_bytes + _refuse_copied_leaves(text, leaves, donated)
    if facts.temp_bytes > max_temp_fraction * donated_bytes:
        raise AssertionError(
            explain(
                "The state is donated, but the program works on a copy of it.",
                got=f"{facts.temp_bytes:,} bytes of temporaries for {donated_bytes:,} donated bytes{_largest_copies(text)}",
                want=f"at most {max_temp_fraction:g} of the donated bytes",
                fix="write before you read (add, then sample): whoever reads the old value after the write keeps a copy alive",
            )
        )


def _refuse_copied_leaves(text: str, leaves: list[tuple[Any, Any]], donated: list[int]) -> int:
    """Raise, naming them, if donated leaves share no buffer with an output; return 0 otherwise."""
    aliased = {int(number) for number in _ALIASED_PARAMETER.findall(text.split("entry_computation_layout", 1)[0])}
    parameters = _parameter_of_leaf(text, [jax.tree_util.keystr(path[1:]) for path, _ in leaves])
    copied = [leaves[index] for index in donated if parameters.get(index) not in aliased]
    if not copied:
        return 0
    named = ", ".join(f"{_leaf_name(path)} ({_bytes(leaf):,} bytes)" for path, leaf in copied)
    raise AssertionError(
        explain(
            "Donated leaves are not updated in place: no output takes their buffers.",
            got=named,
            want="an output of the same shape, dtype, sharding and memory kind for each donated leaf",
            fix="return the new state with every leaf, unchanged in shape and dtype, and donate only what is returned",
        )
    )


def _parameter_of_leaf(text: str, suffixes: list[str]) -> dict[int, int]:
    """Return the program's parameter number of each argument leaf; JAX drops leaves that a program does not read."""
    entry = text[text.index("\nENTRY ") :]
    found = sorted((int(number), name.replace("\\'", "'")) for number, name in _PARAMETER.findall(entry))
    if len(found) == len(suffixes):
        return {index: number for index, (number, _) in enumerate(found)}
    mapping, remaining = {}, iter(range(len(suffixes)))
    for number, name in found:  # both are in the order of the arguments
        index = next((index for index in remaining if name.endswith(suffixes[index])), None)
        if index is not None:
            mapping[index] = number
    return mapping


def _leaf_name(path: tuple[Any, ...]) -> str:
    number = path[0].idx
    return ("state" if number == 0 else f"argument {number}") + jax.tree_util.keystr(path[1:])


def _bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _largest_copies(text: str) -> str:
    """Return the largest copies of the program as words, or nothing."""
    sizes = Counter()
    for kind, bits, shape in _COPY.findall(text):
        size = math.prod(int(length) for length in shape.split(",") if length) * max(1, int(bits or 8) // 8)
        sizes[f"{kind}{bits}[{shape}]"] = max(size, sizes[f"{kind}{bits}[{shape}]"])
    largest = [f"{shape} ({size:,} bytes)" for shape, size in sizes.most_common(3) if size]
    return f"; largest copies: {', '.join(largest)}" if largest else ""


def _facts(compiled: Any) -> CompiledFacts:
    memory = compiled.memory_analysis()

    def total(name: str) -> int:
        return getattr(memory, f"{name}_size_in_bytes") + getattr(memory, f"host_{name}_size_in_bytes")

    kinds = Counter(match.group(1) for match in _COLLECTIVE.finditer(compiled.as_text()))
    return CompiledFacts(total("argument"), total("output"), total("alias"), total("temp"), kinds)
