"""PowerSGD: what is sent as thin matrices, how close that comes, and what becomes of the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import ConfigError
from ringreduce.testing import run_ranks
from ringreduce.training.compression import Reducer
from ringreduce.training.compression.powersgd import PowerSGD

SIZES = [1, 2, 3, 4]

#: Matrices of two to four dimensions that rank 2 makes smaller, and what is sent as it is: vectors, a number, nothing,
#: and matrices that are too small.
SHAPES = [(7,), (11, 13), (), (9, 3, 5), (0, 4), (2, 3), (7, 5, 3, 3), (1, 50), (1,)]
COMPRESSED = [(11, 13), (9, 3, 5), (7, 5, 3, 3)]

#: What float32 may add to a result of numbers around 1.
TOLERANCE = 2e-5

Array = npt.NDArray[np.float32]
Layout = Callable[..., tuple[list[tuple[int, ...]], list[slice], int]]


def gradients(rank: int, step: int, length: int) -> Array:
    """Return a bucket that is different on each rank and in each step."""
    return np.random.default_rng([23, rank, step]).standard_normal(length).astype(np.float32)


def contents(flat: Array, places: Sequence[slice]) -> bytes:
    """Return the bits of the parameters' parts of a bucket."""
    return b"".join(flat[place].tobytes() for place in places)


def products(rank: int, shape: tuple[int, int], inner: int) -> Array:
    """Return a flat matrix of rank ``inner`` whose columns lie in the same space on all ranks."""
    left = np.random.default_rng(inner).standard_normal((shape[0], inner))
    right = np.random.default_rng([inner, rank]).standard_normal((inner, shape[1]))
    return (left @ right).astype(np.float32).reshape(-1)


def reduce(reducer: Reducer, communicator: Communicator, flat: Array, average: bool = True) -> Array:
    """Return what a reducer makes of this rank's bucket."""
    result = flat.copy()
    reducer.reduce(communicator, result, average)
    return result


