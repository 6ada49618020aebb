"""What is done to the numbers of two terms, or of one: a compiled function for each row of the catalog.

All are called alike: the addresses of the result, of the first and of the second term, how many numbers there are, and
how many ranks. The result may lie in one of the terms, and overlaps none of them otherwise. Floats of 16 bits are added
as floats of 32 bits, and rounded once; integers of up to 32 bits are averaged as floats of 64 bits, which are exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
from numba import njit, types

from ringreduce.native.catalog import AVERAGED_INTEGERS
from ringreduce.native.intrinsics import bits_of_float, float_of_bits, float_of_half, half_of_float, pointer_to

_compiled = njit(
    types.int64(*[types.int64] * 5), nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
)


def _pair(at: Any, operation: Any) -> Any:
    """Return a function of two terms. LLVM vectorises a loop that stores to one of its terms only if it sees which."""

    @_compiled
    def pair(target, first, second, n, size):
        t = numba.carray(at(target), n)
        a = numba.carray(at(first), n)
        b = numba.carray(at(second), n)
        if target == first:
            for i in range(n):
                t[i] = operation(t[i], b[i], size)
        elif target == second:
            for i in range(n):
                t[i] = operation(a[i], t[i], size)
        else:
            for i in range(n):
                t[i] = operation(a[i], b[i], size)
        return 0

    return pair


@njit
def _sum(a, b, size):
    return a + b


@njit
def _min(a, b, size):
    return a if a < b or a != a else b  # as NumPy: of a zero and its negative the second, of a number and NaN that


@njit
def _max(a, b, size):
    return a if a > b or a != a else b


_OPERATIONS = {"sum": _sum, "min": _min, "max": _max}


def _divide(element: Any) -> Any:
    at = pointer_to(element)

    @_compiled
    def divide(target, first, second, n, size):
        t = numba.carray(at(target), n)
        if size & (size - 1) == 0:  # the inverse is as exact, and quicker
            inverse = element(1.0) / element(size)
            for i in range(n):
                t[i] = t[i] * inverse
        else:
            divisor = element(size)
            for i in range(n):
                t[i] = t[i] / divisor
        return 0

    return divide


@njit
def _quotient(total, size):
    if size & (size - 1) == 0:
        return total * (type(total)(1.0) / type(total)(size))
    return total / type(total)(size)


@njit
def _as_it_is(total, size):
    return total


@njit
def _float64(number):
    return types.float64(number)


@njit
def _widen_bfloat16(bits):
    return float_of_bits(types.uint32(bits) << types.uint32(16))


@njit
def _round_to_bfloat16(number):
    """Round to the nearest, of two to the even one; a NaN stays one, as a quiet one of its sign."""
    bits = bits_of_float(number)
    upper = bits >> types.uint32(16)
    if number != number:
        return types.uint16(upper | types.uint32(0x40))
    return types.uint16((bits + (types.uint32(0x7FFF) + (upper & types.uint32(1)))) >> types.uint32(16))


def _toward_zero(element: Any) -> Any:
    @njit
    def narrow(number):
        return element(types.int64(number)) if element is types.uint32 else element(types.int32(number))

    return narrow


class _Wide(NamedTuple):
    """How numbers are summed in a wider type: both types, and what casts to that and back."""

    element: Any
    wide: Any
    widen: Any
    narrow: Any


_WIDE = {
    "bfloat16": _Wide(types.uint16, types.float32, _widen_bfloat16, _round_to_bfloat16),
    "float16": _Wide(types.uint16, types.float32, float_of_half, half_of_float),
    **{
        name: _Wide(getattr(types, name), types.float64, _float64, _toward_zero(getattr(types, name)))
        for name in AVERAGED_INTEGERS
    },
}
_FINISHES = {"sum": _as_it_is, "average": _quotient}


def _wide_pair(dtype: str, op: str) -> Any:
    element, _, widen, narrow = _WIDE[dtype]
    finish = _FINISHES[op]

    @njit
    def operation(a, b, size):
        return narrow(finish(widen(a) + widen(b), size))

    return _pair(pointer_to(element), operation)


def _grow(dtype: str) -> Any:
    element, wide, widen, _ = _WIDE[dtype]
    wide_at = pointer_to(wide)
    at = pointer_to(element)

    @_compiled
    def grow(target, first, second, n, size):
        """Add numbers of ``second`` to the floats of the result; ``first`` is 0 where that is not begun."""
        t = numba.carray(wide_at(target), n)
        b = numba.carray(at(second), n)
        if first == 0:
            for i in range(n):
                t[i] = widen(b[i])
        else:
            for i in range(n):
                t[i] = t[i] + widen(b[i])
        return 0

    return grow


def _round(dtype: str, op: str) -> Any:
    element, wide, _, narrow = _WIDE[dtype]
    finish = _FINISHES[op]
    wide_at = pointer_to(wide)
    at = pointer_to(element)

    @_compiled
    def round_all(target, first, second, n, size):
        t = numba.carray(at(target), n)
        a = numba.carray(wide_at(first), n)
        for i in range(n):
            t[i] = narrow(finish(a[i], size))
        return 0

    return round_all


def compiled(name: str) -> Any:
    """Return a function of `ringreduce.native.catalog.FUNCTIONS`."""
    what, *ops, dtype = name.split()
    if what == "grow":
        return _grow(dtype)
    if what == "round":
        return _round(dtype, *ops)
    if what == "divide":
        return _divide(getattr(types, dtype))
    if what == "average" or dtype in ("bfloat16", "float16"):
        return _wide_pair(dtype, what)
    return _pair(pointer_to(getattr(types, dtype)), _OPERATIONS[what])
