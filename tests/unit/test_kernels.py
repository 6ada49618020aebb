"""The kernels, and casts through wider types, against references computed in float64 or in whole numbers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from suites.conformance import FOLDS

from ringreduce.buffers import DTYPES, divide, divide_toward_zero, kernels_for, narrow, widen, wider
from ringreduce.buffers.kernels import TorchHalfKernels, WideKernels
from ringreduce.common.reduce_ops import ReduceOp

COUNT = 257

HALVES = ["float16", "bfloat16"]

WHOLE = ("int", "uint", "bool")

CASES = [
    (name, op)
    for name in DTYPES
    for op in ReduceOp
    if op.takes(DTYPES[name].kind) and (op is not ReduceOp.AVERAGE or DTYPES[name].kind not in WHOLE)
]

UFUNCS = {
    **FOLDS,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.LAND: np.frompyfunc(lambda a, b: int(bool(a and b)), 2, 1),
    ReduceOp.LOR: np.frompyfunc(lambda a, b: int(bool(a or b)), 2, 1),
    ReduceOp.LXOR: np.frompyfunc(lambda a, b: int(bool(a) != bool(b)), 2, 1),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Overflows and NaN are values here; whoever calls kernels and casts silences NumPy's warnings, once for all."""
    with np.errstate(all="ignore"):
        yield


def native(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def random(name: str, rng: np.random.Generator) -> np.ndarray:
    """Return random elements in their native type: integers over their whole range, floats of ordinary size."""
    kind = DTYPES[name].kind
    if kind in ("int", "uint"):
        limits = np.iinfo(name)
        return rng.integers(limits.min, limits.max, COUNT, dtype=name, endpoint=True)
    if kind == "bool":
        return rng.integers(0, 2, COUNT).astype(bool)
    values = rng.standard_normal(COUNT)
    return (values + 1j * rng.standard_normal(COUNT) if kind == "complex" else values).astype(native(name))


def reference(arrays: list[np.ndarray], op: ReduceOp) -> np.ndarray:
    """Reduce in float64, or in whole numbers without a limit."""
    kind = arrays[0].dtype.kind
    wide = [array.astype(object if kind in "iu" else np.complex128 if kind == "c" else np.float64) for array in arrays]
    if kind == "b":
        wide = arrays
    total = reduce(UFUNCS.get(op, np.add), wide)
    if op is ReduceOp.AVERAGE:
        total = total / len(arrays)
    if kind in "iu":
        bits = 8 * arrays[0].itemsize
        return (
            np.array([int(each) % 2**bits for each in total], np.uint64)
            .astype(f"u{arrays[0].itemsize}")
            .view(arrays[0].dtype)
        )
    return total


def assert_agrees(name: str, actual: np.ndarray, wanted: np.ndarray, roundings: int) -> None:
    """Whole numbers agree exactly, floats to within so many roundings of the largest intermediate value."""
    if DTYPES[name].kind in WHOLE:
        np.testing.assert_array_equal(actual, wanted)
        return
    bits = {"float16": 11, "bfloat16": 8, "float64": 53, "complex128": 53}.get(name, 24)
    wide = np.complex128 if DTYPES[name].kind == "complex" else np.float64
    np.testing.assert_allclose(
        actual.astype(wide), wanted, rtol=roundings * 2.0**-bits, atol=roundings * 8 * 2.0**-bits
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "op"), CASES)
def test_combining_equals_the_reference(name: str, op: ReduceOp, size: int, rng: np.random.Generator) -> None:
    """Any dtype, op and number of sources gives the reference's result, in a new target and in each of the sources."""
    row = DTYPES[name]
    arrays = [random(name, rng) for _ in range(size)]
    wanted = reference(arrays, op)
    results = []
    for place in range(size + 1):
        sources = [array.copy().view(row.storage) for array in arrays]
        target = np.empty(COUNT, row.storage) if place == size else sources[place]
        combine = kernels_for(row, op, size).combine(sources)
        combine(target)
        assert_agrees(name, target.view(native(name)), wanted, roundings=size)
        results.append(target.tobytes())
        for index, source in enumerate(sources):
            assert index == place or source.tobytes() == arrays[index].tobytes(), "a source was written to"
    assert len(set(results)) == 1


