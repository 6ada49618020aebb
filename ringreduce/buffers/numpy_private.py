"""The private part of NumPy that ringreduce touches.

It was tried with the versions in `TRIED`, and is looked at again for each array.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ringreduce.common.private_parts import Part

#: The versions of NumPy with which this was tried; the tests run with the last one.
TRIED = ("2.2.6", "2.4.6")


class Field(Protocol):
    """Where NumPy keeps the address of an array's memory."""

    @property
    def value(self) -> int | None:
        """The address, of now."""
        ...


class _ByInterface(NamedTuple):
    """The address as NumPy says it: for each call a dictionary is made."""

    array: weakref.ref[npt.NDArray[Any]]

    @property
    def value(self) -> int | None:
        array = self.array()
        return None if array is None else int(array.__array_interface__["data"][0])


def address_field(array: npt.NDArray[Any]) -> Field:
    """Return what has the address of an array's memory as its ``value``; it does not keep the array.

    Reads a field of NumPy's C struct, the first one after Python's own: `address_of` takes a fifth of a small call. It
    must not be read once the array is freed. Where the address is not there, it is that of ``__array_interface__``.
    """
    if sys.implementation.name == "cpython":  # Only there `id` is an address.
        field = ctypes.c_void_p.from_address(id(array) + object.__basicsize__)
        if field.value == array.__array_interface__["data"][0]:
            return field
    return _ByInterface(weakref.ref(array))


def layout_of(array: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """Return memory that changes if the array gets another address, shape, layout, dtype or flags.

    It is in NumPy's C struct, and must not be read once the array is freed.

    Returns:
        (address, numbers of 64 bits); empty: it is not there.
    """
    if sys.implementation.name != "cpython":
        return []
    start = id(array) + object.__basicsize__
    data, ndim, shape, strides, _, dtype, _ = (ctypes.c_int64 * 7).from_address(start)
    count = array.ndim
    if (data, ndim & 0xFFFFFFFF, dtype) != (array.__array_interface__["data"][0], count, id(array.dtype)):
        return []
    numbers = ctypes.c_int64 * count
    if count and (*numbers.from_address(shape), *numbers.from_address(strides)) != (*array.shape, *array.strides):
        return []
    return [(start, 4), (start + 40, 2), (shape, count), (strides, count)]


def _is_a_field() -> bool:
    array = np.zeros(2, np.uint8)
    return not isinstance(address_field(array), _ByInterface) and not isinstance(address_field(array[1:]), _ByInterface)


def _has_layout() -> bool:
    array = np.zeros((2, 3), np.uint8)
    return bool(layout_of(array) and layout_of(array[1:, ::2]))


PARTS = (
    Part("address_field", _is_a_field, "small calls with NumPy's arrays take a fifth longer"),
    Part("layout_of", _has_layout, "small calls with NumPy's arrays take a fifth longer"),
)
