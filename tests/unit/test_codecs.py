"""Wire formats: bits as ml_dtypes and float64 define them, error bounds, and what becomes of NaN, infinity and zero."""

from __future__ import annotations

import threading
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ringreduce.buffers.codecs import CODECS, Codec
from ringreduce.collectives.compressed import best_codec
from ringreduce.common.config import Config
from ringreduce.native.cache import loops
from ringreduce.native.library import CODECS as LOOPS
from ringreduce.testing import run_threads

SCALED = {"fp8": 448, "int8": 127, "int4": 7}


def codecs() -> dict[str, Codec]:
    """Return all codecs; where Numba is installed, also those with compiled loops."""
    library = loops(Config.from_environ().caches, LOOPS).library
    best = {f"{name}, compiled": best_codec(name, library) for name in CODECS}
    return {**CODECS, **{name: codec for name, codec in best.items() if codec not in CODECS.values()}}


TRIED = codecs()
ALL = pytest.mark.parametrize("codec", TRIED.values(), ids=TRIED)
ALL_SCALED = pytest.mark.parametrize(
    "codec",
    [each for each in TRIED.values() if each.name in SCALED],
    ids=[name for name, each in TRIED.items() if each.name in SCALED],
)
BLOCKS = {"bf16": 1, "fp16": 1, "fp8": 256, "int8": 256, "int4": 64}
SMALLEST_NORMAL = 2.0**-126
LARGEST = float(np.finfo(np.float32).max)
SEVERAL_PIECES = 3 * 32768 + 256 + 77

#: Few elements of any kind, repeated with growing factors, so that most arrays have several blocks of many sizes.
FLOATS = hnp.arrays(np.float32, st.integers(0, 70), elements=st.floats(width=32))
FINITE = hnp.arrays(np.float32, st.integers(0, 70), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))


def encoded(codec: Codec, values: np.ndarray) -> np.ndarray:
    """Return the bytes of an array, which are written over others."""
    target = np.full(codec.nbytes(values.size), 0xA5, np.uint8)
    codec.encode(values, target)
    return target


def decoded(codec: Codec, source: np.ndarray, count: int) -> np.ndarray:
    """Return the values that bytes stand for, which are written over others."""
    target = np.full(count, np.nan, np.float32)
    codec.decode(source, target)
    return target


def passed(codec: Codec, values: np.ndarray) -> np.ndarray:
    """Return what arrives at the other end."""
    return decoded(codec, encoded(codec, values), values.size)


def spread(values: np.ndarray) -> np.ndarray:
    """Return an odd count of blocks from a few elements: their multiples from 1 down, so that no two are the same."""
    factors = np.linspace(1, 0.1, 11, dtype=np.float32)
    return np.multiply.outer(factors, values).reshape(-1)


def scale_of(block: np.ndarray, largest: int) -> np.float32:
    """Return the scale that a block has to get, in the simplest words; NaN if it has a NaN or an infinity."""
    if not np.isfinite(block).all():
        return np.float32(np.nan)
    exact = np.float32(np.abs(block.astype(np.float64)).max() / largest)
    return np.float32(max(exact, np.float32(SMALLEST_NORMAL)).astype(ml_dtypes.bfloat16))


def codes_of(name: str, quotients: np.ndarray) -> bytes:
    """Return the codes of a block of values in units of scale, element by element."""
    if name == "fp8":
        return quotients.astype(ml_dtypes.float8_e4m3fn).tobytes()
    integers = [round(float(quotient)) for quotient in quotients]
    if name == "int8":
        return bytes(integer % 256 for integer in integers)
    nibbles = [integer + 8 for integer in integers] + [0] * (len(integers) % 2)
    return bytes(low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True))


def reference(name: str, values: np.ndarray) -> bytes:
    """Return the encoding by a scaled codec, block by block."""
    result = b""
    for start in range(0, values.size, BLOCKS[name]):
        block = values[start : start + BLOCKS[name]]
        scale = scale_of(block, SCALED[name])
        result += b"\xc0\x7f" if np.isnan(scale) else scale.astype(ml_dtypes.bfloat16).tobytes()
        quotients = np.zeros(block.size) if np.isnan(scale) else block.astype(np.float64) / np.float64(scale)
        result += codes_of(name, quotients.astype(np.float32))
    return result


def test_the_formats_and_their_blocks() -> None:
    """There are five formats, found by name, from the most bits to the fewest."""
    assert [(name, codec.block) for name, codec in CODECS.items()] == list(BLOCKS.items())
    assert [codec.name for codec in CODECS.values()] == list(CODECS)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("bf16", {0: 0, 1: 2, 7: 14}),
        ("fp16", {0: 0, 1: 2, 7: 14}),
        ("fp8", {0: 0, 1: 3, 255: 257, 256: 258, 257: 261, 1024: 1032}),
        ("int8", {0: 0, 1: 3, 255: 257, 256: 258, 257: 261, 1024: 1032}),
        ("int4", {0: 0, 1: 3, 2: 3, 3: 4, 63: 34, 64: 34, 65: 37, 1024: 544}),
    ],
)
def test_encoded_sizes(name: str, sizes: dict[int, int]) -> None:
    """A block takes two bytes for its scale, and its codes; a last, shorter one only what it needs."""
    assert {count: CODECS[name].nbytes(count) for count in sizes} == sizes


