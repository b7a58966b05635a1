"""How many operations the experience path takes, before and after, by one rule for both (Fig. 2 of the paper).

An operation is a function of RLlib's or conduit's source, entered on the driver's main thread within the path of one update,
that is given experience or returns it: arrays, tensors, episodes, their buffers, or a list, dict or tuple with one in it. Each
function counts once, however often it is called (``calls`` says how often). It is a transfer where its name is in ``TRANSFERS``:
it moves, copies, slices, stacks or converts and computes nothing new; else it is processing. A program compiled by JAX is
one operation, of processing, whatever is fused in it. What env runners do, and what goes on between processes, is in neither count.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SOURCES = ("ray/rllib/", "conduit_jax/")
_EXPERIENCE = ("Episode", "InfiniteLookbackBuffer", "SampleBatch", "MultiAgentBatch", "ReadyBatch", "Chunk", "Writes")
_ARRAYS = ("ndarray", "Tensor", "ArrayImpl")
_PROGRAMS = {
    "conduit_jax.adapters.rllib.programs": ("advance", "insert"),
    "conduit_jax.adapters.rllib.rollouts": ("advantages", "_gather", "_gather_columns"),
}
TRANSFERS = frozenset(
    (
        # RLlib
        *("add_batch_item", "add_n_batch_items", "batch", "concat_episode", "concat_samples", "convert_to_numpy"),
        *("convert_to_torch_tensor", "convert_to_tensor", "copy", "cut", "extend", "append", "pop", "get", "get_state"),
        *(
            "get_observations",
            "get_actions",
            "get_rewards",
            "get_extra_model_outputs",
            "get_infos",
            "slice",
            "to_numpy",
        ),
        *("_getattr_by_index", "_get_slice", "_get_all_indices", "_get_data", "foreach_batch_item_change_in_place"),
        *("_make_batch_if_necessary", "shuffle", "rows", "__getitem__", "__setitem__", "__init__", "as_multi_agent"),
        *("_slice", "_batch_slice", "_concat_values", "concat", "mapping", "to_device", "_convert_batch_type"),
        *("split_and_zero_pad", "unpad_data_if_necessary", "from_numpy", "batch_without_time", "_get_item", "validate"),
        # conduit
        *("read", "_column", "_record", "take", "_fresh", "_start", "leaf_to_torch", "_deliver", "_map", "_moved"),
        *(
            "deliver",
            "deliver_columns",
            "_parted",
            "unflatten",
            "tensors",
            "_numpy_to_torch",
            "_tensor",
            "ordered",
            "_filled",
            "_leaves",
        ),
    )
)


def _holds(value: Any, deep: bool = True) -> bool:
    name = type(value).__name__
    if name in _ARRAYS or name.endswith(_EXPERIENCE):
        return True
    if deep and isinstance(value, dict):
        return any(_holds(part, False) for part in list(value.values())[:8])
    return deep and isinstance(value, list | tuple) and any(_holds(part, False) for part in value[:8])


class Operations:
    """What was entered while ``watching``, on this thread. Slow: never in a block that is timed."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self._known: dict[Any, tuple[str, str] | None] = {}
        self._watched = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count within the block; blocks may be nested."""
        self._watched += 1
        whole = self._programs() if self._watched == 1 else {}
        for (module, name), program in whole.items():
            setattr(module, name, self._counted(module, name, program))
        sys.setprofile(self._see)
        try:
            yield
        finally:
            self._watched -= 1
            if not self._watched:
                sys.setprofile(None)
            for (module, name), program in whole.items():
                setattr(module, name, program)

    def _programs(self) -> dict[tuple[Any, str], Any]:
        """Return conduit's compiled functions: C++ calls them, and the profiler does not see it."""
        found = {}
        for home, names in _PROGRAMS.items():
            module = sys.modules.get(home)
            found |= {(module, name): getattr(module, name) for name in names if module is not None}
        return found

    def _counted(self, module: Any, name: str, program: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[module.__name__, f"{name} (compiled)"] += 1
            return program(*args, **kwargs)

        return counted

    def _see(self, frame: FrameType, event: str, value: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if code not in self._known:
            found = next((source for source in _SOURCES if source in code.co_filename), None)
            plain = not code.co_name.startswith("<")
            self._known[code] = (code.co_filename.partition(found)[2], code.co_qualname) if found and plain else None
        name = self._known[code]
        if name is None:
            return
        if event == "call":
            given = list(frame.f_locals.values())
            if any(_holds(part) for part in given):
                self.calls[name] += 1
        elif name not in self.calls and _holds(value):
            self.calls[name] += 1

    def figures(self, updates: int) -> dict[str, Any]:
        """Return the operations of ``updates`` updates: transfers, processing, both, calls an update, and their names."""
        names = [f"{path}:{name}" for path, name in self.calls]
        moving = [name for name in names if name.rsplit(".", 1)[-1].rsplit(":", 1)[-1] in TRANSFERS]
        return {
            "operations": len(names),
            "transfer": len(moving),
            "processing": len(names) - len(moving),
            "calls_an_update": sum(self.calls.values()) / updates,
            "names": sorted(names),
        }


__all__ = ["TRANSFERS", "Operations"]
