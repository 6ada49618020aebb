"""Shapes and strides, of arrays anywhere."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["c_order", "is_c_order", "overlaps_itself"]


def c_order(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides, in bytes, of elements that lie one after the other in C order."""
    strides = [itemsize]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * length)
    return tuple(reversed(strides)) if shape else ()


def is_c_order(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Return whether elements lie one after the other in C order; strides that are never walked do not count."""
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
