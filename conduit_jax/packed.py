"""Small structures that travel as one array: several columns of 32-bit words behind the face of a NamedTuple.

Every array that enters or leaves a compiled call costs one or two microseconds on CPU (jax 0.10.2), and every output is a
kernel of its own; the seven columns of a ``SampleInfo`` would cost more than the draw they describe. Inside ``jit`` reading a
column is a slice that fuses into its user; outside it is an operation of its own, so keep the structure whole there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType

_Class = TypeVar("_Class", bound=type)


class Packed:
    """Columns of equal shape ``lead``, stacked as ``words`` uint32 ``(*lead, columns)``: bits unchanged, one pytree leaf.

    Columns may be given and read as attributes; ``_replace``, ``_asdict`` and ``_fields`` are those of a NamedTuple, and so
    are ``len`` and ``info[i]``: the columns are counted and numbered, not the rows. Of the last ``_optional`` columns any
    may be ``None``, which takes no room. Columns of ``_counts`` are numpy outside ``jit``, and reading one waits: an
    operation on a device array would fail in another mesh's context ("Received incompatible devices for jitted
    computation", jax 0.10.2). Where another process holds a part of them they stay device arrays. Shapes
    (``jax.eval_shape``) have columns that are shapes.
    """

    __slots__ = ("_present", "words")
    _dtypes: ClassVar[dict[str, np.dtype]]
    _optional: ClassVar[tuple[str, ...]]
    _counts: ClassVar[bool]
    _fields: ClassVar[tuple[str, ...]]
    words: Any
    _present: tuple[str, ...]

    def __init__(self, *columns: Any, **named: Any):
        given = dict(zip(self._fields, columns, strict=False)) | named
        missing = [name for name in self._fields if given.get(name) is None and name not in self._optional]
        twice_or_unknown = len(given) < len(columns) + len(named) or set(given) - set(self._fields)
        if missing or twice_or_unknown:
            raise TypeError(f"{type(self).__name__} takes {', '.join(self._fields)}; got {', '.join(given)}")
        self._present = tuple(name for name in self._fields if given.get(name) is not None)
        self.words = _stack([_as_words(given[name], self._dtypes[name]) for name in self._present])

    def __getattr__(self, name: str) -> Any:
        if name not in type(self)._fields:  # also while an instance is being made
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name not in self._present:
            return None
        words, dtype = self.words, self._dtypes[name]
        if isinstance(words, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(words.shape[:-1], dtype)
        if self._counts and _is_here(words):
            words = np.asarray(words)
        column = words[..., self._present.index(name)]
        if dtype == np.bool_:
            return column != 0
        if isinstance(column, (np.ndarray, np.generic)):
            return column.view(dtype)
        return column if dtype == np.uint32 else jax.lax.bitcast_convert_type(column, dtype)

    @classmethod
    def of_words(cls, words: Any, present: tuple[str, ...]) -> Any:
        """Return the structure whose columns ``present``, in the order of ``_fields``, are those of ``words``."""
        if present != tuple(name for name in cls._fields if name in present or name not in cls._optional):
            raise ValueError(f"{cls.__name__} has columns {', '.join(cls._fields)}; got {', '.join(present)}")
        made = object.__new__(cls)
        made._present, made.words = present, words
        return made

    @property
    def present(self) -> tuple[str, ...]:
        """The names of the columns that are not ``None``."""
        return self._present

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of every column."""
        return self.words.shape[:-1]

    def _asdict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields}

    def _replace(self, **changes: Any) -> Any:
        return type(self)(**(self._asdict() | changes))

    def __iter__(self) -> Any:
        return iter(self._asdict().values())

    def __len__(self) -> int:
        return len(self._fields)

    def __getitem__(self, index: Any) -> Any:
        try:
            name = self._fields[operator.index(index)]
        except TypeError:
            raise TypeError(
                f"{type(self).__name__}[i] is its i-th column, as of a NamedTuple; got {type(index).__name__}. "
                "Rows are jax.tree.map(lambda words: words[rows], info)."
            ) from None
        return getattr(self, name)

    def __repr__(self) -> str:
        if not hasattr(self.words, "dtype"):  # what a tree map has put in its place
            return f"{type(self).__name__}({self.words!r})"
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self._asdict().items())})"


@dataclass_transform()
def packed(*, optional: tuple[str, ...] = (), counts: bool = False, **dtypes: Any) -> Callable[[_Class], _Class]:
    """Make a subclass of ``Packed`` of the columns ``dtypes``, 32 bits each, in their order, and a pytree of one leaf.

    ``counts`` are numbers for the host.
    """

    def make(cls: _Class) -> _Class:
        cls._dtypes = {name: np.dtype(dtype) for name, dtype in dtypes.items()}
        cls._fields, cls._optional, cls._counts = tuple(dtypes), optional, counts
        for name in optional:  # its default, None, would hide the column
            delattr(cls, name)

        def unflatten(present: tuple[str, ...], children: Iterable[Any]) -> Any:
            (words,) = children
            made = object.__new__(cls)
            made._present, made.words = present, words
            return made

        jax.tree_util.register_pytree_with_keys(
            cls,
            lambda own: (((jax.tree_util.GetAttrKey("words"), own.words),), own._present),
            unflatten,
            lambda own: ((own.words,), own._present),
        )
        return cls

    return make


def _is_here(words: Any) -> bool:
    """Whether ``words`` is an array whose values this process can read."""
    return isinstance(words, jax.Array) and not isinstance(words, Tracer) and words.is_fully_addressable


def _as_words(column: Any, dtype: np.dtype) -> Any:
    if isinstance(column, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(column.shape, np.uint32)
    if not isinstance(column, jax.Array):
        column = np.asarray(column, dtype)
        return column.astype(np.uint32) if dtype == np.bool_ else column.view(np.uint32)
    column = column.astype(dtype)
    if dtype == np.bool_:
        return column.astype(np.uint32)
    return column if dtype == np.uint32 else jax.lax.bitcast_convert_type(column, np.uint32)


def _stack(columns: list[Any]) -> Any:
    shape = np.broadcast_shapes(*(column.shape for column in columns))
    if any(isinstance(column, jax.ShapeDtypeStruct) for column in columns):
        return jax.ShapeDtypeStruct((*shape, len(columns)), np.uint32)
    if all(isinstance(column, np.ndarray) for column in columns):
        return np.stack(np.broadcast_arrays(*columns), axis=-1)
    return jnp.stack(_alike([jnp.broadcast_to(column, shape) for column in columns]), axis=-1)


def _alike(columns: list[jax.Array]) -> list[jax.Array]:
    """Return ``columns`` laid out alike, as explicit axes want it, or one raises a ``ShardingTypeError`` (jax 0.10.2)."""
    layouts = [jax.typeof(column).sharding for column in columns]
    typed = [number for number, own in enumerate(layouts) if AxisType.Explicit in own.mesh.axis_types]
    if not typed:
        return columns
    first = next((number for number in typed if any(layouts[number].spec)), typed[0])  # one that is split, if any is
    if any(isinstance(column, Tracer) for column in columns):
        return [
            column if own == layouts[first] else jax.sharding.reshard(column, layouts[first])
            for column, own in zip(columns, layouts, strict=True)
        ]
    wanted = columns[first].sharding
    return [column if column.sharding == wanted else jax.device_put(column, wanted) for column in columns]


__all__ = ["Packed", "packed"]
