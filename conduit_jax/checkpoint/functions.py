"""Functions as settings: their name, and a fingerprint of what they do, so that one changed between two runs is told apart.

A fingerprint is of bytecode, constants, defaults and what is closed over, and of the functions and plain constants of the same
module that it uses by name; not of comments, docstrings or line numbers. What another module does is not looked at, nor is
what an object of another module holds.
Bytecode differs between versions of Python: fingerprints of two are not compared.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Data = dict[str, Any]


def function_as_data(function: Callable[..., Any]) -> Data:
    """Return the name of a function or of a callable's type, and its fingerprint."""
    named = function if hasattr(function, "__qualname__") else type(function)
    name = f"{getattr(named, '__module__', '')}.{named.__qualname__}"
    told = _Teller(getattr(_plain(function), "__module__", None)).told(function)
    code = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
    return {"": "function", "name": name, "python": sys.implementation.cache_tag, "code": code}


def are_functions(saved: Any, here: Any) -> bool:
    """Return whether both are what ``function_as_data`` returned."""
    return all(isinstance(one, dict) and one.get("") == "function" for one in (saved, here))


def comparable(saved: Data, here: Data) -> bool:
    """Return whether the fingerprints of two functions of one name mean the same."""
    return saved.get("name") != here.get("name") or saved.get("python") == here.get("python")


def _plain(function: Any) -> Any:
    """Return the Python function that a method, a jitted or another wrapped function goes by."""
    while True:
        inner = getattr(function, "__func__", None) or getattr(function, "__wrapped__", None)
        if inner is None:
            return function
        function = inner


class _Teller:
    """Tells a value as text that is the same in every process; of functions of ``module`` what they do."""

    def __init__(self, module: str | None):
        self._module = module
        self._told: dict[int, tuple[int, Any]] = {}  # objects told already, numbered and kept: they may know each other

    def told(self, value: Any) -> Any:
        if isinstance(value, bool | int | float | complex | str | bytes) or value is None or value is Ellipsis:
            return repr(value)
        if isinstance(value, types.ModuleType):
            return value.__name__
        if isinstance(value, types.CodeType):
            return self._code(value, None)
        if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            return value.dtype.name, self.told(jax.random.key_data(value))
        if isinstance(value, np.generic | np.ndarray) or hasattr(value, "__array__"):
            array = np.asarray(value)
            if array.dtype.hasobject:  # whose bytes say where the objects are
                return array.dtype.name, array.shape, self.told(array.ravel().tolist())
            return array.dtype.name, array.shape, hashlib.sha256(array.tobytes()).hexdigest()
        if id(value) in self._told:
            return f"number {self._told[id(value)][0]}"
        self._told[id(value)] = len(self._told), value
        return self._several(value)

    def _several(self, value: Any) -> Any:
        if isinstance(value, dict):
            return [(self.told(key), self.told(item)) for key, item in value.items()]
        if isinstance(value, set | frozenset):
            return sorted(str(self.told(item)) for item in value)
        if isinstance(value, tuple | list):
            return [type(value).__name__, *map(self.told, value)]
        if isinstance(value, functools.partial):
            return ["partial", *map(self.told, (value.func, value.args, value.keywords))]
        plain = _plain(value)
        if isinstance(plain, types.FunctionType):
            own = self.told(value.__self__) if isinstance(value, types.MethodType) else None
            return own, self._function(plain)
        own = dataclasses.is_dataclass(value) or type(value).__module__ == self._module
        if isinstance(value, type) or not own or not hasattr(value, "__dict__"):
            return f"{type(value).__name__} {getattr(value, '__qualname__', type(value).__qualname__)}"
        call = inspect.getattr_static(type(value), "__call__", None)
        does = self._function(call) if isinstance(call, types.FunctionType) else None
        return type(value).__qualname__, self.told(vars(value)), does

    def _function(self, function: types.FunctionType) -> Any:
        if function.__module__ != self._module:
            return function.__module__, function.__qualname__
        closed = [_content(cell) for cell in function.__closure__ or ()]
        outside = {
            name: function.__globals__[name]
            for name in sorted(_names(function.__code__))
            if name in function.__globals__ and _is_told(function.__globals__[name])
        }
        parts = (function.__defaults__, function.__kwdefaults__, closed, outside)
        return self._code(function.__code__, function.__doc__), *map(self.told, parts)

    def _code(self, code: types.CodeType, doc: str | None) -> Any:
        constants = [None if doc is not None and one == doc else one for one in code.co_consts]
        return code.co_code.hex(), code.co_names, [self.told(one) for one in constants]


def _names(code: types.CodeType) -> set[str]:
    """Return the names that a function looks up, and those inside it."""
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return {*code.co_names}.union(*map(_names, inner))


def _is_told(value: Any) -> bool:
    """Whether a global is a part of what a function does: a function, or a constant that is written out."""
    return isinstance(_plain(value), types.FunctionType) or isinstance(value, bool | int | float | str | tuple)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


__all__ = ["are_functions", "comparable", "function_as_data"]
