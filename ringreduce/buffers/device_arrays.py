"""Arrays in device memory, of any library, as addresses and layouts; and new ones of the same library.

CuPy arrays and torch tensors are taken as they are. Anything else with ``__cuda_array_interface__`` (Numba, RMM, JAX)
is taken by what that says. Libraries are only imported where the caller's arrays come from them already.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

import numpy as np

from ringreduce.buffers.dtypes import DType, ml_bfloat16
from ringreduce.common.errors import UnsupportedBufferError
from ringreduce.common.libraries import INSTALL_CUPY

#: What ``__cuda_array_interface__`` gives for the legacy default stream, as 0 may not be given.
_LEGACY_STREAM = 1


@dataclass(eq=False, slots=True)
class DeviceOperand:
    """An argument of a collective in device memory.

    What the caller enqueued on ``stream`` before the call is done to the array first; what is enqueued there after the
    call comes after it.

    Attributes:
        array: the caller's array, which must live as long as this is used.
        address: where its first element is.
        shape: its shape.
        strides: in bytes.
        dtype: the type of its elements.
        device: the ordinal of its GPU in this process, None if only the driver knows it.
        stream: the caller's stream on that GPU; the legacy default stream where an array's interface names none.
        writable: whether results may be stored there.
    """

    array: Any
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    device: int | None
    stream: int
    writable: bool = True

    @classmethod
    def of(cls, array: Any) -> DeviceOperand | None:
        """Look at an array without a copy; None if it is not in device memory.

        Raises:
            UnsupportedBufferError: it does, and its elements or layout are not supported.
        """
        torch = sys.modules.get("torch")
        if is_tensor(array, torch):
            return _of_torch(array, torch) if array.is_cuda else None
        cupy = sys.modules.get("cupy")
        if cupy is not None and isinstance(array, cupy.ndarray):
            return _of_cupy(array, cupy)
        interface = getattr(array, "__cuda_array_interface__", None)
        return None if interface is None else _of_interface(array, interface)

    @property
    def count(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the elements are one after the other in C order."""
        return is_c_order(self.shape, self.strides, self.dtype.itemsize)

    def require_writable(self) -> None:
        """Check that results can be stored here.

        Raises:
            UnsupportedBufferError: the memory is read-only, or several elements share one place.
        """
        if not self.writable:
            raise UnsupportedBufferError("the array is read-only, so no result can be stored in it; pass a copy")
        require_apart(self.shape, self.strides, self.dtype.itemsize)

    def same_memory(self, other: DeviceOperand) -> bool:
        """Return whether two operands of one shape and dtype are one."""
        return self.address == other.address and self.strides == other.strides

    def may_overlap(self, other: DeviceOperand) -> bool:
        """Return whether the two might have a byte in common; never False where they have."""
        (low, high), (other_low, other_high) = self._bounds(), other._bounds()
        return low < other_high and other_low < high

    def like(self, shape: Sequence[int] | None = None) -> Any:
        """Return an uninitialised array of the same library, device and dtype (and shape, unless one is given)."""
        dims = self.shape if shape is None else tuple(shape)
        torch: Any = sys.modules.get("torch")
        if is_tensor(self.array, torch):
            return torch.empty(dims, dtype=getattr(torch, self.dtype.name), device=f"cuda:{self.device}")
        cupy = cupy_for("a result in device memory")
        with nullcontext() if self.device is None else cupy.cuda.Device(self.device):
            return cupy.empty(dims, _native(self.dtype))

    def scratch(self, *, new: bool = False) -> DeviceOperand:
        """Return this if it is in C order, else (or if it is to be ``new``) memory of that kind, on `like`'s stream."""
        if self.contiguous and not new:
            return self
        copy = DeviceOperand.of(self.like())
        assert copy is not None and copy.contiguous
        return copy

    def assign(self, source: DeviceOperand) -> None:
        """Copy from ``source``. One of the two is what `scratch` gave for the other, on whose stream this is done."""
        if is_tensor(self.array, sys.modules.get("torch")):
            self.array.detach().copy_(source.array)
            return
        cupy = cupy_for("an array in device memory that is not in C order")
        target = cupy.asarray(self.array)
        with target.device:
            target[...] = cupy.asarray(source.array)

    def _bounds(self) -> tuple[int, int]:
        """Return the addresses of the first byte and of the one after the last."""
        if not self.count:
            return self.address, self.address
        reaches = [stride * (length - 1) for length, stride in zip(self.shape, self.strides, strict=True)]
        below = sum(reach for reach in reaches if reach < 0)
        above = sum(reach for reach in reaches if reach > 0)
        return self.address + below, self.address + above + self.dtype.itemsize


def not_plain(tensor: Any) -> str:
    """Say that a tensor is of a type that holds others, as DTensor does, and what to do."""
    hint = "; pass the part that is here, tensor.to_local()" if hasattr(tensor, "to_local") else ""
    return f"tensors of type {type(tensor).__name__} are not supported{hint}"


