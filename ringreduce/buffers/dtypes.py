"""The element types that collectives accept, one row each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.common.errors import UnsupportedBufferError
from ringreduce.common.reduce_ops import ReduceOp

#: Of any dtype and shape; of bytes.
Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Attributes:
        name: NumPy's (or ml_dtypes') name for it; torch uses the same ones.
        storage: the NumPy dtype of the views that the package works on; bfloat16, which NumPy lacks, is kept as uint16.
        kind: ``"float"``, ``"complex"``, ``"int"``, ``"uint"`` or ``"bool"``.
        itemsize: bytes per element.
        integral: whether averages are truncated toward zero; booleans count as 0 and 1.
        is_long: whether this is an integer of 64 bits, the widest: sums of them may not fit.
        half: whether this is a 16-bit float, which is accumulated in float32.
    """

    name: str
    storage: np.dtype[Any]
    kind: str
    itemsize: int = field(init=False, compare=False)
    integral: bool = field(init=False, compare=False)
    is_long: bool = field(init=False, compare=False)
    half: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "itemsize", self.storage.itemsize)
        object.__setattr__(self, "integral", self.kind in ("int", "uint", "bool"))
        object.__setattr__(self, "is_long", self.integral and self.itemsize == 8)
        object.__setattr__(self, "half", self.kind == "float" and self.itemsize == 2)

    @classmethod
    def of(cls, dtype: Any) -> DType:
        """Return the row of a NumPy, ml_dtypes or torch dtype, or of a name.

        Raises:
            UnsupportedBufferError: collectives cannot take such elements.
        """
        if dtype.__hash__ is None:
            return _look_up(dtype)
        row = _FOUND.get(dtype)
        if row is None:
            row = _FOUND[dtype] = _look_up(dtype)
        return row


def require_op(op: ReduceOp, dtype: DType) -> None:
    """Raise `UnsupportedBufferError` if an operation does not take such elements."""
    if not op.takes(dtype.kind):
        raise UnsupportedBufferError(f"{op.value} takes integers and bool, got {dtype.name}")


_KINDS = {"f": "float", "c": "complex", "i": "int", "u": "uint", "b": "bool"}
_FLOATS = ("float16", "float32", "float64", "complex64", "complex128")
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")

#: Names and their rows, in the order in which documentation and ``bench -d all`` list them.
DTYPES: dict[str, DType] = {
    name: DType(name, np.dtype(name), _KINDS[np.dtype(name).kind]) for name in _FLOATS + _INTEGERS
}
DTYPES["bfloat16"] = DType("bfloat16", np.dtype(np.uint16), "float")

_FOUND: dict[Any, DType] = {}


def _look_up(dtype: Any) -> DType:
    # Dtypes of torch print as "torch.float32"; everything else that is a dtype has a NumPy name.
    name = str(dtype).removeprefix("torch.") if type(dtype).__module__ == "torch" else _numpy_name(dtype)
    if name in DTYPES:
        return DTYPES[name]
    raise UnsupportedBufferError(f"elements of type {name} are not supported; choose one of {', '.join(DTYPES)}")


def _numpy_name(dtype: Any) -> str:
    if dtype == "bfloat16":
        return "bfloat16"
    try:
        numpy_dtype = np.dtype(dtype)
    except TypeError:
        return repr(dtype)
    return numpy_dtype.name if numpy_dtype.isnative else f"{numpy_dtype.name} in foreign byte order"


def ml_bfloat16() -> np.dtype[Any]:
    """Return the NumPy dtype for bfloat16 that the ml_dtypes package defines.

    Raises:
        UnsupportedBufferError: the package is not installed.
    """
    try:
        import ml_dtypes
    except ImportError:
        raise UnsupportedBufferError("NumPy arrays of bfloat16 take ml_dtypes: pip install ml_dtypes") from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype
