"""What is done to the numbers of two terms, or of one: a compiled function for each row of the catalog.

All are called alike: the addresses of the result, of the first and of the second term, how many numbers there are, and
how many terms in all. The result may lie in one of the terms, and overlaps none of them otherwise. Floats of 16 bits
are added as floats of 32 bits, and rounded once.
"""

from __future__ import annotations

from typing import Any

import numba
from numba import njit, types

from ringreduce.native.intrinsics import bits_of_float, float_of_bits, float_of_half, half_of_float, pointer_to

_compiled = njit(
    types.int64(*[types.int64] * 5), nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
)
_float_at = pointer_to(types.float32)
_half_at = pointer_to(types.uint16)


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
        return total * (types.float32(1.0) / types.float32(size))
    return total / types.float32(size)


@njit
def _as_it_is(total, size):
    return total


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


#: What makes a float of 16 bits one of 32, and what rounds that.
_CASTS = {"bfloat16": (_widen_bfloat16, _round_to_bfloat16), "float16": (float_of_half, half_of_float)}
_FINISHES = {"sum": _as_it_is, "average": _quotient}


def _half_pair(dtype: str, op: str) -> Any:
    widen, narrow = _CASTS[dtype]
    finish = _FINISHES[op]

    @njit
    def operation(a, b, size):
        return narrow(finish(widen(a) + widen(b), size))

    return _pair(_half_at, operation)


def _grow(dtype: str) -> Any:
    widen, _ = _CASTS[dtype]

    @_compiled
    def grow(target, first, second, n, size):
        """Add numbers of ``second`` to the floats of the result; ``first`` is 0 where that is not begun."""
        t = numba.carray(_float_at(target), n)
        b = numba.carray(_half_at(second), n)
        if first == 0:
            for i in range(n):
                t[i] = widen(b[i])
        else:
            for i in range(n):
                t[i] = t[i] + widen(b[i])
        return 0

    return grow


def _round(dtype: str, op: str) -> Any:
    _, narrow = _CASTS[dtype]
    finish = _FINISHES[op]

    @_compiled
    def round_all(target, first, second, n, size):
        t = numba.carray(_half_at(target), n)
        a = numba.carray(_float_at(first), n)
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
    return _half_pair(dtype, what) if dtype in _CASTS else _pair(pointer_to(getattr(types, dtype)), _sum)
