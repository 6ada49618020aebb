"""Memory that collectives work on: dtypes, views of arrays, and the kernels that combine, cast and copy."""

from ringreduce.buffers.arrays import (
    Operand,
    address_of,
    as_given,
    library_of,
    like,
    native,
    new,
    operand_of,
    require_host,
    typed,
    unowned,
)
from ringreduce.buffers.dtypes import DTYPES, Array, Bytes, DType
from ringreduce.buffers.integers import averages, divide_toward_zero, divide_wrapped, sums_fit
from ringreduce.buffers.kernels import (
    Call,
    Kernels,
    WeightedKernels,
    divide,
    kernels_for,
    narrow,
    quiet_context,
    widen,
    wider,
)

__all__ = [
    "DTYPES",
    "Array",
    "Bytes",
    "Call",
    "DType",
    "Kernels",
    "Operand",
    "WeightedKernels",
    "address_of",
    "as_given",
    "averages",
    "divide",
    "divide_toward_zero",
    "divide_wrapped",
    "kernels_for",
    "library_of",
    "like",
    "narrow",
    "native",
    "new",
    "operand_of",
    "quiet_context",
    "require_host",
    "sums_fit",
    "typed",
    "unowned",
    "widen",
    "wider",
]