@ALL
@pytest.mark.parametrize("count", [0, 1, 2, 3, 63, 64, 65, 255, 257, 1023, SEVERAL_PIECES])
def test_any_count_passes(codec: Codec, count: int, rng: np.random.Generator) -> None:
    """Odd counts, none at all, and several pieces: all elements arrive, off by no more than int4 allows."""
    values = rng.standard_normal(count, np.float32)
    np.testing.assert_allclose(passed(codec, values), values, rtol=0, atol=0.5 * 6 / 7)


@ALL
@pytest.mark.parametrize("blocks", [1, 3, 64, 300])
def test_parts_that_are_cut_at_blocks_give_the_bytes_of_the_whole(
    codec: Codec, blocks: int, rng: np.random.Generator
) -> None:
    """An array may be encoded and decoded in parts: one after the other, their bytes are those of the whole."""
    values = rng.standard_normal(2 * blocks * codec.block + 13, np.float32)
    cut = blocks * codec.block
    left, right = encoded(codec, values[:cut]), encoded(codec, values[cut:])
    whole = encoded(codec, values)
    np.testing.assert_array_equal(np.concatenate([left, right]), whole)
    after = decoded(codec, whole[codec.nbytes(cut) :], values.size - cut)
    np.testing.assert_array_equal(after, decoded(codec, whole, values.size)[cut:])


