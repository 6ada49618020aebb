"""Wire formats: float32 arrays in 16, 8 or 4 bits per element.

==== ========= ===== ================================================ =========================
name bits each block values that a block can hold, in units of scale  error, at most
==== ========= ===== ================================================ =========================
bf16 16        1     any bfloat16 (no scale)                          2**-8 of the value
fp16 16        1     any float16 (no scale); inf from 65520 on        2**-11 of the value
fp8  8         256   the finite float8_e4m3fn: 0, 2**-9, ..., 448     2**-4 of the value
int8 8         256   -127 ... 127                                     half a scale
int4 4         64    -7 ... 7                                         half a scale
==== ========= ===== ================================================ =========================

("Of the value" holds from the format's smallest normal number on; below it the error is half the spacing there.)

A block of a scaled format is its scale, a bfloat16, and then its codes; the last block of an array may be shorter. So
an array that is cut at multiples of the block may be encoded in parts: the parts' bytes, one after the other, are those
of the whole. Multi-byte fields are little-endian.

The scale is the largest magnitude in the block divided by the largest value of the format, L, rounded to nearest even.
Why that neither clips nor wastes: a bfloat16 has 8 significant bits, so the largest element comes out within
(1 +- 2**-8) L, and that rounds to L in each of the formats (127 * 2**-8 < 1/2). The products L * scale and code * scale
need at most 15 bits: they are exact in float32, and values that were decoded give the same bytes when they are encoded
again. Those of the largest float32 are still finite. Scales are never below the smallest normal number, 2**-126; so
there is no division by zero, and subnormal numbers come out as multiples of 2**-126 (fp8: of 2**-135).

A block with a NaN or an infinity among its elements decodes to NaN as a whole: an overflow has to reach code that looks
for it (a gradient scaler does), and there is no finite scale that would not hide it.

Everything is done in pieces that stay in the cache, with scratch that belongs to the call: a codec has no state, and
any number of threads may use one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from ringreduce.buffers import DTYPES, DType, address_of, narrow, widen
from ringreduce.buffers.dtypes import Array, Bytes
from ringreduce.common.partition import pieces

Floats = npt.NDArray[np.float32]

#: Elements per piece: 128 KiB of float32, so that a piece and its temporaries stay in the L2 cache. No message has
#: more, but in int4 where the settings allow for longer segments.
_PIECE: Final = 1 << 15
_SMALLEST_NORMAL: Final = np.finfo(np.float32).smallest_normal
_BFLOAT16: Final = DTYPES["bfloat16"]
_SCALE_NBYTES: Final = 2
_U16: Final = np.dtype("<u2")


class Codec(ABC):
    """One wire format. All ranks use the same one; its methods are local, and safe in any thread.

    Values are one-dimensional C-contiguous float32 arrays, encoded ones uint8 arrays of ``nbytes(values.size)``; both
    belong to the caller and do not overlap. Whatever the values are, there is no warning and no error.

    Attributes:
        name: the key in ``CODECS``.
        block: elements that share a scale, 1 if there is none. Arrays are to be cut at multiples of it.
    """

    name: str
    block: int

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """Return the bytes that ``count`` elements take."""

    @abstractmethod
    def encode(self, source: Floats, target: Bytes) -> None:
        """Write the encoding of ``source`` into all of ``target``. Equal values give equal bytes everywhere."""

    @abstractmethod
    def decode(self, source: Bytes, target: Floats) -> None:
        """Overwrite ``target`` with the values that ``source`` encodes."""

    @abstractmethod
    def decode_add(self, source: Bytes, target: Floats) -> None:
        """Add the values that ``source`` encodes to ``target``, with one float32 rounding each."""


class _CodecInPieces(Codec):
    """A codec by NumPy."""

    def encode(self, source: Floats, target: Bytes) -> None:
        scratch = np.empty(min(source.size, _PIECE), np.float32)
        with np.errstate(all="ignore"):
            for values, encoded in self._pieces(source, target):
                self._encode_piece(values, encoded, scratch[: values.size].reshape(values.shape))

    def decode(self, source: Bytes, target: Floats) -> None:
        for values, encoded in self._pieces(target, source):
            self._decode_piece(encoded, values)

    def decode_add(self, source: Bytes, target: Floats) -> None:
        scratch = np.empty(min(target.size, _PIECE), np.float32)
        with np.errstate(all="ignore"):
            for values, encoded in self._pieces(target, source):
                decoded = scratch[: values.size].reshape(values.shape)
                self._decode_piece(encoded, decoded)
                values += decoded

    @abstractmethod
    def _pieces(self, values: Floats, encoded: Bytes) -> Iterator[tuple[Floats, Array]]:
        """Yield pieces of values, and what they are encoded as."""

    @abstractmethod
    def _encode_piece(self, values: Floats, encoded: Array, scratch: Floats) -> None:
        """Encode a piece; ``scratch`` is as large as the values."""

    @abstractmethod
    def _decode_piece(self, encoded: Array, values: Floats) -> None:
        """Overwrite a piece of values."""


class _HalfCodec(_CodecInPieces):
    """A 16-bit float per element, rounded to nearest even; NaN stays NaN, and what is too large becomes infinite."""

    block = 1

    def __init__(self, name: str, dtype: DType) -> None:
        self.name = name
        self._dtype = dtype

    def nbytes(self, count: int) -> int:
        return count * self._dtype.itemsize

    def _pieces(self, values: Floats, encoded: Bytes) -> Iterator[tuple[Floats, Array]]:
        assert encoded.size == self.nbytes(values.size)
        halves = encoded.view(self._dtype.storage)
        for piece in pieces(0, values.size, _PIECE):
            yield values[piece], halves[piece]

    def _encode_piece(self, values: Floats, encoded: Array, scratch: Floats) -> None:
        narrow(values, self._dtype, encoded)

    def _decode_piece(self, encoded: Array, values: Floats) -> None:
        widen(encoded, self._dtype, values)


class _ScaledCodec(_CodecInPieces):
    """Blocks of small codes with one scale each; the module says how scales are chosen.

    Args:
        name: the key in ``CODECS``.
        bits: of a code.
        block: elements per scale; divides ``_PIECE``.
        largest: the largest value that a code can represent.
    """

    def __init__(self, name: str, *, bits: int, block: int, largest: int) -> None:
        self.name = name
        self.block = block
        self._bits = bits
        self._largest = np.float32(largest)
        self._starts = np.arange(0, _PIECE, block)

    def nbytes(self, count: int) -> int:
        full, tail = divmod(count, self.block)
        return full * self._row_nbytes(self.block) + (self._row_nbytes(tail) if tail else 0)

    @abstractmethod
    def _quantise(self, scaled: Floats, codes: Bytes) -> None:
        """Round values in units of scale, (blocks, elements), and store their codes; ``scaled`` may be overwritten."""

    @abstractmethod
    def _expand(self, codes: Bytes, scaled: Floats) -> None:
        """Store the values in units of scale, (blocks, elements), that the codes stand for."""

    def _row_nbytes(self, count: int) -> int:
        """Return the bytes that a block of ``count`` elements takes."""
        return _SCALE_NBYTES + (count * self._bits + 7) // 8

    def _pieces(self, values: Floats, encoded: Bytes) -> Iterator[tuple[Floats, Array]]:
        """Yield (blocks, elements) and (blocks, bytes) of each piece: whole blocks, and last the shorter one."""
        assert encoded.size == self.nbytes(values.size)
        row_nbytes = self._row_nbytes(self.block)
        step = _PIECE // self.block
        full = values.size // self.block
        elements = values[: full * self.block].reshape(full, self.block)
        rows = encoded[: full * row_nbytes].reshape(full, row_nbytes)
        for start in range(0, full, step):
            yield elements[start : start + step], rows[start : start + step]
        if values.size % self.block:
            yield values[full * self.block :].reshape(1, -1), encoded[full * row_nbytes :].reshape(1, -1)

    def _encode_piece(self, values: Floats, encoded: Array, scratch: Floats) -> None:
        scales = self._largest_of_each(values, scratch)
        scales /= self._largest
        np.maximum(scales, _SMALLEST_NORMAL, out=scales)
        broken = ~np.isfinite(scales)
        if broken.any():
            # The same NaN whatever the elements are and the processor makes of them.
            scales[broken] = np.nan
        bits = encoded[:, :_SCALE_NBYTES].view(_U16)
        narrow(scales[:, np.newaxis], _BFLOAT16, bits)
        np.divide(values, widen(bits, _BFLOAT16), out=scratch)
        if broken.any():
            scratch[broken] = 0
        self._quantise(scratch, encoded[:, _SCALE_NBYTES:])

    def _largest_of_each(self, values: Floats, scratch: Floats) -> Floats:
        """Return the largest magnitude in each block; of a block with NaN, a NaN."""
        # As integers, magnitudes have the same order, with NaN behind infinity, and a maximum costs half the time.
        bits = np.bitwise_and(values.view(np.uint32), 0x7FFFFFFF, out=scratch.view(np.uint32))
        return np.maximum.reduceat(bits.reshape(-1), self._starts[: len(values)]).view(np.float32)

    def _decode_piece(self, encoded: Array, values: Floats) -> None:
        self._expand(encoded[:, _SCALE_NBYTES:], values)
        values *= widen(encoded[:, :_SCALE_NBYTES].view(_U16), _BFLOAT16)


class _Int8Codec(_ScaledCodec):
    """Codes are the integers -127 ... 127 in two's complement; ties go to the even one."""

    def _quantise(self, scaled: Floats, codes: Bytes) -> None:
        np.rint(scaled, out=scaled)
        np.copyto(codes.view(np.int8), scaled, casting="unsafe")

    def _expand(self, codes: Bytes, scaled: Floats) -> None:
        np.copyto(scaled, codes.view(np.int8))


