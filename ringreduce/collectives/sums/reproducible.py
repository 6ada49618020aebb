"""Sums whose bits depend on the terms alone: not on the number of ranks, the order, the algorithm, fusion or segments.

Every finite float is an integer times a power of two, and integers add without rounding, in any order. So the terms are
cut into 64-bit words, the words are summed over the ranks as integers by an ordinary allreduce, and the exact sum is
rounded once, at the end. The result is the correctly rounded sum: it is off by at most half a unit in the last place,
however much cancels on the way.

The words of one block of `BLOCK` elements cover the bits from the lowest that any rank has set there to the highest.
The ranks agree on these bounds by a maximum, first. The bounds do depend on how the terms are spread over ranks; the
sum does not, as nothing is ever cut off. A word has 62 - b bits of its own, b being those of the number of ranks, so
that sums of words do not overflow.

Two cases are as exact, and quicker. Where float64 has all bits of a group and of its sums, it is summed in place of
words. And the plain sum of two floats is rounded once, so at two ranks an ordinary allreduce makes it.

Bytes: 12 for every block to agree, then 8 per element for each word that the widest block of a group needs. Normally
distributed values take one word in the types up to 32 bits and two in float64: 2 times the bytes of a plain allreduce
for float32 and float64, 4 times for 16-bit floats. The extremes at four ranks are 5 words for float32, 36 for float64.

Time: on four nodes with links of 1 Gbit/s 2.0 to 2.5 times that of a plain allreduce (float32, 16 MiB). Within a node
computing decides: at three and four ranks 7 to 8 ns per element of float32, at two 0.3, against 0.1 to 0.3 for a plain
allreduce. To add a term to an accumulator takes 4 to 6 ns per element.

Special cases: a NaN or infinities of both signs among the terms give NaN (always the same one), other infinities
themselves. A sum of zero is +0.0, of negative zeros too. Only a sum that is too large overflows, to infinity: partial
sums never do.

Source of the idea to sum floats as integers on a grid: U. Kulisch, "Very fast and exact accumulation of products",
Computing 91 (2011), doi:10.1007/s00607-010-0131-2. Rounding to odd, which lets a value be rounded twice as if once:
S. Boldo and G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", IEEE
Transactions on Computers 57 (2008), doi:10.1109/TC.2007.70819. That two 16-bit floats may be added in float32: S. A.
Figueroa, "When is double rounding innocuous?", ACM SIGNUM Newsletter 30 (1995), doi:10.1145/221332.221334.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce.buffers import Array, DType, Operand, as_given, like, narrow, new, widen
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.arguments import CheckingArguments
from ringreduce.common.errors import UnsupportedBufferError
from ringreduce.common.partition import pieces
from ringreduce.common.reduce_ops import MAX, SUM

#: The plain sum of so many floats is rounded once.
_ROUNDED_ONCE = 2
#: Elements that share the bounds of their bits; a few float64 arrays of this length stay in L2.
BLOCK = 1 << 14
#: Blocks that are sent in one allreduce (a group), all with as many words as the widest needs.
GROUP = 32

#: Significant bits of float64.
_DIGITS = 53
_LIMB = 40  # Bits of an accumulator's words.
_TERMS = 1 << 22  # So many terms can be added before carries: 2^(40 + 22) fits into 63 bits.
_WORD = 62  # Bits of a word on the wire, those of the ranks' sum included.
_NOTHING = (-(1 << 20), -(1 << 20), 0)  # The window of zeros.
_NAME = "reproducible_allreduce"  # The name in errors.

#: Significant bits, and the exponent of the least number above zero.
_FORMATS = {"float16": (11, -24), "bfloat16": (8, -133), "float32": (24, -149), "float64": (53, -1074)}


def reproducible_allreduce(
    communicator: Communicator, array: Any, *, out: Any = None, algorithm: str | None = None
) -> Any:
    """Sum the ranks' arrays exactly and round once; every rank gets the same bits. Collective.

    The bits depend on nothing but the values of the ranks' elements. Several terms of one rank are to be added up in a
    `ReproducibleAccumulator`: a sum in floating point before this call is rounded already, and depends on which rank
    has which terms.

    Args:
        communicator: any number of ranks.
        array: any shape and strides; shape and dtype must agree on all ranks. float16, bfloat16, float32 or float64;
            integers and bool, whose plain sum does not depend on the order, go to `Communicator.allreduce`.
        out: where the result goes, ``array`` itself for in place; same shape and dtype. None: a new array.
        algorithm: of the allreduces of the words; see `Communicator.allreduce`.

    Returns:
        ``out``, or the new array.

    Raises:
        UnsupportedBufferError: complex numbers, or ``out`` does not fit. Nothing has moved then.
        MismatchError: shapes or dtypes differ between ranks. Raised on all ranks; nothing has moved then.
    """
    with CheckingArguments(communicator, _NAME):
        source = Operand.of(array)
        whole = source.dtype.integral
        if not whole:
            _require_float(source.dtype)
        result = like(array) if out is None else out
        target = _target(result, source.shape, source.dtype)
        values = source.flat()
        overlaps = out is not None and out is not array and np.may_share_memory(values, target.view)
        if overlaps:
            values = values.copy()
    _require_agreement(communicator, target)
    if whole or (communicator.size <= _ROUNDED_ONCE and not overlaps):
        communicator.allreduce(array, SUM, out=result, algorithm=algorithm)
        if not whole:
            _make_plain_sum_canonical(target)
    else:
        blocks = [_Term(values[piece], source.dtype) for piece in pieces(0, source.count, BLOCK)]
        _merge(communicator, blocks, target, algorithm=algorithm)
    return as_given(array, result) if out is None else result


class ReproducibleAccumulator:
    """An exact sum of any number of arrays, added one by one on any rank; not thread-safe.

    The same terms give the same bits on any number of ranks, whichever rank adds which in whatever order. Memory: 8
    bytes per element for each 40 bits between the highest and the lowest that occur in a block of terms: 16 to 24 with
    normally distributed values, at most 72 with float32.

    Args:
        shape: that of every term.
        dtype: that of every term and of the result: float16, bfloat16, float32 or float64. A torch dtype makes results
            torch tensors.

    Raises:
        UnsupportedBufferError: another dtype.
    """

    def __init__(self, shape: int | Sequence[int], dtype: Any) -> None:
        self._dtype = DType.of(dtype)
        _require_float(self._dtype)
        self._library = "torch" if type(dtype).__module__ == "torch" else "numpy"
        self._shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        sizes = [piece.stop - piece.start for piece in pieces(0, math.prod(self._shape), BLOCK)]
        self._blocks = [_Limbs(size) for size in sizes]

    @np.errstate(all="ignore")
    def add(self, array: Any) -> None:
        """Add a term. Local: ranks may add different numbers of terms, or none.

        Args:
            array: of the accumulator's shape and dtype, with any strides.

        Raises:
            UnsupportedBufferError: it is of another shape or dtype.
        """
        term = Operand.of(array)
        _require_same(term, "the term", self._shape, dtype=self._dtype)
        values = term.flat()
        for limbs, piece in zip(self._blocks, pieces(0, term.count, BLOCK), strict=True):
            limbs.add(_Term(values[piece], self._dtype))

    def allreduce(self, communicator: Communicator, *, out: Any = None, algorithm: str | None = None) -> Any:
        """Return the sum of all ranks' terms, rounded once; every rank gets the same bits. Collective.

        More terms can be added afterwards. Shapes and dtypes must agree on all ranks; arguments and errors are those of
        `reproducible_allreduce`.
        """
        with CheckingArguments(communicator, _NAME):
            result = new(self._shape, self._dtype, self._library) if out is None else out
            target = _target(result, self._shape, self._dtype)
        _require_agreement(communicator, target)
        _merge(communicator, self._blocks, target, algorithm=algorithm)
        return result


# ---- what the ranks exchange ----


@np.errstate(all="ignore")  # Where warnings are errors, one would leave the other ranks waiting.
def _merge(communicator: Communicator, blocks: Sequence[_Block], target: Operand, algorithm: str | None) -> None:
    """Sum blocks, as many and as long on all ranks, into the target. Collective."""
    windows = np.array([block.window() for block in blocks], np.int32).reshape(-1, 3)
    communicator.allreduce(windows, MAX, out=windows)  # The result is the bits of each block on any rank.
    flat = target.flat()
    for group in pieces(0, len(blocks), GROUP):
        part = flat[group.start * BLOCK : group.stop * BLOCK]
        _merge_group(communicator, blocks[group], windows[group], part=part, dtype=target.dtype, algorithm=algorithm)
    if not target.contiguous:
        np.copyto(target.view, flat.reshape(target.shape))


def _merge_group(
    communicator: Communicator,
    blocks: Sequence[_Block],
    windows: Array,
    part: Array,
    dtype: DType,
    algorithm: str | None,
) -> None:
    """Sum consecutive blocks into a part of the result, which may be the memory of the terms."""
    radix = _WORD - communicator.size.bit_length()
    places = list(pieces(0, part.size, BLOCK))
    lows = [-negated for _, negated, _ in windows.tolist()]
    widths = [max(0, top + negated) for top, negated, _ in windows.tolist()]
    # NumPy rounds float64 to float32 first on its way to bfloat16.
    if max(widths) + communicator.size.bit_length() <= _DIGITS and dtype.name != "bfloat16":
        sums = np.empty(part.size)
        for block, place, low in zip(blocks, places, lows, strict=True):
            block.store(sums[place], low)
        communicator.allreduce(sums, SUM, out=sums, algorithm=algorithm)
        _make_canonical(sums)
        np.copyto(part, sums, casting="unsafe")
        return
    counts = [-(-width // radix) for width in widths]
    words = np.zeros((max(counts), part.size), np.int64)
    special = np.zeros(part.size if windows[:, 2].any() else 0, np.float32)
    for block, place, low, count in zip(blocks, places, lows, counts, strict=True):
        block.fill(words[:count, place], low, radix)
        if special.size:
            block.mark(special[place])
    if special.size:
        communicator.allreduce(special, SUM, out=special, algorithm=algorithm)
        special[np.isnan(special)] = np.nan  # The sign and payload of the sum may depend on the order.
    if words.size:
        communicator.allreduce(words, SUM, out=words, algorithm=algorithm)
    for place, low, count in zip(places, lows, counts, strict=True):
        total = _rounded(words[:count, place], low, radix, dtype)
        if special.size:
            total = np.where(special[place] == 0, total, special[place])
        narrow(total, dtype, part[place])


def _require_agreement(communicator: Communicator, target: Operand) -> None:
    """Raise `MismatchError` on all ranks if shapes or dtypes differ."""
    communicator.rendezvous(f"{_NAME}(shape {'x'.join(map(str, target.shape)) or 'scalar'}, {target.dtype.name})")


@np.errstate(all="ignore")
def _make_plain_sum_canonical(target: Operand) -> None:
    """Make zeros of a plain sum positive, and all NaNs the same."""
    flat = target.flat()
    wide = widen(flat, target.dtype) if target.dtype.half else flat
    _make_canonical(wide)
    if wide is not flat:
        narrow(wide, target.dtype, flat)
    if not target.contiguous:
        np.copyto(target.view, flat.reshape(target.shape))


def _make_canonical(values: Array) -> None:
    """Make zeros positive, and all NaNs the same. Stores nothing otherwise: other ranks may store there next time."""
    bits = values.view(f"i{values.itemsize}")
    least = np.iinfo(bits.dtype).min
    if bits.min(initial=0) == least:
        values[bits == least] = 0
    if np.isnan(values.max(initial=0)):
        values[np.isnan(values)] = np.nan


# ---- floats to words ----


class _Term:
    """A block of floats: this rank's terms of the sum of that block."""

    def __init__(self, values: Array, dtype: DType) -> None:
        self._values = values
        self._dtype = dtype

    def _wide(self) -> Array:
        return widen(self._values, self._dtype) if self._dtype.half else self._values

    def window(self) -> tuple[int, int, int]:
        """Return (top, -low, special): all is below 2^top, and a multiple of 2^low; 1 for infinities and NaNs."""
        values = self._wide()
        bits = values.view(np.uint32 if values.itemsize == 4 else np.uint64)
        bits = bits & np.array(~values.dtype.type(-0.0).view(bits.dtype))  # This clears the sign.
        largest = bits.max().view(values.dtype)
        special = not np.isfinite(largest)
        if special:
            bits[~np.isfinite(bits.view(values.dtype))] = 0
            largest = bits.max().view(values.dtype)
        if largest == 0:
            return *_NOTHING[:2], int(special)
        bits -= bits.dtype.type(1)  # By this zeros become the largest.
        smallest = (bits.min() + bits.dtype.type(1)).view(values.dtype)
        digits, least = _FORMATS[self._dtype.name]
        low = max(math.frexp(smallest)[1] - digits, least)
        return math.frexp(largest)[1], -low, int(special)

    def store(self, target: Array, low: int) -> None:
        """Store the terms, which float64 holds."""
        np.copyto(target, self._wide())

    def fill(self, words: Sequence[Array] | Array, low: int, radix: int) -> None:
        """Add what is finite to words: row i counts units of 2^(low + i radix)."""
        rest = self._wide().astype(np.float64)
        if not np.isfinite(rest).all():
            rest[~np.isfinite(rest)] = 0  # There is no integer for them.
        for index in reversed(range(len(words))):
            word = _scaled(rest, -(low + index * radix)).astype(np.int64)  # The conversion cuts off lower bits.
            np.add(words[index], word, out=words[index])
            if index:
                # The difference is exact: both have the same leading bits.
                rest -= _scaled(word.astype(np.float64), low + index * radix)

    def mark(self, special: Array) -> None:
        """Add infinities and NaNs, in float32."""
        values = self._wide()
        special += np.where(np.isfinite(values), 0, values).astype(np.float32)


