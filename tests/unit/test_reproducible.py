"""Reproducible sums against exact fractions, and against themselves on other numbers of ranks."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from suites.conformance import expected, sample

import ringreduce as rr
from ringreduce.collectives.sums import reproducible
from ringreduce.collectives.sums.reproducible import ReproducibleAccumulator, reproducible_allreduce
from ringreduce.testing import caught, run_ranks

#: dtype -> significant bits, exponent of the least number above zero, exponent that is too large
FORMATS = {
    np.dtype(np.float16): (11, -24, 16),
    np.dtype(ml_dtypes.bfloat16): (8, -133, 128),
    np.dtype(np.float32): (24, -149, 128),
    np.dtype(np.float64): (53, -1074, 1024),
}
DTYPES = pytest.mark.parametrize("dtype", FORMATS, ids=str)
WORLDS = [(1, None), (2, None), (2, 1), (3, 2), (4, None), (7, None), (7, 2)]


def rounded(exact: Fraction, dtype: Any) -> float:
    """The float of ``dtype`` next to a fraction, of two the even one, by the definition."""
    if exact == 0:
        return 0.0
    digits, least, too_large = FORMATS[np.dtype(dtype)]
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent += Fraction(2) ** exponent <= magnitude  # now 2^(exponent - 1) <= magnitude < 2^exponent
    unit = Fraction(2) ** max(exponent - digits, least)
    nearest = round(exact / unit) * unit
    return float(nearest) if abs(nearest) < Fraction(2) ** too_large else math.copysign(math.inf, exact)


def exact_sums(terms: Any) -> Any:
    """The sums of terms (count, ...) over the first dimension, each rounded once."""
    flat = terms.reshape(len(terms), -1).astype(np.float64)
    sums = [rounded(sum(map(Fraction, column.tolist()), Fraction(0)), terms.dtype) for column in flat.T]
    return np.array(sums).reshape(terms.shape[1:]).astype(terms.dtype)


def scattered(dtype: Any, shape: tuple[int, ...], spread: int) -> Any:
    """Normal numbers times powers of two up to 2^spread either way, as far as the dtype goes."""
    _, least, too_large = FORMATS[np.dtype(dtype)]
    generator = np.random.default_rng(0)
    exponents = generator.integers(max(-spread, least + 2), min(spread + 1, too_large - 6), shape)
    return np.ldexp(generator.standard_normal(shape), exponents).astype(dtype)


def sums_of_ranks(terms: Any, node_size: int | None = None) -> list[Any]:
    """Every rank's result where rank i has terms[i]."""
    return run_ranks(
        len(terms), lambda ranks: reproducible_allreduce(ranks, terms[ranks.rank, ...]), node_size=node_size
    )


def sums_in_place(terms: Any, node_size: int | None = None) -> list[Any]:
    """As `sums_of_ranks`, where the result replaces the terms."""

    def run(communicator: rr.Communicator) -> Any:
        array = terms[communicator.rank, ...].copy()
        assert reproducible_allreduce(communicator, array, out=array) is array
        return array

    return run_ranks(len(terms), run, node_size=node_size)


def sums_of_samples(owners: list[list[int]], terms: Any, node_size: int | None = None) -> list[Any]:
    """Every rank's result where rank i adds the terms whose numbers are owners[i], in that order."""

    def run(communicator: rr.Communicator) -> Any:
        accumulator = ReproducibleAccumulator(terms.shape[1:], terms.dtype)
        for index in owners[communicator.rank]:
            accumulator.add(terms[index, ...])
        return accumulator.allreduce(communicator)

    return run_ranks(len(owners), run, node_size=node_size)


def assert_bits(results: list[Any], answer: Any) -> None:
    for result in results:
        assert (result.dtype, result.shape) == (answer.dtype, answer.shape)
        assert result.tobytes() == answer.tobytes()


# ---- the sum is the correctly rounded one ----