def orthonormal(matrix: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the columns of a matrix made orthonormal one after the other, by Gram and Schmidt's rule."""
    columns: list[npt.NDArray[np.float64]] = []
    for column in matrix.T:
        for _ in range(2):  # once more against rounding
            column = column - sum(((other @ column) * other for other in columns), np.zeros_like(column))
        columns.append(column / np.linalg.norm(column))
    return np.stack(columns, axis=1)


class Reference:
    """PowerSGD of one matrix on all ranks at once: algorithms 1 and 2 of the paper, in float64, averaging."""

    def __init__(self, size: int, guess: npt.NDArray[np.float64], shape: tuple[int, int], error_feedback: bool) -> None:
        self.residuals = np.zeros((size, *shape))
        self._guess = guess
        self._error_feedback = error_feedback

    def step(self, grads: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the decompressed average of (ranks, rows, cols)."""
        meant = grads + self.residuals if self._error_feedback else grads
        basis = orthonormal(np.mean(meant @ self._guess, axis=0))
        factors = meant.transpose(0, 2, 1) @ basis
        self.residuals = meant - basis @ factors.transpose(0, 2, 1)
        self._guess = np.mean(factors, axis=0)
        return basis @ self._guess.T


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"rank": 0}, "rank"), ({"min_ratio": 0.5}, "min_ratio"), ({"min_ratio": math.nan}, "min")],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    """A rank below 1 sends nothing, and a ratio below 1 more than there is."""
    with pytest.raises(ConfigError, match=message):
        PowerSGD(**settings)


def test_what_is_compressed() -> None:
    """Matrices that become smaller, by more than min_ratio; never vectors, however long."""
    assert [shape for shape in SHAPES if PowerSGD(2).compresses(shape)] == COMPRESSED
    square = (8, 8)
    assert PowerSGD(3).compresses(square)
    assert not PowerSGD(4).compresses(square)  # 64 numbers instead of 64
    assert PowerSGD(1, min_ratio=3.9).compresses(square)
    assert not PowerSGD(1, min_ratio=4.0).compresses(square)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("inner", [1, 2])
def test_matrices_of_small_rank_are_exact(layout: Layout, size: int, average: bool, inner: int) -> None:
    """If the ranks' matrices are of rank r or less, with columns in one space, nothing is lost, in the first step."""
    shapes, places, length = layout([(11, 13), (5,)])

    def run(communicator: Communicator) -> tuple[Array, float]:
        flat = gradients(communicator.rank, 0, length)
        flat[places[0]] = products(communicator.rank, (11, 13), inner)
        reducer = PowerSGD(2).reducer(shapes, places)
        return reduce(reducer, communicator, flat, average), reducer.error

    combine = np.mean if average else np.sum
    matrix = combine([products(rank, (11, 13), inner) for rank in range(size)], axis=0)
    vector = combine([gradients(rank, 0, length)[places[1]] for rank in range(size)], axis=0)
    for flat, error in run_ranks(size, run):
        # P's columns may be nearly dependent, which makes more of rounding errors.
        np.testing.assert_allclose(flat[places[0]], matrix, rtol=0, atol=10 * TOLERANCE)
        np.testing.assert_allclose(flat[places[1]], vector, rtol=0, atol=TOLERANCE)
        assert error < 1e-5


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_powersgd_is_its_definition(layout: Layout, size: int, error_feedback: bool, rank: int) -> None:
    """Over several steps all ranks have the same bits, which are those of the paper's algorithm but for rounding."""
    settings = PowerSGD(rank, seed=7, error_feedback=error_feedback)
    shapes, places, length = layout(SHAPES)
    steps = 4

    def run(communicator: Communicator) -> tuple[list[Array], list[float]]:
        reducer = settings.reducer(shapes, places)
        results, errors = [], []
        for step in range(steps):
            results.append(reduce(reducer, communicator, gradients(communicator.rank, step, length)))
            errors.append(reducer.error)
        return results, errors

    ranks = run_ranks(size, run)
    for results, _ in ranks:
        assert [contents(result, places) for result in results] == [contents(result, places) for result in ranks[0][0]]

    # The first guess is the reducer's own: random numbers have no definition to compare them with.
    guesses = settings.reducer(shapes, places).state_dict()["factors"].astype(np.float64)
    for shape, place in zip(shapes, places, strict=True):
        grads = np.array([[gradients(w, step, length)[place] for w in range(size)] for step in range(steps)])
        grads = grads.astype(np.float64)
        if settings.compresses(shape):
            matrix = shape[0], math.prod(shape[1:])
            guess, guesses = np.split(guesses, [rank * matrix[1]])
            reference = Reference(size, guess.reshape(rank, matrix[1]).T, matrix, error_feedback)
            expected = [reference.step(each.reshape(size, *matrix)).reshape(-1) for each in grads]
        else:
            expected = [each.mean(axis=0) for each in grads]
        for step in range(steps):
            np.testing.assert_allclose(ranks[0][0][step][place], expected[step], rtol=0, atol=TOLERANCE)


def test_the_error_is_the_part_that_was_not_sent(layout: Layout) -> None:
    """It is what the residual is to what the rank meant to send, parameters that are sent as they are included."""
    shapes, places, length = layout([(11, 13), (40,)])

    def run(communicator: Communicator) -> None:
        reducer = PowerSGD().reducer(shapes, places)
        assert reducer.error == 0.0
        for step in range(3):
            grads = gradients(communicator.rank, step, length)
            before = reducer.state_dict()["residual"].astype(np.float64)
            meant = np.concatenate([grads[place] + before[place] for place in places])
            reduce(reducer, communicator, grads)
            left = reducer.state_dict()["residual"].astype(np.float64)
            assert reducer.error == pytest.approx(np.linalg.norm(left) / np.linalg.norm(meant), rel=1e-5)
            assert 0.1 < reducer.error < 1.0

    run_ranks(2, run)


@pytest.mark.parametrize("error_feedback", [True, False])
def test_what_was_sent_and_the_residual_are_the_gradients(layout: Layout, error_feedback: bool) -> None:
    """Over all steps nothing is lost with error feedback; without, most of the gradients is."""
    size, steps = 3, 20
    shapes, places, length = layout([(11, 13), (9, 3, 5), (6,)])

    def run(communicator: Communicator) -> tuple[Array, Array]:
        reducer = PowerSGD(1, error_feedback=error_feedback).reducer(shapes, places)
        applied = sum(reduce(reducer, communicator, gradients(communicator.rank, t, length)) for t in range(steps))
        state = reducer.state_dict()
        return applied, state["residual"] if error_feedback else np.zeros(places[-1].stop, np.float32)

    ranks = run_ranks(size, run)
    for place in places[:2]:
        true = np.mean([sum(gradients(rank, t, length)[place] for t in range(steps)) for rank in range(size)], axis=0)
        missing = true - ranks[0][0][place] - np.mean([left[place] for _, left in ranks], axis=0)
        if error_feedback:
            assert np.abs(missing).max() < 10 * TOLERANCE
        else:
            assert np.linalg.norm(missing) > 0.3 * np.linalg.norm(true)


def test_residuals_stay_small_where_ranks_differ(layout: Layout) -> None:
    """What one rank's gradients have always, and the others' not, does not pile up in its residual."""
    shapes, places, length = layout([(12, 10)], gap=0)

    def run(communicator: Communicator) -> list[float]:
        reducer = PowerSGD().reducer(shapes, places)
        own = gradients(communicator.rank, 0, length)
        lengths = []
        for step in range(1, 101):
            reduce(reducer, communicator, own + gradients(communicator.rank, step, length))
            lengths.append(float(np.linalg.norm(reducer.state_dict()["residual"])))
        return lengths

    # A step sends 2 of 12 dimensions. Piled up it would be 100 times its length.
    for lengths in run_ranks(3, run):
        assert max(lengths) < 12 * np.linalg.norm(gradients(0, 0, length))


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e12])
def test_the_size_of_gradients_does_not_matter(layout: Layout, scale: float) -> None:
    """Gradients of any magnitude are compressed as well as any: nothing on the way is their square, in float32."""
    shapes, places, length = layout([(11, 13)], gap=0)

    def run(communicator: Communicator) -> tuple[Array, Array]:
        small, plain = (PowerSGD(2).reducer(shapes, places) for _ in range(2))
        for step in range(3):
            grads = gradients(communicator.rank, step, length)
            results = (
                reduce(small, communicator, grads * np.float32(scale)) / np.float32(scale),
                reduce(plain, communicator, grads),
            )
        return results

    for small, plain in run_ranks(2, run):
        np.testing.assert_allclose(small, plain, rtol=0, atol=TOLERANCE)


