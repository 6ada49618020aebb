"""Fits the cost model of allreduces to measured times; `ringreduce.collectives.tuning` says what it consists of."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringreduce.collectives import Work
from ringreduce.collectives.tuning import Model, is_ours, work
from ringreduce.common.topology import Topology

__all__ = ["Sample", "fit"]

Vector = npt.NDArray[np.float64]

#: Seconds per byte reduced, at most: a processor that shares a core reduces faster. Algorithms that send more often
#: reduce more too, and without a limit a fit can take a slow network for a slow processor.
_MOST_GAMMA = 1e-9


class Sample(NamedTuple):
    """One measured time: the slowest rank's, of one allreduce of ``nbytes`` bytes per rank."""

    algorithm: str
    nbytes: int
    topology: Topology
    seconds: float


def fit(samples: Iterable[Sample]) -> Model:
    """Return the model that explains measured times best.

    It minimises the sum of squares of relative errors, so that microseconds count as much as milliseconds, and no
    parameter is negative. A parameter on which nothing measured depends is 0, gamma is at most a nanosecond per byte.

    Args:
        samples: an algorithm that is none of ours is the MPI library's.
    """
    ours: list[Sample] = []
    vendor: list[Sample] = []
    for each in samples:
        (ours if is_ours(each.algorithm) else vendor).append(each)
    factors, seconds = [work(*each[:3]) for each in ours], [each.seconds for each in ours]
    *parts, gamma = _least_squares(factors, seconds, len(Work._fields))
    if gamma > _MOST_GAMMA:
        gamma = _MOST_GAMMA
        known = [each.reduced * gamma for each in factors]
        parts = _least_squares([each[:-1] for each in factors], seconds, len(parts), known)
    whole = _least_squares([(1.0, each.nbytes) for each in vendor], [each.seconds for each in vendor], 2)
    return Model(*[*parts, gamma, *whole])


def _least_squares(
    factors: Sequence[Sequence[float]], seconds: Sequence[float], count: int, known: Sequence[float] | None = None
) -> list[float]:
    """Solve for ``count`` non-negative parameters, in the sense of least squares of relative errors.

    The best non-negative solution is the best unrestricted one of some subset of the parameters, the rest being 0;
    there are few, so all are tried. Among equals, the one with the fewest parameters.

    Args:
        factors: of the parameters, for each sample.
        seconds: for each sample.
        count: of parameters.
        known: seconds of each sample that are explained already; None: none.
    """
    best = [0.0] * count
    if not factors:
        return best
    matrix = np.array(factors, np.float64) / np.array(seconds)[:, None]
    scale = np.linalg.norm(matrix, axis=0)
    target: Vector = 1 - np.array(known or [0.0] * len(factors)) / np.array(seconds)
    least = float(np.sum(target**2))  # the error when all are 0
    for size in range(1, count + 1):
        for subset in itertools.combinations(np.flatnonzero(scale), size):
            chosen = list(subset)
            columns = matrix[:, chosen] / scale[chosen]
            solution: Vector = np.linalg.lstsq(columns, target, rcond=None)[0]
            error = float(np.sum((columns @ solution - target) ** 2))
            if (solution >= 0).all() and error < least - 1e-12 * len(factors):
                least, best = error, [0.0] * count
                for column, value in zip(chosen, solution / scale[chosen], strict=True):
                    best[column] = float(value)
    return best
