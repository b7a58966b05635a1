"""Arrays handed between JAX and torch: the same memory wherever that is safe, else one copy, counted with its reason.

What was tried (jax 0.10.2, torch 2.13): JAX hands out every dtype torch has without a copy, and waits for a running program
first. The other way JAX takes memory that starts on 64 bytes and is strided compactly; anything else it copies silently
or refuses, and 64-bit numbers it narrows silently, whatever they hold (x64 off). So each case is decided here.

A tensor that shares memory with an array keeps it alive, and the other way round. Batches are results of their own; never
hand out a plane's storage: while a view of it lives, a donated insert copies all of it.
"""

from __future__ import annotations

import functools
import importlib
import threading
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conduit_jax.errors import ConfigError, SpecError, refuse
from conduit_jax.sharding.staging import aligned_empty

ALIGNMENT = 64
_NARROWED = {"int64": np.int32, "float64": np.float32, "complex128": np.complex64}
_WIDENED = {"int2": jnp.int8, "int4": jnp.int8, "uint2": jnp.uint8, "uint4": jnp.uint8}


@functools.cache
def import_torch() -> Any:
    """Return the module torch; ``ConfigError`` that names it where it is missing."""
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise ConfigError("This needs torch: pip install 'conduit_jax[torch]'") from error


@dataclass
class Handovers:
    """How arrays got across: ``shared`` without a copy; ``copied`` and ``copied_bytes`` by reason.

    Reasons: ``alignment``, ``dtype``, ``stride``, ``read-only`` (numpy), ``device`` (several of them, host memory of a GPU, or
    another one wanted).
    """

    shared: int = 0
    copied: Counter[str] = field(default_factory=Counter)
    copied_bytes: Counter[str] = field(default_factory=Counter)
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    def enter(self, reason: str | None, size: int) -> None:
        """Enter one array of ``size`` bytes, copied for ``reason``."""
        with self._lock:
            if reason is None:
                self.shared += 1
            else:
                self.copied[reason] += 1
                self.copied_bytes[reason] += size


HANDOVERS = Handovers()  # of all calls that name no account of their own


class Lender:
    """Host memory for tensors, used again when nothing looks at it any more; at most ``keep_bytes`` are kept unused."""

    def __init__(self, keep_bytes: int = 256 << 20):
        self._keep_bytes, self._kept_bytes = keep_bytes, 0
        self._free: dict[int, list[np.ndarray]] = {}
        self._returned: deque[np.ndarray] = deque()
        self._lock = threading.Lock()
        self.lent = 0

    def lend(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return uninitialised memory of 64-byte alignment; it comes back when the last view of it, torch's too, is gone."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with self._lock:
            self._settle()
            free = self._free.get(size)
            slab = free.pop() if free else None
            self._kept_bytes -= size if slab is not None else 0
            self.lent += 1
        slab = aligned_empty((size,), np.dtype(np.uint8)) if slab is None else slab
        loan = _Loan(slab)
        weakref.finalize(loan, self._back, slab)
        return np.asarray(loan).view(dtype).reshape(shape)

    def _back(self, slab: np.ndarray) -> None:
        # The garbage collector may call this on the thread that is in lend(): it must not wait for the lock.
        self._returned.append(slab)
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        while self._returned:
            slab = self._returned.popleft()
            self.lent -= 1
            if self._kept_bytes + slab.nbytes <= self._keep_bytes:
                self._free.setdefault(slab.nbytes, []).append(slab)
                self._kept_bytes += slab.nbytes


class _Loan:
    """What every view of a slab holds on to."""

    def __init__(self, slab: np.ndarray):
        self.__array_interface__ = slab.__array_interface__


_LENDER = Lender()


def leaf_to_torch(leaf: Any, device: Any = None, handovers: Handovers = HANDOVERS) -> Any:
    """Return a JAX or numpy array as a tensor, on ``device`` where one is wanted.

    ``SpecError`` for typed PRNG keys. A tensor may share memory with the array: do not write to it in place.
    """
    torch = import_torch()
    if not isinstance(leaf, jax.Array):
        return _numpy_to_torch(torch, np.asarray(leaf), device, handovers)
    reason, dtype, sharding = None, leaf.dtype, leaf.sharding
    if not isinstance(dtype, np.dtype):
        refuse(SpecError, "A typed PRNG key is no tensor.", got=dtype, fix="jax.random.key_data(key)")
    widened = _widened(dtype)
    if widened is not None:
        reason, leaf = "dtype", leaf.astype(widened)
    if len(sharding.device_set) > 1 or (sharding.memory_kind == "pinned_host" and _on_gpu(sharding)):
        reason, tensor = "device", _gathered(torch, leaf)
    else:
        tensor = torch.from_dlpack(leaf)
    if device is not None and tensor.device != torch.device(device):
        reason, tensor = "device", tensor.to(device)
    handovers.enter(reason, leaf.nbytes if reason is not None else 0)
    return tensor


@functools.cache
def _widened(dtype: np.dtype) -> Any:
    return _WIDENED.get(dtype.name)


def _on_gpu(sharding: Any) -> bool:
    return any(device.platform != "cpu" for device in sharding.device_set)


def _gathered(torch: Any, leaf: jax.Array) -> Any:
    """Return all shards side by side in lent host memory."""
    slab = _LENDER.lend(leaf.shape, np.dtype(leaf.dtype))
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            slab[shard.index] = np.asarray(shard.data)
    return _tensor(torch, slab)


def _tensor(torch: Any, array: np.ndarray) -> Any:
    """Return ``array``'s memory as a tensor; numpy's own dtypes and those JAX adds to it."""
    if array.dtype.kind in "biufc":
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(f"int{8 * array.dtype.itemsize}")).view(getattr(torch, array.dtype.name))


