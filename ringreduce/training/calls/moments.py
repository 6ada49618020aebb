"""Means and variances over the batches of all ranks, for batch normalisation in any framework."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.common.errors import ConfigError
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.calls.requests import RequestBuilder

_Floats = npt.NDArray[np.float64]


def gather_moments(
    count: int, mean: npt.NDArray[Any], variance: npt.NDArray[Any], process_set: ProcessSet
) -> tuple[_Floats, _Floats, float]:
    """Return mean and variance of each channel over all ranks, and how many values each is of. Collective.

    They are put together as in T. F. Chan, G. H. Golub, R. J. LeVeque, "Algorithms for computing the sample variance",
    The American Statistician 37 (1983), which keeps the digits that ``E[x^2] - E[x]^2`` loses.

    Args:
        count: how many values each channel has on this rank; may differ between ranks, and be 0.
        mean: of this rank's values, (channels,); finite also where there are none.
        variance: likewise; biased: divided by ``count``.
        process_set: the ranks.

    Raises:
        ConfigError: there is one value per channel in all; on all ranks.
    """
    mine = np.concatenate([[float(count)], mean, variance])[None]
    with RequestBuilder("allgather", None, process_set) as prepare:
        request = prepare.allgather([mine], itemgetter(0))
    counts, means, variances = np.split(request.carry_out(), [1, 1 + len(mean)], axis=1)
    total = float(counts.sum())
    require_variance(total)
    weights = counts / max(total, 1.0)
    together = (weights * means).sum(0)
    return together, (weights * (variances + np.square(means - together))).sum(0), total


def require_variance(count: float) -> None:
    """Raise `ConfigError` if each channel has one value; none at all are no error, as little as in torch."""
    if count == 1:
        raise ConfigError("expected more than 1 value per channel to train with, got 1 in the batches of all ranks")