class _Limbs:
    """The sum of any number of terms of a block, with the methods of `_Term`.

    It consists of words of `_LIMB` bits, made when they are needed. Word i counts units of 2^(i `_LIMB`).
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._words: dict[int, Array] = {}
        self._special: Array | None = None
        self._terms = 0

    def add(self, term: _Term) -> None:
        top, negated, special = term.window()
        if special:
            self._special = np.zeros(self._size, np.float32) if self._special is None else self._special
            term.mark(self._special)
        if top == _NOTHING[0]:
            return
        if self._terms == _TERMS:
            self._carry()
        self._terms += 1
        indices = range(-negated // _LIMB, (top - 1) // _LIMB + 1)
        term.fill([self._word(index) for index in indices], indices[0] * _LIMB, _LIMB)

    def _word(self, index: int) -> Array:
        if index not in self._words:
            self._words[index] = np.zeros(self._size, np.int64)
        return self._words[index]

    def _carry(self) -> None:
        """Make all words at most 2^(`_LIMB` - 1), of either sign, so that they end where the sum does."""
        self._terms = 1  # A carried word is at most as large as one term.
        index = min(self._words, default=0)
        while index <= max(self._words, default=-1):
            word = self._words.get(index)
            if word is not None:
                carry = (word + (1 << (_LIMB - 1))) >> _LIMB
                if carry.any():
                    word -= carry << _LIMB
                    next_word = self._word(index + 1)
                    next_word += carry
            index += 1

    def window(self) -> tuple[int, int, int]:
        self._carry()
        tops = [_NOTHING[0]]
        lows = [-_NOTHING[1]]
        for index, word in self._words.items():
            bits = int(np.bitwise_or.reduce(word))
            if bits:
                tops.append(index * _LIMB + int(np.abs(word).max()).bit_length())
                lows.append(index * _LIMB + (bits & -bits).bit_length() - 1)
        return max(tops), -min(lows), int(self._special is not None)

    def store(self, target: Array, low: int) -> None:
        words = np.zeros((1, self._size), np.int64)
        self.fill(words, low, _WORD)
        np.ldexp(words[0], low, out=target)
        self.mark(target)

    def fill(self, words: Array, low: int, radix: int) -> None:
        for index, word in self._words.items():
            if not word.any():
                continue
            position = index * _LIMB - low
            if position < 0:
                word = word >> -position  # The bits below are zeros.
                position = 0
            row, shift = divmod(position, radix)
            above = np.sign(word) * (np.abs(word) >> (radix - shift))
            words[row] += (word - (above << (radix - shift))) << shift
            if above.any():
                words[row + 1] += above

    def mark(self, special: Array) -> None:
        if self._special is not None:
            special += self._special


_Block = _Term | _Limbs


# ---- words to floats ----


def _scaled(values: Array, exponent: int) -> Array:
    """Return values times 2^exponent, in two steps where that is no float64."""
    if abs(exponent) < 1000:
        return values * 2.0**exponent
    return values * 2.0 ** (exponent // 2) * 2.0 ** (exponent - exponent // 2)


def _rounded(words: Array, low: int, radix: int, dtype: DType) -> Array:
    """Return the words' sum, rounded once: as float64, but for 16-bit floats as float32.

    It still has to be rounded to ``dtype``, with the same result as if that had been the only time.
    """
    if not len(words):
        return np.zeros(words.shape[1], np.float32)
    exponent: Any = low + (len(words) - 1) * radix
    leading = words[-1]
    if len(words) > 1:
        sign = _carried(words, radix)[-1] >> 63  # 0 or -1
        words ^= sign
        words -= sign
        leading, exponent = _leading(_carried(words, radix), exponent, radix)
        leading = (leading ^ sign) - sign
    kept = _to_odd(leading, dtype)
    return _scaled(kept, exponent) if isinstance(exponent, int) else np.ldexp(kept, exponent)


def _carried(words: Array, radix: int) -> Array:
    """Make all words but the last at least 0 and less than 2^radix; return them."""
    for index in range(len(words) - 1):
        carry = words[index] >> radix
        words[index] -= carry << radix
        words[index + 1] += carry
    return words


def _leading(words: Array, exponent: int, radix: int) -> tuple[Array, Array]:
    """Return the leading 62 bits of numbers >= 0, the last one set if any bit after them is, and their unit.

    Args:
        words: at least 0, and all but the last less than 2^radix.
        exponent: the last word counts units of 2^exponent; so does the result, with an exponent for each number.
        radix: the exponent of a word is so much more than that of the one before.
    """
    leading = words[-1]
    exponents = np.full(leading.shape, exponent)
    for index in range(len(words) - 2, -1, -1):
        # Of 0 below 0; one too many if the leading bits are 54 ones or more. Those stay, so that a number of which bits
        # were dropped has length 62 from then on, and takes no more of what follows.
        length = (leading.astype(np.float64).view(np.int64) >> 52) - 1022
        shift = np.minimum(np.maximum(_WORD - length, 0), radix)
        exponent -= radix
        below = radix - shift
        taken = words[index] >> below
        leading = ((leading << shift) | taken) | (words[index] != taken << below)
        exponents -= shift
    return leading, exponents


def _to_odd(whole: Array, dtype: DType) -> Array:
    """Return integers as floats with more bits than ``dtype``: inexact ones get an odd last bit.

    float64 has none with more, and gets the nearest: what is rounded later is only scaled, and sums never have bits
    below the least subnormal number.
    """
    floats = whole.astype(np.float32 if dtype.half else np.float64)
    if dtype.name == "float64":
        return floats
    error = whole - floats.astype(np.int64)
    bits = floats.view(np.int32 if dtype.half else np.int64)
    away = ((error ^ whole) >> 63) | 1  # Away from zero, in units of the last bit: 1 or -1.
    bits += (away * ((error != 0) & (bits & 1 == 0))).astype(bits.dtype)
    return floats


# ---- checks ----


def _require_float(dtype: DType) -> None:
    if dtype.kind != "float":
        raise UnsupportedBufferError(f"reproducible sums take real floats, got {dtype.name}")


def _target(array: Any, shape: tuple[int, ...], dtype: DType) -> Operand:
    target = Operand.of(array)
    _require_same(target, "out", shape, dtype=dtype)
    target.require_writable()
    return target


def _require_same(operand: Operand, what: str, shape: tuple[int, ...], dtype: DType) -> None:
    if operand.shape != shape or operand.dtype != dtype:
        raise UnsupportedBufferError(
            f"{what} has shape {operand.shape} and dtype {operand.dtype.name}, expected {shape} and {dtype.name}"
        )
