"""Averages of integers: toward zero, and exact even where a sum of 64-bit integers wraps around.

A sum S that has wrapped around lacks a multiple of 2**64. Each of its terms is q d + r, with the divisor d and r from 0
to d - 1. Let Q be the sum of all q. The sum of all r is S - d Q: it is small, so the multiple of 2**64 does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce.buffers.dtypes import Array

#: Bits of the numbers that are not negative, by the kind of dtype.
_BITS = {"i": 63, "u": 64}


def sums_fit(terms: Sequence[Array], size: int, scratch: Array | None = None) -> bool:
    """Return whether no sum of 64-bit integers can wrap around; False where that is not sure.

    Args:
        terms: views of one shape and dtype; those of all ranks, or of some ranks.
        size: the number of terms of a sum, one for each rank.
        scratch: of the same shape and dtype, is overwritten; needed if there are several views.
    """
    first, *others = terms
    if not first.size:
        return True
    limit = (1 << _BITS[first.dtype.kind] - (size - 1).bit_length()) - 1
    seen = first
    for number in others:  # The bits of all numbers together are within the limit just if each of them is.
        seen = np.bitwise_or(seen, number, out=scratch)
    if seen.view(np.uint64).max() <= limit:
        return True
    if first.dtype.kind == "u":
        return False
    return all(term.max() <= limit and term.min() >= -limit for term in terms)


def quotient(dividend: int, divisor: int) -> int:
    """Return the quotient toward zero, by a positive divisor."""
    return dividend // divisor if dividend >= 0 else -(-dividend // divisor)


def divide_toward_zero(wide: Array, divisor: int, scratch: Array | None = None, out: Array | None = None) -> None:
    """Divide integers; -7 / 2 gives -3.

    Args:
        wide: the numbers, of a type that also holds them plus or minus the divisor; are overwritten.
        divisor: at least 1.
        scratch: of the same shape and type, is overwritten; None: memory is taken for it.
        out: for the quotients, of the same shape and type; None: in place.
    """
    out = wide if out is None else out
    if wide.dtype.kind != "u":
        # A negative number is brought up by divisor - 1: then rounding down gives what rounding up gave.
        scratch = np.empty_like(wide) if scratch is None else scratch
        if divisor == 2 and wide.itemsize == 8:
            np.right_shift(wide.view(np.uint64), 63, out=scratch.view(np.uint64))
        else:
            np.right_shift(wide, 8 * wide.itemsize - 1, out=scratch)
            np.bitwise_and(scratch, divisor - 1, out=scratch)
        np.add(wide, scratch, out=wide)
    if divisor & (divisor - 1) == 0:
        np.right_shift(wide, divisor.bit_length() - 1, out=out)  # A shift is several times as fast as a division.
    else:
        np.floor_divide(wide, divisor, out=out)


def averages(sums: Any, quotients: Any, divisor: Any) -> tuple[Any, Any]:
    """Return averages of 64-bit integers, rounded down, and of which one more is the average toward zero.

    Args:
        sums: arrays of NumPy or torch, which may have wrapped around: modulo 2**64.
        quotients: the sums of all terms' quotients by the divisor, rounded down, modulo 2**64.
        divisor: at least 1. The quotients of the true sums fit.
    """
    remainders = sums - quotients * divisor
    whole = remainders // divisor
    down = quotients + whole
    return down, (down < 0) & (remainders != whole * divisor)


def divide_wrapped(sums: Array, quotients: Array, divisor: int) -> None:
    """Replace sums by averages toward zero; for arguments see `averages`."""
    down, more = averages(sums, quotients, divisor)
    np.add(down, more, out=sums)
