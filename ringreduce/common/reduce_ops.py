"""The reduce operations and what they mean for every kind of element.

| op      | floats, complex        | integers                          | bool                 |
|---------|------------------------|-----------------------------------|----------------------|
| sum     | sum                    | sum, wraps around like NumPy's    | any                  |
| average | sum / size             | exact sum / size, toward zero (1) | all                  |
| min     | smallest, NaN wins (2) | smallest                          | all                  |
| max     | largest, NaN wins (2)  | largest                           | any                  |
| product | product                | product, wraps around             | all                  |
| band    | refused                | the bits that all have            | all                  |
| bor     | refused                | the bits that any has             | any                  |
| bxor    | refused                | the bits that an odd number has   | an odd number        |
| land    | refused                | 1 where none is 0, else 0 (3)     | all                  |
| lor     | refused                | 1 where any is not 0, else 0 (3)  | any                  |
| lxor    | refused                | 1 where an odd number is not 0 (3)| an odd number        |

(1) even if the sum overflows: if a sum of 64-bit integers could, the quotients of its terms by the size are summed as
well.
(2) a NaN on any rank gives NaN; complex numbers are ordered like NumPy's: by real, then by imaginary part.
(3) of several ranks; one rank gets what it gives, as in MPI.

float16 and bfloat16 are accumulated in float32 and rounded once where one rank adds up all ranks' values
(within a node), and travel as float32 between nodes.
"""

from __future__ import annotations

import enum

from ringreduce.common.errors import ConfigError


class ReduceOp(enum.Enum):
    """How the ranks' elements become one; the table is in the module's docstring."""

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    LAND = "land"
    LOR = "lor"
    LXOR = "lxor"

    __hash__ = object.__hash__  # Members are one object each; that of `enum.Enum` is a function in Python.

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """Return ``op`` itself, or the operation of that name (``"avg"`` and ``"prod"`` are understood too).

        Raises:
            ConfigError: there is no such operation.
        """
        if isinstance(op, cls):
            return op
        name = {"avg": "average", "prod": "product"}.get(str(op).lower(), str(op).lower())
        try:
            return cls(name)
        except ValueError:
            names = ", ".join(member.value for member in cls)
            raise ConfigError(f"unknown reduce operation {op!r}; choose one of {names}") from None

    def takes(self, kind: str) -> bool:
        """Return whether this reduces elements of a kind; see `ringreduce.buffers.DType`."""
        return self not in INTEGER_OPS or kind in ("int", "uint", "bool")


#: What takes integers and bool alone.
INTEGER_OPS = frozenset((ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR, ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR))

SUM = ReduceOp.SUM
AVERAGE = ReduceOp.AVERAGE
MIN = ReduceOp.MIN
MAX = ReduceOp.MAX
PRODUCT = ReduceOp.PRODUCT
BAND = ReduceOp.BAND
BOR = ReduceOp.BOR
BXOR = ReduceOp.BXOR
LAND = ReduceOp.LAND
LOR = ReduceOp.LOR
LXOR = ReduceOp.LXOR
