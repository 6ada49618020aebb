"""Whether a call comes again: with the array of an earlier one, or with one that may stand in for it.

A program that calls with the same object again may have moved or reshaped it meanwhile: `same_memory`. One that has new
tensors in each step, as torch's gradients may be, calls with the same name and another object: `same_kind`. What they
return takes one call of Python, a tenth of a small collective, so neither is made of the other.

Compiled programs have no array objects: their layouts are keys. In a training step the binding looks at each gradient
(`Slot.look`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce.buffers.numpy_private import address_field


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

        def is_same(given: Any, keeps: object = known) -> bool:
            return (
                data.value == address
                and given.strides == strides
                and given.shape == shape
                and given.dtype is dtype
                and (not written or given.flags.writeable)
            )

        return is_same
    # `set_`, `resize_`, ``data =`` and `t_` change a tensor, also to a lazy view; and its storage can be made smaller.
    address = array.data_ptr()
    kind = array.dtype
    size = array.shape
    strides = array.stride()
    nbytes = array.untyped_storage().nbytes()
    return lambda given: (
        known() is given
        and given.data_ptr() == address
        and given.dtype is kind
        and given.shape == size
        and given.stride() == strides
        and given.untyped_storage().nbytes() == nbytes
        and not (given.is_conj() or given.is_neg())
    )


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
    return lambda given: (
        type(given) is kind
        and given.shape == shape
        and given.dtype is dtype
        and given.is_cpu
        and given.layout is layout
        and not (given.requires_grad or given.is_neg() or given.is_conj())
        and given.is_contiguous()
        and given.data_ptr() != 0
        and given.untyped_storage().nbytes() >= given.storage_offset() * given.itemsize + nbytes
    )
