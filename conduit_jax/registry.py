"""The hooks registered with a plane, by table, until it is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from conduit_jax.errors import HookError, check_choice, refuse
from conduit_jax.hooks import (
    Hook,
    Stage,
    compose_stages,
    delivered_as_is,
    delivery_hook,
    finalize_hook,
    ingestion_hook,
    stored_as_is,
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

    def ingestion(self, function: Function, table: str | None, init_carry: Callable[[Any], Any] | None) -> None:
        """Take ``function`` as the whole of ingestion; ``HookError`` where stages were registered."""
        self._check(table)
        if self._stages.get(table):
            refuse(HookError, "Ingestion is registered in stages already.", got=function, want="another stage")
        self._ingestion[table] = ingestion_hook(function, init_carry)

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

    def delivery(self, function: Function, table: str | None) -> None:
        """Take ``function`` as delivery."""
        self._check(table)
        self._delivery[table] = delivery_hook(function)

    def finalize(self, function: Function, table: str | None) -> None:
        """Take ``function`` as the end of an on-policy iteration."""
        self._check(table)
        self._finalize[table] = finalize_hook(function)

    def of(self, table: str) -> Hooks:
        """Return the hooks of ``table``; whatever was not registered passes through what it is given."""
        whole = self._ingestion.get(table) or self._staged(table) or self._ingestion.get(None) or self._staged(None)
        return Hooks(
            whole or ingestion_hook(stored_as_is),
            self._delivery.get(table) or self._delivery.get(None) or delivery_hook(delivered_as_is),
            self._finalize.get(table) or self._finalize.get(None) or finalize_hook(stored_as_is),
        )

    def _staged(self, table: str | None) -> Hook | None:
        stages = self._stages.get(table)
        return ingestion_hook(compose_stages(stages)) if stages else None

    def _check(self, table: str | None) -> None:
        if table is not None:
            check_choice("table", table, self._names)


def decorator(function: Function | None, take: Callable[[Function], None]) -> Any:
    """Return ``function`` after ``take``, or the decorator that does so: a registration reads well both ways."""

    def register(hook: Function) -> Function:
        take(hook)
        return hook

    return register if function is None else register(function)