def test_zeros_are_no_dead_end(layout: Layout) -> None:
    """After a step in which all gradients were zero, or of rank 1, others are approximated as well as ever."""
    shapes, places, length = layout([(11, 13)], gap=0)
    full = products(0, (11, 13), 2)
    full.reshape(11, 13)[:3] = 0.0  # as rows of an embedding are that no sample uses

    def run(communicator: Communicator) -> list[Array]:
        reducer = PowerSGD(2, error_feedback=False).reducer(shapes, places)
        one = products(0, (11, 13), 1)
        return [reduce(reducer, communicator, grads) for grads in (np.zeros(length, np.float32), one, full, one, full)]

    for zeros, *others in run_ranks(2, run):
        assert not zeros.any()
        for result, expected in zip(others, (products(0, (11, 13), 1), full) * 2, strict=True):
            np.testing.assert_allclose(result, expected, rtol=0, atol=TOLERANCE)


def test_the_guess_gets_better(layout: Layout) -> None:
    """The same gradients again and again are approximated ever better, down to the best there is of that rank."""
    shapes, places, length = layout([(11, 13)], gap=0)

    def run(communicator: Communicator) -> list[float]:
        reducer = PowerSGD(2, error_feedback=False).reducer(shapes, places)
        errors = []
        for _ in range(40):
            reduce(reducer, communicator, gradients(0, 0, length))
            errors.append(reducer.error)
        return errors

    values = np.linalg.svd(gradients(0, 0, length).reshape(11, 13), compute_uv=False)
    best = np.linalg.norm(values[2:]) / np.linalg.norm(values)
    for errors in run_ranks(2, run):
        assert errors[0] > 1.05 * best
        assert errors[-1] == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_what_is_not_finite_arrives_and_does_not_stay(layout: Layout, bad: float, where: int) -> None:
    """The parameter with a bad entry on one rank is bad on all; only it, and only in that step."""
    shapes, places, length = layout([(11, 13), (5,), (9, 8)])

    def run(communicator: Communicator) -> tuple[list[bool], float, list[float], bytes]:
        reducer = PowerSGD(2).reducer(shapes, places)
        reduce(reducer, communicator, gradients(communicator.rank, 0, length))
        grads = gradients(communicator.rank, 1, length)
        if communicator.rank == 1:
            grads[places[where].start + 3] = bad
        spoilt = reduce(reducer, communicator, grads)
        error, residual = reducer.error, reducer.state_dict()["residual"]
        after = reduce(reducer, communicator, gradients(communicator.rank, 2, length))
        assert np.isfinite(after).all()
        finite = [bool(np.isfinite(spoilt[place]).all()) for place in places]
        return finite, error, np.unique(residual).tolist(), contents(spoilt, places) + contents(after, places)

    ranks = run_ranks(3, run)
    for finite, error, residual, content in ranks:
        assert finite == [index != where for index in range(3)]
        assert math.isnan(error)
        assert residual == [0.0]
        assert content == ranks[0][3]


