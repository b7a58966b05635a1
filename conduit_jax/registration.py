"""What a plane is told before it is built: its hooks, by decorator or by call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from conduit_jax.config import Algorithm, OnPolicy, ReplayConfig
from conduit_jax.errors import HookError, refuse
from conduit_jax.hooks import Stage
from conduit_jax.registry import HookRegistry, decorator
from conduit_jax.schedule.host import check_batched

PyTree = Any


class Registration(ABC):
    """The hooks of one plane's tables; a plane says until when they may be registered."""

    def __init__(self, algorithm: Algorithm, replay: Mapping[str, ReplayConfig]):
        self.algorithm, self.replay = algorithm, dict(replay)
        self._hooks = HookRegistry(self.replay)

    def register_ingestion(
        self,
        function: Callable[..., Any] | None = None,
        *,
        init_carry: Callable[[PyTree], PyTree] | None = None,
        table: str | None = None,
        stage: str | None = None,
        needs: tuple[str, ...] = (),
        gives: tuple[str, ...] = (),
        host: bool = False,
        batched: bool = False,
    ) -> Any:
        """Register ``ingestion(rollout[, context]) -> records``.

        With ``init_carry(rollout) -> carry`` the form is ``(carry, rollout[, context]) -> (carry, records)``.

        The hook is pure and traced once; it sees one rollout unit (one partition's lanes). With ``stage`` it is one of
        several functions over named columns: it takes the columns it ``needs`` by keyword and returns a dict of those it
        ``gives``. A function that cannot be traced is registered with ``host=True``: it is given numpy arrays and runs
        beside the plane; independent stages on the host run side by side. ``batched=True`` lets a traced hook see all units
        of a call at once, with a leading axis, at the price of results that may round differently by granularity.
        Usable as a decorator, with or without arguments. ``LifecycleError`` once the plane is built.
        """

        def take(hook: Callable[..., Any]) -> None:
            self._must_be_open("register_ingestion")
            if (stage is None and (needs or gives)) or (stage is not None and init_carry is not None):
                got = "needs= or gives= without stage=" if stage is None else "stage= with init_carry="
                want = "stage=, needs= and gives= together, or init_carry= for one whole function"
                refuse(HookError, "A hook is one function or a stage of several, not both.", got=got, want=want)
            if stage is None:
                check_batched(host, batched, init_carry)
                self._hooks.ingestion(hook, table, init_carry, host=host, batched=batched)
            else:
                self._hooks.stage(Stage(stage, hook, needs, gives, host), table)

        return decorator(function, take)

    def register_delivery(
        self, function: Callable[..., Any] | None = None, *, table: str | None = None, host: bool = False
    ) -> Any:
        """Register ``delivery(data[, key[, context]]) -> data``: what is sampled becomes what the learner takes.

        With ``host=True`` it is a function of numpy ``data`` that cannot be traced, run on a worker when its batch is drawn.
        Checked when the plane is built or, where it takes a context, when it is first used.
        """

        def take(hook: Callable[..., Any]) -> None:
            self._must_be_open("register_delivery")
            self._hooks.delivery(hook, table, host=host)

        return decorator(function, take)

    def register_finalize(self, function: Callable[..., Any] | None = None, *, table: str | None = None) -> Any:
        """Register ``finalize(records[, context]) -> records`` over an iteration's records ``(units * T, lanes, ...)``."""

        def take(hook: Callable[..., Any]) -> None:
            self._must_be_open("register_finalize")
            if not isinstance(self.algorithm, OnPolicy):
                got = type(self.algorithm).__name__
                refuse(HookError, "Only on-policy iterations are finalized.", got=got, want="OnPolicy")
            self._hooks.finalize(hook, table)

        return decorator(function, take)

    @abstractmethod
    def _must_be_open(self, call: str) -> None:
        """Raise ``LifecycleError`` where ``call`` came too late."""
