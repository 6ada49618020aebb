"""Casts through wider types: bfloat16 as ml_dtypes defines it, integers divided toward zero."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.buffers import DTYPES, divide_toward_zero, narrow, widen, wider

BFLOAT16 = DTYPES["bfloat16"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Overflows and NaN are values here; whoever calls kernels and casts silences NumPy's warnings, once for all."""
    with np.errstate(all="ignore"):
        yield


def narrowed(wide: np.ndarray) -> np.ndarray:
    """Return the bits of float32 values that were narrowed to bfloat16."""
    target = np.empty(wide.shape, np.uint16)
    narrow(wide, BFLOAT16, target)
    return target


def assert_narrows_like_ml_dtypes(bits: np.ndarray) -> None:
    """NaN may have any payload, but stays NaN of its sign; everything else has the same bits."""
    wide = bits.astype(np.uint32).view(np.float32)
    ours, theirs = narrowed(wide), wide.astype(ml_dtypes.bfloat16).view(np.uint16)
    nan = np.isnan(wide)
    np.testing.assert_array_equal(ours[~nan], theirs[~nan])
    assert np.isnan(ours[nan].view(ml_dtypes.bfloat16)).all()
    np.testing.assert_array_equal(ours[nan] >> 15, (bits[nan] >> 31).astype(np.uint16))


UPPER = np.arange(1 << 16, dtype=np.uint32) << 16


@pytest.mark.parametrize("lower", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_narrowing_rounds_to_nearest_even(lower: int) -> None:
    """All upper halves, NaN and inf among them, with lower halves around the tie round as ml_dtypes rounds them."""
    assert_narrows_like_ml_dtypes(UPPER | np.uint32(lower))


def test_narrowing_of_random_bits(rng: np.random.Generator) -> None:
    """Any float32, subnormal or huge, narrows as ml_dtypes narrows it."""
    assert_narrows_like_ml_dtypes(rng.integers(0, 1 << 32, 200_000, dtype=np.uint32))


def test_widening_a_bfloat16_is_exact() -> None:
    """All 2**16 values widen to the float32 of equal value, and narrow back to their own bits."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = widen(bits, BFLOAT16)
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide, bits.view(ml_dtypes.bfloat16).astype(np.float32))
    number = ~np.isnan(wide)
    np.testing.assert_array_equal(narrowed(wide)[number], bits[number])


@pytest.mark.parametrize(
    "name", [name for name, row in DTYPES.items() if row.half or row.kind in ("int", "uint", "bool")]
)
def test_widening_makes_a_contiguous_copy(name: str) -> None:
    """What is widened has the wider type and C order, and is never the caller's memory, whatever its strides."""
    array = np.arange(12).reshape(3, 4).astype(DTYPES[name].storage).T
    wide = widen(array, DTYPES[name])
    assert wide.dtype == wider(DTYPES[name]).storage
    assert wide.flags.c_contiguous
    assert not np.shares_memory(wide, array)
    back = np.empty_like(array)
    narrow(wide, DTYPES[name], back)
    np.testing.assert_array_equal(back, array)


def test_an_array_of_no_dimension_stays_an_array() -> None:
    """A loss is a scalar: widened it must still have a place to store into."""
    wide = widen(np.array(0x4000, np.uint16), BFLOAT16)
    wide[...] *= 1.5
    target = np.empty((), np.uint16)
    narrow(wide, BFLOAT16, target)
    assert target.view(ml_dtypes.bfloat16) == 3.0


def test_narrowing_into_strides() -> None:
    """Results can be stored into a view of any strides."""
    target = np.zeros((3, 4), np.uint16)
    narrow(np.full((4, 3), 1.5, np.float32), BFLOAT16, target.T)
    assert (target == 0x3FC0).all()


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20), st.integers(1, 64))
def test_signed_division_goes_toward_zero(values: list[int], divisor: int) -> None:
    """The quotient is the exact one without its fraction: -7 / 2 is -3."""
    array = np.array(values, np.int64)
    divide_toward_zero(array, divisor)
    assert array.tolist() == [abs(value) // divisor * (1 if value > 0 else -1) for value in values]


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20), st.integers(1, 64))
def test_unsigned_division_goes_toward_zero(values: list[int], divisor: int) -> None:
    """The quotient of unsigned numbers is exact up to the largest of them."""
    array = np.array(values, np.uint64)
    divide_toward_zero(array, divisor)
    assert array.tolist() == [value // divisor for value in values]
