"""The user's functions at the two ends of the path, brought to one form and checked before they are compiled.

An ingestion hook becomes ``(carry, rollout, context) -> (carry, Records)`` and a delivery hook ``(data, key, context) ->
data``; both are pure, traced once, and see one rollout unit (one partition's lanes) or one partition's batch, so that
results cannot depend on granularity or placement.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import jax

from conduit_jax.errors import ConduitError, HookError, check_choice, refuse
from conduit_jax.types import Records

PyTree = Any

CAPTURE_LIMIT_BYTES = 64 << 10
ENDPOINTS = ("Actor", "ExperienceBuffer", "Learner")


class Hook(NamedTuple):
    """A registered function in its one form, with the ``name`` errors use; ``init_carry(rollout) -> carry``.

    One that is not traceable runs on the ``host``, its independent ``stages`` side by side; a batched one has the form
    ``together`` too, over arguments with a leading axis of g units. ``takes_context`` says whether it reads the context;
    one that is ``late`` checks itself whenever it is traced for use, as what its context looks like is not known before.
    """

    function: Callable[..., Any]
    name: str
    init_carry: Callable[[PyTree], PyTree]
    takes_context: bool = False
    late: bool = False
    host: bool = False
    together: Callable[..., Any] | None = None
    stages: tuple[Stage, ...] = ()


class Stage(NamedTuple):
    """A named part of a hook: reads the columns it ``needs``, returns those it ``gives``, as keyword arguments and a dict."""

    name: str
    function: Callable[..., dict[str, PyTree]]
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    host: bool = False


def no_carry(rollout: PyTree) -> PyTree:
    """The carry of a hook that has none."""
    return ()


def ingestion_hook(function: Callable[..., Any], init_carry: Callable[[PyTree], PyTree] | None = None) -> Hook:
    """Return ``function(rollout)``, ``(rollout, context)`` or, with ``init_carry``, ``(carry, rollout[, context])`` in the one form.

    Raises ``HookError`` for any other number of parameters.
    """
    name, count = _name(function), positional(function)
    carried = init_carry is not None
    allowed = (2, 3) if carried else (1, 2)
    if count not in allowed:
        want = "(carry, rollout) or (carry, rollout, context)" if carried else "(rollout) or (rollout, context)"
        fix = (
            None
            if carried or count != 3
            else "pass init_carry= when registering: a hook of three parameters has a carry"
        )
        refuse(HookError, f"Ingestion hook {name!r} takes another number of arguments.", got=count, want=want, fix=fix)

    def unified(carry: PyTree, rollout: PyTree, context: PyTree) -> tuple[PyTree, Records]:
        given = (carry, rollout, context)[0 if carried else 1 :]
        result = function(*given[:count])
        carry, items = result if carried else (carry, result)
        return carry, items if isinstance(items, Records) else Records(items)

    return Hook(unified, name, init_carry or no_carry, takes_context=count == allowed[1])


def batched_hook(hook: Hook) -> Hook:
    """Return an ingestion ``hook`` over units with a leading axis g in the one form, for one unit, and as it is."""

    def of_one(carry: PyTree, rollout: PyTree, context: PyTree) -> tuple[PyTree, Records]:
        ahead = [jax.tree.map(lambda leaf: jax.numpy.asarray(leaf)[None], tree) for tree in (rollout, context)]
        carry, records = hook.function(carry, *ahead)
        return carry, jax.tree.map(lambda leaf: leaf[0], records)

    return hook._replace(function=of_one, together=hook.function)


def delivery_hook(function: Callable[..., Any]) -> Hook:
    """Return ``function(data)``, ``(data, key)`` or ``(data, key, context)`` in the one form; ``HookError`` otherwise."""
    name, count = _name(function), positional(function)
    if count not in (1, 2, 3):
        refuse(
            HookError,
            f"Delivery hook {name!r} takes another number of arguments.",
            got=count,
            want="(data), (data, key) or (data, key, context)",
        )
    return Hook(lambda data, key, context: function(*(data, key, context)[:count]), name, no_carry, count == 3)


def finalize_hook(function: Callable[..., Any]) -> Hook:
    """Return ``function(records)`` or ``(records, context)`` in the form ``(records, context) -> records``."""
    name, count = _name(function), positional(function)
    if count not in (1, 2):
        refuse(
            HookError,
            f"Finalize hook {name!r} takes another number of arguments.",
            got=count,
            want="(records) or (records, context)",
        )
    return Hook(lambda records, context: function(*(records, context)[:count]), name, no_carry, count == 2)


def stored_as_is(rollout: PyTree) -> PyTree:
    """The ingestion of a plane without a hook: the pushed tree is the records, leaves ``(T, lanes, ...)``."""
    return rollout


def delivered_as_is(data: PyTree) -> PyTree:
    """The delivery of a plane without a hook: what is sampled is what the learner takes."""
    return data


def compose_stages(stages: Sequence[Stage]) -> Callable[[dict[str, PyTree]], dict[str, PyTree]]:
    """Return one function over named columns that runs ``stages`` in the order of their needs.

    A column is readable when the stage that gives it has ended. Raises ``HookError`` where two stages give one column,
    have one name, or wait for each other.
    """
    ordered, _ = in_order_of_needs(stages)

    def run(columns: dict[str, PyTree]) -> dict[str, PyTree]:
        columns = dict(columns)
        for stage in ordered:
            columns |= run_stage(stage, columns)
        return columns

    return run


def in_order_of_needs(stages: Sequence[Stage]) -> tuple[list[Stage], dict[str, str]]:
    """Return ``stages`` so that each comes after those whose columns it needs, and who gives which column.

    ``HookError`` where two stages give one column, have one name, or wait for each other.
    """
    names = [stage.name for stage in stages]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        refuse(HookError, "Two stages have one name.", got=twice, want="a name of its own for each")
    givers: dict[str, str] = {}
    for stage in stages:
        for column in stage.gives:
            if column in givers:
                refuse(
                    HookError,
                    f"Two stages give column {column!r}.",
                    got=f"{givers[column]!r} and {stage.name!r}",
                    want="one",
                )
            givers[column] = stage.name
    return _in_order_of_needs(stages, givers), givers


def run_stage(stage: Stage, columns: dict[str, PyTree]) -> dict[str, PyTree]:
    """Return the columns ``stage`` gives; ``HookError`` where one it needs is missing or it gives others than it declared."""
    lacking = [need for need in stage.needs if need not in columns]
    if lacking:
        refuse(HookError, f"Stage {stage.name!r} needs columns nobody gives.", got=sorted(columns), want=lacking)
    given = stage.function(**{need: columns[need] for need in stage.needs})
    if set(given) != set(stage.gives):
        refuse(
            HookError,
            f"Stage {stage.name!r} gave other columns than it declared.",
            got=sorted(given),
            want=list(stage.gives),
        )
    return given


def _in_order_of_needs(stages: Sequence[Stage], givers: dict[str, str]) -> list[Stage]:
    waiting, done, ordered = list(stages), set(), []
    while waiting:
        free = [
            stage for stage in waiting if all(givers.get(need) in done or need not in givers for need in stage.needs)
        ]
        if not free:
            refuse(
                HookError,
                "Stages wait for each other.",
                got=", ".join(stage.name for stage in waiting),
                want="needs without a cycle",
            )
        ordered += free
        done |= {stage.name for stage in free}
        waiting = [stage for stage in waiting if stage.name not in done]
    return ordered


class _Reader:
    """The ``actor_in`` of the paper's Fig. 8: ``read()`` returns one unit."""

    def __init__(self, unit: PyTree):
        self._unit = unit

    def read(self) -> PyTree:
        return self._unit


