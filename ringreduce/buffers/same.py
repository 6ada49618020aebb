"""Whether a call comes again: with the array of an earlier one, or with one that may stand in for it.

A program that calls with the same object again may have moved or reshaped it meanwhile: `same_memory`. One that has new
tensors in each step, as torch's gradients may be, calls with the same name and another object: `same_kind`. What they
return takes one call of Python, a tenth of a small collective, so neither is made of the other.

Compiled programs have no array objects: their layouts are keys. In a training step the binding looks at each gradient
(`Slot.look`).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce.buffers.dtypes import Array
from ringreduce.buffers.numpy_private import address_field, layout_of


def same_memory(array: Any, forget: Callable[[object], object], *, written: bool) -> Callable[[Any], bool]:
    """Return a function that says whether an array is this one, with the memory and layout of now; it does not keep it.

    Args:
        array: of NumPy or torch; None: nothing was passed.
        forget: called when the array is freed.
        written: whether it must still be writable.
    """
    if array is None:
        return lambda given: given is None
    known: Callable[[], Any] = weakref.ref(array, forget)
    if isinstance(array, np.ndarray):  # A weak reference forbids `resize`; all else can be assigned.
        # It is not read once the array is freed: `forget` has removed what reads it before another object gets its id.
        data = address_field(array)
        address = data.value
        shape = array.shape
        strides = array.strides
        dtype = array.dtype

        def is_same(other: Any, keeps: object = known) -> bool:
            return (
                data.value == address
                and other.strides == strides
                and other.shape == shape
                and other.dtype is dtype
                and (not written or other.flags.writeable)
            )

        return is_same
    # `set_`, `resize_`, ``data =`` and `t_` change a tensor, also to a lazy view; and its storage can be made smaller.
    address = array.data_ptr()
    kind = array.dtype
    size = array.shape
    strides = array.stride()
    nbytes = array.untyped_storage().nbytes()
    return lambda other: (
        known() is other
        and other.data_ptr() == address
        and other.dtype is kind
        and other.shape == size
        and other.stride() == strides
        and other.untyped_storage().nbytes() == nbytes
        and not (other.is_conj() or other.is_neg())
    )


def unchanged(*arrays: Any) -> Array | None:
    """Return what `Library.is_same` takes, to see whether arrays have the memory, layout and flags of now.

    None: they are not all of NumPy.
    """
    numbers: list[int] = []
    places = 0
    for array in arrays:
        if type(array) is not np.ndarray:
            return None
        found = layout_of(array)
        if not found:
            return None
        for address, count in found:
            numbers += [address, count, *(ctypes.c_int64 * count).from_address(address)]
            places += 1
    return np.array([places, *numbers], np.int64)


def same_kind(tensor: Any, nbytes: int) -> Callable[[Any], bool]:
    """Return a function that says whether a tensor can be used where it is, as this one could be.

    Args:
        tensor: of torch, in host memory.
        nbytes: of its elements.
    """
    kind = type(tensor)
    dtype = tensor.dtype
    layout = tensor.layout
    shape = tensor.shape
    return lambda other: (
        type(other) is kind
        and other.shape == shape
        and other.dtype is dtype
        and other.is_cpu
        and other.layout is layout
        and not (other.requires_grad or other.is_neg() or other.is_conj())
        and other.is_contiguous()
        and other.data_ptr() != 0
        and other.untyped_storage().nbytes() >= other.storage_offset() * other.itemsize + nbytes
    )
