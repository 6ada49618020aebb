"""Top-k: which entries travel, what becomes of the others, and the bookkeeping of errors that compressions share."""

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
from ringreduce.training.compression.topk import TopK, largest

SIZES = [1, 2, 3, 4]

#: Parameters of every number of dimensions, one without elements among them.
SHAPES = [(7,), (), (5, 3), (0, 4), (3, 2, 2), (2, 3, 2, 1), (1,)]

Layout = Callable[..., tuple[list[tuple[int, ...]], list[slice], int]]


def occupied(places: Sequence[slice], length: int) -> npt.NDArray[np.bool_]:
    """Return which entries of a bucket belong to a parameter."""
    mask = np.zeros(length, bool)
    for place in places:
        mask[place] = True
    return mask


def gradients(rank: int, step: int, length: int) -> npt.NDArray[np.float32]:
    """Return a bucket that is different on each rank and in each step."""
    return np.random.default_rng([17, rank, step]).standard_normal(length).astype(np.float32)


def first_largest(values: npt.NDArray[np.floating[Any]], count: int) -> list[int]:
    """Return the positions of the largest entries by the definition: sorted by magnitude, then by position."""
    order = sorted(range(values.size), key=lambda i: (-abs(values[i]), i))
    return sorted(i for i in order[:count] if values[i])


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5, math.nan])
def test_a_fraction_is_a_part(fraction: float) -> None:
    """Nothing, or more than all, cannot be sent."""
    with pytest.raises(ConfigError, match="fraction"):
        TopK(fraction)


@pytest.mark.parametrize("count", [1, 2, 5, 40, 41])
def test_the_largest_by_magnitude_are_chosen(count: int, rng: np.random.Generator) -> None:
    """Sign does not matter, order does not matter, and positions are ascending."""
    values = rng.standard_normal(41).astype(np.float32)
    assert largest(values, count).tolist() == first_largest(values, count)


@pytest.mark.parametrize("count", range(1, 8))
def test_of_equal_entries_the_first_are_chosen(count: int) -> None:
    """Ties are broken by position, whatever the sign, so that every run chooses the same."""
    values = np.array([1, -2, 2, 0, -1, 2, -0.0, 1e-45], np.float32)
    assert largest(values, count).tolist() == first_largest(values, count)


def test_zeros_are_never_chosen() -> None:
    """Where fewer entries than asked for are not zero, fewer travel."""
    assert largest(np.zeros(5, np.float32), 3).tolist() == []
    assert largest(np.array([0, 3, -0.0], np.float32), 3).tolist() == [1]


def test_all_that_is_not_finite_is_chosen() -> None:
    """NaNs and infinities of both signs come before everything, and all of them, however few were asked for."""
    values = np.array([1, np.nan, 5, -np.inf, -np.nan, np.inf], np.float32)
    assert largest(values, 1).tolist() == [1, 3, 4, 5]
    assert largest(values, 5).tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("error_feedback", [True, False])