@pytest.mark.parametrize(("name", "op"), CASES)
def test_an_average_of_some_terms_is_a_sum(name: str, op: ReduceOp, rng: np.random.Generator) -> None:
    """Of all kernels, averages alone care whether all terms are there: they are divided only then."""
    row = DTYPES[name]
    arrays = [random(name, rng) for _ in range(3)]
    target = np.empty(COUNT, row.storage)
    kernels_for(row, op, 3).combine([array.view(row.storage) for array in arrays], complete=False)(target)
    wanted = reference(arrays, ReduceOp.SUM if op is ReduceOp.AVERAGE else op)
    assert_agrees(name, target.view(native(name)), wanted, roundings=3)


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize(("name", "op"), CASES)
def test_folding_equals_the_reference(name: str, op: ReduceOp, complete: bool, rng: np.random.Generator) -> None:
    """A fold is a combination of two that ends in the first, and can be called again."""
    row = DTYPES[name]
    target, source = random(name, rng), random(name, rng)
    kernels = kernels_for(row, op, 2)
    if op is ReduceOp.AVERAGE and not complete:
        op = ReduceOp.SUM
    once = reference([target, source], op)
    place = target.view(row.storage)
    combine = kernels.combine([place, source.view(row.storage)], complete=complete)
    combine(place)
    assert_agrees(name, target, once, roundings=2)
    twice = reference([target, source], op)
    combine(place)
    assert_agrees(name, target, twice, roundings=2)


@pytest.mark.parametrize("name", HALVES)
def test_bound_kernels_see_new_data(name: str) -> None:
    """A kernel is bound to memory, not to what stood there; 16-bit sums of 1..4 are exact either way."""
    row = DTYPES[name]
    sources = [np.zeros(5, native(name)) for _ in range(4)]
    target = np.empty(5, row.storage)
    for kernels in (WideKernels(row, ReduceOp.SUM, 4), TorchHalfKernels(row, ReduceOp.SUM, 4)):
        combine = kernels.combine([source.view(row.storage) for source in sources])
        for turn in (1, 2):
            for rank, source in enumerate(sources):
                source[:] = turn * (rank + 1)
            combine(target)
            assert target.view(native(name)).tolist() == [10 * turn] * 5


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("op", [op for op in ReduceOp if op.takes("float")], ids=lambda op: op.value)
@pytest.mark.parametrize("name", HALVES)
def test_half_kernels_agree_with_each_other(name: str, op: ReduceOp, size: int, rng: np.random.Generator) -> None:
    """With torch and without it results are equal, overflows and subnormals included; NaN payloads may differ."""
    row = DTYPES[name]
    arrays = [rng.integers(0, 1 << 16, 4096, dtype=np.uint16).astype(np.uint16) for _ in range(size)]
    results = []
    for kernels in (WideKernels(row, op, size), TorchHalfKernels(row, op, size)):
        target = np.empty(4096, row.storage)
        kernels.combine([array.view(row.storage) for array in arrays])(target)
        results.append(target.view(native(name)))
    ours, theirs = results
    nan = np.isnan(ours)
    np.testing.assert_array_equal(nan, np.isnan(theirs))
    np.testing.assert_array_equal(ours[~nan].astype(np.float32), theirs[~nan].astype(np.float32))


