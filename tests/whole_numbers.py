"""Averages of integers over ranks, held to Python's integers, which have no limits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import ringreduce as rr

#: One below, on and above what is cut into blocks evenly, a prime, and one that takes several pieces.
_COUNTS = (0, 1, 2, 5, 97, 33_001)


def averages(arrays: list[np.ndarray]) -> np.ndarray:
    """Return the averages of arrays of integers, toward zero."""
    totals = [sum(terms) for terms in zip(*(array.tolist() for array in arrays), strict=True)]
    size = len(arrays)
    return np.array([abs(each) // size * (1 if each >= 0 else -1) for each in totals], arrays[0].dtype)


def terms(rank: int, count: int, dtype: str, *, large: bool) -> np.ndarray:
    """Return what a rank gives: numbers of the whole range, the limits among them, or small ones."""
    rng, limits = np.random.default_rng([rank, count]), np.iinfo(dtype)
    if not large:
        return rng.integers(max(limits.min, -100), 100, count, dtype=dtype)
    array = rng.integers(limits.min, limits.max, count, dtype=dtype, endpoint=True)
    array[:: max(1, count // 3)] = limits.max - rank  # the last as well, where three divides
    array[1 :: max(1, count // 2)] = limits.min
    return array


def check_averages(
    communicator: rr.Communicator, dtype: str, *, algorithms: bool = True, counts: Sequence[int] = _COUNTS
) -> None:
    """Check allreduce, reduce and reduce_scatter, of which some, all or none of the sums fit. Every rank calls it."""
    rank, size = communicator.rank, communicator.size
    for count in counts:
        for large in ({*range(size)}, {size - 1}, set[int]()):
            arrays = [terms(each, count, dtype, large=each in large) for each in range(size)]
            wanted, mine = averages(arrays), arrays[rank]
            for name in (None, *(communicator.algorithms("allreduce") if algorithms else ())):
                np.testing.assert_array_equal(communicator.allreduce(mine, "average", algorithm=name), wanted)
                out = mine.copy()
                communicator.allreduce(out, "average", out=out, algorithm=name)
                np.testing.assert_array_equal(out, wanted)
            for name in (None, *(communicator.algorithms("reduce") if algorithms else ())):
                for root in {0, size - 1}:
                    result = communicator.reduce(mine, root, "average", algorithm=name)
                    if rank == root:
                        np.testing.assert_array_equal(result, wanted)
            for name in (None, *(communicator.algorithms("reduce_scatter") if algorithms else ())):
                part = communicator.reduce_scatter(mine, "average", algorithm=name)
                np.testing.assert_array_equal(part, np.array_split(wanted, size)[rank])
                splits = [count, *[0] * (size - 1)]
                part = communicator.reduce_scatter(mine, "average", splits=splits, algorithm=name)
                np.testing.assert_array_equal(part, wanted if rank == 0 else wanted[:0])
