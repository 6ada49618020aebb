"""Compiled loops of the codecs int8 and int4; `ringreduce.buffers.codecs` has the same by NumPy, and the formats."""

from __future__ import annotations

import numba
import numpy as np
from numba import njit, types

from ringreduce.native.intrinsics import bits_of, float_of, pointer_to, rounded
from ringreduce.native.loops import compiled

_floats = pointer_to(types.float32)
_bits = pointer_to(types.int32)
_halves = pointer_to(types.uint16)
_signed = pointer_to(types.int8)
_bytes = pointer_to(types.uint8)

_SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal
_INFINITY = 0x7F800000
_NAN = 0x7FC0  # as a bfloat16
_SCALE_NBYTES = 2
_ROUNDING = 0x7FFF


@njit
def put_scale(source, target, count, largest):
    """Store the scale of a block, a bfloat16, and return it; 0 if the block has a NaN or an infinity."""
    bits = numba.carray(_bits(source), 1)
    most = np.int32(0)
    for i in range(count):
        magnitude = bits[i] & np.int32(0x7FFFFFFF)
        most = max(most, magnitude)
    half = numba.carray(_halves(target), 1)
    if most >= np.int32(_INFINITY):
        half[0] = _NAN
        return np.float32(0)
    scale = bits_of(max(float_of(most) / np.float32(largest), _SMALLEST_NORMAL))
    half[0] = (scale + ((scale >> 16) & 1) + _ROUNDING) >> 16
    return scale_at(target)


@njit
def scale_at(address):
    """Return the scale of a block."""
    return float_of(np.int32(np.int32(numba.carray(_halves(address), 1)[0]) << 16))


@njit
def code_of(value, scale):
    """Return a value in units of scale."""
    return np.int32(rounded(value / scale))


@compiled(types.int64(*[types.int64] * 3))
def encode_int8(source, target, count):
    """Encode floats."""
    for start in range(0, count, 256):
        n = min(256, count - start)
        block = target + start // 256 * (_SCALE_NBYTES + 256)
        scale = put_scale(source + 4 * start, block, n, 127)
        values = numba.carray(_floats(source + 4 * start), 1)
        codes = numba.carray(_signed(block + _SCALE_NBYTES), 1)
        for i in range(n):
            codes[i] = code_of(values[i], scale) if scale else 0
    return 0


@compiled(types.int64(*[types.int64] * 4))
def decode_int8(source, target, count, adds):
    """Decode floats, or add what is decoded to them."""
    for start in range(0, count, 256):
        n = min(256, count - start)
        block = source + start // 256 * (_SCALE_NBYTES + 256)
        scale = scale_at(block)
        values = numba.carray(_floats(target + 4 * start), 1)
        codes = numba.carray(_signed(block + _SCALE_NBYTES), 1)
        for i in range(n):
            value = np.float32(codes[i]) * scale
            values[i] = values[i] + value if adds else value
    return 0


@compiled(types.int64(*[types.int64] * 3))
def encode_int4(source, target, count):
    """Encode floats."""
    for start in range(0, count, 64):
        n = min(64, count - start)
        block = target + start // 64 * (_SCALE_NBYTES + 32)
        scale = put_scale(source + 4 * start, block, n, 7)
        values = numba.carray(_floats(source + 4 * start), 1)
        codes = numba.carray(_bytes(block + _SCALE_NBYTES), 1)
        for i in range(n // 2):
            first = code_of(values[2 * i], scale) if scale else 0
            second = code_of(values[2 * i + 1], scale) if scale else 0
            codes[i] = first + 8 | second + 8 << 4
        if n & 1:
            codes[n // 2] = code_of(values[n - 1], scale) + 8 if scale else 8
    return 0


@compiled(types.int64(*[types.int64] * 4))
def decode_int4(source, target, count, adds):
    """Decode floats, or add what is decoded to them."""
    for start in range(0, count, 64):
        n = min(64, count - start)
        block = source + start // 64 * (_SCALE_NBYTES + 32)
        scale = scale_at(block)
        values = numba.carray(_floats(target + 4 * start), 1)
        codes = numba.carray(_bytes(block + _SCALE_NBYTES), 1)
        for i in range(n // 2):
            pair = np.int32(codes[i])
            first = np.float32((pair & 15) - 8) * scale
            second = np.float32((pair >> 4) - 8) * scale
            values[2 * i] = values[2 * i] + first if adds else first
            values[2 * i + 1] = values[2 * i + 1] + second if adds else second
        if n & 1:
            last = np.float32((np.int32(codes[n // 2]) & 15) - 8) * scale
            values[n - 1] = values[n - 1] + last if adds else last
    return 0