@pytest.mark.parametrize("name", HALVES)
def test_half_sums_are_rounded_once(name: str) -> None:
    """Many small terms survive beside a large one, as they do in float32 and would not in 16 bits."""
    row = DTYPES[name]
    large, small = (2048.0, 0.75) if name == "float16" else (256.0, 0.75)
    arrays = [np.full(3, value, native(name)) for value in (large, small, small, small)]
    wanted = np.full(3, large + 3 * small, np.float32).astype(native(name))
    assert wanted[0] != large
    for kernels in (WideKernels(row, ReduceOp.SUM, 4), TorchHalfKernels(row, ReduceOp.SUM, 4)):
        target = np.empty(3, row.storage)
        kernels.combine([array.view(row.storage) for array in arrays])(target)
        assert target.view(native(name)).tolist() == wanted.tolist()


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("op", [op for op in ReduceOp if op.takes("float")], ids=lambda op: op.value)
@pytest.mark.parametrize("name", [name for name, row in DTYPES.items() if row.kind in ("float", "complex")])
def test_nan_of_any_rank_wins(name: str, op: ReduceOp, place: int) -> None:
    """A NaN in one source is a NaN in the result of every op, min and max included, and nowhere else."""
    row = DTYPES[name]
    arrays = [np.ones(3, native(name)) for _ in range(3)]
    arrays[place][1] = np.nan
    target = np.empty(3, row.storage)
    kernels_for(row, op, 3).combine([array.view(row.storage) for array in arrays])(target)
    assert np.isnan(target.view(native(name))).tolist() == [False, True, False]


def test_integers_wrap_around() -> None:
    """A sum or product that is too large wraps around, as NumPy's does."""
    for name, op, values, wanted in (
        ("int8", ReduceOp.SUM, (100, 100), -56),
        ("uint8", ReduceOp.SUM, (200, 100), 44),
        ("int32", ReduceOp.PRODUCT, (1 << 30, 4), 0),
        ("uint64", ReduceOp.SUM, (2**64 - 1, 2), 1),
    ):
        target = np.empty(1, name)
        kernels_for(DTYPES[name], op, 2).combine([np.array([value], name) for value in values])(target)
        assert target.tolist() == [wanted]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("name", ["float32", "float64", "complex64", "complex128"])
def test_division_rounds_once(name: str, size: int, rng: np.random.Generator) -> None:
    """An average's division is the correctly rounded quotient."""
    array = random(name, rng)
    wanted = array / native(name).type(size)
    divide(array, size)
    np.testing.assert_array_equal(array, wanted)


def test_empty_views_are_combined() -> None:
    """A rank may own no element at all."""
    for name in ("float32", "bfloat16"):
        row = DTYPES[name]
        empty = [np.empty(0, row.storage) for _ in range(3)]
        kernels_for(row, ReduceOp.SUM, 3).combine(empty)(empty[0])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 256, 257])  # 16 bits hold the sum of 256 terms of 8 bits
@pytest.mark.parametrize("name", [name for name in DTYPES if DTYPES[name].kind in WHOLE])
def test_averages_of_integers(name: str, size: int, rng: np.random.Generator) -> None:
    """They are what whole numbers give, rounded toward zero, over the whole range, whatever the sum."""
    arrays = [random(name, rng) for _ in range(size)]
    limits = (0, 1) if name == "bool" else (np.iinfo(name).min, np.iinfo(name).max)
    for array in arrays:
        array[:2] = limits
        array[COUNT // 2 :] = limits[1]
    arrays[0][COUNT // 2] = limits[0]
    totals = [sum(int(each) for each in terms) for terms in zip(*arrays, strict=True)]
    wanted = np.array([abs(each) // size * (1 if each >= 0 else -1) for each in totals], dtype=object).astype(name)
    combine = kernels_for(DTYPES[name], ReduceOp.AVERAGE, size).combine(arrays)
    for target in (np.empty(COUNT, name), arrays[-1]):
        combine(target)
        np.testing.assert_array_equal(target, wanted)


BFLOAT16 = DTYPES["bfloat16"]


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


@pytest.mark.parametrize(("dtype", "least", "most"), [(np.int64, -(2**63), 2**63 - 1), (np.uint64, 0, 2**64 - 1)])
@given(data=st.data(), divisor=st.integers(1, 64))
def test_division_goes_toward_zero(dtype: type, least: int, most: int, data: st.DataObject, divisor: int) -> None:
    """The quotient is the exact one without its fraction, up to the largest numbers: -7 / 2 is -3."""
    values = data.draw(st.lists(st.integers(least, most), max_size=20))
    array = np.array(values, dtype)
    divide_toward_zero(array, divisor)
    assert array.tolist() == [abs(value) // divisor * (1 if value > 0 else -1) for value in values]