def _numpy_to_torch(torch: Any, value: np.ndarray, device: Any, handovers: Handovers) -> Any:
    reason = None
    if not value.flags.writeable or any(stride < 0 for stride in value.strides):
        reason, value = "stride" if value.flags.writeable else "read-only", np.array(value)
    tensor = _tensor(torch, value)
    if device is not None and tensor.device != torch.device(device):
        reason, tensor = "device", tensor.to(device)
    handovers.enter(reason, value.nbytes)
    return tensor


def leaf_from_torch(leaf: Any, handovers: Handovers = HANDOVERS) -> Any:
    """Return a tensor as a JAX array; what is no tensor is returned as it is.

    ``SpecError`` for integers beyond what JAX holds without x64, which would wrap silently. The array may share memory with the
    tensor: do not write to it until what reads the array has run (``plane.flush``), or hand over a ``clone()``.
    """
    torch = import_torch()
    if not isinstance(leaf, torch.Tensor):
        return leaf
    tensor, reason = leaf.detach(), None
    if tensor.layout != torch.strided:
        reason, tensor = "stride", tensor.to_dense()
    if tensor.is_conj() or tensor.is_neg():
        reason, tensor = "stride", tensor.resolve_conj().resolve_neg()
    narrow = _NARROWED.get(str(tensor.dtype).removeprefix("torch."))
    if narrow is not None and not jax.config.read("jax_enable_x64"):
        reason, tensor = "dtype", _narrowed(torch, tensor, np.dtype(narrow).name)
    if tensor.device.type != "cpu" and not _jax_has(tensor.device.type):
        reason, tensor = "device", tensor.cpu()
    if not _compact(tensor):
        reason, tensor = "stride", tensor.contiguous()
    if tensor.numel() and tensor.data_ptr() % ALIGNMENT:
        reason, tensor = "alignment", tensor.clone()
    handovers.enter(reason, tensor.numel() * tensor.element_size())
    return jax.dlpack.from_dlpack(tensor)


def _narrowed(torch: Any, tensor: Any, name: str) -> Any:
    if name == "int32" and tensor.numel():
        least, most = int(tensor.min()), int(tensor.max())
        if least < -(2**31) or most >= 2**31:
            refuse(
                SpecError,
                "A tensor holds integers that int32 cannot.",
                got=f"int64 from {least} to {most}",
                want="from -2147483648 to 2147483647",
                fix="switch x64 on: jax.config.update('jax_enable_x64', True)",
            )
    return tensor.to(getattr(torch, name))


def _compact(tensor: Any) -> bool:
    """Whether the strides are those of a transposition of dense memory, all that JAX takes."""
    if tensor.numel() <= 1:
        return True
    expected = 1
    for stride, length in sorted(
        (stride, length) for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def _jax_has(kind: str) -> bool:
    return any(device.platform in (kind, "gpu") for device in jax.devices())


__all__ = ["HANDOVERS", "Handovers", "Lender", "import_torch", "leaf_from_torch", "leaf_to_torch"]