class _Writer:
    """The ``exp_out`` of the paper's Fig. 8: ``write`` takes the result, once."""

    def __init__(self) -> None:
        self.written: list[PyTree] = []

    def write(self, value: PyTree) -> None:
        self.written.append(value)


def _endpoint_form(
    source: str, target: str, kind: str, input: str, output: str
) -> Callable[[Callable[..., None]], Callable[[PyTree], PyTree]]:
    check_choice("input", input, ENDPOINTS, kind=HookError)
    check_choice("output", output, ENDPOINTS, kind=HookError)
    if (input, output) != (source, target):
        refuse(HookError, f"A {kind} hook runs from {source} to {target}.", got=f"{input} to {output}")

    def decorate(function: Callable[..., None]) -> Callable[[PyTree], PyTree]:
        @wraps(function)
        def hook(unit: PyTree) -> PyTree:
            writer = _Writer()
            function(_Reader(unit), writer)
            if len(writer.written) != 1:
                refuse(
                    HookError, f"Hook {_name(function)!r} must write once.", got=f"{len(writer.written)} writes", want=1
                )
            return writer.written[0]

        hook.__signature__ = inspect.Signature([inspect.Parameter("unit", inspect.Parameter.POSITIONAL_ONLY)])  # type: ignore[attr-defined]
        return hook

    return decorate


