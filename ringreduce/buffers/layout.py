"""Shapes and strides, of arrays anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from ringreduce.common.errors import UnsupportedBufferError


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