@DTYPES
@pytest.mark.parametrize("spread", [0, 50, 2000])
@pytest.mark.parametrize(("size", "node_size"), WORLDS)
def test_sums_are_rounded_once(size: int, node_size: int | None, spread: int, dtype: Any) -> None:
    """From like magnitudes to the whole range of the type: the exact sum of the ranks' elements, rounded once."""
    terms = scattered(dtype, (size, 3, 13), spread)
    answer = exact_sums(terms)
    assert_bits(sums_of_ranks(terms, node_size), answer)
    assert_bits(sums_of_samples([[rank] for rank in range(size)], terms, node_size), answer)


def test_float64_sums_are_those_of_fsum() -> None:
    """The standard library's exact sum is the same."""
    terms = scattered(np.float64, (4, 101), 300)
    assert_bits(sums_of_ranks(terms), np.array([math.fsum(column) for column in terms.T]))


@DTYPES
@settings(max_examples=20)
@given(data=st.data())
def test_any_terms_in_any_places(dtype: Any, data: st.DataObject) -> None:
    """Whatever the terms and whoever has them: the exact sum, rounded once; ties and last bits are looked for."""
    digits, least, too_large = FORMATS[dtype]
    bits = st.integers(1 << (digits - 1), (1 << digits) - 1) | st.sampled_from([0, 1, 1 << (digits - 1)])
    exponents = st.sampled_from([0, 1, digits - 1, digits, digits + 1, 60, 200]).map(lambda up: least + up)
    numbers = st.builds(
        lambda sign, whole, exponent: sign * math.ldexp(whole, min(exponent, too_large - digits - 4)),
        st.sampled_from([1, -1]),
        bits,
        exponents,
    )
    terms = np.array(data.draw(st.lists(numbers, min_size=1, max_size=6))).astype(dtype).reshape(-1, 1)
    size = data.draw(st.integers(1, 3))
    owner = data.draw(st.lists(st.integers(0, size - 1), min_size=len(terms), max_size=len(terms)))
    owners = [[index for index in range(len(terms)) if owner[index] == rank] for rank in range(size)]
    answer = exact_sums(terms)
    assert_bits(sums_of_samples(owners, terms), answer)
    padded = np.concatenate([terms, np.zeros((1, 1), dtype)])
    assert_bits(sums_of_ranks(padded), answer)


@DTYPES
def test_what_cancels_leaves_nothing_behind(dtype: Any) -> None:
    """A large term and its negative do not swallow a small one, whoever adds them in whatever order."""
    _, least, too_large = FORMATS[np.dtype(dtype)]
    huge, tiny = math.ldexp(1.0, too_large - 2), math.ldexp(1.0, least)
    terms = np.array([[huge, huge, 1e4], [1.0, tiny, -1e4], [-huge, -huge, 0.0]]).astype(dtype)
    for order in itertools.permutations(range(3)):
        assert_bits(sums_of_ranks(terms[list(order)]), np.array([1.0, tiny, 0.0]).astype(dtype))
        assert_bits(sums_of_samples([list(order), []], terms), np.array([1.0, tiny, 0.0]).astype(dtype))


@DTYPES
def test_only_a_sum_that_is_too_large_overflows(dtype: Any) -> None:
    """Partial sums may leave the range of the type."""
    digits, _, too_large = FORMATS[np.dtype(dtype)]
    largest = (2.0**digits - 1) * 2.0 ** (too_large - digits)
    terms = np.array([[largest, largest], [largest, largest], [-largest, 0.0]]).astype(dtype)
    assert_bits(sums_of_ranks(terms), np.array([largest, np.inf]).astype(dtype))
    assert_bits(sums_of_samples([[0, 1], [2]], terms), np.array([largest, np.inf]).astype(dtype))


@DTYPES
def test_halfway_cases_go_to_the_even_neighbour_unless_anything_follows(dtype: Any) -> None:
    """One part in 2^digits is a tie; the least number of the type, on another rank, breaks it."""
    digits, least, _ = FORMATS[np.dtype(dtype)]
    half, tiny = math.ldexp(1.0, -digits), math.ldexp(1.0, least)
    terms = np.array([[1, 1, 1, -1], [half, half, half, -half], [0, tiny, -tiny, -tiny]]).astype(dtype)
    answer = np.array([1, 1 + 2 * half, 1, -1 - 2 * half]).astype(dtype)
    assert_bits(sums_of_ranks(terms), answer)
    assert_bits(sums_of_samples([[2], [0, 1]], terms), answer)


