"""The tables of a plane: which there are, which of them are built, and putting another one in the place of one."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping

import jax

from conduit_jax.build import IterationTable, ReplayTable
from conduit_jax.config import DEFAULT_TABLE, ReplayConfig
from conduit_jax.errors import ConfigError, LifecycleError, check_choice, refuse
from conduit_jax.relief import relieve_table
from conduit_jax.relocation import Stranded
from conduit_jax.sharding.migration import Put
from conduit_jax.sharding.pressure import MemoryPressure

_all: weakref.WeakValueDictionary[int, Tables] = weakref.WeakValueDictionary()


class Tables(dict[str, ReplayTable | IterationTable]):
    """The built ones by name; ``configs`` are those of all. Whoever builds or changes one holds ``lock``.

    In a child that is forked there are none: those of its parent are kept for nobody.
    """

    def __init__(self, configs: Mapping[str, ReplayConfig]):
        super().__init__()
        self.lock = threading.Lock()
        self._configs = configs
        self._of_parent: dict[str, ReplayTable | IterationTable] = {}
        _all[id(self)] = self

    def known(self, name: str) -> str:
        """Return ``name``; ``ConfigError`` where there is no such table."""
        if name == DEFAULT_TABLE and name not in self._configs:
            fix, want = f"say which: table={next(iter(self._configs))!r}", ", ".join(self._configs)
            refuse(ConfigError, "The plane has no default table.", got="no table=", want=want, fix=fix)
        check_choice("table", name, self._configs)
        return name

    def built(self, name: str, call: str) -> ReplayTable | IterationTable:
        """Return a table for ``call``; ``LifecycleError`` where it is not built."""
        built = self.get(name)
        if built is None:
            self.known(name)
            refuse(
                LifecycleError,
                f"{call} needs a built table.",
                got=f"table {name!r} without any push",
                fix="push a rollout first, or plane.build(...)",
            )
        return built

    def replayed(self, name: str, call: str) -> ReplayTable:
        """Return a table for ``call``, as ``built`` does; ``LifecycleError`` where it is an on-policy one, too."""
        built = self.get(name)
        if isinstance(built, ReplayTable):
            return built
        self.built(name, call)
        fix = "for sample in plane.epochs(): ..."
        return refuse(LifecycleError, f"{call} is for replayed experience.", got="OnPolicy", fix=fix)

    def leave_to_parent(self) -> None:
        """Hold no table any more, but let none go: their arrays are the parent's, and so are the locks that letting go would take."""
        self._of_parent = dict(self)
        self.clear()

    def become(self, tables: Mapping[str, ReplayTable | IterationTable]) -> None:
        """Hold ``tables`` and no others; whoever asks for one of both meanwhile finds it."""
        self.update(tables)
        for name in set(self) - set(tables):
            del self[name]

    def change(self, name: str, change: Callable[[], ReplayTable]) -> None:
        """Put what ``change`` returns in the place of a table; where it could neither go on nor back, the table as it is then."""
        try:
            self[name] = change()
        except Stranded as error:
            self[name] = error.table
            raise

    def relieve(self, name: str, before: ReplayTable, pressure: MemoryPressure, put: Put = jax.device_put) -> None:
        """Move a table away from memory that is too full for it, unless another thread has since ``before``."""
        with self.lock:
            if self.get(name) is before:
                self[name] = relieve_table(before, pressure, put)


def _leave_all_to_parent() -> None:
    for tables in list(_all.values()):
        tables.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


__all__ = ["Tables"]