def empty_on_device(address: int, nbytes: int, shape: Sequence[int], dtype: DType, device: int, owner: object) -> Any:
    """Return a CuPy array of memory that is there already; it and its views keep ``owner`` alive.

    Args:
        address: where the memory begins.
        nbytes: how much there is, at least what the array needs.
        shape: of the array.
        dtype: of the array; bfloat16 takes ml_dtypes.
        device: the GPU's ordinal.
        owner: what gives the memory back when nobody refers to it any more.
    """
    cupy = cupy_for("a buffer in device memory")
    memory = cupy.cuda.UnownedMemory(address, nbytes, owner, device_id=device)
    return cupy.ndarray(tuple(shape), _native(dtype), memptr=cupy.cuda.MemoryPointer(memory, 0))


# ---- the libraries ----


def _of_torch(tensor: Any, torch: Any) -> DeviceOperand:
    if tensor.layout is not torch.strided:
        raise UnsupportedBufferError(f"tensors of layout {tensor.layout} are not supported; pass a dense one")
    if hasattr(type(tensor), "to_local"):
        raise UnsupportedBufferError(not_plain(tensor))
    dtype = DType.of(tensor.dtype)
    # Lazy views, whose memory holds something else: a copy has what they stand for, and nobody stores there.
    lazy = tensor.is_conj() or tensor.is_neg()
    if lazy:
        tensor = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    strides = tuple(stride * dtype.itemsize for stride in tensor.stride())
    stream = torch.cuda.current_stream(tensor.device).cuda_stream
    shape = tuple(tensor.shape)
    device = tensor.device.index
    return DeviceOperand(
        tensor,
        tensor.data_ptr(),
        shape=shape,
        strides=strides,
        dtype=dtype,
        device=device,
        stream=stream,
        writable=not lazy,
    )


def _of_cupy(array: Any, cupy: Any) -> DeviceOperand:
    device = array.device.id
    with array.device:
        stream = cupy.cuda.get_current_stream().ptr
    dtype = DType.of(array.dtype)
    return DeviceOperand(
        array,
        array.data.ptr,
        shape=tuple(array.shape),
        strides=tuple(array.strides),
        dtype=dtype,
        device=device,
        stream=stream,
    )


def _of_interface(array: Any, interface: Mapping[str, Any]) -> DeviceOperand:
    if interface.get("mask") is not None:
        raise UnsupportedBufferError("masked arrays are not supported; fill them")
    address, read_only = interface["data"]
    named = np.dtype(interface["typestr"])
    if named.kind == "V":  # NumPy has no code for these: bfloat16, if its own dtype says so.
        named = getattr(array, "dtype", named)
    dtype = DType.of(named)
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    strides = c_order(shape, dtype.itemsize) if strides is None else tuple(strides)
    stream = interface.get("stream")  # None: the array may be used at once, on any stream
    stream = 0 if stream in (None, _LEGACY_STREAM) else stream
    return DeviceOperand(
        array, address, shape=shape, strides=strides, dtype=dtype, device=None, stream=stream, writable=not read_only
    )


def cupy_for(what: str) -> Any:
    """Return CuPy; raise `UnsupportedBufferError` where it is missing, and say what takes it."""
    try:
        import cupy
    except ImportError as error:
        raise UnsupportedBufferError(f"{what} takes CuPy: {INSTALL_CUPY} ({error})") from error
    return cupy


def _native(dtype: DType) -> np.dtype[Any]:
    return ml_bfloat16() if dtype.name == "bfloat16" else dtype.storage


def is_tensor(array: Any, torch: Any) -> bool:
    """Return whether an array is a torch tensor.

    Args:
        array: anything.
        torch: the module, as far as it is imported; or None.
    """
    # Another thread may be importing torch just now; then this is no tensor.
    kind = getattr(torch, "Tensor", None)
    return kind is not None and isinstance(array, kind)


# ---- shapes and strides ----


def c_order(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides, in bytes, of elements that are one after the other in C order."""
    strides = tuple(accumulate(reversed(shape[1:]), mul, initial=itemsize))
    return strides[::-1] if shape else ()


def is_c_order(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Return whether elements are one after the other in C order; strides that are never walked do not count."""
    wanted = c_order(shape, itemsize)
    return 0 in shape or all(n == 1 or has == wants for n, has, wants in zip(shape, strides, wanted, strict=True))


def overlaps_itself(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Return whether several elements may share a place in memory; never False where they do."""
    if 0 in shape:
        return False
    reach = itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < reach:
            return True
        reach = stride * (length - 1) + reach
    return False


def require_apart(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> None:
    """Raise an `UnsupportedBufferError` if several elements may share a place, so that no result can be stored."""
    if overlaps_itself(shape, strides, itemsize):
        raise UnsupportedBufferError(
            f"elements of the array share memory (shape {shape}, strides {strides}), as after expand or broadcast_to; "
            "pass a copy"
        )