def test_an_overflow_on_the_way_does_not_stay(layout: Layout) -> None:
    """Finite gradients whose factor is too large for float32 make a bad step, not a bad reducer."""
    shapes, places, length = layout([(11, 13)], gap=0)

    def run(communicator: Communicator) -> tuple[Array, float, Array]:
        reducer = PowerSGD(1).reducer(shapes, places)
        reducer.load_state_dict({"factors": np.full(13, 0.01, np.float32), "residual": np.zeros(length, np.float32)})
        spoilt = reduce(reducer, communicator, np.full(length, 2e38, np.float32))
        return spoilt, reducer.error, reduce(reducer, communicator, np.ones(length, np.float32))

    for spoilt, error, after in run_ranks(2, run):
        assert not np.isfinite(spoilt).any()
        assert math.isnan(error)
        np.testing.assert_allclose(after, 1.0, rtol=0, atol=TOLERANCE)


def test_a_state_of_another_bucket_is_refused(layout: Layout) -> None:
    """Names and shapes must be those of this bucket and of these settings, or nothing is loaded."""
    shapes, places, _ = layout([(11, 13)])
    reducer = PowerSGD(2).reducer(shapes, places)
    before = reducer.state_dict()
    for other in (
        PowerSGD(1).reducer(shapes, places),
        PowerSGD(2, error_feedback=False).reducer(shapes, places),
        PowerSGD(2).reducer(*layout([(13, 11)])[:2]),
    ):
        with pytest.raises(ConfigError, match="saved state"):
            reducer.load_state_dict(other.state_dict())
    after = reducer.state_dict()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_what_lies_between_parameters_stays(layout: Layout) -> None:
    """Gaps are neither sent nor written to, even if there are NaNs in them."""
    shapes, places, length = layout(SHAPES)
    inside = np.zeros(length, bool)
    for place in places:
        inside[place] = True

    def run(communicator: Communicator) -> Array:
        grads = np.where(inside, gradients(communicator.rank, 0, length), np.float32(math.nan))
        return reduce(PowerSGD(2).reducer(shapes, places), communicator, grads)

    for flat in run_ranks(2, run):
        np.testing.assert_array_equal(np.isnan(flat), ~inside)


def test_random_numbers_of_the_program_stay_what_they_were(layout: Layout) -> None:
    """The first guess takes nothing from NumPy's global generator, and depends on the seed alone."""
    shapes, places, _ = layout([(11, 13)])
    np.random.seed(3)
    expected = np.random.rand()
    np.random.seed(3)
    guesses = [PowerSGD(seed=seed).reducer(shapes, places).state_dict()["factors"] for seed in (-1, -1, 2)]
    assert np.random.rand() == expected
    assert np.array_equal(guesses[0], guesses[1])
    assert not np.array_equal(guesses[0], guesses[2])