class _Int4Codec(_ScaledCodec):
    """Codes are the integers -7 ... 7 plus 8; of two in a byte the first has the lower bits. Ties go to the even one.

    Behind an odd number of codes there are four zero bits.
    """

    def _quantise(self, scaled: Floats, codes: Bytes) -> None:
        np.rint(scaled, out=scaled)
        scaled += np.float32(8)
        nibbles = np.zeros((len(codes), 2 * codes.shape[1]), np.uint8)
        np.copyto(nibbles[:, : scaled.shape[1]], scaled, casting="unsafe")
        pairs = nibbles.view(_U16)
        pairs |= pairs >> 4
        # The cast keeps the lower byte.
        np.copyto(codes, pairs, casting="unsafe")

    def _expand(self, codes: Bytes, scaled: Floats) -> None:
        pairs = codes.astype(_U16, order="C")
        pairs |= pairs << 4
        pairs &= 0x0F0F
        nibbles = pairs.view(np.int8)
        nibbles -= 8
        np.copyto(scaled, nibbles[:, : scaled.shape[1]])


def _values_of_e4m3() -> Floats:
    """Return what the 256 codes of float8_e4m3fn stand for: sign, 4 bits of exponent (bias 7), 3 of mantissa.

    There is no infinity, the exponent 15 is one like others, and the last code of either sign is NaN.

    Source: P. Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433, table 1.
    """
    codes = np.arange(128)
    exponents = codes >> 3
    mantissas = codes & 7
    values = np.where(exponents > 0, (8 + mantissas) * 2.0 ** (exponents - 10), mantissas * 2.0**-9)
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


