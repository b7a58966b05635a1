"""The exceptions a caller may catch, and the one sentence shape all messages share.

Every message says *what* happened, what was *got*, what was *wanted* and how to *fix* it, in that order, so that a
reader who has seen one has seen them all (``explain`` builds it). Structural faults are raised before anything has
changed: after an error the state is as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import NoReturn


class ConduitError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(ConduitError, ValueError):
    """A configuration value, or a combination of them, that can never work; raised when it is set."""


class SpecError(ConduitError, TypeError):
    """Experience whose tree, shape or dtype is not the one the buffer was built for; names the leaf by path."""


class HookError(ConduitError):
    """A registered ingestion, delivery or finalize function that cannot be used as it is."""


class PlacementError(ConduitError):
    """Storage that does not fit, or cannot live, where it was told to."""


class NotReadyError(ConduitError):
    """Too little experience to deliver a batch now, or a rate limiter forbids it, and nobody is about to add any."""


class LifecycleError(ConduitError, RuntimeError):
    """A call that the plane's life (open, built, closed) does not allow at this point."""


class BackpressureError(ConduitError, TimeoutError):
    """A bounded queue stayed full, a rate limiter shut, a turn or a hook's result did not come, for longer than its deadline."""


class CheckpointError(ConduitError):
    """A checkpoint that is missing or damaged, or state that cannot be saved."""


class ValueRefusedError(ConduitError, ValueError):
    """Values (priorities, say) that were refused whole: nothing of the call was applied."""


def explain(what: str, *, got: object = None, want: object = None, fix: str | None = None) -> str:
    """Return the package's one message shape: ``what`` then ``got``, ``want`` and ``fix`` where given."""
    lines = [what]
    lines += [f"  got:  {got}"] if got is not None else []
    lines += [f"  want: {want}"] if want is not None else []
    lines += [f"  fix:  {fix}"] if fix is not None else []
    return "\n".join(lines)


def refuse(
    kind: type[ConduitError], what: str, *, got: object = None, want: object = None, fix: str | None = None
) -> NoReturn:
    """Raise ``kind`` with a message of the package's one shape."""
    raise kind(explain(what, got=got, want=want, fix=fix))


def check_at_least(name: str, value: float, bound: float, *, fix: str | None = None) -> None:
    """Raise ``ConfigError`` unless ``value`` is a number of at least ``bound`` (NaN is refused too)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= bound:
        refuse(ConfigError, f"{name} is out of range.", got=repr(value), want=f"a number >= {bound}", fix=fix)


def check_integer(name: str, value: object, bound: int, *, fix: str | None = None) -> None:
    """Raise ``ConfigError`` unless ``value`` is an ``int`` of at least ``bound``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < bound:
        refuse(ConfigError, f"{name} is out of range.", got=repr(value), want=f"an integer >= {bound}", fix=fix)


def check_fraction(name: str, value: float) -> None:
    """Raise ``ConfigError`` unless ``value`` lies in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        refuse(ConfigError, f"{name} is out of range.", got=repr(value), want="a number in [0, 1]")


def check_function(name: str, value: object, what: str) -> None:
    """Raise ``ConfigError`` unless ``value`` can be called; ``what`` says what it is given and returns."""
    if not callable(value):
        refuse(ConfigError, f"{name} is no function.", got=repr(value), want=f"a function {what}")


def refuse_forked(call: str) -> NoReturn:
    """Raise ``LifecycleError`` for a ``call`` in a child that was forked after its object was made."""
    refuse(
        LifecycleError,
        f"{call} was called in a forked child.",
        got="a process forked after the plane was made: JAX does not survive a fork",
        fix="start workers with multiprocessing.get_context('spawn') and push from the parent",
    )


def check_choice(name: str, value: object, choices: Iterable[str], *, kind: type[ConduitError] = ConfigError) -> None:
    """Raise ``kind`` with the nearest legal word unless ``value`` is one of ``choices``."""
    names = sorted(choices)
    if value in names:
        return
    near = get_close_matches(str(value), names, n=1)
    refuse(
        kind,
        f"Unknown {name}.",
        got=repr(value),
        want=", ".join(names),
        fix=f"did you mean {near[0]!r}?" if near else None,
    )


def nearest_multiples(value: int, divisor: int) -> str:
    """Return the legal numbers around ``value`` that ``divisor`` divides, as words: ``"96 or 104"``."""
    below, above = value // divisor * divisor, -(-value // divisor) * divisor
    return f"{below} or {above}" if below and below != above else f"{above}"