def test_what_float64_cannot_hold_still_counts() -> None:
    """A float32 tie is broken by a bit that rounding to float64 first would lose, in one word or in two."""
    column = [1.0, 2.0**-24, 2.0**-33 + 2.0**-56, -(2.0**-33)]
    terms = np.array([column, [-each for each in column], [*column[:2], 2.0**-70, 0]], np.float32).T
    answer = np.array([1 + 2.0**-23, -1 - 2.0**-23, 1 + 2.0**-23], np.float32)
    assert_bits(sums_of_ranks(np.ascontiguousarray(terms)), answer)
    for column_number in range(3):
        terms_of_one = np.ascontiguousarray(terms[:, column_number : column_number + 1])
        assert_bits(sums_of_ranks(terms_of_one), answer[column_number : column_number + 1])


@pytest.mark.parametrize("ones", range(50, 62))
@pytest.mark.parametrize("sign", [1, -1])
def test_long_runs_of_ones_are_rounded_once(sign: int, ones: int) -> None:
    """Where a number's length is taken from a float that was rounded up, the bits that follow are still in place."""
    whole = (1 << 200) - (1 << (200 - ones))
    for tail in (0, 1, 1 << 60, 1 << 139, (1 << 139) - 1, (1 << 140) - 1):
        parts = [(whole + tail) >> cut & ((1 << 50) - 1) for cut in (150, 100, 50, 0)]
        numbers = [sign * math.ldexp(part, cut) for part, cut in zip(parts, (150, 100, 50, 0), strict=True)]
        terms = np.array(numbers).reshape(4, 1)
        assert_bits(sums_of_ranks(terms), exact_sums(terms))


# ---- the bits do not depend on where and how ----


@DTYPES
@pytest.mark.parametrize("node_size", [None, 1, 2])
def test_the_same_samples_on_any_number_of_ranks(node_size: int | None, dtype: Any) -> None:
    """Twelve samples, dealt to 1, 2, 3, 4 or 7 ranks in blocks or in turn: the same bits."""
    terms = scattered(dtype, (12, 203), 30)
    answer = exact_sums(terms)
    for size in (1, 2, 3, 4, 7):
        in_turn = [list(range(rank, 12, size)) for rank in range(size)]
        in_blocks = [block.tolist()[::-1] for block in np.array_split(np.arange(12), size)]
        for owners in (in_turn, in_blocks):
            assert_bits(sums_of_samples(owners, terms, node_size), answer)


@pytest.mark.parametrize("node_size", [None, 1, 2])
def test_algorithms_give_the_same_bits(node_size: int | None) -> None:
    """What carries the words does not matter."""
    terms = scattered(np.float32, (4, 1003), 40)
    answer = exact_sums(terms)

    def run(communicator: rr.Communicator) -> None:
        names = communicator.algorithms()
        assert len(names) > 3
        assert_bits(
            [reproducible_allreduce(communicator, terms[communicator.rank], algorithm=n) for n in names], answer
        )

    run_ranks(4, run, node_size=node_size)