class _Fp8Codec(_ScaledCodec):
    """Codes are float8_e4m3fn, rounded to nearest even."""

    _VALUES = _values_of_e4m3()

    def _quantise(self, scaled: Floats, codes: Bytes) -> None:
        bits = scaled.view(np.uint32)
        signs = bits >> 24
        signs &= 0x80
        bits &= 0x7FFFFFFF
        # From 2**-6 on, where 1/512 is the spacing, codes are the upper bits of a float32 but for the exponent's bias.
        # Below, they count 512ths. Neither rule gives too much in the other's range once the count ends at 8.
        counts = np.minimum(scaled, np.float32(2.0**-6))
        counts *= np.float32(512)
        np.rint(counts, out=counts)
        rounding = bits >> 20
        rounding &= 1
        rounding += 0x7FFFF
        bits += rounding
        bits >>= 20
        result = bits.view(np.int32)
        result -= (127 - 7) << 3
        np.maximum(result, counts.astype(np.int32), out=result)
        bits |= signs
        np.copyto(codes, bits, casting="unsafe")

    def _expand(self, codes: Bytes, scaled: Floats) -> None:
        # No code is out of range: the mode saves a check, and the copy of the output that goes with it.
        np.take(self._VALUES, codes, out=scaled, mode="clip")


class CompiledCodec(Codec):
    """A codec whose loops are compiled.

    Args:
        codec: the same, by NumPy.
        encode, decode: the loops, see `ringreduce.native.library.Library`.
    """

    def __init__(
        self, codec: Codec, encode: Callable[[int, int, int], int], decode: Callable[[int, int, int, int], int]
    ) -> None:
        self.name = codec.name
        self.block = codec.block
        self._codec = codec
        self._encode = encode
        self._decode = decode

    def nbytes(self, count: int) -> int:
        return self._codec.nbytes(count)

    def encode(self, source: Floats, target: Bytes) -> None:
        self._encode(address_of(source), address_of(target), source.size)

    def decode(self, source: Bytes, target: Floats) -> None:
        self._decode(address_of(source), address_of(target), target.size, 0)

    def decode_add(self, source: Bytes, target: Floats) -> None:
        self._decode(address_of(source), address_of(target), target.size, 1)


#: Names and their codecs, from the most to the fewest bits.
CODECS: Mapping[str, Codec] = {
    codec.name: codec
    for codec in (
        _HalfCodec("bf16", DTYPES["bfloat16"]),
        _HalfCodec("fp16", DTYPES["float16"]),
        _Fp8Codec("fp8", bits=8, block=256, largest=448),
        _Int8Codec("int8", bits=8, block=256, largest=127),
        _Int4Codec("int4", bits=4, block=64, largest=7),
    )
}
