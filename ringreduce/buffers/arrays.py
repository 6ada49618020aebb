"""Arrays of any supported library as strided NumPy views, and back. The one place that distinguishes them."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ringreduce.buffers.device_arrays import DeviceOperand, is_tensor, not_plain, require_apart
from ringreduce.buffers.dtypes import Array, Bytes, DType, ml_bfloat16
from ringreduce.common.errors import UnsupportedBufferError

if TYPE_CHECKING:
    import torch

#: What is taken as an array of no dimension.
_NUMBERS = np.generic, bool, int, float, complex


class Operand:  # Not a frozen dataclass, which would take three times as long to make.
    """An argument of a collective: the caller's memory, seen through NumPy.

    Attributes:
        view: the array's own memory with its own shape and strides, in ``dtype.storage``.
        dtype: the type of its elements.
        address: of the first element.
        shape, nbytes: of the view.
        contiguous: whether the elements are one after the other in C order.
        is_copy: whether the memory is not the caller's, but a copy that was made of a number or a lazy view.

    Args:
        view, dtype: see above.
        address: of the first element; -1: it is looked up.
        is_copy: see above.
    """

    __slots__ = ("address", "contiguous", "dtype", "is_copy", "nbytes", "shape", "view")

    def __init__(self, view: Array, dtype: DType, address: int = -1, *, is_copy: bool = False) -> None:
        self.view = view
        self.dtype = dtype
        self.address: int = view.__array_interface__["data"][0] if address < 0 else address
        self.shape = view.shape
        self.nbytes = view.nbytes
        self.contiguous = view.flags.c_contiguous
        self.is_copy = is_copy

    @classmethod
    def of(cls, array: Any) -> Operand:
        """View a NumPy array or a torch CPU tensor, without a copy; or a number, of NumPy or Python, as it is now.

        Raises:
            UnsupportedBufferError: it is neither, or its elements or device are not supported.
        """
        if isinstance(array, np.ndarray):
            return cls._of_numpy(array)
        torch = sys.modules.get("torch")
        if torch is not None and is_tensor(array, torch):
            return cls._of_torch(array, torch)
        if hasattr(array, "__cuda_array_interface__"):
            raise UnsupportedBufferError("arrays in device memory are not supported here; pass one in host memory")
        if isinstance(array, _NUMBERS):
            view = np.asarray(array)
            view.flags.writeable = False
            operand = cls._of_numpy(view)
            operand.is_copy = True
            return operand
        hint = "; pass np.asarray(...)" if isinstance(array, (list, tuple)) else ""
        raise UnsupportedBufferError(f"expected a NumPy array or a torch tensor, got {type(array).__name__}{hint}")

    @classmethod
    def _of_numpy(cls, array: Array) -> Operand:
        dtype = DType.of(array.dtype)
        if type(array) is np.ndarray and array.dtype == dtype.storage:
            return cls(array, dtype)
        if isinstance(array, np.ma.MaskedArray):
            raise UnsupportedBufferError("masked arrays are not supported; pass array.data, or fill them")
        view = np.asarray(array)  # Subclasses such as np.matrix reshape differently.
        return cls(view.view(dtype.storage) if view.dtype != dtype.storage else view, dtype)

    @classmethod
    def _of_torch(cls, tensor: torch.Tensor, torch: ModuleType) -> Operand:
        if tensor.layout is not torch.strided:
            raise UnsupportedBufferError(f"tensors of layout {tensor.layout} are not supported; pass a dense one")
        if not tensor.is_cpu:
            raise UnsupportedBufferError(f"tensors on {tensor.device} are not supported here; pass a CPU tensor")
        dtype = DType.of(tensor.dtype)
        if tensor.is_neg() or tensor.is_conj():  # NumPy does not know lazy views: copy, and let nobody store there.
            view = tensor.detach().resolve_conj().resolve_neg().numpy()
            view.flags.writeable = False
            return cls(view, dtype, is_copy=True)
        try:
            address = tensor.data_ptr()
            storage = tensor.untyped_storage()
        except RuntimeError:
            raise UnsupportedBufferError(not_plain(tensor)) from None
        shape = tensor.shape
        strides = None
        places = tensor.numel()
        if places and not tensor.is_contiguous():
            steps = tensor.stride()
            strides = tuple([step * dtype.itemsize for step in steps])
            places = sum([(length - 1) * step for length, step in zip(shape, steps, strict=True)]) + 1
        if places and (tensor.storage_offset() + places) * dtype.itemsize > storage.nbytes():
            raise UnsupportedBufferError(
                f"the tensor, shape {tuple(shape)}, has only {storage.nbytes()} bytes of memory: its storage was made "
                "smaller, or a resize_ failed, after which torch keeps the new shape"
            )
        if places and not address:
            raise UnsupportedBufferError(not_plain(tensor))
        return cls(
            np.asarray(_TensorMemory(storage, address, dtype.storage, shape=shape, strides=strides)), dtype, address
        )

    @property
    def count(self) -> int:
        """Elements."""
        return self.view.size

    def flat(self) -> Array:
        """Return the elements in C order as one dimension: a view if they are contiguous, else a copy."""
        return np.ascontiguousarray(self.view).reshape(-1)  # Without reshape, a single dimension would keep its gaps.

    def describe(self, *, by_count: bool = False) -> str:
        """Return dtype and shape in words; ``by_count``: as if it had one dimension."""
        return described(self.dtype.name, (self.count,) if by_count else self.shape)

    def unowned(self) -> Operand:
        """Return the same contiguous memory, which that one does not keep alive; see `unowned`."""
        return Operand(unowned(self.view, self.address).reshape(self.shape), self.dtype, self.address)

    def require_writable(self) -> None:
        """Check that results can be stored here.

        Raises:
            UnsupportedBufferError: the memory is read-only, or several elements share one place.
        """
        if not self.view.flags.writeable:
            raise UnsupportedBufferError(
                "the array is read-only (or a lazy conjugate of another), so no result can be stored in it; pass a copy"
            )
        if not self.contiguous:
            require_apart(self.view.shape, self.view.strides, self.view.itemsize)


class _TensorMemory:
    """The memory of a torch tensor as NumPy takes it; the storage lives as long as the arrays that are made of this.

    Not `Tensor.numpy`, after which the storage can never be resized again.
    """

    __slots__ = ("__array_interface__", "_storage")

    def __init__(
        self,
        storage: torch.UntypedStorage,
        address: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
    ) -> None:
        self._storage = storage
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str,
            "data": (address, False),
            "strides": strides,
        }


@lru_cache(maxsize=1024)
def described(dtype: str, shape: tuple[int, ...]) -> str:
    """Return a dtype, by its name, and a shape in words."""
    return f"{dtype}, shape {' x '.join(map(str, shape)) or 'of a number'}"


def operand_of(array: Any) -> Operand | DeviceOperand:
    """Look at an array in host or device memory, without a copy.

    Raises:
        UnsupportedBufferError: it is none, or its elements or layout are not supported.
    """
    if isinstance(array, np.ndarray):
        return Operand._of_numpy(array)
    if isinstance(array, (Operand, DeviceOperand)):
        return array
    torch = sys.modules.get("torch")
    if torch is not None and is_tensor(array, torch) and array.is_cpu:
        return Operand._of_torch(array, torch)
    return DeviceOperand.of(array) or Operand.of(array)


def require_host(operand: Operand | DeviceOperand, what: str) -> Operand:
    """Return the memory of an array that goes into something that takes none in device memory.

    Args:
        operand: of the array.
        what: it goes into.

    Raises:
        UnsupportedBufferError: it is in device memory.
    """
    if not isinstance(operand, Operand):
        raise UnsupportedBufferError(
            f"{what} takes arrays in host memory, as no GPU has run it yet; pass a copy of the array on the CPU"
        )
    return operand


def new(shape: Sequence[int], dtype: DType, library: str) -> Any:
    """Return an uninitialised private array of ``library`` (``"numpy"`` or ``"torch"``)."""
    return native(np.empty(shape, dtype.storage), dtype, library)


def native(view: Array, dtype: DType, library: str) -> Any:
    """Return an array of ``library`` on the memory of a contiguous one of the storage type."""
    if library == "torch":
        import torch

        tensor = torch.from_numpy(view)
        return tensor.view(torch.bfloat16) if dtype.name == "bfloat16" else tensor
    return view.view(ml_bfloat16()) if dtype.name == "bfloat16" else view


def typed(memory: Bytes, dtype: DType) -> Any:
    """View bytes as a one-dimensional array of ``dtype``: NumPy's, or torch's where NumPy has no such type."""
    if dtype.name != "bfloat16":
        return memory.view(dtype.storage)
    if importlib.util.find_spec("ml_dtypes") is not None:
        return memory.view(ml_bfloat16())
    import torch

    return torch.from_numpy(memory).view(torch.bfloat16)


def address_of(array: Array) -> int:
    """Return where the first element is."""
    address: int = array.__array_interface__["data"][0]
    return address


def unowned(array: Array, address: int = -1) -> Array:
    """View the memory of a contiguous array, as one dimension and writable, without keeping it alive.

    For plans, which outlive the arrays that they were made for: the caller that runs one holds an array at that
    address.

    Args:
        array: contiguous.
        address: of its first element, if that is known.
    """
    memory: Any = (ctypes.c_byte * array.nbytes).from_address(address if address >= 0 else address_of(array))
    return np.frombuffer(memory, array.dtype) if array.nbytes else np.empty(0, array.dtype)


def library_of(array: Any) -> str:
    """Return whose array this is, ``"numpy"`` or ``"torch"``; numbers are NumPy's."""
    return "numpy" if isinstance(array, (np.ndarray, *_NUMBERS)) else "torch"


def like(array: Any, shape: Sequence[int] | None = None) -> Any:
    """Return an uninitialised private array of the same library and dtype (and shape, unless one is given)."""
    if isinstance(array, _NUMBERS):
        array = np.asarray(array)
    return new(tuple(array.shape) if shape is None else shape, DType.of(array.dtype), library_of(array))


def as_given(array: Any, result: Any) -> Any:
    """Return a new array as a number, if what it was made for is one: of the same type."""
    if type(array) is np.ndarray or not isinstance(array, _NUMBERS):
        return result
    return result[()] if isinstance(array, np.generic) else result.item()
