"""Going through a wider type, where a sum in the array's own would overflow or be rounded at every hop."""

from __future__ import annotations

import numpy as np

from ringreduce.buffers.dtypes import DTYPES, Array, DType


def wider(dtype: DType) -> DType:
    """Return the type in which elements of ``dtype`` are summed when they leave it: float32, int64 or uint64."""
    if dtype.half:
        return DTYPES["float32"]
    return DTYPES["uint64"] if dtype.name == "uint64" else DTYPES["int64"]


def widen(view: Array, dtype: DType, out: Array | None = None) -> Array:
    """Return the elements of a view (in ``dtype.storage``) in the wider type, C-contiguous; in ``out`` if given."""
    wide = np.empty(view.shape, wider(dtype).storage) if out is None else out
    if dtype.name == "bfloat16":  # the upper half of a float32
        bits = wide.view(np.uint32)
        np.copyto(bits, view)
        np.left_shift(bits, np.uint32(16), out=bits)
    else:
        np.copyto(wide, view)
    return wide


def narrow(wide: Array, dtype: DType, target: Array) -> None:
    """Store elements of the wider type into a view of ``dtype``; floats round to nearest even."""
    if dtype.name == "bfloat16":
        np.copyto(target, _round_to_bfloat16(wide))
    else:
        np.copyto(target, wide, casting="unsafe")


def divide_toward_zero(wide: Array, divisor: int, scratch: Array | None = None) -> None:
    """Divide integers in place; -7 / 2 gives -3.

    Args:
        wide: the numbers, of a type that also holds them plus or minus the divisor.
        divisor: at least 1.
        scratch: of the same shape and type, is overwritten; None: memory is taken for it.
    """
    if wide.dtype.kind != "u":
        # A negative number is brought up by divisor - 1: then rounding down gives what rounding up gave.
        scratch = np.empty_like(wide) if scratch is None else scratch
        np.right_shift(wide, 8 * wide.itemsize - 1, out=scratch)
        np.bitwise_and(scratch, divisor - 1, out=scratch)
        np.add(wide, scratch, out=wide)
    if divisor & (divisor - 1) == 0:
        np.right_shift(wide, divisor.bit_length() - 1, out=wide)  # several times as fast
    else:
        np.floor_divide(wide, divisor, out=wide)


def _round_to_bfloat16(wide: Array) -> Array:
    bits = wide.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    # Rounding would carry a NaN's payload into the exponent; a quiet NaN keeps its sign.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    chosen: Array = np.where(np.isnan(wide), quiet, rounded)
    return chosen.astype(np.uint16)
