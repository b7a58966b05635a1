"""The hooks registered with a plane, by table, until it is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from conduit_jax.errors import HookError, check_choice, refuse
from conduit_jax.hooks import (
    Hook,
    Stage,
    batched_hook,
    compose_stages,
    delivered_as_is,
    delivery_hook,
    finalize_hook,
    ingestion_hook,
    positional,
    stored_as_is,
    trace,
)

Function = Callable[..., Any]


class Hooks(NamedTuple):
    """The functions of one table in their one form."""

    ingestion: Hook
    delivery: Hook
    finalize: Hook


class HookRegistry:
    """Collects hooks for ``tables``; one registered without a table serves every table that has none of its own."""

    def __init__(self, tables: Iterable[str]):
        self._names = tuple(tables)
        self._ingestion: dict[str | None, Hook] = {}
        self._stages: dict[str | None, list[Stage]] = {}
        self._delivery: dict[str | None, Hook] = {}
        self._finalize: dict[str | None, Hook] = {}
        self._taken: set[tuple[str, str | None]] = set()

    def ingestion(
        self,
        function: Function,
        table: str | None,
        init_carry: Callable[[Any], Any] | None,
        *,
        host: bool = False,
        batched: bool = False,
    ) -> None:
        """Take ``function`` as the whole of ingestion, on the ``host`` or ``batched``; ``HookError`` where stages were registered."""
        self._check(table)
        if self._stages.get(table):
            refuse(HookError, "Ingestion is registered in stages already.", got=function, want="another stage")
        hook = ingestion_hook(function, init_carry)._replace(host=host)
        self._ingestion[table] = self._only("ingestion", table, batched_hook(hook) if batched else hook)

    def stage(self, stage: Stage, table: str | None) -> None:
        """Take one stage of ingestion; ``HookError`` where one whole function was registered."""
        self._check(table)
        if table in self._ingestion:
            refuse(
                HookError,
                "Ingestion is already registered as one function.",
                got=f"stage {stage.name!r}",
                want="stages only",
            )
        self._stages.setdefault(table, []).append(stage)

    def delivery(self, function: Function, table: str | None, *, host: bool = False) -> None:
        """Take ``function`` as delivery; one on the ``host`` takes data alone."""
        self._check(table)
        hook = delivery_hook(function)._replace(host=host)
        if host and positional(function) != 1:
            refuse(HookError, f"Host delivery hook {hook.name!r} takes more than data.", want="(data)")
        self._delivery[table] = self._only("delivery", table, hook)

    def finalize(self, function: Function, table: str | None) -> None:
        """Take ``function`` as the end of an on-policy iteration."""
        self._check(table)
        self._finalize[table] = self._only("finalize", table, finalize_hook(function))

    def of(self, table: str) -> Hooks:
        """Return the hooks of ``table``; whatever was not registered passes through what it is given.

        Delivery and finalize hooks that take a context are checked when they are used, and so is a delivery hook behind
        such a finalize hook, as it is not known what reaches it.
        """
        whole = self._ingestion.get(table) or self._staged(table) or self._ingestion.get(None) or self._staged(None)
        delivery = self._delivery.get(table) or self._delivery.get(None) or delivery_hook(delivered_as_is)
        finalize = self._finalize.get(table) or self._finalize.get(None) or finalize_hook(stored_as_is)
        if finalize.takes_context or delivery.takes_context:
            delivery = _checked_when_used(delivery, leading_axes=1)
        if finalize.takes_context:
            finalize = _checked_when_used(finalize, leading_axes=2)
        return Hooks(whole or ingestion_hook(stored_as_is), delivery, finalize)

    def may_be_replaced(self) -> None:
        """Let each hook be registered once more: a plane could not be built with those there are."""
        self._taken.clear()

    def _only(self, endpoint: str, table: str | None, hook: Hook) -> Hook:
        """Return ``hook`` if it is the first of its endpoint and table; ``HookError`` for a second one."""
        if (endpoint, table) in self._taken:
            refuse(
                HookError,
                f"A second {endpoint} hook would replace the first one.",
                got=f"{hook.name!r} for {'every table' if table is None else f'table {table!r}'}",
                want="one hook",
                fix="call both functions in one hook, or register each with a table= of its own",
            )
        self._taken.add((endpoint, table))
        return hook

    def _staged(self, table: str | None) -> Hook | None:
        stages = self._stages.get(table)
        if not stages:
            return None
        hook = ingestion_hook(compose_stages(stages))
        host = any(stage.host for stage in stages)
        return hook._replace(host=True, stages=tuple(stages), name="of stages") if host else hook

    def _check(self, table: str | None) -> None:
        if table is not None:
            check_choice("table", table, self._names)


def _checked_when_used(hook: Hook, leading_axes: int) -> Hook:
    """Return ``hook`` to be traced and checked at its first use, with the context of that use, instead of when a plane is built.

    A delivery or finalize hook is built together with the first ``push``, whose context is not the one it will be given.
    """

    def function(*arguments: Any) -> Any:
        lead = jax.tree.leaves(arguments[0])[0].shape[:leading_axes]
        for path, leaf in jax.tree.leaves_with_path(trace(hook, *arguments)):
            if leaf.shape[:leading_axes] != lead:
                refuse(
                    HookError,
                    f"Hook {hook.name!r} returns a leaf without its leading axes: {jax.tree_util.keystr(path) or '<root>'}.",
                    got=f"shape {leaf.shape}",
                    want=f"leading axes {lead}",
                )
        return hook.function(*arguments)

    return hook._replace(function=function, late=True)


def decorator(function: Function | None, take: Callable[[Function], None]) -> Any:
    """Return ``function`` after ``take``, or the decorator that does so: a registration reads well both ways."""

    def register(hook: Function) -> Function:
        take(hook)
        return hook

    return register if function is None else register(function)