@DTYPES
def test_blocks_and_groups_change_nothing(monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    """Elements are summed each by themselves, wherever a block or a group of blocks ends; so fusion is no matter."""
    terms = scattered(dtype, (3, 61), 25)
    terms[:, 11:13] = 0
    terms[:, 17:40] = 0
    terms[1, 50] = np.inf
    answer = np.where(np.arange(61) == 50, np.inf, exact_sums(np.where(np.isfinite(terms), terms, 0))).astype(dtype)
    for block, group in [(1, 1), (2, 3), (7, 2), (61, 1)]:
        monkeypatch.setattr(reproducible, "BLOCK", block)
        monkeypatch.setattr(reproducible, "GROUP", group)
        assert_bits(sums_of_ranks(terms), answer)
        assert_bits(sums_of_samples([[0], [1, 2]], terms), answer)


def test_many_blocks() -> None:
    """The sizes as they are: several groups, the last one shorter, and a strided result."""
    count = reproducible.BLOCK * reproducible.GROUP + reproducible.BLOCK + 5

    def run(communicator: rr.Communicator) -> Any:
        array = np.full((2, count), communicator.rank + 0.5, np.float32)
        array[0, :: communicator.rank + 1] = np.float32(1e-20)
        strided = array[:, ::2]
        assert reproducible_allreduce(communicator, strided, out=strided) is strided
        return strided.copy()

    first, second = run_ranks(2, run)
    assert first.tobytes() == second.tobytes()
    assert np.all(first[1] == 2.0)
    assert np.all(first[0] == np.float32(2e-20))


def test_carries_keep_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words of an accumulator are carried before they overflow, however many terms there are.

    With words of 60 bits that takes five terms.
    """
    monkeypatch.setattr(reproducible, "_LIMB", 60)
    monkeypatch.setattr(reproducible, "_TERMS", 4)
    terms = scattered(np.float32, (40, 5), 60)
    terms[:, 1] = -np.abs(terms[:, 1])
    terms[:, 2] = np.float32(2.0**120 - 2.0**96)  # nearly all of a word
    terms[:, 3] = -terms[:, 2]
    terms[20:, 4] = -terms[:20, 4]
    assert_bits(sums_of_samples([list(range(17)), list(range(17, 40))], terms), exact_sums(terms))


# ---- special values ----


@DTYPES
@pytest.mark.parametrize("node_size", [None, 1])
def test_nans_and_infinities(node_size: int | None, dtype: Any) -> None:
    """They come out as from a plain sum, every NaN with the same bits; the elements beside them are not touched."""
    nan, inf = math.nan, math.inf
    columns = [[1, nan, 2], [inf, 1, 2], [1, -inf, -inf], [inf, -inf, 1], [nan, inf, 0], [-nan, nan, 1], [1, 2, 3]]
    terms = np.array(columns).T.astype(dtype)
    answer = np.array([nan, inf, -inf, nan, nan, nan, 6]).astype(dtype)
    for order in itertools.permutations(range(3)):
        assert_bits(sums_of_ranks(terms[list(order)], node_size), answer)
        assert_bits(sums_in_place(terms[list(order)], node_size), answer)
        assert_bits(sums_of_samples([[order[0]], list(order[1:])], terms, node_size), answer)
    answer = np.array([nan, inf, -inf, nan, nan, nan, 3]).astype(dtype)
    assert_bits(sums_of_ranks(terms[:2], node_size), answer)
    assert_bits(sums_in_place(terms[1::-1], node_size), answer)


@DTYPES
def test_zeros_sum_to_positive_zero(dtype: Any) -> None:
    """Of either sign, on all ranks, and where nothing was added."""
    zeros = np.array([[0.0, -0.0, 0.0], [0.0, -0.0, -0.0]]).astype(dtype)
    assert_bits(sums_of_ranks(zeros), np.zeros(3, dtype))
    assert_bits(sums_of_ranks(np.concatenate([zeros, zeros])), np.zeros(3, dtype))
    assert_bits(sums_of_ranks(zeros[1:]), np.zeros(3, dtype))
    assert_bits(sums_of_samples([[0, 1], []], zeros), np.zeros(3, dtype))
    assert_bits(sums_of_samples([[], []], zeros), np.zeros(3, dtype))


# ---- arguments ----


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3, 5)])
@DTYPES
def test_shapes(dtype: Any, shape: tuple[int, ...]) -> None:
    """Scalars and empty arrays are arrays too."""
    terms = np.ones((3, *shape)).astype(dtype)
    for size in (1, 2, 3):
        assert_bits(sums_of_ranks(terms[:size]), np.full(shape, float(size)).astype(dtype))
    assert_bits(sums_of_samples([[0, 1, 2], []], terms), np.full(shape, 3.0).astype(dtype))


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_integers_are_summed_as_ever(dtype: str) -> None:
    """Their plain sum does not depend on the order."""
    parts = [sample(rank, 7, dtype) for rank in range(3)]
    assert_bits(sums_of_ranks(np.array(parts)), expected(parts, rr.SUM))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_in_torch_out(dtype: torch.dtype) -> None:
    """Tensors work as everywhere, bfloat16 too, with and without a place for the result."""

    def run(communicator: rr.Communicator) -> None:
        tensor = torch.full((5,), 1.5, dtype=dtype)
        total = torch.full((5,), 1.5 * communicator.size, dtype=dtype)
        accumulator = ReproducibleAccumulator(tensor.shape, dtype)
        accumulator.add(tensor)
        assert torch.equal(reproducible_allreduce(communicator, tensor), total)
        assert torch.equal(accumulator.allreduce(communicator), total)
        assert accumulator.allreduce(communicator, out=tensor) is tensor
        assert torch.equal(tensor, total)

    run_ranks(2, run)


def test_out_may_overlap_and_inputs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result may go into memory that the input shares; elsewhere the input is left as it was."""
    monkeypatch.setattr(reproducible, "BLOCK", 2)
    monkeypatch.setattr(reproducible, "GROUP", 1)

    def run(communicator: rr.Communicator) -> None:
        memory = np.arange(9, dtype=np.float32)
        reproducible_allreduce(communicator, memory[:8], out=memory[1:])
        assert memory.tolist() == [0, 0, 2, 4, 6, 8, 10, 12, 14]
        kept = memory.copy()
        reproducible_allreduce(communicator, memory)
        assert memory.tobytes() == kept.tobytes()
        strided = np.zeros(18, np.float32)[::2]
        reproducible_allreduce(communicator, memory, out=strided)
        assert strided.tobytes() == (2 * kept).tobytes()

    run_ranks(2, run)


def test_an_accumulator_goes_on_after_a_sum() -> None:
    """Asking for the sum changes nothing about it."""

    def run(communicator: rr.Communicator) -> list[float]:
        accumulator = ReproducibleAccumulator(1, np.float64)
        sums = []
        for term in (1e300, 1.0, -1e300):
            accumulator.add(np.array([term]))
            sums.append(accumulator.allreduce(communicator).item())
        return sums

    assert run_ranks(2, run) == [[2e300, 2e300, 2.0]] * 2


def test_what_is_refused() -> None:
    """Complex numbers and what does not fit, before anything moves."""

    def run(communicator: rr.Communicator) -> list[rr.RingReduceError | None]:
        accumulator = ReproducibleAccumulator(3, np.float32)
        floats = np.ones(3, np.float32)
        read_only = np.ones(3, np.float32)
        read_only.flags.writeable = False
        return [
            caught(reproducible_allreduce, communicator, np.ones(3, np.complex64)),
            caught(reproducible_allreduce, communicator, floats, out=np.ones(4, np.float32)),
            caught(reproducible_allreduce, communicator, floats, out=np.ones(3, np.float64)),
            caught(reproducible_allreduce, communicator, floats, out=read_only),
            caught(accumulator.add, np.ones(4, np.float32)),
            caught(accumulator.add, np.ones(3, np.float64)),
            caught(accumulator.allreduce, communicator, out=np.ones(4, np.float32)),
            caught(ReproducibleAccumulator, 3, np.int32),
        ]

    for errors in run_ranks(2, run):
        assert all(isinstance(error, rr.UnsupportedBufferError) for error in errors)


@pytest.mark.parametrize(
    ("mine", "other"),
    [(np.ones((2, 3)), np.ones((3, 2))), (np.ones(4), np.ones(4, np.float32)), (np.ones(4), np.ones(40_000))],
    ids=["shape", "dtype", "blocks"],
)
def test_ranks_that_disagree_learn_of_it(mine: Any, other: Any) -> None:
    """Another shape or dtype on one rank is an error on all, and the next call works."""

    def run(communicator: rr.Communicator) -> Any:
        error = caught(reproducible_allreduce, communicator, other if communicator.rank == 1 else mine)
        assert isinstance(error, rr.MismatchError)
        return reproducible_allreduce(communicator, np.ones(3)).tolist()

    assert run_ranks(3, run) == [[3.0] * 3] * 3