@pytest.mark.parametrize(("name", "dtype"), [("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)])
def test_sixteen_bits_are_those_of_the_reference(name: str, dtype: type, rng: np.random.Generator) -> None:
    """Any float32 rounds to nearest even, too large ones to infinity; a NaN stays a NaN; decoding is exact."""
    values = rng.integers(0, 1 << 32, SEVERAL_PIECES, dtype=np.uint32).view(np.float32)
    values[:4] = [65519.99, 65520, -np.inf, LARGEST]
    with np.errstate(over="ignore", invalid="ignore"):
        theirs = values.astype(dtype)
    ours = encoded(CODECS[name], values).view(dtype)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(ours.view(np.uint16)[number], theirs.view(np.uint16)[number])
    assert np.isnan(ours[~number].astype(np.float32)).all()
    np.testing.assert_array_equal(passed(CODECS[name], values), theirs.astype(np.float32))


def test_fp8_rounds_as_float8_e4m3fn() -> None:
    """All values of the format, the ties between them, and the float32 next to those, round as ml_dtypes rounds."""
    values = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = (values[1:] + values[:-1]) / 2
    points = np.concatenate([values, ties, [1e-3, 1e-20, 1e-45]]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(448))])
    points = np.concatenate([points, -points])
    # A 448 in each block: its scale is 1.
    rows = np.full((-(-points.size // 255), 256), 448, np.float32)
    rows[:, 1:].flat[: points.size] = points
    expected = rows.astype(ml_dtypes.float8_e4m3fn)
    actual = encoded(CODECS["fp8"], rows.reshape(-1)).reshape(len(rows), -1)
    np.testing.assert_array_equal(actual[:, 2:], expected.view(np.uint8))
    np.testing.assert_array_equal(passed(CODECS["fp8"], rows.reshape(-1)), expected.astype(np.float32).reshape(-1))


@ALL_SCALED
@given(few=FLOATS)
def test_blocks_are_those_of_the_reference(codec: Codec, few: np.ndarray) -> None:
    """Scales and codes are those that float64 gives, block by block, whatever the elements are."""
    with np.errstate(all="ignore"):
        values = spread(few)
    assert encoded(codec, values).tobytes() == reference(codec.name, values)


@ALL_SCALED
def test_many_blocks_are_those_of_the_reference(codec: Codec, rng: np.random.Generator) -> None:
    """The same for several pieces and a short last block, with blocks of all magnitudes that float32 has."""
    exponents = np.repeat(rng.integers(-140, 128, -(-SEVERAL_PIECES // 64)), 64)[:SEVERAL_PIECES]
    values = np.ldexp(rng.uniform(-1, 1, SEVERAL_PIECES), exponents).astype(np.float32)
    assert encoded(codec, values).tobytes() == reference(codec.name, values)


@ALL
@given(few=FLOATS)
def test_decoded_values_keep_their_bytes(codec: Codec, few: np.ndarray) -> None:
    """What was decoded gives the same bytes when it is encoded again: a value that is passed on loses nothing more."""
    with np.errstate(all="ignore"):
        once = encoded(codec, spread(few))
    again = encoded(codec, decoded(codec, once, 11 * few.size))
    np.testing.assert_array_equal(again, once)


@ALL
@pytest.mark.parametrize("value", [0.0, -0.0])
def test_zeros_stay_zeros(codec: Codec, value: float) -> None:
    """A block of zeros is exact, and so is a zero among others."""
    values = np.full(2 * codec.block + 5, value, np.float32)
    np.testing.assert_array_equal(passed(codec, values), 0)
    values[0] = 3.7e20 if codec.name != "fp16" else 3.7
    np.testing.assert_array_equal(passed(codec, values)[1:], 0)


@ALL_SCALED
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_block_with_nan_or_infinity_becomes_nan(codec: Codec, value: float, place: int) -> None:
    """An overflow reaches all of its block, be it the shorter one, and nothing else."""
    values = np.linspace(-1, 1, 2 * codec.block + 5, dtype=np.float32)
    whole = passed(codec, values)
    values[place * codec.block + 3] = value
    touched = np.arange(values.size) // codec.block == place
    actual = passed(codec, values)
    assert np.isnan(actual[touched]).all()
    np.testing.assert_array_equal(actual[~touched], whole[~touched])


@ALL_SCALED
@pytest.mark.parametrize("value", [LARGEST, 3e38, -LARGEST])
def test_huge_values_stay_finite(codec: Codec, value: float) -> None:
    """The largest float32 is no overflow: what comes out is as large but for the rounding of the scale."""
    values = np.full(codec.block + 3, value, np.float32)
    np.testing.assert_allclose(passed(codec, values), values, rtol=2.0**-8)


@ALL_SCALED
def test_blocks_of_subnormal_numbers(codec: Codec) -> None:
    """The scale is the smallest normal number at least, so no subnormal number is off by more than half of that."""
    values = np.arange(codec.block + 3, dtype=np.uint32).view(np.float32).copy()
    values[1::2] += np.float32(0.9 * SMALLEST_NORMAL)
    errors = np.abs(passed(codec, values).astype(np.float64) - values)
    assert errors.max() <= SMALLEST_NORMAL / 2


@ALL
def test_decode_add_adds_what_decode_gives(codec: Codec, rng: np.random.Generator) -> None:
    """The sum has the bits of a decode and an add, for finite values, NaN and infinities of both signs."""
    values = rng.standard_normal(SEVERAL_PIECES, np.float32)
    values[[3, 700]] = np.nan, np.inf
    source = encoded(codec, values)
    target = rng.standard_normal(values.size, np.float32)
    target[700] = -np.inf
    with np.errstate(invalid="ignore"):
        expected = target + decoded(codec, source, values.size)
    codec.decode_add(source, target)
    np.testing.assert_array_equal(target, expected)


@ALL
def test_no_value_is_an_error(codec: Codec) -> None:
    """Where NumPy raises whatever the processor notices, signalling NaN and underflow among it, a codec is silent."""
    values = np.zeros((6, 256), np.float32)
    values[:5, 7] = [LARGEST, -np.inf, np.nan, 1e-45, 1]
    values[0, 8] = values[4, 8] = 1e-40
    values.view(np.uint32)[5, 7] = 0x7F800001
    flat = values.reshape(-1)
    with np.errstate(all="raise"):
        wire = encoded(codec, flat)
        target = decoded(codec, wire, flat.size)
        np.negative(target, out=target)
        codec.decode_add(wire, target)
    firsts = np.isfinite(target.reshape(values.shape)[:, 0])
    assert firsts.tolist() == [True, codec.block == 1, codec.block == 1, True, True, codec.block == 1]


@ALL
def test_read_only_and_unaligned_memory(codec: Codec, rng: np.random.Generator) -> None:
    """Sources may be read-only, and bytes may begin anywhere; nothing is written beside the target."""
    values = rng.standard_normal(2 * codec.block + 3, np.float32)
    expected = encoded(codec, values)
    values.flags.writeable = False
    around = np.full(expected.size + 2, 0x5A, np.uint8)
    codec.encode(values, around[1:-1])
    np.testing.assert_array_equal(around[1:-1], expected)
    assert around[0] == around[-1] == 0x5A
    around.flags.writeable = False
    floats = np.full(values.size + 2, 7, np.float32)
    codec.decode(around[1:-1], floats[1:-1])
    np.testing.assert_array_equal(floats[1:-1], decoded(codec, expected, values.size))
    assert floats[0] == floats[-1] == 7


@ALL
def test_threads_share_a_codec(codec: Codec, rng: np.random.Generator) -> None:
    """Threads that encode and decode at the same time get what each of them gets alone."""
    arrays = [rng.standard_normal(SEVERAL_PIECES, np.float32) * 10.0**exponent for exponent in range(4)]
    start = threading.Barrier(len(arrays))

    def work(number: int) -> list[np.ndarray]:
        start.wait()
        return [passed(codec, arrays[number]) for _ in range(3)]

    together = run_threads(len(arrays), work)
    for values, results in zip(arrays, together, strict=True):
        for result in results:
            np.testing.assert_array_equal(result, passed(codec, values))


@ALL
def test_scratch_does_not_grow_with_the_array(codec: Codec) -> None:
    """A million elements, 4 MiB, take less than 1 MiB of memory beside the caller's arrays."""
    values = np.ones(1 << 20, np.float32)
    wire = encoded(codec, values)
    tracemalloc.start()
    codec.encode(values, wire)
    codec.decode(wire, values)
    codec.decode_add(wire, values)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