def test_topk_is_its_definition(layout: Layout, size: int, average: bool, error_feedback: bool) -> None:
    """Each rank's largest entries of gradient plus residual are added in rank order, over several steps."""
    shapes, places, length = layout(SHAPES)
    mask = occupied(places, length)
    count = math.ceil(0.2 * mask.sum())

    def run(communicator: Communicator) -> list[npt.NDArray[np.float32]]:
        reducer = TopK(0.2, error_feedback).reducer(shapes, places)
        results = []
        for step in range(4):
            flat = gradients(communicator.rank, step, length)
            reducer.reduce(communicator, flat, average)
            results.append(flat)
        return results

    ranks = run_ranks(size, run)
    residuals = np.zeros((size, length))
    for step in range(4):
        total = np.zeros(length)
        for rank in range(size):
            meant = np.where(mask, gradients(rank, step, length), 0.0) + residuals[rank]
            chosen = first_largest(meant, count)
            total[chosen] += meant[chosen]
            meant[chosen] = 0.0
            residuals[rank] = meant if error_feedback else 0.0
        expected = total / size if average else total
        for results in ranks:
            assert results[step].tobytes() == ranks[0][step].tobytes()
            np.testing.assert_allclose(results[step], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_all_entries_give_the_exact_sum(layout: Layout, size: int) -> None:
    """With a fraction of 1 the result is the sum in rank order, bit for bit, and the error is 0."""
    shapes, places, length = layout(SHAPES, gap=0)

    def run(communicator: Communicator) -> tuple[bytes, float]:
        reducer = TopK(1.0).reducer(shapes, places)
        flat = gradients(communicator.rank, 0, length)
        reducer.reduce(communicator, flat, average=False)
        return flat.tobytes(), reducer.error

    expected = np.zeros(length, np.float32)
    for rank in range(size):
        expected += gradients(rank, 0, length)
    assert run_ranks(size, run) == [(expected.tobytes(), 0.0)] * size


@pytest.mark.parametrize("error_feedback", [True, False])
def test_what_was_sent_and_the_residual_are_the_gradients(layout: Layout, error_feedback: bool) -> None:
    """Over all steps nothing is lost with error feedback; without, most of the gradients is."""
    size, steps = 3, 20
    shapes, places, length = layout(SHAPES)
    mask = occupied(places, length)

    def run(communicator: Communicator) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        reducer = TopK(0.05, error_feedback).reducer(shapes, places)
        applied = np.zeros(length)
        for step in range(steps):
            flat = gradients(communicator.rank, step, length)
            reducer.reduce(communicator, flat, average=True)
            applied += flat
        left = np.zeros(length)
        if error_feedback:
            residual = reducer.state_dict()["residual"]
            left[: residual.size] = residual
        return applied, left

    ranks = run_ranks(size, run)
    true = np.mean([sum(gradients(rank, step, length) for step in range(steps)) for rank in range(size)], axis=0) * mask
    missing = true - ranks[0][0] - np.mean([left for _, left in ranks], axis=0)
    if error_feedback:
        assert np.abs(missing).max() < 1e-5
    else:
        assert np.linalg.norm(missing) > 0.5 * np.linalg.norm(true)


def test_the_error_is_the_part_that_was_not_sent(layout: Layout) -> None:
    """It is 0 before the first step, relative to what the rank meant to send, and 0 where that is nothing."""
    shapes, places, _ = layout([(4,)])

    def run(communicator: Communicator) -> list[float]:
        reducer = TopK(0.25).reducer(shapes, places)
        errors = [reducer.error]
        for values in ([0.0, 3.0, 4.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]):
            reducer.reduce(communicator, np.array([*values, 0.0, 0.0, 0.0], np.float32), average=True)
            errors.append(reducer.error)
        return errors

    assert run_ranks(2, run) == [[0.0, pytest.approx(0.6), 0.0, 0.0]] * 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_arrives_and_does_not_stay(layout: Layout, bad: float) -> None:
    """Every entry that is not finite on one rank is so everywhere; the step after is as that of a new reducer."""
    shapes, places, length = layout([(9,), (2, 3), (5,)])

    def run(communicator: Communicator) -> tuple[list[int], float, bytes, bytes]:
        reducer, fresh = (TopK(0.1).reducer(shapes, places) for _ in range(2))
        reducer.reduce(communicator, gradients(communicator.rank, 0, length), average=True)
        flat = gradients(communicator.rank, 1, length)
        if communicator.rank == 1:
            flat[[0, 5, 8, 13, 22]] = bad
        reducer.reduce(communicator, flat, average=True)
        spoilt = np.flatnonzero(~np.isfinite(flat)).tolist()
        error = reducer.error
        after = []
        for each in (reducer, fresh):
            flat = gradients(communicator.rank, 2, length)
            each.reduce(communicator, flat, average=True)
            after.append(flat.tobytes())
        return spoilt, error, after[0], after[1]

    for spoilt, error, after, expected in run_ranks(3, run):
        assert spoilt == [0, 5, 8, 13, 22]
        assert math.isnan(error)
        assert after == expected


def test_a_state_of_another_bucket_is_refused(layout: Layout) -> None:
    """Names and shapes must be those of this bucket; without error feedback there is no state."""
    reducer = TopK().reducer(*layout([(4,)])[:2])
    other = TopK().reducer(*layout([(5,)])[:2])
    stateless = TopK(error_feedback=False).reducer(*layout([(4,)])[:2])
    assert stateless.state_dict() == {}
    for state in (other.state_dict(), stateless.state_dict()):
        with pytest.raises(ConfigError, match="saved state"):
            reducer.load_state_dict(state)
    with pytest.raises(ConfigError, match="saved state"):
        stateless.load_state_dict(reducer.state_dict())


def test_what_lies_between_parameters_has_no_influence(layout: Layout) -> None:
    """Gaps are never sent, even if there are NaNs in them, and come back as zeros."""
    shapes, places, length = layout([(3,), (2, 2)])
    gaps = ~occupied(places, length)

    def run(communicator: Communicator) -> Any:
        flat = gradients(communicator.rank, 0, length)
        flat[gaps] = math.nan
        TopK(1.0).reducer(shapes, places).reduce(communicator, flat, average=True)
        return flat

    for flat in run_ranks(2, run):
        assert not flat[gaps].any()
        assert np.isfinite(flat).all()