def register_ingestion(
    *, input: str = "Actor", output: str = "ExperienceBuffer"
) -> Callable[[Callable[..., None]], Callable[[PyTree], PyTree]]:
    """Turn ``f(actor_in, exp_out)`` (paper, Fig. 8) into a hook for ``plane.register_ingestion``."""
    return _endpoint_form("Actor", "ExperienceBuffer", "ingestion", input, output)


def register_delivery(
    *, input: str = "ExperienceBuffer", output: str = "Learner"
) -> Callable[[Callable[..., None]], Callable[[PyTree], PyTree]]:
    """Turn ``f(exp_in, learner_out)`` (paper, Fig. 8) into a hook for ``plane.register_delivery``."""
    return _endpoint_form("ExperienceBuffer", "Learner", "delivery", input, output)


def trace(hook: Hook, *arguments: PyTree) -> PyTree:
    """Return the shapes ``hook`` gives for ``arguments`` (shapes or arrays); ``HookError`` if it raises or captures arrays.

    What a hook closes over is frozen into the program when it is traced, so more than 64 KB of it is refused by name. A
    ``late`` hook is not traced yet: it is taken to return what it is given.
    """
    if hook.late:
        return arguments[0]
    try:
        jaxpr, shapes = jax.make_jaxpr(hook.function, return_shape=True)(*jax.tree.map(_unplaced, arguments))
    except ConduitError:
        raise
    except Exception as error:
        raise HookError(f"Hook {hook.name!r} raised while it was traced: {type(error).__name__}: {error}") from error
    captured = _captured_bytes(jaxpr)
    if captured > CAPTURE_LIMIT_BYTES:
        refuse(
            HookError,
            f"Hook {hook.name!r} closes over arrays; they would be frozen at their present value.",
            got=f"{captured:,} bytes captured ({', '.join(_captured_names(hook)) or 'unnamed'})",
            want=f"at most {CAPTURE_LIMIT_BYTES:,} bytes",
            fix="pass changing arrays as context= at each call",
        )
    return shapes


def _unplaced(leaf: Any) -> Any:
    """Return the shape of an array on devices: a hook is traced apart from where its arguments are."""
    return (
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type) if isinstance(leaf, jax.Array) else leaf
    )


def _captured_bytes(program: Any) -> int:
    """Return the bytes of constants in a program, those of jitted functions inside it included."""
    own = sum(getattr(constant, "nbytes", 0) for constant in program.consts)
    inner = [
        value for equation in program.eqns for value in jax.tree.leaves(equation.params) if hasattr(value, "consts")
    ]
    return own + sum(_captured_bytes(value) for value in inner)


def _captured_names(hook: Hook) -> list[str]:
    function = inspect.getclosurevars(hook.function).nonlocals.get("function", hook.function)
    function = inspect.unwrap(function)
    owner = getattr(function, "__self__", function)  # of a bound method, or a callable object
    seen = dict(getattr(owner, "__dict__", {}))
    if inspect.isfunction(function) or inspect.ismethod(function):
        variables = inspect.getclosurevars(function)
        seen |= {**variables.globals, **variables.nonlocals}
    return [name for name, value in seen.items() if any(hasattr(leaf, "nbytes") for leaf in jax.tree.leaves(value))]


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def positional(function: Callable[..., Any]) -> int:
    """Return how many positional parameters ``function`` has without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return refuse(
            HookError,
            f"Hook {_name(function)!r} has no readable signature.",
            fix="wrap it in a def with named parameters",
        )
    free = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in free and parameter.default is inspect.Parameter.empty for parameter in parameters)
