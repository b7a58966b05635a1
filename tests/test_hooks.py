"""Hooks of every accepted form come to one form; what cannot work is refused when it is registered or traced, by name."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conduit_jax as conduit
from conduit_jax import hooks
from conduit_jax.errors import ConfigError, HookError, SpecError
from conduit_jax.hooks import (
    CAPTURE_LIMIT_BYTES,
    Hook,
    Stage,
    compose_stages,
    delivery_hook,
    finalize_hook,
    ingestion_hook,
    trace,
)
from conduit_jax.types import Records

UNIT = jax.ShapeDtypeStruct((3, 2), jnp.float32)


def start_carry(rollout: Any) -> Any:
    return jnp.zeros(())


def refused(make: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(HookError) as caught:
        make(*arguments, **named)
    return str(caught.value)


# Forms.


@pytest.mark.parametrize(
    ("function", "init_carry", "expected"),
    [
        (lambda rollout: ("items", rollout), None, ("carry", Records(("items", "rollout")))),
        (lambda rollout, context: (rollout, context), None, ("carry", Records(("rollout", "context")))),
        (lambda rollout: Records(rollout, lengths=3), None, ("carry", Records("rollout", 3))),
        (lambda carry, rollout: ("new " + carry, rollout), start_carry, ("new carry", Records("rollout"))),
        (
            lambda carry, rollout, context: (carry, (rollout, context)),
            start_carry,
            ("carry", Records(("rollout", "context"))),
        ),
        (lambda rollout, scale=2: (rollout, scale), None, ("carry", Records(("rollout", 2)))),
    ],
)
def test_an_ingestion_hook_sees_what_its_parameters_ask_for(function: Any, init_carry: Any, expected: Any) -> None:
    assert ingestion_hook(function, init_carry).function("carry", "rollout", "context") == expected


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_delivery_hook_sees_what_its_parameters_ask_for(count: int) -> None:
    forms = {
        1: lambda data: (data,),
        2: lambda data, key: (data, key),
        3: lambda data, key, context: (data, key, context),
    }
    assert delivery_hook(forms[count]).function("data", "key", "context") == ("data", "key", "context")[:count]


@pytest.mark.parametrize("count", [1, 2])
def test_a_finalize_hook_sees_what_its_parameters_ask_for(count: int) -> None:
    forms = {1: lambda records: (records,), 2: lambda records, context: (records, context)}
    assert finalize_hook(forms[count]).function("records", "context") == ("records", "context")[:count]


def no_parameter() -> None: ...
def three(a: Any, b: Any, c: Any) -> None: ...
def four(a: Any, b: Any, c: Any, d: Any) -> None: ...
def one(a: Any) -> None: ...


@pytest.mark.parametrize(
    ("make", "function", "got"),
    [
        (ingestion_hook, no_parameter, 0),
        (ingestion_hook, three, 3),
        (lambda function: ingestion_hook(function, start_carry), one, 1),
        (lambda function: ingestion_hook(function, start_carry), four, 4),
        (delivery_hook, no_parameter, 0),
        (delivery_hook, four, 4),
        (finalize_hook, no_parameter, 0),
        (finalize_hook, three, 3),
    ],
)
def test_another_number_of_parameters_is_refused_by_name_got_and_want(make: Any, function: Any, got: int) -> None:
    text = refused(make, function)
    assert function.__name__ in text
    assert f"got:  {got}" in text
    assert "want: (" in text


def test_a_carry_without_its_start_is_told_how_to_give_it() -> None:
    assert "init_carry=" in refused(ingestion_hook, three)


def test_without_a_carry_the_carry_is_empty() -> None:
    assert ingestion_hook(lambda rollout: rollout).init_carry(UNIT) == ()
    assert ingestion_hook(lambda carry, rollout: (carry, rollout), start_carry).init_carry is start_carry


def test_a_callable_object_and_a_partial_are_hooks_too() -> None:
    class Scale:
        def __call__(self, data: Any) -> Any:
            return 2 * data

    assert trace(delivery_hook(Scale()), UNIT, None, None).shape == (3, 2)
    assert trace(delivery_hook(functools.partial(lambda factor, data: factor * data, 2.0)), UNIT, None, None).shape == (
        3,
        2,
    )


# Tracing.

LARGE = np.zeros(CAPTURE_LIMIT_BYTES // 4 + 1, np.float32)
LARGE_ON_DEVICE = LARGE.copy()


def captures(value: Any, kind: str) -> Any:
    """A delivery hook that reads a captured array inside ``kind`` of program."""

    def add(data: Any) -> Any:
        return data + jnp.sum(value)

    forms = {
        "plain": add,
        "jit": jax.jit(add),
        "cond": lambda data: jax.lax.cond(data[0, 0] > 0, add, lambda data: data, data),
        "scan": lambda data: jax.lax.scan(lambda carry, _: (add(carry), None), data, None, length=2)[0],
        "checkpoint": jax.checkpoint(add),
        "vmap": jax.vmap(add),
    }
    return lambda data: forms[kind](data)


@pytest.mark.parametrize("kind", ["plain", "jit", "cond", "scan", "checkpoint", "vmap"])
@pytest.mark.parametrize("on_device", [True, False])
def test_a_hook_that_captures_more_than_64_kilobytes_is_refused(kind: str, on_device: bool) -> None:
    value = jnp.asarray(LARGE) if on_device else LARGE
    text = refused(trace, delivery_hook(captures(value, kind)), UNIT, None, None)
    assert "captures" in text  # the hook's name
    assert f"{LARGE.nbytes:,} bytes" in text
    assert "context=" in text


def test_the_captured_array_is_named() -> None:
    table = jnp.asarray(LARGE)

    def lookup(data: Any) -> Any:
        return data + table[0] + jnp.sum(LARGE)

    text = refused(trace, delivery_hook(lookup), UNIT, None, None)
    assert "lookup" in text
    assert "table" in text
    assert "LARGE" in text
    assert "LARGE_ON_DEVICE" not in text
    carried = refused(trace, ingestion_hook(lambda rollout: rollout + jnp.sum(table)), (), UNIT, None)
    assert "table" in carried


class Lookup:
    def __init__(self) -> None:
        self.table = jnp.asarray(LARGE)

    def __call__(self, data: Any) -> Any:
        return data + jnp.sum(self.table)

    def method(self, data: Any) -> Any:
        return self(data)


def add_sum(table: Any, data: Any) -> Any:
    return data + jnp.sum(table)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (Lookup, "table"),
        (lambda: Lookup().method, "table"),
        (lambda: functools.partial(add_sum, jnp.asarray(LARGE)), "unnamed"),
    ],
)
def test_objects_methods_and_partials_that_capture_are_refused_like_functions(make: Any, named: str) -> None:
    text = refused(trace, delivery_hook(make()), UNIT, None, None)
    assert "closes over arrays" in text
    assert f"({named})" in text


@pytest.mark.parametrize("kind", ["plain", "jit", "scan"])
def test_small_captures_are_fine_up_to_the_limit(kind: str) -> None:
    exactly = jnp.zeros(CAPTURE_LIMIT_BYTES // 4, jnp.float32)
    assert trace(delivery_hook(captures(exactly, kind)), UNIT, None, None).shape == (3, 2)


def test_what_comes_as_context_is_not_captured() -> None:
    def uses_context(data: Any, key: Any, context: Any) -> Any:
        return data + jnp.sum(context)

    assert trace(delivery_hook(uses_context), UNIT, None, jnp.asarray(LARGE)).shape == (3, 2)


def test_an_error_inside_a_hook_names_the_hook_and_keeps_its_cause() -> None:
    def divides(data: Any) -> Any:
        return data / {}["missing"]

    with pytest.raises(HookError, match=r"divides.*KeyError: 'missing'") as caught:
        trace(delivery_hook(divides), UNIT, None, None)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_hook_that_branches_on_values_is_refused_as_untraceable() -> None:
    def branches(data: Any) -> Any:
        return data if data[0, 0] > 0 else -data

    assert "branches" in refused(trace, delivery_hook(branches), UNIT, None, None)


@pytest.mark.parametrize("kind", [ConfigError, SpecError])
def test_an_error_of_ours_inside_a_hook_comes_through_as_it_is(kind: type[Exception]) -> None:
    def raises(data: Any) -> Any:
        raise kind("ours")

    with pytest.raises(kind) as caught:
        trace(delivery_hook(raises), UNIT, None, None)
    assert str(caught.value) == "ours"


# Stages.


def stage(name: str, needs: tuple[str, ...], gives: tuple[str, ...], log: list[str]) -> Stage:
    def function(**columns: Any) -> dict[str, Any]:
        assert set(columns) == set(needs)
        log.append(name)
        return {column: "".join(sorted(columns.values())) + column for column in gives}

    return Stage(name, function, needs, gives)


def test_stages_run_in_the_order_of_their_needs_however_they_are_listed() -> None:
    outcomes = set()
    for order in itertools.permutations(range(4)):
        log: list[str] = []
        stages = [
            stage("first", ("x",), ("a",), log),
            stage("second", ("a",), ("b", "c"), log),
            stage("third", ("a", "c"), ("d",), log),
            stage("apart", (), ("e",), log),
        ]
        columns = compose_stages([stages[index] for index in order])({"x": "x"})
        assert sorted(log) == ["apart", "first", "second", "third"]
        assert log.index("first") < log.index("second") < log.index("third")
        outcomes.add(tuple(sorted(columns.items())))
    assert outcomes == {(("a", "xa"), ("b", "xab"), ("c", "xac"), ("d", "xaxacd"), ("e", "e"), ("x", "x"))}


def test_the_callers_columns_are_left_alone() -> None:
    columns = {"x": "x"}
    compose_stages([stage("first", ("x",), ("a",), [])])(columns)
    assert columns == {"x": "x"}


def test_stages_in_a_circle_are_refused_by_their_names() -> None:
    text = refused(
        compose_stages,
        [stage("free", (), ("z",), []), stage("hen", ("b",), ("a",), []), stage("egg", ("a",), ("b",), [])],
    )
    assert "got:  hen, egg" in text


def test_two_givers_of_one_column_are_refused_by_name() -> None:
    text = refused(compose_stages, [stage("one", (), ("a",), []), stage("two", (), ("a",), [])])
    assert "'a'" in text
    assert "'one' and 'two'" in text


def test_two_stages_of_one_name_are_refused_and_none_is_lost() -> None:
    assert "'same'" in refused(compose_stages, [stage("same", (), ("a",), []), stage("same", ("a",), ("b",), [])])


def test_a_column_nobody_gives_is_named_with_the_stage_that_needs_it() -> None:
    text = refused(compose_stages([stage("late", ("lost",), ("a",), [])]), {"x": "x"})
    assert "'late'" in text
    assert "want: ['lost']" in text


def test_a_stage_that_gives_other_columns_than_it_declared_is_refused() -> None:
    text = refused(compose_stages([Stage("liar", lambda: {"b": 1}, (), ("a",))]), {})
    assert "'liar'" in text
    assert "got:  ['b']" in text
    assert "want: ['a']" in text


# The paper's form (Fig. 8).


def test_the_papers_form_is_a_hook_of_one_unit() -> None:
    @conduit.register_ingestion(input="Actor", output="ExperienceBuffer")
    def store(actor_in: Any, exp_out: Any) -> None:
        exp_out.write(actor_in.read() + 1)

    @conduit.register_delivery(input="ExperienceBuffer", output="Learner")
    def deliver(exp_in: Any, learner_out: Any) -> None:
        learner_out.write(exp_in.read() * 2)

    assert ingestion_hook(store).function("carry", 1, None) == ("carry", Records(2))
    assert delivery_hook(deliver).function(3, None, None) == 6
    assert "store" in ingestion_hook(store).name
    assert trace(delivery_hook(deliver), UNIT, None, None).shape == (3, 2)


@pytest.mark.parametrize("writes", [0, 2])
def test_the_papers_form_writes_exactly_once(writes: int) -> None:
    @hooks.register_ingestion()
    def store(actor_in: Any, exp_out: Any) -> None:
        for _ in range(writes):
            exp_out.write(actor_in.read())

    text = refused(trace, ingestion_hook(store), (), UNIT, None)
    assert "store" in text
    assert f"got:  {writes} writes" in text


@pytest.mark.parametrize(
    ("register", "ends", "words"),
    [
        (hooks.register_ingestion, {"input": "Aktor"}, "did you mean 'Actor'"),
        (hooks.register_delivery, {"output": "Lerner"}, "did you mean 'Learner'"),
        (hooks.register_ingestion, {"input": "Learner"}, "from Actor to ExperienceBuffer"),
        (
            hooks.register_delivery,
            {"input": "Learner", "output": "ExperienceBuffer"},
            "from ExperienceBuffer to Learner",
        ),
    ],
)
def test_endpoints_that_do_not_exist_or_run_backwards_are_refused(
    register: Any, ends: dict[str, str], words: str
) -> None:
    assert words in refused(register, **ends)


def test_the_papers_form_that_captures_is_refused_by_the_arrays_name() -> None:
    table = jnp.asarray(LARGE)

    @hooks.register_delivery()
    def deliver(exp_in: Any, learner_out: Any) -> None:
        learner_out.write(exp_in.read() + jnp.sum(table))

    text = refused(trace, delivery_hook(deliver), UNIT, None, None)
    assert "deliver" in text
    assert "(table)" in text


def test_a_hook_is_a_value_with_the_name_of_its_function() -> None:
    hook = delivery_hook(one)
    assert isinstance(hook, Hook)
    assert hook.name == "one"
