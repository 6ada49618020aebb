"""What is said of a GPU and of work on it, above the driver that does it (`ringreduce.gpu.cupy_driver`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringreduce.buffers.dtypes import DType
from ringreduce.common.reduce_ops import ReduceOp

#: Opaque: what the driver made. Stream 0 is the legacy default stream.
Stream = int
Event = Any


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, as this process sees it.

    Attributes:
        number: the ordinal in this process.
        uuid: what names it in every process, on every machine.
        name: the product.
        capability: compute capability, 90 for 9.0.
        nbytes: its memory.
    """

    number: int
    uuid: str
    name: str
    capability: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What is done to how many elements.

    Attributes:
        dtype: of the arrays; 16-bit floats are accumulated in float32 and rounded once.
        op: how they are reduced; no average of integers or bools, no minimum or maximum of complex numbers.
        count: elements of each array.
    """

    dtype: DType
    op: ReduceOp
    count: int

    @property
    def nbytes(self) -> int:
        """Of each array."""
        return self.count * self.dtype.itemsize
